from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.starter.defaults import RECIPE
from node.workers import grpo, trainer
from node.workers.child import UserError
from node.workers.client import WorkerError, open_worker
from node.workers.model import CausalLM
from node.workers.trainer import Learner, Sample, Trainer
from node.workers.weights import checksum, load_into, map_whole, read_manifest
from proofs.sampling import logprobs
from protocol.errors import LocalError
from protocol.manifest import Manifest
from protocol.rollout import Group, Response, Submission
from tests.node.workers import small
from tests.node.workers.small import QWEN

RECIPE_SMALL = replace(
    RECIPE,
    group_size=4,
    groups_per_submission=3,
    max_response_tokens=6,
    learning_rate=10**9,  # 1e-3
    warmup_steps=3,
    weight_decay=10_000,
    grad_clip=1_000_000,
    inner_steps=2,
)
FIELDS = {name: getattr(RECIPE_SMALL, name) for name in RECIPE_SMALL.__slots__}


def samples(made: CausalLM, count: int, seed: int = 0) -> list[Sample]:
    """Honest rollouts of ``made``, rewarded for even tokens."""
    return [
        Sample(
            claim.prompt,
            claim.responses,
            claim.logprobs,
            [10**6 * sum(token % 2 == 0 for token in line) // len(line) for line in claim.responses],
        )
        for claim in small.written(made, small.prompts(made.config, count, seed))
    ]


def submission(directory: Path, name: str, groups: list[Sample]) -> str:
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
    made.configure(str(directory / "config.json"), FIELDS)
    made.load(str(manifest), str(whole), checkpoint)
    return made


def publish(answer: dict[str, Any], whole: Path) -> Path:
    """Write the manifest that the daemon would make of a step's answer."""
    manifest = whole.with_suffix(".manifest")
    manifest.write_bytes(Manifest.of_file(answer["tensors"], whole.read_bytes(), answer["checksum"]).encode())
    return manifest


def step(made: Trainer, directory: Path, number: int, files: list[str]) -> tuple[dict[str, Any], Path, str]:
    whole, checkpoint = directory / f"v{number}", str(directory / f"c{number}")
    return made.train(files, str(whole), checkpoint), whole, checkpoint


def test_the_loss_and_its_gradient_by_the_plain_definition(tmp_path: Path) -> None:
    """One optimizer step over three packed groups against sequences computed one by one."""
    made = small.model(small.config(tmp_path))
    older = small.model(made.config)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.mul_(1.02)
    rollouts = samples(older, 5)
    recipe = replace(RECIPE_SMALL, inner_steps=1, grad_clip=0, weight_decay=0, entropy=20_000, kl=50_000)
    limits = grpo.Limits.of(recipe)

    total, tokens = torch.zeros(()), 0
    reference = small.model(made.config)
    for sample in rollouts:
        advantage = grpo.advantages(sample.rewards)
        if advantage is None:
            continue
        for response, reported, value in zip(sample.responses, sample.reported, advantage, strict=True):
            line = torch.tensor([[*sample.prompt, *response]])
            slots = line.shape[1]
            mask = torch.ones((slots, slots), dtype=torch.bool).tril()[None, None]
            logits = reference.logits(reference(line, torch.arange(slots)[None], mask)[0, len(sample.prompt) - 1 : -1])
            logs = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
            mu = torch.tensor(reported) / -1e6
            weight = (logs.detach() - mu).exp().clamp(max=2.0)
            ratio = (logs - logs.detach()).exp()
            drift = (mu - logs).exp() - (mu - logs) - 1
            total = total + (weight * ratio * value + 0.02 * grpo.entropy(logits, 1.0) - 0.05 * drift).sum()
            tokens += len(response)
    (-total / tokens).backward()  # type: ignore[no-untyped-call]
    wanted = [parameter.grad for parameter in reference.parameters()]
    norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in wanted if grad is not None))

    learner = Learner(made, recipe)
    metrics = learner.train(rollouts)
    assert limits.entropy == 0.02
    assert metrics["loss"] == pytest.approx(-total.item() / tokens, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["tokens"] == tokens
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["groups_used"] + metrics["groups_dropped"] == 5
    for parameter, gradient in zip(made.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_how_a_step_is_cut_into_passes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for slots in (1, 10_000):
        monkeypatch.setattr(trainer, "BATCH_SLOTS", slots)
        made = small.model(small.config(tmp_path))
        metrics = Learner(made, RECIPE_SMALL).train(samples(made, 6))
        found.append((metrics["loss"], metrics["grad_norm"], metrics["clip_share"], metrics["importance_mean"]))
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


def test_old_logprobs_are_those_before_the_first_update(tmp_path: Path) -> None:
    """With several optimizer steps, later ones see ratios that left 1."""
    made = small.model(small.config(tmp_path))
    rollouts = samples(made, 8)
    metrics = Learner(made, replace(RECIPE_SMALL, inner_steps=4, learning_rate=10**10)).train(rollouts)
    assert metrics["updates"] == 4
    assert metrics["importance_mean"] == pytest.approx(1.0, abs=1e-3)  # fresh rollouts: π_old is μ
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert metrics["clip_share"] > 0


def test_groups_without_signal_change_nothing(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    before = checksum(made)
    flat = [replace(sample, rewards=[500_000] * 4) for sample in samples(made, 3)]
    metrics = Learner(made, RECIPE_SMALL).train(flat)
    assert (metrics["trained"], metrics["tokens"], metrics["groups_dropped"], metrics["updates"]) == (0, 0, 3, 0)
    assert checksum(made) == before


def test_reward_climbs(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    learner = Learner(made, replace(RECIPE_SMALL, learning_rate=5 * 10**9))
    means = []
    for number in range(6):
        rollouts = samples(made, 12, seed=number)
        means.append(sum(sum(sample.rewards) for sample in rollouts) / 48e6)
        learner.train(rollouts)
    assert means[-1] > means[0] + 0.15


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
    assert answer["metrics"]["updates"] == 6
    assert {row[1] for row in answer["tensors"]} == {"F32" if dtype == torch.float32 else "BF16"}

    second = loaded(tmp_path, *middle)
    again, other, _ = step(second, tmp_path, 9, files[4:])
    assert other.read_bytes() == after.read_bytes()
    assert again["checksum"] == answer["checksum"]
    assert (tmp_path / "c9").read_bytes() == (tmp_path / "c2").read_bytes()

    fresh = CausalLM(made.config)
    assert load_into(fresh, map_whole(read_manifest(publish(answer, after)), after)) == answer["checksum"]


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    file = submission(tmp_path, "s", samples(made, 3))
    first = loaded(tmp_path, manifest, whole)
    answer, after, checkpoint = step(first, tmp_path, 0, [file])
    assert answer["metrics"]["trained"] > 0
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
    with pytest.raises(FloatingPointError, match="not finite"):
        step(broken, tmp_path, 0, [file])
    assert not (tmp_path / "v0").exists()
    assert not (tmp_path / "c0").exists()
    with pytest.raises(LocalError, match="the last good one must be loaded again"):
        step(broken, tmp_path, 0, [file])
    good = small.store(healthy, tmp_path, "good")
    broken.load(*map(str, good))
    assert step(broken, tmp_path, 0, [file])[0]["metrics"]["trained"] > 0


def test_a_lost_submission_is_named_and_harms_nothing(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    working = loaded(tmp_path, manifest, whole)
    file = submission(tmp_path, "s", samples(made, 3))
    with pytest.raises(UserError, match=r"cannot read the submission .*lost"):
        step(working, tmp_path, 0, [file, str(tmp_path / "lost")])
    assert step(working, tmp_path, 0, [file])[0]["metrics"]["trained"] > 0


def test_reported_logprobs_agree_with_the_trainers(tmp_path: Path) -> None:
    """What the engine reports at temperature T is what the trainer recomputes at T: the importance weight is 1."""
    made = small.model(small.config(tmp_path, {**QWEN, "model_type": "llama"}))
    settings = replace(small.SETTINGS, temperature=0.7)
    claims = small.written(made, small.prompts(made.config, 4), settings)
    rollouts = [Sample(c.prompt, c.responses, c.logprobs, [0, 10**6, 0, 0]) for c in claims]
    recipe = replace(RECIPE_SMALL, temperature=700_000, inner_steps=1)
    assert Learner(made, recipe).train(rollouts)["importance_mean"] == pytest.approx(1.0, abs=1e-4)
    assert float(logprobs(torch.zeros((1, 4)), torch.tensor([2]), 0.7)) == pytest.approx(-math.log(4))


async def test_the_child_through_the_real_client(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    manifest, whole = small.store(made, tmp_path)
    file = submission(tmp_path, "s", samples(made, 3))
    here = loaded(tmp_path, manifest, whole)
    answer, after, _ = step(here, tmp_path, 0, [file])
    async with open_worker("node.workers.trainer", name="trainer") as worker:
        config = str(tmp_path / "config.json")
        await worker.call("configure", timeout=60, config=config, tokenizer="", recipe=FIELDS, threads=1)
        with pytest.raises(WorkerError, match="no version loaded"):
            await worker.call("train", timeout=60, submissions=[file], output="x", checkpoint="y")
        await worker.call("load", timeout=60, manifest=str(manifest), weights=str(whole), checkpoint=None)
        output = tmp_path / "child"
        told = await worker.call(
            "train", timeout=60, submissions=[file], output=str(output), checkpoint=str(tmp_path / "child-state")
        )
    assert told["checksum"] == answer["checksum"]
    assert output.read_bytes() == after.read_bytes()
