from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from node.starter.defaults import RECIPE
from node.workers import grpo, policy
from node.workers.grpo import ObjectiveLimits, Tokens

LIMITS = ObjectiveLimits(low=0.2, high=0.3, most=4.0, importance_max=2.0, entropy=0.0, kl=0.0)


def value(
    ratio: float, advantage: float, age: float = 1.0, limits: ObjectiveLimits = LIMITS
) -> tuple[float, float, bool]:
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
        (found.value.sum() + grpo.kl_from(logprobs, torch.zeros(1)).sum()).backward()  # type: ignore[no-untyped-call]
        assert math.isfinite(found.value.item())
        assert logprobs.grad is not None
        assert bool(torch.isfinite(logprobs.grad).all())


LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
SPREAD = torch.tensor([0.5, 1.0, 0.25, 2.0], dtype=torch.float64)
TOKENS = Tokens(
    # Ratios on both sides of 1 and of each clip, none within a finite difference of one.
    old=LOGPROBS - torch.tensor([0.05, -0.5, 0.4, -0.1], dtype=torch.float64),
    reported=LOGPROBS - torch.tensor([0.15, -0.6, 2.0, -0.1], dtype=torch.float64),
    reference=LOGPROBS + torch.tensor([0.3, -0.2, 0.0, -1.0], dtype=torch.float64),
    advantage=torch.tensor([1.0, -1.0, 0.7, -0.7], dtype=torch.float64),
    weight=torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64),
)


def test_the_whole_loss_by_hand() -> None:
    """Every term on; the numbers are those of the module's formula, worked out token by token."""
    limits = ObjectiveLimits(low=0.2, high=0.2, most=4.0, importance_max=2.0, entropy=0.1, kl=0.3)
    e = math.exp
    terms = [
        # w · min(min(r, δ)Â, clip(r)Â): e^0.05 is within the clip
        e(0.1) * e(0.05) * 1.0 + 0.1 * 0.5 - 0.3 * (e(0.3) - 0.3 - 1),
        # r = e^−0.5 below 1 − ε with Â < 0: clipped to 0.8; w = e^−0.1
        e(-0.1) * 0.8 * -1.0 + 0.1 * 1.0 - 0.3 * (e(-0.2) + 0.2 - 1),
        # r = e^0.4 above 1 + ε with Â > 0: clipped to 1.2; w = e^1.6, bounded by 2
        2.0 * 1.2 * 0.7 + 0.1 * 0.25 - 0.0,
        # r = e^−0.1 within the clip; w = 1
        1.0 * e(-0.1) * -0.7 + 0.1 * 2.0 - 0.3 * (e(-1.0) + 1.0 - 1),
    ]
    expected = -(0.5 * terms[0] + 0.5 * terms[1] + terms[2] + terms[3]) / 3.0
    found, sums = grpo.loss(LOGPROBS, SPREAD, TOKENS, limits, denominator=3.0)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    measured = dict(zip(grpo.MEASURES, sums.tolist(), strict=True))
    assert measured["ratio_mean"] == pytest.approx(e(0.05) + e(-0.5) + e(0.4) + e(-0.1))
    assert measured["importance_mean"] == pytest.approx(e(0.1) + e(-0.1) + 2.0 + 1.0)
    assert measured["clip_share"] == 2
    assert measured["entropy"] == pytest.approx(3.75)
    drift = [(-0.15, 1), (0.6, 1), (-2.0, 1), (0.1, 1)]
    assert measured["behaviour_kl"] == pytest.approx(sum(e(x) - x - 1 for x, _ in drift))
    assert measured["reference_kl"] == pytest.approx(sum(e(x) - x - 1 for x in (0.3, -0.2, 0.0, -1.0)))


def test_parts_of_a_step_add_up_to_it() -> None:
    limits = ObjectiveLimits(low=0.2, high=0.2, most=4.0, importance_max=2.0, entropy=0.1, kl=0.3)
    whole, _ = grpo.loss(LOGPROBS, SPREAD, TOKENS, limits, 3.0)
    parts = [
        grpo.loss(LOGPROBS[part], SPREAD[part], TOKENS.part(part), limits, 3.0)[0]
        for part in (slice(0, 1), slice(1, 4))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item())


@pytest.mark.parametrize(
    ("entropy", "kl", "reference"), [(0.0, 0.0, False), (0.5, 0.0, False), (0.0, 0.7, True), (0.2, 0.3, True)]
)
def test_each_terms_gradient_agrees_with_finite_differences(entropy: float, kl: float, reference: bool) -> None:
    """From the logits on, so that entropy and log-probabilities are those of one softmax."""
    limits = ObjectiveLimits(low=0.2, high=0.2, most=4.0, importance_max=2.0, entropy=entropy, kl=kl)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((6, 9), generator=generator, dtype=torch.float64).requires_grad_()
    chosen = torch.randint(0, 9, (6, 1), generator=generator)
    start = torch.log_softmax(logits.detach(), -1).gather(1, chosen)[:, 0]
    old = start + torch.tensor([0.05, -0.1, 0.4, -0.5, 0.0, -1.6], dtype=torch.float64)
    tokens = Tokens(
        old=old,
        reported=old + torch.tensor([0.1, -0.1, 0.3, 0.0, -2.0, 0.2], dtype=torch.float64),
        reference=start + torch.tensor([0.2, 0.0, -1.0, 0.5, -0.3, 2.0], dtype=torch.float64) if reference else None,
        advantage=torch.tensor([1.0, -1.0, 0.7, -0.7, 2.0, -0.5], dtype=torch.float64),
        weight=torch.tensor([1.0, 0.5, 0.5, 0.25, 1.0, 2.0], dtype=torch.float64),
    )

    def loss(values: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(values, -1)
        spread = -(logs.exp() * logs).sum(-1)
        return grpo.loss(logs.gather(1, chosen)[:, 0], spread, tokens, limits, 6.0)[0]

    assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-7)


def test_the_kl_term_has_the_gradient_of_its_definition() -> None:
    """What a penalty on log-probabilities without gradient would miss: d/dlogπ = 1 − π_0/π."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    grpo.kl_from(logprobs, torch.tensor([-1.5, -1.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - math.e])


def test_normalisation_by_hand() -> None:
    assert grpo.token_weight(4, "token") == 1.0
    assert grpo.token_weight(4, "sequence") == 0.25


def test_length_shaped_advantages_by_hand() -> None:
    # All right but one; target 10, α = 0.01: rewards 1 − 0.02, 1 − 0.05, 0 − 0; mean 0.64333
    found = grpo.advantages([1_000_000, 1_000_000, 0], lengths=[12, 5, 10], target=10, penalty=10_000)
    mean = (0.98 + 0.95 + 0.0) / 3
    assert found == pytest.approx([0.98 - mean, 0.95 - mean, -mean])
    # No division by the deviation: a length that misses by 1 000 at α = 0.0003 moves an advantage by 0.3, not by 1.5.
    # And lengths alone are no signal: the filter looks at the task's rewards.
    assert grpo.advantages([1_000_000] * 3, lengths=[1, 500, 1000], target=10, penalty=300) is None


def test_advantages_by_hand() -> None:
    # mean 0.25, deviations 0.75 and −0.25, ddof 1: √((0.5625 + 3·0.0625)/3) = 0.5
    assert grpo.advantages([1_000_000, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert grpo.advantages([7, 7, 7]) is None
    assert grpo.advantages([5]) is None
    tiny = grpo.advantages([0, 1])
    assert tiny is not None
    assert max(map(abs, tiny)) < 0.5  # the 1e-6 keeps a millionth from looking like a verdict


def test_kl_by_hand() -> None:
    logprobs, reported = torch.tensor([0.0, -1.0]), torch.tensor([0.0, -2.0])
    assert grpo.kl_from(logprobs, reported).tolist() == pytest.approx([0.0, math.exp(-1) + 1 - 1])


def test_the_policys_entropy_by_hand() -> None:
    seen: list[float] = []

    def evaluate(logprobs: Tensor, spread: Tensor, part: slice) -> Tensor:
        seen.extend(spread.tolist())
        return spread.sum()

    hidden, head = torch.eye(2), torch.tensor([[0.0, 0.0], [2 * math.log(3.0), 0.0]])
    policy._Head.apply(hidden, head, None, None, torch.tensor([0, 1]), 2.0, evaluate)  # type: ignore[no-untyped-call]
    # At temperature 2 the first row's probabilities are ¼ and ¾, the second's alike.
    assert seen == pytest.approx([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)])


def test_limits_come_from_the_recipe() -> None:
    limits = ObjectiveLimits.of(RECIPE)
    assert (limits.low, limits.high, limits.most, limits.importance_max) == (0.2, 0.2, 4.0, 2.0)
