from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.workers import grpo, policy, row_layout
from node.workers import learner as learners
from node.workers.learner import TrainingSample, samples_of
from node.workers.model import CausalLM
from node.workers.policy import TrainedPolicy
from node.workers.weight_files import checksum
from proofs.sampling import logprobs
from protocol.work import schedule
from protocol.work.rollout import Group, Response, Submission
from tests.node.workers import small
from tests.node.workers.small import QWEN, RECIPE_SMALL, samples


def moved(made: CausalLM, factor: float) -> CausalLM:
    """The same model, a little elsewhere."""
    other = small.model(made.config)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


def alone(made: CausalLM, prompt: list[int], response: list[int]) -> torch.Tensor:
    """The logits [n, V] that chose the response, computed for this sequence by itself."""
    line = torch.tensor([[*prompt, *response]])
    slots = line.shape[1]
    mask = torch.ones((slots, slots), dtype=torch.bool).tril()[None, None]
    return made.logits(made(line, torch.arange(slots)[None], mask)[0, len(prompt) - 1 : -1])


def entropy(logits: Tensor) -> Tensor:
    logs = torch.log_softmax(logits, dim=-1)
    return -(logs.exp() * logs).sum(dim=-1)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_and_its_gradient_by_the_plain_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, normalisation: str, recompute: bool
) -> None:
    """One optimizer step over packed groups of an older model, every term on, against sequences one by one."""
    monkeypatch.setattr(policy, "HEAD_VALUES", 350)  # pieces of seven tokens
    made = small.model(small.config(tmp_path))
    made.recompute = recompute
    rollouts = samples(moved(made, 1.02), 5)
    recipe = replace(RECIPE_SMALL, inner_steps=1, grad_clip=0, entropy=20_000, kl=50_000, normalisation=normalisation)
    plain, first = small.model(made.config), moved(made, 0.97)
    total, share, pulls, count = torch.zeros(()), 0.0, 0.0, 0
    for sample in rollouts:
        advantage = grpo.advantages(sample.rewards)
        if advantage is None:
            continue
        for response, reported, value in zip(sample.responses, sample.reported, advantage, strict=True):
            prompt, response = list(sample.prompt), list(response)
            places = torch.tensor(response)[:, None]
            logits = alone(plain, prompt, response)
            logs = torch.log_softmax(logits, -1).gather(1, places)[:, 0]
            start = torch.log_softmax(alone(first, prompt, response), -1).gather(1, places)[:, 0].detach()
            mu = torch.tensor(reported) / -1e6
            weight = (logs.detach() - mu).exp().clamp(max=2.0)
            ratio = (logs - logs.detach()).exp()
            pull = (start - logs).exp() - (start - logs) - 1
            each = 1 / len(response) if normalisation == "sequence" else 1.0
            total = total + each * (weight * ratio * value + 0.02 * entropy(logits) - 0.05 * pull).sum()
            share += each * len(response)
            pulls += float(pull.detach().sum())
            count += len(response)
    (-total / share).backward()  # type: ignore[no-untyped-call]
    wanted = [parameter.grad for parameter in plain.parameters()]
    norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in wanted if grad is not None))

    learner = small.learner(made, recipe)
    monkeypatch.setattr(learner.optimizer, "zero_grad", lambda **_: None)
    metrics = learner.train(rollouts, lambda: TrainedPolicy(first, 1.0))
    assert metrics["loss"] == pytest.approx(-total.item() / share, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["tokens"] == count
    assert metrics["reference_kl"] == pytest.approx(pulls / count, rel=1e-3)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["groups_used"] + metrics["groups_dropped"] == 5
    for parameter, gradient in zip(made.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_how_a_step_is_cut_into_passes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for slots in (1, 10_000):
        monkeypatch.setattr(learners, "BATCH_SLOTS", {"cpu": slots})
        made = small.model(small.config(tmp_path))
        metrics = small.learner(made, RECIPE_SMALL).train(samples(made, 6))
        found.append((metrics["loss"], metrics["grad_norm"], metrics["clip_share"], metrics["importance_mean"]))
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


def test_old_logprobs_are_those_before_the_first_update(tmp_path: Path) -> None:
    """With several optimizer steps, later ones see ratios that left 1."""
    made = small.model(small.config(tmp_path))
    rollouts = samples(made, 8)
    metrics = small.learner(made, replace(RECIPE_SMALL, inner_steps=4, learning_rate=10**10)).train(rollouts)
    assert metrics["updates"] == 4
    assert metrics["importance_mean"] == pytest.approx(1.0, abs=1e-3)  # fresh rollouts: π_old is μ
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert metrics["clip_share"] > 0


def test_groups_without_signal_change_nothing(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    before = checksum(made)
    flat = [replace(sample, rewards=[500_000] * 4) for sample in samples(made, 3)]
    metrics = small.learner(made, RECIPE_SMALL).train(flat)
    assert (metrics["trained"], metrics["tokens"], metrics["groups_dropped"], metrics["updates"]) == (0, 0, 3, 0)
    assert checksum(made) == before


def test_reward_climbs(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    learner = small.learner(made, replace(RECIPE_SMALL, learning_rate=5 * 10**9))
    means = []
    for number in range(6):
        rollouts = samples(made, 12, seed=number)
        means.append(sum(sum(sample.rewards) for sample in rollouts) / 48e6)
        learner.train(rollouts)
    assert means[-1] > means[0] + 0.15


def test_reported_logprobs_agree_with_the_trainers(tmp_path: Path) -> None:
    """What the engine reports at temperature T is what the trainer recomputes at T: the importance weight is 1."""
    made = small.model(small.config(tmp_path, {**QWEN, "model_type": "llama"}))
    settings = replace(small.SETTINGS, temperature=0.7)
    claims = small.written(made, small.prompts(made.config, 4), settings)
    rollouts = [TrainingSample(c.prompt, c.responses, c.logprobs, [0, 10**6, 0, 0]) for c in claims]
    recipe = replace(RECIPE_SMALL, temperature=700_000, inner_steps=1)
    assert small.learner(made, recipe).train(rollouts)["importance_mean"] == pytest.approx(1.0, abs=1e-4)
    assert float(logprobs(torch.zeros((1, 4)), torch.tensor([2]), 0.7)) == pytest.approx(-math.log(4))


def test_length_control_uses_the_target_of_the_prompts_seed() -> None:
    groups = tuple(
        Group(counter, (5, 6), tuple(Response((7,) * length, (0,) * length, 0, 0) for length in (1, 3)), b"")
        for counter in range(20)
    )
    submission = Submission(b"\1" * 32, b"\2" * 32, b"\3" * 32, 0, groups)
    recipe = replace(RECIPE_SMALL, target_lengths=(2, 5))
    found = samples_of(submission, recipe)
    seeds = [schedule.seed(b"\1" * 32, b"\2" * 32, b"\3" * 32, counter) for counter in range(20)]
    assert [sample.target for sample in found] == [schedule.target_length(seed, (2, 5)) for seed in seeds]
    assert {sample.target for sample in found} == {2, 5}
    assert {sample.target for sample in samples_of(submission, RECIPE_SMALL)} == {None}


def test_length_control_moves_lengths_towards_the_target(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    learner = small.learner(made, replace(RECIPE_SMALL, learning_rate=5 * 10**9, length_penalty=200_000))
    lengths = []
    for number in range(8):
        rollouts = [replace(sample, target=1) for sample in samples(made, 12, seed=number)]
        lengths.append(sum(len(line) for sample in rollouts for line in sample.responses) / 48)
        learner.train(rollouts)
    assert lengths[-1] < lengths[0] - 1


def test_a_recipe_with_a_kl_term_asks_for_the_reference(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    with pytest.raises(ValueError, match="needs the reference"):
        small.learner(made, replace(RECIPE_SMALL, kl=1000)).train(samples(made, 3))


def test_the_kl_term_holds_the_policy_near_the_reference(tmp_path: Path) -> None:
    found = {}
    for weight in (1, 1_000_000):
        made = small.model(small.config(tmp_path))
        first = small.model(made.config)
        learner = small.learner(made, replace(RECIPE_SMALL, learning_rate=5 * 10**9, kl=weight))
        for number in range(4):
            metrics = learner.train(samples(made, 12, seed=number), partial(TrainedPolicy, first, 1.0))
        found[weight] = metrics["reference_kl"]
    assert found[1_000_000] < found[1] / 3


def test_the_warm_up_rises_to_the_recipes_rate(tmp_path: Path) -> None:
    made = small.model(small.config(tmp_path))
    learner = small.learner(made, replace(RECIPE_SMALL, inner_steps=1, warmup_steps=4, learning_rate=10**9))
    rates = []
    for number in range(5):
        rates.append(learner.train(samples(made, 3, seed=number))["learning_rate"])
    assert rates == pytest.approx([0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])  # of the next step


def test_perturbing_one_segment_leaves_the_others_unchanged(tmp_path: Path) -> None:
    """Two groups in one pass: another token in one response changes nothing of any other response."""
    made = small.model(small.config(tmp_path))
    groups = [row_layout.RowGroup([3, 4], [[5, 6, 7], [8, 9, 10, 11]]), row_layout.RowGroup([12], [[13, 14], [15, 16]])]
    other = [row_layout.RowGroup([3, 4], [[5, 40, 7], [8, 9, 10, 11]]), groups[1]]
    found = []
    for each in (groups, other):
        (batch,) = row_layout.pack(each, sort=True)
        logs = TrainedPolicy(made, 1.0)(batch)
        found.append({int(place): float(value) for place, value in zip(batch.places, logs, strict=True)})
    changed = {place for place in found[0] if abs(found[0][place] - found[1][place]) > 1e-6}
    assert changed <= {1, 2}
    assert 2 in changed
    assert len(found[0]) == 11
