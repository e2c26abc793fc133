"""Confidence intervals of evaluations: pure functions of the scores.

1. Answers to one question are a cluster: they are alike, so a hundred answers to ten questions do not say as much as a
   hundred to a hundred. The standard error is that of the questions' means (Miller 2024, "Adding Error Bars to Evals",
   arXiv:2411.00640, §2.2 on clustered standard errors, for clusters of equal weight).
2. A pass rate of one answer a question has Wilson's score interval (Wilson 1927, JASA 22: 209–212; Brown, Cai and
   DasGupta 2001, Statistical Science 16: 101–133), which holds at 0 and 1 and for few questions. So have means of
   questions that are all the same: their spread cannot be estimated, and nothing between 0 and 1 has more than a rate.
3. Two versions are compared on the same questions, by the differences of the questions' means (Miller 2024, §4.2 on
   paired differences): what the questions have in common goes out.
4. Intervals of several sets are combined by Zou and Donner's method (2008, Statistics in Medicine 27: 1693–1702): the
   distances of the limits, each times its set's share, add up as squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Final

LEVEL: Final = 0.95
Z: Final = NormalDist().inv_cdf(0.5 + LEVEL / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the limits of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson(value: float, count: int) -> Estimate:
    """The score interval of a rate ``value`` in ``count`` independent trials."""
    if count < 1 or not 0.0 <= value <= 1.0:
        raise ValueError(f"a rate of {value} in {count} trials")
    shrink = 1 + Z * Z / count
    middle = (value + Z * Z / (2 * count)) / shrink
    half = Z * math.sqrt(value * (1 - value) / count + Z * Z / (4 * count * count)) / shrink
    # The score interval holds the rate always; rounding may not.
    return Estimate(value, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half)))


def mean(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> Estimate:
    """The mean of the questions' means ``values``, with an interval by their standard error, within ``low`` and
    ``high``; the whole of that where there is one question, which tells of no spread."""
    if not values:
        raise ValueError("no questions")
    value = fmean(values)
    if len(values) == 1:
        return Estimate(value, low, high)
    half = Z * stdev(values) / math.sqrt(len(values))
    return Estimate(value, max(low, value - half), min(high, value + half))


def pass_rate(questions: Sequence[Sequence[bool]]) -> Estimate:
    """The rate of passes among the answers to ``questions``, each with at least one; rules 1 and 2."""
    means = [fmean(answers) for answers in questions]
    return wilson(fmean(means), len(means)) if all(len(answers) == 1 for answers in questions) else reward(means)


def reward(means: Sequence[float]) -> Estimate:
    """The mean reward, from 0 to 1, of questions with these ``means``; rules 1 and 2."""
    return wilson(means[0], len(means)) if len(set(means)) == 1 else mean(means)


def difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """How much better ``after`` is than ``before``, question by question; rule 3. Without any spread it is a point."""
    return mean([b - a for a, b in zip(before, after, strict=True)], -1.0, 1.0)


def combined(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The mean of several sets' estimates by their positive shares; rule 4."""
    total = sum(share for share, _ in parts)
    value = sum(share * part.value for share, part in parts) / total
    below = math.sqrt(sum((share * (part.value - part.low)) ** 2 for share, part in parts)) / total
    above = math.sqrt(sum((share * (part.high - part.value)) ** 2 for share, part in parts)) / total
    return Estimate(value, value - below, value + above)
