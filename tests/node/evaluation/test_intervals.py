"""Confidence intervals, against published values, closed forms and simulated coverage."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.evaluation import intervals
from node.evaluation.intervals import Estimate


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17: 857-872, table I, method 3 (Wilson without continuity correction).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_limits(passed: int, count: int, low: float, high: float) -> None:
    found = intervals.wilson(passed / count, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.integers(1, 2000), st.data())
def test_wilson_holds_its_rate_and_mirrors(count: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, count))
    found = intervals.wilson(passed / count, count)
    assert 0 <= found.low <= found.value <= found.high <= 1
    mirrored = intervals.wilson((count - passed) / count, count)
    assert math.isclose(mirrored.high, 1 - found.low, abs_tol=1e-12)


def test_answers_to_one_question_count_as_one_cluster() -> None:
    # Ten answers each to four questions, all alike within a question: it says no more than one answer each.
    alike = [[True] * 10, [False] * 10, [True] * 10, [False] * 10]
    found = intervals.pass_rate(alike)
    assert found.value == 0.5
    # Standard error of (1, 0, 1, 0): sqrt(1/3) / 2.
    assert math.isclose(found.high - found.value, min(0.5, intervals.Z * math.sqrt(1 / 3) / 2))
    naive = intervals.wilson(0.5, 40)
    assert found.high - found.low > 2 * (naive.high - naive.low)


def test_one_answer_a_question_is_wilsons_and_so_is_what_has_no_spread() -> None:
    assert intervals.pass_rate([[True], [True], [False], [True]]) == intervals.wilson(0.75, 4)
    assert intervals.pass_rate([[True, True]] * 12) == intervals.wilson(1.0, 12)
    assert intervals.pass_rate([[True, False]] * 12) == intervals.wilson(0.5, 12)
    assert intervals.reward([0.2] * 9) == intervals.wilson(0.2, 9)
    assert intervals.reward([0.2, 0.4]) == intervals.mean([0.2, 0.4])


def test_one_question_tells_nothing() -> None:
    assert intervals.mean([0.25]) == Estimate(0.25, 0.0, 1.0)
    assert intervals.difference([0.25], [0.5]) == Estimate(0.25, -1.0, 1.0)
    with pytest.raises(ValueError, match="no questions"):
        intervals.mean([])


def test_paired_differences_leave_out_what_questions_have_in_common() -> None:
    hard = [0.0, 0.1, 0.5, 0.9, 0.2, 0.7]
    better = [each + 0.1 + 0.01 * (-1) ** place for place, each in enumerate(hard)]
    found = intervals.difference(hard, better)
    assert math.isclose(found.value, 0.1)
    assert not found.low <= 0.0 <= found.high
    # Apart the two overlap by far.
    alone = intervals.mean(hard)
    assert alone.low <= intervals.mean(better).value <= alone.high
    assert intervals.difference(hard, hard) == Estimate(0.0, 0.0, 0.0)


def test_sets_are_combined_by_their_shares() -> None:
    one, two = Estimate(0.2, 0.1, 0.4), Estimate(0.6, 0.5, 0.6)
    found = intervals.combined([(1, one), (3, two)])
    assert math.isclose(found.value, 0.5)
    assert math.isclose(found.low, 0.5 - math.hypot(0.1, 0.3) / 4)
    assert math.isclose(found.high, 0.5 + math.hypot(0.2, 0.0) / 4)
    alone = intervals.combined([(7, one)])
    assert all(math.isclose(a, b) for a, b in zip((one.low, one.high), (alone.low, alone.high), strict=True))


@pytest.mark.parametrize("samples", [1, 8])
def test_nineteen_of_twenty_intervals_hold_the_truth(samples: int) -> None:
    chance = random.Random(7)
    held = 0
    for _ in range(400):
        questions = []
        for _ in range(60):
            ease = chance.betavariate(0.5, 0.5)  # mostly very hard or very easy, as questions are
            questions.append([chance.random() < ease for _ in range(samples)])
        found = intervals.pass_rate(questions)
        held += found.low <= 0.5 <= found.high
    assert 0.92 <= held / 400 <= 0.975
