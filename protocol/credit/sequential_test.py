"""Judging a node and not a proof: sequential tests over all its submissions, in integers.

Two tests run for every author, Wald tests (SPRT) with a floor, over the submissions that validators decided about:

1. *Deficits*: an honest author's tokens have a mean clipped deficit of at most ``deficit_honest``, a forger's of
   ``deficit_mean`` (both in millionths of ``deficit_clip``). With D the sum of the clipped deficits of n tokens, in
   clips, the evidence is ``D · ln(forged / honest) − n · (forged − honest)`` nats: the log-likelihood ratio of two
   Poisson streams. Its exponential is a supermartingale for *any* tokens, dependent ones too, whose deficits lie in
   0…1 and whose mean given the past is at most the honest one, because e^{θx} ≤ 1 + x·(e^θ − 1) there. So by Ville's
   inequality it passes ln(1/α) with probability at most α, however long it runs: no model of the noise is needed.
2. *Borders*: an honest submission is judged "borderline" with a probability of at most 10⁻³, a forger's of 0.2.
3. Neither falls below ``FLOOR``, so that no one gathers credit to cheat on, nor passes ``CONVICTS``, whatever a
   validator makes up. There it stays until a hard rejection, with which both tests begin anew.
4. The budget: an honest node is ever convicted within N submissions by one test with a probability of at most
   10⁻⁶ + N · 10⁻⁹ (once from 0, and at most N times from the floor).
5. One audit by itself is hard evidence from ``SINGLE`` on (10⁻⁹), and borderline from ``BORDER`` on (10⁻⁴).

Evidence is in millionths of a nat. Abraham Wald, Sequential Analysis (1947); Jean Ville, Étude critique de la notion de
collectif (1939).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from protocol.constants import MILLION
from protocol.errors import LocalError

CONVICTS: Final = 13_815_510
"""ln 10⁶: evidence that convicts a node."""
FLOOR: Final = -6_907_755
"""−ln 10³: as far as a good name goes."""
SINGLE: Final = 20_723_265
"""ln 10⁹: evidence in one audit, or in one group of it, that is hard by itself."""
BORDER: Final = 9_210_340
"""ln 10⁴: evidence in one audit from which on it is borderline."""

_BORDERLINE: Final = 5_298_317
"""ln(0.2 / 0.001): what a borderline submission adds to the second test."""
_PASSED: Final = -222_143
"""ln(0.8 / 0.999): what any other adds."""

_BITS: Final = 64
_LN2: Final = 12_786_308_645_202_655_660
"""ln 2 · 2⁶⁴, rounded to nearest."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the final log says of an author in some cut: the ``tier`` of its audits (``protocol.work.schedule``; 0 is a
    full audit, and a newcomer's), and the evidence of the two tests."""

    tier: int = 0
    deficits: int = 0
    borders: int = 0

    @property
    def convicts(self) -> bool:
        """Whether a test has run its course."""
        return self.deficits >= CONVICTS or self.borders >= CONVICTS

    def after(self, gain: int, borderline: bool) -> Standing:
        """The standing after one more submission, of which one audit gave the evidence ``gain``."""
        border = _BORDERLINE if borderline else _PASSED
        return Standing(self.tier, moved(self.deficits, gain), moved(self.borders, border))


NEWCOMER: Final = Standing()


@lru_cache(maxsize=64)
def log_ratio(numerator: int, denominator: int) -> int:
    """``ln(numerator / denominator)`` in micro, rounded down, of integers with numerator ≥ denominator > 0: exact
    integer arithmetic, so that it is the same number everywhere."""
    if not 0 < denominator <= numerator:
        raise LocalError(f"no logarithm of {numerator} / {denominator} here")
    whole = 0
    while numerator >= 2 * denominator:
        denominator *= 2
        whole += 1
    value = (numerator << _BITS) // denominator  # in [1, 2) · 2⁶⁴
    fraction = 0
    for _ in range(_BITS):  # one bit of the binary logarithm for each squaring
        value = value * value >> _BITS
        fraction <<= 1
        if value >= 2 << _BITS:
            value >>= 1
            fraction |= 1
    return ((whole << _BITS) + fraction) * _LN2 * MILLION >> 2 * _BITS


def gain(deficit_sum: int, tokens: int, honest: int, forged: int) -> int:
    """The evidence of ``tokens`` replayed tokens whose clipped deficits add up to ``deficit_sum`` millionths of a clip.

    ``honest`` and ``forged`` are the mean deficits of rule 1, in the same unit; no evidence where they are not apart.
    """
    if not 0 < honest < forged:
        return 0
    return deficit_sum * log_ratio(forged, honest) // MILLION - tokens * (forged - honest)


def moved(evidence: int, by: int) -> int:
    """The evidence of a test after one more submission (rule 3)."""
    return evidence if evidence >= CONVICTS else min(CONVICTS, max(FLOOR, evidence + by))
