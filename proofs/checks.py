"""The checks of one submission, a function each, and the table of what a verdict can say.

1. A check looks at values only: what a parsed submission claims, and what the replay child measured (``GroupReplay``).
   Nothing here needs torch, so that the daemon can judge.
2. All arithmetic is on integers (micro, counts), so that validators with equal measurements agree.
3. Sampling is judged by evidence (``protocol.credit.sequential_test``): that of all replayed tokens together, or that
   of the group where it is largest, so that one wrong group among many right ones cannot hide in their mean. And no
   single choice may be further off than a log-probability may, for both are how far two of a token's logits differ
   between machines: a mean forgives one token in some hundreds that is chosen by hand, and one is enough to end a
   response early.
4. The other statistics are bounded over the whole audit and, ``GROUP_FACTOR`` times as wide, in each group by itself. A
   maximum and a median are bounded in each group. Bounds on shares allow one place beyond the share, at any size:
   honest ties exist, and 1 % of 20 tokens is no token.
   What lies beyond its bound is *borderline*, a soft failure that earns nothing and is evidence against the node, and
   what lies beyond ``HARD_FACTOR`` times the bound is hard.
5. The end token is a token like any other: whether it was the right choice is what replay finds. Termination only asks
   that a response ends where it must: at its first end token or at the recipe's length.
6. A scorer that cannot decide (``None``) blames nobody; a reward that is provably wrong is hard, whatever else
   could not be decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.constants import MILLION
from protocol.credit import sequential_test
from protocol.credit.reputation import BORDERLINE
from protocol.domain import Recipe, Thresholds
from protocol.errors import LocalError
from protocol.records import Rollout
from protocol.work.rollout import FINISH_END, FINISH_LENGTH, Group, Response, Submission

GROUP_FACTOR: Final = 4
"""How much wider the bounds are for a single group than for all audited groups together."""
HARD_FACTOR: Final = 4
"""How far beyond a bound chance and unknown machines are no excuse any more."""

FLOAT32_THRESHOLDS: Final = Thresholds(
    deficit_clip=1_000,
    deficit_honest=50,
    deficit_mean=1_000,
    mismatch_share=10_000,
    activation_mismatch_share=50_000,
    mantissa_mean=100_000,
    mantissa_median=0,
    logprob_error=5_000,
)
"""Limits for a domain that generates and verifies in float32.

Honest float32 runs that differ in batch shape, kernel or machine move logits by about 1e-5. So a token is chosen
otherwise about once in 10⁵, with a deficit as small: a hundredth of the clip. A forger's deficits exceed the clip
almost always: it counts tokens that these weights do not choose, of which an honest author has less than 50 in a
million, and int8 weights 1,000 and more. A log-probability moves by a few millionths; a hidden value crosses a bfloat16
rounding boundary, by one unit, for well below 1 % of values; and a few of the k largest values change at the k-th
place. Where precisions mix, limits must be calibrated (``farflung proofs calibrate``): honest bfloat16 exceeds these.
"""


@dataclass(frozen=True, slots=True)
class Reason:
    """What a reason code stands for: a verdict's outcome and severity, and words for people."""

    outcome: str
    severity: str
    words: str


REASONS: Final[Mapping[str, Reason]] = {
    "ok": Reason("accepted", "none", "everything audited was right"),
    "malformed": Reason("rejected", "hard", "the file or its proofs break the format"),
    "wrong-header": Reason("rejected", "hard", "the file is not what its entry announced"),
    "bounds": Reason("rejected", "hard", "a token is outside the vocabulary"),
    "wrong-prompt": Reason("rejected", "hard", "a prompt is not the one that the seed prescribes"),
    "termination": Reason("rejected", "hard", "a response ends where it must not"),
    "sampling": Reason("rejected", "hard", "the tokens are not those that these weights and this noise choose"),
    "logprobs": Reason("rejected", "hard", "the log-probabilities are not those of these weights"),
    "activations": Reason("rejected", "hard", "the activations are not those of these weights"),
    "borderline": Reason("rejected", "soft", "it is further from what these weights give than honest work is"),
    "drift": Reason("rejected", "hard", "its author's submissions are too far off, all together, to be honest"),
    "copied": Reason("rejected", "hard", "a response is another submission's, and not what its own seed gives"),
    "reward": Reason("rejected", "hard", "a reward is not what its response earns"),
    "understated": Reason("void", "soft", "a reward is below what its response earns"),
    "undecidable": Reason("void", "soft", "a reward could not be decided, or its validators did not agree"),
    "missing": Reason("rejected", "soft", "the file could not be fetched in time"),
    "late": Reason("rejected", "soft", "its version no longer counted when it could be judged"),
    "gap": Reason("void", "soft", "counters before it are missing"),
    "ineligible": Reason("void", "soft", "the author had not joined before the version was made"),
    "duplicate": Reason("void", "soft", "its counters were announced before"),
    "unjudged": Reason("void", "soft", "too few of those who were to judge it did so in time"),
}
"""Every reason code that a verdict or the ledger gives."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """A verdict in the making. ``score`` is the mean clipped deficit of the replayed tokens in millionths of the clip
    (0: every choice was exactly right), ``audited`` the number of replayed groups."""

    outcome: str
    severity: str
    reason: str
    score: int
    audited: int
    words: str


@dataclass(frozen=True, slots=True)
class GroupReplay:
    """What replaying one group measured; the replay child sends the fields as a list, in this order.

    ``mismatches`` of the ``tokens`` response tokens have a positive deficit; ``deficit_sum`` adds the deficits up, each
    clipped at ``deficit_clip``, in millionths of that; ``deficit_max`` is the largest, in micro; ``logprob_error_max``
    is the largest difference between a reported and a recomputed log-probability in micro. The last four are
    ``proofs.activation.ActivationResult``: ``activation_values`` is 0 where the proofs were malformed.
    """

    tokens: int
    mismatches: int
    deficit_sum: int
    deficit_max: int
    logprob_error_max: int
    activation_values: int
    activation_mismatches: int
    mantissa_sum: int
    mantissa_median: int


def result(reason: str, *, score: int = 0, audited: int = 0) -> AuditResult:
    """The result that ``reason`` (a key of ``REASONS``) stands for."""
    meaning = REASONS[reason]
    return AuditResult(meaning.outcome, meaning.severity, reason, score, audited, meaning.words)


def header_matches(submission: Submission, domain: bytes, author: bytes, rollout: Rollout) -> bool:
    """Whether the file is the one that ``author``'s entry announced: ids, counters, numbers of things."""
    return (
        submission.domain == domain
        and submission.author == author
        and submission.weights == rollout.weights
        and submission.first_counter == rollout.first_counter
        and len(submission.groups) == rollout.groups
        and submission.responses == rollout.responses
        and submission.tokens == rollout.tokens
        and submission.signal == rollout.signal
    )


def within_vocabulary(submission: Submission, vocabulary: int) -> bool:
    """Whether all tokens are below ``vocabulary``: to be asked before an engine looks any of them up."""
    return all(
        max(group.prompt) < vocabulary and all(max(response.tokens) < vocabulary for response in group.responses)
        for group in submission.groups
    )


def prompt_matches(group: Group, expected: Sequence[int]) -> bool:
    """Whether the group answers the prompt that its seed prescribes."""
    return group.prompt == tuple(expected)


def terminated(response: Response, recipe: Recipe, end_token: int) -> bool:
    """Whether the response ends at its first end token or, without one, at the recipe's length, and says which."""
    if end_token in response.tokens:
        return response.finish == FINISH_END and response.tokens.index(end_token) == len(response.tokens) - 1
    return response.finish == FINISH_LENGTH and len(response.tokens) == recipe.max_response_tokens


def score(replays: Iterable[GroupReplay]) -> int:
    """The mean clipped deficit of all replayed tokens (millionths of the clip, rounded up); 0 where there are none."""
    replays = list(replays)
    tokens = sum(replay.tokens for replay in replays)
    return -(-sum(replay.deficit_sum for replay in replays) // tokens) if tokens else 0


def proofs_parsed(replays: Iterable[GroupReplay]) -> bool:
    """Whether the activation proofs of all groups had the exact format."""
    return all(replay.activation_values > 0 for replay in replays)


def evidence(replays: Iterable[GroupReplay], thresholds: Thresholds) -> int:
    """The evidence (micro-nats) of all these tokens together."""
    replays = list(replays)
    return sequential_test.gain(
        sum(replay.deficit_sum for replay in replays),
        sum(replay.tokens for replay in replays),
        thresholds.deficit_honest,
        thresholds.deficit_mean,
    )


def sampling_evidence(replays: Sequence[GroupReplay], thresholds: Thresholds) -> int:
    """The evidence (micro-nats) that the tokens are not those that replay chooses (rule 3)."""
    return max(evidence(replays, thresholds), *(evidence([replay], thresholds) for replay in replays))


def sampling_reason(replays: Sequence[GroupReplay], thresholds: Thresholds) -> str:
    """ "sampling", "borderline" or "ok": whether the tokens are what replay chooses."""
    found = sampling_evidence(replays, thresholds)
    worst = max(replay.deficit_max for replay in replays)

    def holds(part: Sequence[GroupReplay], factor: int) -> bool:
        tokens, mismatches = sum(replay.tokens for replay in part), sum(replay.mismatches for replay in part)
        return _share_holds(mismatches, tokens, factor * thresholds.mismatch_share)

    if found >= sequential_test.SINGLE or worst > HARD_FACTOR * thresholds.logprob_error:
        return "sampling"
    if found >= sequential_test.BORDER:
        return BORDERLINE
    graded = _graded("sampling", replays, holds)
    return BORDERLINE if graded == "ok" and worst > thresholds.logprob_error else graded


def hopeless(replay: GroupReplay, thresholds: Thresholds) -> bool:
    """Whether an audit that finds this in one group is hard, whatever the other groups are: they need no replay."""
    return (
        not proofs_parsed([replay])
        or sampling_evidence([replay], thresholds) >= sequential_test.SINGLE
        or replay.deficit_max > HARD_FACTOR * thresholds.logprob_error
    )


def logprobs_reason(replays: Sequence[GroupReplay], thresholds: Thresholds) -> str:
    """ "logprobs", "borderline" or "ok": whether every reported log-probability is close to the recomputed one."""
    worst = max(replay.logprob_error_max for replay in replays)
    if worst > HARD_FACTOR * thresholds.logprob_error:
        return "logprobs"
    return BORDERLINE if worst > thresholds.logprob_error else "ok"


def activations_reason(replays: Sequence[GroupReplay], thresholds: Thresholds) -> str:
    """ "activations", "borderline" or "ok": whether the committed values are the recomputed ones, by the share whose
    sign or exponent differs, and the mean and each group's median of the other values' mantissa errors."""

    def holds(part: Sequence[GroupReplay], factor: int) -> bool:
        values = sum(replay.activation_values for replay in part)
        mismatches = sum(replay.activation_mismatches for replay in part)
        error = sum(replay.mantissa_sum for replay in part)
        return _share_holds(mismatches, values, factor * thresholds.activation_mismatch_share) and (
            error * MILLION <= factor * thresholds.mantissa_mean * (values - mismatches)
        )

    found = _graded("activations", replays, holds)
    median = max(replay.mantissa_median for replay in replays) * MILLION
    if median > HARD_FACTOR * max(thresholds.mantissa_median, MILLION):
        return "activations"
    return BORDERLINE if found == "ok" and median > thresholds.mantissa_median else found


def _graded(reason: str, replays: Sequence[GroupReplay], holds: Callable[[Sequence[GroupReplay], int], bool]) -> str:
    """``reason``, "borderline" or "ok" for a bound that ``holds`` for some replays at so many times its width."""
    for factor, found in ((HARD_FACTOR, reason), (1, BORDERLINE)):
        if not holds(replays, factor) or not all(holds([replay], factor * GROUP_FACTOR) for replay in replays):
            return found
    return "ok"


def rewards_reason(group: Group, rewards: Sequence[int | None]) -> str:
    """ "reward" where a claim exceeds the recomputed reward; else "understated" where one is below it, which a timeout
    on a busy machine explains and nobody gains by; else "undecidable" where a recomputed one is None; else "ok"."""
    if len(rewards) != len(group.responses):
        raise LocalError(f"{len(rewards)} rewards for {len(group.responses)} responses")
    pairs = list(zip(rewards, (response.reward for response in group.responses), strict=True))
    if any(right is not None and claimed > right for right, claimed in pairs):
        return "reward"
    if any(right is not None and claimed < right for right, claimed in pairs):
        return "understated"
    return "undecidable" if None in rewards else "ok"


def _share_holds(count: int, total: int, share: int) -> bool:
    """Whether ``count`` of ``total`` is at most ``share`` (micro), with the allowance of rule 4."""
    return count <= 1 + share * total // MILLION
