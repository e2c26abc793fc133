"""The recipe: group-relative policy optimisation with two-sided clipping, for rollouts of slightly older weights.

For a response token with advantage Â, π the current policy, π_old the policy before the step, μ the one that wrote
it and π_0 that of version 0:

    r = π / π_old                                     exp of the clamped difference of log-probabilities
    w = min(π_old / μ, importance_max)                detached: corrects for the age of the rollout
    J = w · min( min(r, δ)·Â, clip(r, 1 − ε_low, 1 + ε_high)·Â )
    loss = −Σ a · (J + entropy · H(π) − kl · KL(π ‖ π_0)) / Σ a

1. Plain PPO leaves r unbounded where Â < 0; δ > 1 + ε_high bounds it (INTELLECT-2, https://arxiv.org/abs/2505.07291).
2. π_old is recomputed by the trainer, so r starts at 1 whatever engine wrote the rollout. It says nothing of the
   rollout's age; w does, and it rests on log-probabilities that a validator has verified.
3. An advantage is (reward − mean) / (standard deviation + 1e-6) within the group (ddof 1). With length control it is
   reward − mean of rewards shaped by length, in their own unit: where all answers are right, a division by their tiny
   deviation would make much of a few tokens. Either way a group whose *task* rewards are all equal carries no signal
   and is dropped before anything is computed.
4. The weight a of a token is 1 with normalisation "token", so that long responses are not played down, and one over
   the response's length with "sequence", so that each response counts the same. Σ a runs over the whole optimizer
   step: how a step is cut into passes, or shared among processes, changes nothing.
5. Log-ratios are clamped *before* exp: clamp(exp(90)) has a NaN gradient.
6. KL(π ‖ π_0) is the estimator (π_0/π) − log(π_0/π) − 1 (http://joschu.net/blog/kl-approx.html) at the sampled tokens.
   It carries the gradient of π: 1 − π_0/π for each log π.

Tensors are float32 [N], one value a response token; log-probabilities are at the sampling temperature.
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
class ObjectiveLimits:
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
class Tokens:
    """What belongs to each of N response tokens: ``reported`` log μ, ``old`` log π_old (None: the policy has not
    moved since), ``reference`` log π_0 (None: no KL term), ``advantage`` Â and ``weight`` a."""

    reported: Tensor
    old: Tensor | None
    reference: Tensor | None
    advantage: Tensor
    weight: Tensor

    def part(self, where: slice) -> Tokens:
        """Those of some of the tokens."""
        old = None if self.old is None else self.old[where]
        reference = None if self.reference is None else self.reference[where]
        return Tokens(self.reported[where], old, reference, self.advantage[where], self.weight[where])


@dataclass(frozen=True, slots=True)
class Objective:
    """Token by token: ``value`` J with its gradient, ``ratio`` r, ``weight`` w and whether the clip took the gradient
    away (``clipped``, bool). The last three are detached."""

    value: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor


# Rewards to advantages: a group at a time


def shaped(rewards: Sequence[int], lengths: Sequence[int], target: int, penalty: int) -> list[int]:
    """Rewards (micro) less ``penalty`` (micro) for each token by which a length misses the ``target``."""
    return [reward - penalty * abs(target - length) for reward, length in zip(rewards, lengths, strict=True)]


def advantages(
    rewards: Sequence[int], *, lengths: Sequence[int] = (), target: int | None = None, penalty: int = 0
) -> list[float] | None:
    """The advantages of a group's task rewards (micro), or None where the group carries no signal (rule 3).

    A ``target`` length asks for length control: ``lengths`` are the responses' tokens, ``penalty`` micro a token.
    """
    if len(set(rewards)) < 2:
        return None
    if target is not None:
        values = [value / MILLION for value in shaped(rewards, lengths, target, penalty)]
        mean = statistics.fmean(values)
        return [value - mean for value in values]
    values = [reward / MILLION for reward in rewards]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / (deviation + 1e-6) for value in values]


def token_weight(length: int, normalisation: str) -> float:
    """The weight a of each token of a response with ``length`` of them (rule 4)."""
    return 1.0 / length if normalisation == "sequence" else 1.0


# Terms: a token at a time


def ratio_of(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator − denominator) of two log-probabilities, with rule 5's clamp."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def objective(logprobs: Tensor, old: Tensor, reported: Tensor, advantage: Tensor, limits: ObjectiveLimits) -> Objective:
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


def kl_from(logprobs: Tensor, other: Tensor) -> Tensor:
    """The estimate of KL(π ‖ other) at each token (rule 6), never negative; ``other`` are log-probabilities too."""
    difference = (other.detach() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1.0


# The loss


MEASURES = ("ratio_mean", "importance_mean", "clip_share", "entropy", "behaviour_kl", "reference_kl")
"""What ``loss`` sums up over tokens beside the loss itself, by the names of the means."""


def loss(
    logprobs: Tensor, spread: Tensor, tokens: Tokens, limits: ObjectiveLimits, denominator: float
) -> tuple[Tensor, Tensor]:
    """These tokens' share of the step's loss, and the sums of ``MEASURES`` over them (float64 [6], detached).

    ``logprobs`` (log π) and ``spread`` (H(π)) carry the gradient; ``denominator`` is Σ a of the whole optimizer step.
    """
    old = logprobs.detach() if tokens.old is None else tokens.old
    found = objective(logprobs, old, tokens.reported, tokens.advantage, limits)
    value = found.value + limits.entropy * spread
    pull = torch.zeros_like(logprobs)
    if tokens.reference is not None:
        pull = kl_from(logprobs, tokens.reference)
        value = value - limits.kl * pull
    with torch.no_grad():
        drift = kl_from(logprobs, tokens.reported)
        measured = (found.ratio, found.weight, found.clipped, spread, drift, pull)
        sums = torch.stack([each.detach().double().sum() for each in measured])
    return -(tokens.weight * value).sum() / denominator, sums
