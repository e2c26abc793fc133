"""The numbers that a genesis fixes: recipe, timings, policy and thresholds, each a flat part of the body.

1. A part's fields stand in the genesis in the order of their declaration.
2. "micro" is millionths. Learning rates are in units of 10⁻¹² ("pico"). Times are milliseconds.
3. The default timings of a devnet are ten times shorter than a public domain's or more.
4. Target lengths are strictly ascending and no longer than a response may be. Where there are any, the recipe's budget
   prompt has one place ``{}`` for the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

from protocol.codec import Fields, Int, Many, Text
from protocol.constants import MAX_ADMISSIONS, MILLION

ADMISSIONS: Final = ("open", "invited")
NORMALISATIONS: Final = ("token", "sequence")
MAX_TARGET_LENGTHS: Final = 64

_COUNT = Int(1, 2**20)
Count = Annotated[int, _COUNT]
Micro = Annotated[int, Int(0, 1000 * MILLION)]
Share = Annotated[int, Int(0, MILLION)]
Milliseconds = Annotated[int, Int(1, 2**40)]


@dataclass(frozen=True, slots=True)
class Part(Fields):
    """Base of the genesis' flat parts: fields in declaration order, each with a schema."""


@dataclass(frozen=True, slots=True)
class Recipe(Part):
    """How rollouts are made and trained on. The fields' units: counts, tokens, micro, pico (learning rate).

    ``normalisation``: whether every token of an optimizer step weighs the same, or every response. ``target_lengths``
    in tokens (none: no length control): the prompt's seed draws one of them, ``budget_prompt`` tells it to the model,
    and each token more or less than it takes ``length_penalty`` (micro) off the reward.
    """

    async_level: Annotated[int, Int(0, 64)]
    group_size: Annotated[int, Int(1, 256)]
    groups_per_submission: Annotated[int, Int(1, 1024)]
    groups_per_step: Annotated[int, Int(1, 2**16)]
    max_prompt_tokens: Count
    max_response_tokens: Count
    temperature: Annotated[int, Int(1, 100 * MILLION)]
    min_p: Share
    clip_low: Share
    clip_high: Micro
    clip_max: Annotated[int, Int(MILLION, 1000 * MILLION)]
    importance_max: Annotated[int, Int(MILLION, 1000 * MILLION)]
    learning_rate: Annotated[int, Int(0, 10**12)]
    warmup_steps: Annotated[int, Int(0, 2**20)]
    weight_decay: Micro
    grad_clip: Micro
    entropy: Micro
    kl: Micro
    inner_steps: Annotated[int, Int(1, 1024)]
    normalisation: Annotated[str, Text(16, NORMALISATIONS)]
    target_lengths: Annotated[tuple[int, ...], Many(_COUNT, most=MAX_TARGET_LENGTHS)]
    length_penalty: Share
    budget_prompt: Annotated[str, Text(200)]

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
    """Milliseconds: between presences, between attempts to cut, a silence that ends a trainer's term and anybody's
    standing, the wait for a verdict before a submission counts as late, the wait after the first peer before a first
    term, and the least time that a trainer with a full batch is given for a version."""

    presence_ms: Milliseconds
    epoch_ms: Milliseconds
    term_silence_ms: Milliseconds
    verdict_wait_ms: Milliseconds
    founding_wait_ms: Milliseconds
    patience_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class Admission(Part):
    """How strangers become members (``protocol.log.admission``): whether a ticket's work is enough or an invitation is
    needed, the least work (expected hashes), how many keys a cut admits, and how many entries a member may have in the
    log whose work nobody accepted yet (``protocol.log.budget``)."""

    mode: Annotated[str, Text(16, ADMISSIONS)]
    work: Annotated[int, Int(0, 2**40)]
    per_cut: Annotated[int, Int(1, MAX_ADMISSIONS)]
    budget: Annotated[int, Int(1, 2**20)] = 32


@dataclass(frozen=True, slots=True)
class Policy(Part):
    """How many nodes take which role (``*_per_million`` of the nodes present), the reputation (micro) that makes
    a validator where the genesis names none such, and the least share (micro) of a submission's groups to replay."""

    min_nodes: Count
    relays_min: Annotated[int, Int(0, 2**20)]
    relays_per_million: Share
    validators_min: Annotated[int, Int(0, 2**20)]
    validators_per_million: Share
    validator_reputation: Share
    audit_share: Share


@dataclass(frozen=True, slots=True)
class Thresholds(Part):
    """Limits of the rollout checks, all in micro; what each bounds is defined in ``proofs.checks``. They are for the
    domain's compute dtype, audited in float32, and hold for all engines that it admits.

    ``deficit_clip`` is in units of the score; ``deficit_honest`` and ``deficit_mean``, an honest author's largest and a
    forger's least mean deficit, are in millionths of the clip.
    """

    deficit_clip: Annotated[int, Int(1, 100 * MILLION)]
    deficit_honest: Annotated[int, Int(1, MILLION)]
    deficit_mean: Annotated[int, Int(1, MILLION)]
    mismatch_share: Share
    activation_mismatch_share: Share
    mantissa_mean: Annotated[int, Int()]
    mantissa_median: Annotated[int, Int()]
    logprob_error: Annotated[int, Int()]


def default_timings(devnet: bool) -> Timings:
    """The timings that a new domain starts from."""
    if devnet:
        return Timings(500, 500, 6_000, 6_000, 1_000, 60_000)
    return Timings(5_000, 10_000, 60_000, 60_000, 10_000, 600_000)


def default_admission(*, devnet: bool, private: bool) -> Admission:
    """How a new domain admits: a devnet asks for no work, a private domain for an invitation."""
    return Admission("invited" if private else "open", 0 if devnet else 4096, 32)
