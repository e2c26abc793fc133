"""The numbers that a genesis fixes: recipe, timings, policy and thresholds, each a flat part of the body.

1. A part's fields stand in the genesis in the order of their declaration.
2. "micro" is millionths. Learning rates are in units of 10⁻¹² ("pico"). Times are milliseconds.
3. The default timings of a devnet are ten times shorter than a public domain's or more.
4. Target lengths are strictly ascending and no longer than a response may be. Where there are any, the recipe's budget
   prompt has one place ``{}`` for the number.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Final, Self

from protocol import codec
from protocol.codec import Int, Many, Schema, Text
from protocol.constants import MILLION

NORMALISATIONS: Final = ("token", "sequence")
MAX_TARGET_LENGTHS: Final = 64

_COUNT = Int(1, 2**20)
_MICRO = Int(0, 1000 * MILLION)
_SHARE = Int(0, MILLION)
_MS = Int(1, 2**40)


@dataclass(frozen=True, slots=True)
class Part:
    """Base of the genesis' flat parts: fields in declaration order, each with a schema."""

    SCHEMA: ClassVar[tuple[tuple[str, Schema], ...]] = ()

    def to_value(self) -> list[Any]:
        """The fields in declaration order, ready for ``codec.encode``."""
        return [getattr(self, item.name) for item in fields(self)]

    @classmethod
    def from_value(cls, value: codec.Value) -> Self:
        """The inverse of ``to_value`` for a value that was checked against ``SCHEMA``."""
        return cls(*value)


@dataclass(frozen=True, slots=True)
class Recipe(Part):
    """How rollouts are made and trained on. The fields' units: counts, tokens, micro, pico (learning rate).

    ``normalisation``: whether every token of an optimizer step weighs the same, or every response. ``target_lengths``
    in tokens (none: no length control): the prompt's seed draws one of them, ``budget_prompt`` tells it to the model,
    and each token more or less than it takes ``length_penalty`` (micro) off the reward.
    """

    SCHEMA: ClassVar = (
        ("async_level", Int(0, 64)),
        ("group_size", Int(1, 256)),
        ("groups_per_submission", Int(1, 1024)),
        ("groups_per_step", Int(1, 2**16)),
        ("max_prompt_tokens", _COUNT),
        ("max_response_tokens", _COUNT),
        ("temperature", Int(1, 100 * MILLION)),
        ("min_p", _SHARE),
        ("clip_low", _SHARE),
        ("clip_high", _MICRO),
        ("clip_max", Int(MILLION, 1000 * MILLION)),
        ("importance_max", Int(MILLION, 1000 * MILLION)),
        ("learning_rate", Int(0, 10**12)),
        ("warmup_steps", Int(0, 2**20)),
        ("weight_decay", _MICRO),
        ("grad_clip", _MICRO),
        ("entropy", _MICRO),
        ("kl", _MICRO),
        ("inner_steps", Int(1, 1024)),
        ("normalisation", Text(16, NORMALISATIONS)),
        ("target_lengths", Many(_COUNT, most=MAX_TARGET_LENGTHS)),
        ("length_penalty", _SHARE),
        ("budget_prompt", Text(200)),
    )

    async_level: int
    group_size: int
    groups_per_submission: int
    groups_per_step: int
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: int
    min_p: int
    clip_low: int
    clip_high: int
    clip_max: int
    importance_max: int
    learning_rate: int
    warmup_steps: int
    weight_decay: int
    grad_clip: int
    entropy: int
    kl: int
    inner_steps: int
    normalisation: str
    target_lengths: tuple[int, ...]
    length_penalty: int
    budget_prompt: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_lengths", tuple(self.target_lengths))

    def problem(self) -> str | None:
        """What is wrong between fields that each fit their own schema, or None."""
        targets = self.target_lengths
        if any(left >= right for left, right in pairwise(targets)):
            return "the target lengths are not strictly ascending"
        if targets and targets[-1] > self.max_response_tokens:
            return "a target length is longer than a response may be"
        if targets and self.budget_prompt.count("{}") != 1:
            return "the budget prompt needs one {} for the target length"
        return None


@dataclass(frozen=True, slots=True)
class Timings(Part):
    """Milliseconds: between presences, between attempts to cut, a trainer's silence that ends its term, the wait
    for a verdict before a submission counts as late, and the wait after the first peer before a first term."""

    SCHEMA: ClassVar = (
        ("presence_ms", _MS),
        ("epoch_ms", _MS),
        ("term_silence_ms", _MS),
        ("verdict_wait_ms", _MS),
        ("founding_wait_ms", _MS),
    )

    presence_ms: int
    epoch_ms: int
    term_silence_ms: int
    verdict_wait_ms: int
    founding_wait_ms: int


@dataclass(frozen=True, slots=True)
class Policy(Part):
    """How many nodes take which role (``*_per_million`` of the nodes present), the reputation (micro) that makes
    a validator where the genesis names none such, and the least share (micro) of a submission's groups to replay."""

    SCHEMA: ClassVar = (
        ("min_nodes", _COUNT),
        ("relays_min", Int(0, 2**20)),
        ("relays_per_million", _SHARE),
        ("validators_min", Int(0, 2**20)),
        ("validators_per_million", _SHARE),
        ("validator_reputation", _SHARE),
        ("audit_share", _SHARE),
    )

    min_nodes: int
    relays_min: int
    relays_per_million: int
    validators_min: int
    validators_per_million: int
    validator_reputation: int
    audit_share: int


@dataclass(frozen=True, slots=True)
class Thresholds(Part):
    """Limits of the rollout checks, all in micro; what each bounds is defined in ``proofs.checks``. They are for the
    domain's compute dtype, audited in float32, and hold for all engines that it admits.

    ``deficit_clip`` is in units of the score; ``deficit_honest`` and ``deficit_mean``, an honest author's largest and a
    forger's least mean deficit, are in millionths of the clip.
    """

    SCHEMA: ClassVar = (
        ("deficit_clip", Int(1, 100 * MILLION)),
        ("deficit_honest", Int(1, MILLION)),
        ("deficit_mean", Int(1, MILLION)),
        ("mismatch_share", _SHARE),
        ("activation_mismatch_share", _SHARE),
        ("mantissa_mean", Int()),
        ("mantissa_median", Int()),
        ("logprob_error", Int()),
    )

    deficit_clip: int
    deficit_honest: int
    deficit_mean: int
    mismatch_share: int
    activation_mismatch_share: int
    mantissa_mean: int
    mantissa_median: int
    logprob_error: int


def default_timings(devnet: bool) -> Timings:
    """The timings that a new domain starts from."""
    if devnet:
        return Timings(500, 500, 6_000, 6_000, 1_000)
    return Timings(5_000, 10_000, 60_000, 60_000, 10_000)
