from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from node.errors import UserError
from node.workers.child_messages import ConfigureTrainer, LoadTraining, Trained, TrainingStopped, TrainStep
from node.workers.child_process import WorkerError, open_worker
from node.workers.learner import TrainingSample
from node.workers.model import CausalLM
from node.workers.trainer_child import Trainer
from node.workers.weight_files import load_into, map_whole, read_manifest
from protocol.errors import LocalError
from protocol.weights.manifest import Manifest
from protocol.work.rollout import Group, Response, Submission
from tests.node.workers import small
from tests.node.workers.small import RECIPE_SMALL, samples


def submission(directory: Path, name: str, groups: list[TrainingSample]) -> str:
    made = Submission(
        b"\1" * 32,
        b"\2" * 32,
        b"\3" * 32,
        0,
        tuple(
            Group(
                number,
                tuple(sample.prompt),
                tuple(
                    Response(tuple(tokens), tuple(reported), reward, int(tokens[-1] == 1))
                    for tokens, reported, reward in zip(sample.responses, sample.reported, sample.rewards, strict=True)
                ),
                b"",
            )
            for number, sample in enumerate(groups)
        ),
    )
    path = directory / name
    path.write_bytes(made.encode())
    return str(path)


def loaded(directory: Path, manifest: Path, whole: Path, checkpoint: str | None = None) -> Trainer:
    made = Trainer()
    made.configure(ConfigureTrainer(str(directory / "config.json"), RECIPE_SMALL))
    made.load(LoadTraining(str(manifest), str(whole), checkpoint))
    return made


def publish(answer: Trained, whole: Path) -> Path:
    """Write the manifest that the daemon would make of a step's answer."""
    manifest = whole.with_suffix(".manifest")
    manifest.write_bytes(Manifest.of_file(answer.tensors, whole.read_bytes(), answer.checksum).encode())
    return manifest


def step(made: Trainer, directory: Path, number: int, files: list[str]) -> tuple[Trained, Path, str]:
    whole, checkpoint = directory / f"v{number}", str(directory / f"c{number}")
    answer = made.train(TrainStep(files, str(whole), checkpoint))
    assert isinstance(answer, Trained)
    return answer, whole, checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path, dtype=dtype)
    files = [submission(tmp_path, f"s{number}", samples(made, 3, number)) for number in range(6)]

    first = loaded(tmp_path, manifest, whole)
    for number in range(3):
        answer, after, checkpoint = step(first, tmp_path, number, files[2 * number : 2 * number + 2])
        if number == 1:
            middle = (publish(answer, after), after, checkpoint)
    assert answer.metrics["updates"] == 6
    assert {row[1] for row in answer.tensors} == {"F32" if dtype == torch.float32 else "BF16"}

    second = loaded(tmp_path, *middle)
    again, other, _ = step(second, tmp_path, 9, files[4:])
    assert other.read_bytes() == after.read_bytes()
    assert again.checksum == answer.checksum
    assert (tmp_path / "c9").read_bytes() == (tmp_path / "c2").read_bytes()

    fresh = CausalLM(made.config)
    assert load_into(fresh, map_whole(read_manifest(publish(answer, after)), after)) == answer.checksum


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    file = submission(tmp_path, "s", samples(made, 3))
    first = loaded(tmp_path, manifest, whole)
    answer, after, checkpoint = step(first, tmp_path, 0, [file])
    assert answer.trained > 0
    with pytest.raises(UserError, match="belongs to another version"):
        loaded(tmp_path, manifest, whole, checkpoint)
    Path(checkpoint).write_bytes(Path(checkpoint).read_bytes()[:-10])
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        loaded(tmp_path, publish(answer, after), after, checkpoint)


def test_a_step_that_is_not_finite_writes_nothing(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    with torch.no_grad():
        made.model.norm.weight[0] = math.inf
    healthy = small.model(made.config)
    file = submission(tmp_path, "s", samples(healthy, 3))
    manifest, whole = small.store(made, tmp_path)
    broken = loaded(tmp_path, manifest, whole)
    answer = broken.train(TrainStep([file], str(tmp_path / "v0"), str(tmp_path / "c0")))
    assert isinstance(answer, TrainingStopped)
    assert "not finite" in answer.reason
    assert not (tmp_path / "v0").exists()
    assert not (tmp_path / "c0").exists()
    with pytest.raises(LocalError, match="the last good one must be loaded again"):
        step(broken, tmp_path, 0, [file])
    good = small.store(healthy, tmp_path, "good")
    broken.load(LoadTraining(str(good[0]), str(good[1])))
    assert step(broken, tmp_path, 0, [file])[0].trained > 0


def test_a_lost_submission_is_named_and_harms_nothing(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    working = loaded(tmp_path, manifest, whole)
    file = submission(tmp_path, "s", samples(made, 3))
    with pytest.raises(UserError, match=r"cannot read the submission .*lost"):
        step(working, tmp_path, 0, [file, str(tmp_path / "lost")])
    assert step(working, tmp_path, 0, [file])[0].trained > 0


async def test_the_child_through_the_real_client(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    file = submission(tmp_path, "s", samples(made, 3))
    here = loaded(tmp_path, manifest, whole)
    answer, after, _ = step(here, tmp_path, 0, [file])
    async with open_worker("node.workers.trainer_child", name="trainer") as worker:
        await worker.call(ConfigureTrainer(str(tmp_path / "config.json"), RECIPE_SMALL), timeout=60)
        with pytest.raises(WorkerError, match="no version loaded"):
            await worker.call(TrainStep([file], "x", "y"), timeout=60)
        await worker.call(LoadTraining(str(manifest), str(whole)), timeout=60)
        output = tmp_path / "child"
        trained = await worker.call(TrainStep([file], str(output), str(tmp_path / "child-state")), timeout=60)
    assert isinstance(trained, Trained)
    assert trained.checksum == answer.checksum
    assert output.read_bytes() == after.read_bytes()
