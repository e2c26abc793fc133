"""``protocol.credit.sequential_test``: exact logarithms, and what the sequential tests promise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.constants import MILLION
from protocol.credit.sequential_test import CONVICTS, FLOOR, NEWCOMER, SINGLE, Standing, gain, log_ratio, moved
from protocol.errors import LocalError

HONEST, FORGED = 2_000, 8_000


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_logarithms_are_right_to_a_millionth(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert log_ratio(high, low) == pytest.approx(math.log(high / low) * MILLION, abs=1.01)
    assert log_ratio(high, low) <= math.log(high / low) * MILLION + 1e-3


def test_logarithms_by_hand() -> None:
    assert [log_ratio(*pair) for pair in ((1, 1), (2, 1), (10**6, 1), (3, 2))] == [0, 693_147, CONVICTS, 405_465]
    for pair in ((1, 2), (1, 0), (0, 0), (-1, -2)):
        with pytest.raises(LocalError):
            log_ratio(*pair)


def test_evidence_is_a_likelihood_ratio() -> None:
    assert gain(0, 0, HONEST, FORGED) == 0
    assert gain(MILLION, 0, HONEST, FORGED) == log_ratio(4, 1)
    assert gain(0, 1_000, HONEST, FORGED) == -6 * MILLION
    assert gain(3 * MILLION, 1_000, HONEST, FORGED) == 3 * log_ratio(4, 1) - 6 * MILLION
    # Thresholds that are not apart tell nothing.
    assert gain(MILLION, 1, FORGED, FORGED) == gain(MILLION, 1, FORGED, HONEST) == 0


def test_a_test_has_a_floor_and_ends_once() -> None:
    assert moved(0, -100 * MILLION) == FLOOR
    assert moved(FLOOR, MILLION) == FLOOR + MILLION
    assert moved(CONVICTS, -100 * MILLION) == CONVICTS
    standing = Standing(3).after(CONVICTS - 1, False)
    assert (standing.tier, standing.convicts) == (3, False)
    assert standing.after(1, False).convicts
    assert standing.after(1, False).after(-SINGLE, False).convicts


def test_three_borderline_submissions_convict_and_one_in_a_hundred_does_not() -> None:
    standing = NEWCOMER
    for _ in range(2):
        standing = standing.after(0, True)
        assert not standing.convicts
    assert standing.after(0, True).convicts
    standing = NEWCOMER
    for number in range(1_000):
        standing = standing.after(0, number % 100 == 0)
        assert not standing.convicts


def submissions(generator: Random, rate: float, count: int, tokens: int = 400) -> list[int]:
    """The evidence of submissions of which each token has a whole clip of deficit with this probability."""
    return [
        gain(sum(generator.random() < rate for _ in range(tokens)) * MILLION, tokens, HONEST, FORGED)
        for _ in range(count)
    ]


def test_an_author_at_the_honest_limit_keeps_within_the_budget() -> None:
    """The worst honest author there may be: 10⁻⁶ + N · 10⁻⁹ is far from being seen in so few runs."""
    generator = Random(1)
    standing = NEWCOMER
    for found in submissions(generator, HONEST / MILLION, 1_500):
        standing = standing.after(found, False)
        assert not standing.convicts


def test_the_level_of_a_short_test_is_what_it_says() -> None:
    """Of 400 authors at the honest limit at most 1 in 10 passes ln 10, however long it runs (Ville)."""
    generator = Random(2)
    passed = 0
    for _ in range(400):
        total = highest = 0
        for found in submissions(generator, HONEST / MILLION, 12, tokens=200):
            total += found
            highest = max(highest, total)
        passed += highest >= log_ratio(10, 1)
    assert 1 <= passed <= 40


@pytest.mark.parametrize(("rate", "most"), [(0.008, 12), (0.02, 5), (0.2, 1)])
def test_forgers_are_found_the_sooner_the_further_off(rate: float, most: int) -> None:
    standing = replace(NEWCOMER, deficits=FLOOR)
    for number, found in enumerate(submissions(Random(3), rate, 100), 1):
        standing = standing.after(found, False)
        if standing.convicts:
            assert number <= most
            return
    pytest.fail("never found")


def test_evidence_is_the_golden_one() -> None:
    golden = json.loads((Path(__file__).parents[2] / "vectors" / "evidence.json").read_text())
    for row in golden["logarithms"]:
        assert log_ratio(*row["ratio"]) == row["micro"]
    standing = NEWCOMER
    for row in golden["submissions"]:
        found = gain(row["score"] * row["tokens"], row["tokens"], golden["deficit_honest"], golden["deficit_mean"])
        standing = standing.after(found, bool(row["borderline"]))
        assert [standing.deficits - FLOOR, standing.borders - FLOOR] == row["above_floor"]
    assert standing.convicts
