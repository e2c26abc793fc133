from __future__ import annotations

import math

import pytest
import torch

from node.starter.defaults import RECIPE
from node.workers import grpo
from node.workers.grpo import Limits

LIMITS = Limits(low=0.2, high=0.3, most=4.0, importance_max=2.0, entropy=0.0, kl=0.0)


def value(ratio: float, advantage: float, age: float = 1.0, limits: Limits = LIMITS) -> tuple[float, float, bool]:
    """J, dJ/dlogπ and whether it was clipped, at π/π_old = ``ratio`` and π_old/μ = ``age``."""
    old = torch.tensor([-1.5])
    logprobs = (old + math.log(ratio)).requires_grad_()
    found = grpo.objective(logprobs, old, old - math.log(age), torch.tensor([advantage]), limits)
    found.value.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return found.value.item(), logprobs.grad.item(), bool(found.clipped.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),  # on policy: the plain policy gradient
        (1.0, -2.0, -2.0, -2.0),
        (1.25, 2.0, 2.5, 2.5),  # inside the upper clip
        (1.5, 2.0, 2.6, 0.0),  # beyond it: a good token is not pushed further up
        (0.5, 2.0, 1.0, 1.0),  # a good token that became rare may recover
        (0.9, -2.0, -1.8, -1.8),  # inside the lower clip
        (0.5, -2.0, -1.6, 0.0),  # beyond it: a bad token is not pushed further down
        (3.0, -2.0, -6.0, -6.0),  # a bad token that became likely is pushed down
        (9.0, -2.0, -8.0, 0.0),  # but no harder than δ says
    ],
)
def test_two_sided_clipping(ratio: float, advantage: float, expected: float, slope: float) -> None:
    got, gradient, clipped = value(ratio, advantage)
    assert got == pytest.approx(expected, rel=1e-5)
    assert gradient == pytest.approx(slope, rel=1e-5, abs=1e-6)
    assert clipped == (slope == 0.0)


@pytest.mark.parametrize(("age", "weight"), [(0.25, 0.25), (1.0, 1.0), (1.7, 1.7), (5.0, 2.0), (1e30, 2.0)])
def test_importance_weight_is_bounded_and_detached(age: float, weight: float) -> None:
    got, gradient, _ = value(1.0, 3.0, age)
    assert got == pytest.approx(3.0 * weight, rel=1e-4)
    assert gradient == pytest.approx(3.0 * weight, rel=1e-4)


@pytest.mark.parametrize("difference", [90.0, -90.0, 1e6, -1e6])
def test_extreme_ratios_give_finite_gradients(difference: float) -> None:
    logprobs = torch.tensor([difference], requires_grad=True)
    for advantage in (1.0, -1.0):
        found = grpo.objective(logprobs, torch.zeros(1), torch.zeros(1), torch.tensor([advantage]), LIMITS)
        (found.value.sum() + grpo.behaviour_kl(logprobs, torch.zeros(1)).sum()).backward()  # type: ignore[no-untyped-call]
        assert math.isfinite(found.value.item())
        assert logprobs.grad is not None
        assert bool(torch.isfinite(logprobs.grad).all())


def test_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((6, 9), generator=generator, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 9, (6, 1), generator=generator)
    start = torch.log_softmax(logits.detach(), -1).gather(1, tokens)[:, 0]
    # Ratios on both sides of 1, none within a finite difference of a clip.
    old = start + torch.tensor([0.05, -0.1, 0.4, -0.5, 0.0, -1.6], dtype=torch.float64)
    reported = old + torch.tensor([0.1, -0.1, 0.3, 0.0, -2.0, 0.2], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 0.7, -0.7, 2.0, -0.5], dtype=torch.float64)
    limits = Limits(low=0.2, high=0.2, most=4.0, importance_max=2.0, entropy=0.03, kl=0.2)

    def loss(values: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(values, -1).gather(1, tokens)[:, 0]
        found = grpo.objective(logprobs, old, reported, advantage, limits)
        drift = grpo.behaviour_kl(logprobs, reported)
        return -(found.value - limits.kl * drift).sum() / 6

    assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-7)


def test_advantages_by_hand() -> None:
    # mean 0.25, deviations 0.75 and −0.25, ddof 1: √((0.5625 + 3·0.0625)/3) = 0.5
    assert grpo.advantages([1_000_000, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert grpo.advantages([7, 7, 7]) is None
    assert grpo.advantages([5]) is None
    tiny = grpo.advantages([0, 1])
    assert tiny is not None
    assert max(map(abs, tiny)) < 0.5  # the 1e-6 keeps a millionth from looking like a verdict


def test_behaviour_kl_and_entropy_by_hand() -> None:
    logprobs, reported = torch.tensor([0.0, -1.0]), torch.tensor([0.0, -2.0])
    assert grpo.behaviour_kl(logprobs, reported).tolist() == pytest.approx([0.0, math.exp(-1) + 1 - 1])
    uniform = torch.zeros((2, 8))
    assert grpo.entropy(uniform, 0.7).tolist() == pytest.approx([math.log(8)] * 2)
    logits = torch.tensor([[0.0, 2 * math.log(3.0)]])  # at temperature 2: probabilities ¼ and ¾
    assert grpo.entropy(logits, 2.0).item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


def test_limits_come_from_the_recipe() -> None:
    limits = Limits.of(RECIPE)
    assert (limits.low, limits.high, limits.most, limits.importance_max) == (0.2, 0.2, 4.0, 2.0)
