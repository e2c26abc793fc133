"""The trainer on several processes, and in bfloat16: what is sharded computes what is not."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trio
from safetensors.torch import load_file
from torch import Tensor

from node.roles.trainer import torchrun
from node.workers import learner as learners
from node.workers import row_layout, sharding, trainer_child
from node.workers.child_messages import ConfigureTrainer, LoadTraining, Trained, TrainStep
from node.workers.child_process import Worker, WorkerError, open_worker
from node.workers.learner import Learner, TrainingSample, make_policy
from node.workers.model_config import read_config
from node.workers.policy import TrainedPolicy
from node.workers.sharding import Ranks
from node.workers.trainer_child import _fill
from node.workers.weight_files import checksum
from tests.node.workers import small
from tests.node.workers.small import RECIPE_SMALL, samples
from tests.node.workers.test_trainer_child import loaded, publish, step, submission

CPU = torch.device("cpu")


@pytest.fixture
def single() -> Iterator[Ranks]:
    """A sharded group of this process alone."""
    yield sharding.alone("cpu", sharded=True)
    dist.destroy_process_group()


def ranks(parent: int) -> list[int]:
    """The processes that torchrun started, in the order of their ranks."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        variables = dict(
            item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item
        )
        found[int(variables["RANK"])] = pid
    return [found[rank] for rank in sorted(found)]


async def gone(pids: list[int]) -> None:
    """Return once none of these processes is left."""
    with trio.fail_after(30):
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                await trio.lowlevel.wait_readable(descriptor)
                os.close(descriptor)


async def train(worker: Worker, folder: Path, name: str, files: list[str]) -> Trained:
    answer = await worker.call(TrainStep(files, str(folder / name), str(folder / f"{name}.state")), timeout=300)
    assert isinstance(answer, Trained)
    return answer


async def test_two_processes_make_the_update_of_one(tmp_path: Path) -> None:
    """And go on from a checkpoint bit for bit, survive a user's mistake, and end together."""
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    # Seven groups over two optimizer steps: the ranks have different work, and one of them an idle pass.
    files = [submission(tmp_path, f"s{number}", samples(made, 3, number)) for number in range(4)]
    alone = loaded(tmp_path, manifest, whole)
    expected, after, state = step(alone, tmp_path, 0, files[:2])

    meet = tmp_path / "meet"
    meet.mkdir()
    async with open_worker(
        "node.workers.trainer_child",
        name="trainer",
        prefix=torchrun(2, meet),
        launched=True,
        arguments=[str(meet)],
    ) as worker:
        ready = await worker.call(ConfigureTrainer(str(tmp_path / "config.json"), RECIPE_SMALL), timeout=300)
        assert ready.processes == 2
        assert await worker.call(LoadTraining(str(manifest), str(whole)), timeout=300) == checksum(made)

        answer = await train(worker, tmp_path, "two", files[:2])
        for name in ("loss", "grad_norm", "ratio_mean", "importance_mean", "entropy", "tokens", "trained"):
            assert answer.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5), name
        one, two = load_file(state), load_file(tmp_path / "two.state")
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-6)
        assert (tmp_path / "two").stat().st_size == after.stat().st_size

        with pytest.raises(WorkerError, match="cannot read the submission") as caught:
            await train(worker, tmp_path, "none", [files[2], str(tmp_path / "lost")])
        assert caught.value.kind == "user"

        # What one process saved, two go on from, and what two saved, they go on from exactly.
        onwards = await train(worker, tmp_path, "three", files[2:])
        middle = publish(answer, tmp_path / "two")
        again = LoadTraining(str(middle), str(tmp_path / "two"), str(tmp_path / "two.state"))
        await worker.call(again, timeout=300)
        assert (await train(worker, tmp_path, "again", files[2:])).checksum == onwards.checksum
        assert (tmp_path / "again.state").read_bytes() == (tmp_path / "three.state").read_bytes()
        await worker.call(LoadTraining(str(publish(expected, after)), str(after), state), timeout=300)

        pids = ranks(worker.pid)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError) as death:
            await train(worker, tmp_path, "never", files[2:])
        assert death.value.gone
    await gone(pids)


def plan(rank: int, size: int, used: list[TrainingSample]) -> Any:
    group = Ranks(rank, size, CPU)
    learner = Learner(TrainedPolicy(small.model(PLANNED), 1.0), RECIPE_SMALL, group)
    return learner._plan([(sample, [1.0] * len(sample.responses)) for sample in used])


PLANNED = read_config(small.STARTER / "config.json")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("groups", [1, 2, 7])
def test_every_rank_has_as_many_passes_and_every_token_one(
    size: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learners, "BATCH_SLOTS", {"cpu": 40})
    used = [
        TrainingSample([2] * (number + 1), [[3] * (1 + number * place) for place in range(3)], [[number]] * 3, [0] * 3)
        for number in range(groups)
    ]
    used = [TrainingSample(s.prompt, s.responses, [[7] * len(line) for line in s.responses], s.rewards) for s in used]
    plans = [plan(rank, size, used) for rank in range(size)]
    tokens = sum(len(line) for sample in used for line in sample.responses)
    assert len({len(each.passes) for each in plans}) == 1
    assert {each.denominator for each in plans} == {tokens}
    working = [one for each in plans for one in each.passes if bool(one.tokens.weight.all())]
    assert sorted(int(place) for one in working for place in one.rows.places) == list(range(tokens))
    idle = [one for each in plans for one in each.passes if not bool(one.tokens.weight.any())]
    assert len(working) + len(idle) == sum(len(each.passes) for each in plans)


def test_a_rank_that_writes_nothing_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def whole(learner: Learner, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for tensor in tensors.values():
            made = tensor.detach().clone()
            alive.append(weakref.ref(made))
            assert sum(reference() is not None for reference in alive) <= 2  # the one before, while this one is made
            yield made

    monkeypatch.setattr(Learner, "whole", whole)
    learner = Learner(TrainedPolicy(small.model(PLANNED), 1.0), RECIPE_SMALL, Ranks(1, 2, CPU))
    dtypes = dict.fromkeys(learner.parameters(), torch.float32)
    assert trainer_child.write_files(learner, dtypes, tmp_path / "version", tmp_path / "state") == ([], 0)
    assert len(alive) == 2 * len(dtypes)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_computes_with_what_is_published_and_keeps_float32(tmp_path: Path, single: Ranks) -> None:
    made = small.model(small.config(tmp_path))
    policy = make_policy(made.config, RECIPE_SMALL, single, torch.bfloat16)
    _fill(single, policy, {name: value.detach() for name, value in made.named_parameters()})
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert single.checksum(policy.model.parameters()) == checksum(made)
    rollouts = samples(made, 4)
    packed = row_layout.pack([row_layout.RowGroup(s.prompt, s.responses) for s in rollouts])
    rounded = TrainedPolicy(small.model(made.config).bfloat16(), 1.0)
    for batch in packed:
        assert torch.equal(policy(batch).float(), rounded(batch).float())

    learner = Learner(policy, RECIPE_SMALL, single)
    metrics = learner.train(rollouts)
    exact = small.learner(made, RECIPE_SMALL)
    assert metrics["grad_norm"] == pytest.approx(exact.train(rollouts)["grad_norm"], rel=0.05)
    for name, value in exact.parameters().items():
        assert learner.parameters()[name].dtype == torch.float32
        torch.testing.assert_close(single.whole(learner.parameters()[name]), value.detach(), rtol=0, atol=3e-3)
    # An update far below bfloat16's resolution is kept.
    moved = [single.whole(value) for value in learner.parameters().values()]
    assert any(not torch.equal(one, one.bfloat16().float()) for one in moved)
