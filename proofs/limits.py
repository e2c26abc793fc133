"""From the figures of honest and forged groups to a domain's limits, and how well these tell the two apart.

1. Limits are for one compute dtype, audited in float32, and for all engines that honest nodes may use: a submission
   does not say what made it, and what it said could not be believed. So each limit is that of the engine that needs the
   widest.
2. ``deficit_clip`` and the two means are chosen together: the clip at which the nearest forger that can be told apart
   needs the fewest tokens to be convicted. Honest is an upper bound of the honest mean, a forger's mean its own.
3. The bounds of the other statistics stand a factor above what honest groups showed: ``MARGIN`` for means and maxima.
4. A row of figures is ``[tokens, [positive deficits in micro], largest error of a log-probability in micro, activation
   values, mismatches, mantissa sum, mantissa median]`` for a group.

Pure; floats appear here and in nothing that nodes must agree on: what comes out is integers, which a genesis carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from proofs import audit, checks
from proofs.checks import GroupReplay
from protocol.constants import MILLION
from protocol.credit.sequential_test import NEWCOMER, Standing
from protocol.domain import Thresholds
from protocol.work.rollout import FINISH_LENGTH, Group, Response, Submission

Row = Sequence[Any]

MARGIN: Final = 2.0
CLIPS: Final = (1_000, 3_000, 10_000, 30_000, 100_000, 250_000, 500_000, 1_000_000)
"""Clips that are tried, in micro."""
APART: Final = 2.0
"""A forger's mean deficit is told apart where it is this many times the honest one."""
SPREAD: Final = 20
"""The most that the two means are apart: what lies far beyond is convicted by any."""
LEAST_HONEST: Final = 50
"""The least honest mean (millionths of the clip) that a limit asks for: no run is long enough to show less."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A figure of a group that tells forgers from honest authors: the larger, the more forged."""

    name: str
    of: Callable[[Row], float]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What became of a forger's (or an honest node's) submissions, one after the other: the reason of each, and how
    many it took until the first hard rejection (None: none)."""

    reasons: tuple[str, ...]
    until: int | None


def _mean_deficit(row: Row) -> float:
    return float(sum(min(value, MILLION) for value in row[1]) / row[0] / MILLION)


STATISTICS: Final = (
    Statistic("mean deficit", _mean_deficit),
    Statistic("log-probability", lambda row: row[2] / MILLION),
    Statistic("mantissa", lambda row: row[5] / max(1, row[3] - row[4]) if row[3] else 128.0),
    Statistic("sign or exponent", lambda row: row[4] / row[3] if row[3] else 1.0),
)


def replay_of(row: Row, clip: int) -> GroupReplay:
    """A row as an audit with this ``deficit_clip`` sees it."""
    tokens, deficits, error, values, mismatches, mantissa_sum, median = row
    shares = sum(math.ceil(min(value / clip, 1.0) * MILLION) for value in deficits)
    most = math.ceil(max(deficits, default=0.0))
    return GroupReplay(tokens, len(deficits), shares, most, error, values, mismatches, mantissa_sum, median)


def clipped_mean(rows: Sequence[Row], clip: int) -> tuple[float, float]:
    """(mean, upper bound) of the clipped deficit in clips: three standard errors of a Poisson count, and one more."""
    tokens = sum(row[0] for row in rows)
    total = sum(min(value / clip, 1.0) for row in rows for value in row[1])
    return total / tokens, (total + 3 * math.sqrt(total + 1) + 1) / tokens


def thresholds(honest: Mapping[str, Sequence[Row]], forged: Mapping[str, Sequence[Row]]) -> Thresholds:
    """The limits for ``honest`` rows by engine, with the forgers' rows by name to tell apart from them."""
    clip, low, high = _deficits(honest, forged)
    rows = [row for part in honest.values() for row in part]

    def widest(count: Callable[[Row], float], total: Callable[[Row], float], spare: int = 0) -> float:
        """The bound of ``count`` in ``total``, of an engine's rows together and of each with ``spare`` more."""
        return max(
            *(MARGIN * (sum(map(count, part)) / sum(map(total, part))) for part in honest.values()),
            *(MARGIN * ((count(row) - spare) / max(1, total(row))) / checks.GROUP_FACTOR for row in rows),
        )

    differing = widest(lambda row: len(row[1]), lambda row: row[0], spare=1)
    mismatches = widest(lambda row: row[4], lambda row: row[3], spare=1)
    mantissa = widest(lambda row: row[5], lambda row: row[3] - row[4])
    return Thresholds(
        deficit_clip=clip,
        deficit_honest=low,
        deficit_mean=high,
        mismatch_share=_rounded(max(0.01, differing)),
        activation_mismatch_share=_rounded(max(0.02, mismatches)),
        mantissa_mean=_rounded(max(0.1, mantissa)),
        mantissa_median=int(max(row[6] for row in rows)) * MILLION,
        logprob_error=_rounded(MARGIN * max(0.001, *(max(row[2], *row[1], 0) / MILLION for row in rows))),
    )


def _deficits(honest: Mapping[str, Sequence[Row]], forged: Mapping[str, Sequence[Row]]) -> tuple[int, int, int]:
    """``deficit_clip``, ``deficit_honest`` and ``deficit_mean`` (rule 2)."""
    best: tuple[tuple[int, float], tuple[int, int, int]] | None = None
    for clip in CLIPS:
        low = max([LEAST_HONEST, *(_rounded(clipped_mean(part, clip)[1]) for part in honest.values())])
        means = [mean for rows in forged.values() if (mean := clipped_mean(rows, clip)[0] * MILLION) >= APART * low]
        high = int(min([MILLION, SPREAD * low, *means])) if means else min(MILLION, 4 * low)
        # Nats that a token of the nearest forger adds: the more, the fewer tokens convict it.
        power = min(means, default=0.0) * math.log(high / low) - (high - low)
        score = (len(means), power)
        if best is None or score > best[0]:
            best = (score, (clip, low, high))
    assert best is not None
    return best[1]


def _rounded(value: float) -> int:
    """``value`` in micro, rounded up to two digits."""
    micro = max(1, math.ceil(value * MILLION))
    step = int(10 ** max(0, len(str(micro)) - 2))
    return -(-micro // step) * step


def run(rows: Sequence[Sequence[Row]], limits: Thresholds) -> RunOutcome:
    """A node's submissions (their groups' rows), one after the other, judged as validators do that replay all of them
    and whose verdicts become final at once. It ends with the first hard rejection."""
    standing: Standing = NEWCOMER
    reasons: list[str] = []
    for groups in rows:
        replays = {index: replay_of(row, limits.deficit_clip) for index, row in enumerate(groups)}
        found = audit.audit_replay(_blank(groups), replays, limits, standing)
        reasons.append(found.reason)
        if found.severity == "hard":
            return RunOutcome(tuple(reasons), len(reasons))
        gain = checks.evidence(replays.values(), limits)
        standing = standing.after(gain, found.reason == "borderline")
    return RunOutcome(tuple(reasons), None)


def _blank(groups: Sequence[Row]) -> Submission:
    """A submission with as many tokens as the rows tell of."""
    blank = tuple(
        Group(index, (0,), (Response((0,) * row[0], (0,) * row[0], 0, FINISH_LENGTH),), b"")
        for index, row in enumerate(groups)
    )
    return Submission(bytes(32), bytes(32), bytes(32), 0, blank)


def roc(honest: Sequence[float], forged: Sequence[float]) -> list[tuple[float, float]]:
    """(share of honest, share of forged) beyond each limit that matters, from (0, 0) to (1, 1)."""
    points = [(0.0, 0.0)]
    for limit in sorted({*honest, *forged}, reverse=True):
        points.append(
            (
                sum(value >= limit for value in honest) / len(honest),
                sum(value >= limit for value in forged) / len(forged),
            )
        )
    return points


def area(points: Sequence[tuple[float, float]]) -> float:
    """The area under a ROC curve: 1 tells all apart, 0.5 none."""
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """The upper confidence bound of a probability (Clopper and Pearson) of which ``events`` of ``trials`` happened."""
    if events >= trials:
        return 1.0
    chances = [math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1) for n in range(events + 1)]
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        # In logarithms: the chance that nothing happens in many trials is no float.
        yes, no = math.log(middle), math.log1p(-middle)
        total = math.fsum(math.exp(log + n * yes + (trials - n) * no) for n, log in enumerate(chances))
        low, high = (middle, high) if total > 1 - confidence else (low, middle)
    return high
