"""``proofs.limits``: limits that honest figures keep within and forged ones do not; the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal, localcontext
from random import Random
from typing import Any

import pytest

from proofs.checks import FLOAT32_THRESHOLDS
from proofs.limits import LEAST_HONEST, area, clipped_mean, replay_of, roc, run, thresholds, upper_bound
from protocol.constants import MILLION


def rows(rate: float, scale: float, mantissa: float, *, count: int = 60, tokens: int = 400, seed: int = 1) -> list[Any]:
    """Groups in which tokens differ at this rate, by exponentially distributed deficits of this scale (micro)."""
    generator = Random(seed)
    made = []
    for _ in range(count):
        deficits = [round(generator.expovariate(1 / scale), 1) for _ in range(tokens) if generator.random() < rate]
        error = round(abs(generator.gauss(0, scale)))
        made.append([tokens, deficits, error, 416, generator.randrange(4), round(400 * mantissa), 1])
    return made


HONEST = {"ours": rows(0.02, 60_000, 1.4), "other": rows(0.025, 70_000, 1.5, seed=2)}
FORGED = {
    "int4": rows(0.5, 800_000, 9.0, count=20, seed=3),
    "int8": rows(0.06, 120_000, 1.4, count=20, seed=4),
    "twin": rows(0.02, 60_000, 1.4, count=20, seed=5),
}


def test_limits_keep_honest_engines_and_not_forgers() -> None:
    limits = thresholds(HONEST, FORGED)
    for part in (*HONEST.values(), FORGED["twin"]):
        assert run([[row] for row in part], limits).until is None
        assert {run([[row]], limits).reasons for row in part} == {("ok",)}
    assert run([[row] for row in FORGED["int4"]], limits).until == 1
    int8 = run([[row] for row in FORGED["int8"]], limits)
    assert int8.until is not None
    assert int8.until > 1
    assert int8.reasons[-1] in ("drift", "sampling")
    # The widest engine sets every limit.
    assert limits.deficit_honest > clipped_mean(HONEST["other"], limits.deficit_clip)[0] * MILLION
    assert limits.mantissa_mean >= 2 * 1_400_000
    assert limits.mantissa_median == MILLION
    assert limits.deficit_honest < limits.deficit_mean <= 20 * limits.deficit_honest


def test_without_anybody_to_tell_apart_there_are_limits_all_the_same() -> None:
    limits = thresholds(HONEST, {"twin": FORGED["twin"]})
    assert limits.deficit_mean == 4 * limits.deficit_honest
    assert run([[row] for row in HONEST["ours"]], limits).until is None


def test_exact_runs_give_the_least_limits() -> None:
    exact = [[10_000, [], 2, 416, 0, 0, 0]] * 40
    limits = thresholds({"ours": exact}, {"other": rows(0.5, 800_000, 9.0, tokens=10_000, count=2)})
    assert limits.deficit_honest == LEAST_HONEST
    assert (limits.logprob_error, limits.mantissa_median) == (2_000, 0)


def test_a_row_is_seen_as_an_audit_sees_it() -> None:
    found = replay_of([100, [500.0, 2_000.0], 9, 32, 1, 5, 2], 1_000)
    assert (found.tokens, found.mismatches, found.deficit_sum, found.deficit_max) == (100, 2, 1_500_000, 2_000)
    assert (found.logprob_error_max, found.activation_values, found.activation_mismatches) == (9, 32, 1)
    assert (found.mantissa_sum, found.mantissa_median) == (5, 2)
    assert clipped_mean([[100, [500.0, 2_000.0]]], 1_000)[0] == pytest.approx(0.015)


def test_submissions_are_judged_in_a_row() -> None:
    off = [200, [2_000.0] * 2, 0, 32, 0, 0, 0]
    alone = run([[off]], FLOAT32_THRESHOLDS)
    assert (alone.reasons, alone.until) == (("ok",), None)
    chain = run([[off]] * 10, FLOAT32_THRESHOLDS)
    assert (chain.reasons, chain.until) == (("ok", "ok", "drift"), 3)


def test_roc_curves() -> None:
    points = roc([0.0, 1.0, 2.0, 3.0], [2.5, 3.5, 4.0, 0.5])
    assert (points[0], points[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert (0.0, 0.5) in points
    assert area(points) == pytest.approx(12 / 16)
    assert area(roc([0.0, 0.0], [1.0, 1.0])) == 1.0
    assert area(roc([1.0, 1.0], [1.0, 1.0])) == 0.5


@pytest.mark.parametrize(("events", "trials", "bound"), [(0, 3_000, 9.98e-4), (0, 30_000, 9.99e-5), (1, 100, 0.0466)])
def test_upper_bounds_are_clopper_and_pearsons(events: int, trials: int, bound: float) -> None:
    assert upper_bound(events, trials) == pytest.approx(bound, rel=0.01)
    assert upper_bound(trials, trials) == 1.0


def test_a_limit_that_is_narrower_refuses_more() -> None:
    limits = thresholds(HONEST, FORGED)
    strict = replace(limits, mantissa_mean=limits.mantissa_mean // 4)
    assert all(run([[row]], strict).reasons == ("borderline",) for row in HONEST["ours"])


@pytest.mark.parametrize(
    ("events", "trials"), [(1, 10), (800, 10_000), (5_000, 10_000), (9_999, 10_000), (3_000, 20_000)]
)
def test_at_the_upper_bound_so_few_events_have_the_stated_chance(events: int, trials: int) -> None:
    """In decimals of 60 digits, whose exponents no such probability leaves; floats end at 1e-308."""
    with localcontext(prec=60):
        chance = Decimal(upper_bound(events, trials))
        term = total = (1 - chance) ** trials
        for count in range(1, events + 1):
            term *= Decimal(trials - count + 1) / count * chance / (1 - chance)
            total += term
    assert float(total) == pytest.approx(0.05, rel=1e-6)
