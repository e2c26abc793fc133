"""The loss: group-relative policy optimisation with two-sided clipping, for rollouts of slightly older weights.

For a response token with advantage Â, π the current policy, π_old the policy before the step and μ the one that wrote
it:

    r = π / π_old                                     exp of the clamped difference of log-probabilities
    w = min(π_old / μ, importance_max)                detached: corrects for the age of the rollout
    J = w · min( min(r, δ)·Â, clip(r, 1 − ε_low, 1 + ε_high)·Â )
    loss = −(Σ J + entropy · Σ H(π) − kl · Σ KL(π ‖ μ)) / tokens

1. Plain PPO leaves r unbounded where Â < 0; δ > 1 + ε_high bounds it (INTELLECT-2, https://arxiv.org/abs/2505.07291).
2. π_old is recomputed by the trainer, so r starts at 1 whatever engine wrote the rollout. It says nothing of the
   rollout's age; w does, and it rests on log-probabilities that a validator has verified.
3. An advantage is (reward − mean) / (standard deviation + 1e-6) within the group (ddof 1). A group whose rewards are
   all equal carries no signal and is dropped before anything is computed.
4. Sums run over tokens and are divided by one denominator, the tokens of the whole optimizer step: how a step is cut
   into passes changes nothing, and long responses are not played down.
5. Log-ratios are clamped *before* exp: clamp(exp(90)) has a NaN gradient.
6. KL(π ‖ μ) is the estimator (μ/π) − log(μ/π) − 1 (http://joschu.net/blog/kl-approx.html) at the sampled tokens: a pull
   towards the policy that wrote the rollout, which needs no second model.

All tensors are float32 [N], one value a response token; log-probabilities are at the sampling temperature.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from protocol.constants import MILLION
from protocol.domain import Recipe

MAX_LOG_RATIO = 20.0
"""e²⁰ is far beyond every clip, and its square is still finite in float32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The loss's numbers: ε_low, ε_high, δ, the largest importance weight, and the weights of entropy and KL."""

    low: float
    high: float
    most: float
    importance_max: float
    entropy: float
    kl: float

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The limits that a domain's recipe prescribes."""
        numbers = (
            recipe.clip_low,
            recipe.clip_high,
            recipe.clip_max,
            recipe.importance_max,
            recipe.entropy,
            recipe.kl,
        )
        return cls(*(number / MILLION for number in numbers))


@dataclass(frozen=True, slots=True)
class Objective:
    """Token by token: ``value`` J with its gradient, ``ratio`` r, ``weight`` w and whether the clip took the gradient
    away (``clipped``, bool). The last three are detached."""

    value: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor


def advantages(rewards: Sequence[int]) -> list[float] | None:
    """The advantages of a group's rewards (any unit), or None where the group carries no signal."""
    if len(set(rewards)) < 2:
        return None
    values = [reward / MILLION for reward in rewards]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / (deviation + 1e-6) for value in values]


def ratio_of(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator − denominator) of two log-probabilities, with rule 5's clamp."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def objective(logprobs: Tensor, old: Tensor, reported: Tensor, advantage: Tensor, limits: Limits) -> Objective:
    """J of every token. ``logprobs`` (log π) carries the gradient; ``old`` is log π_old and ``reported`` log μ."""
    ratio = ratio_of(logprobs, old.detach())
    weight = ratio_of(old, reported).clamp(max=limits.importance_max).detach()
    bounded = ratio.clamp(max=limits.most) * advantage
    near = ratio.clamp(1.0 - limits.low, 1.0 + limits.high) * advantage
    value = weight * torch.minimum(bounded, near)
    with torch.no_grad():
        outside = (ratio < 1.0 - limits.low) | (ratio > 1.0 + limits.high)
        clipped = ((near < bounded) & outside) | (ratio > limits.most)
    return Objective(value, ratio.detach(), weight, clipped)


def behaviour_kl(logprobs: Tensor, reported: Tensor) -> Tensor:
    """The estimate of KL(π ‖ μ) at each token (rule 6); never negative."""
    difference = (reported - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1.0


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """The entropy in nats [N] of softmax(logits / temperature), ``logits`` [N, V]."""
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(logs.exp() * logs).sum(dim=-1)
