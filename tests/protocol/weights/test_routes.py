"""Routes: moving averages, healing and the draw."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from protocol.weights.routes import FLOOR, HEAL_SECONDS, TYPICAL, Routes

A, B, C = (bytes([number]) * 32 for number in range(3))


def test_rates_are_averaged_and_the_unknown_counts_as_typical() -> None:
    known = Routes()
    assert known.rate(A, 0) is None
    assert known.weight(A, 0) == 1.0
    known.delivered(A, 1000.0, 0)
    assert known.rate(A, 0) == 1000.0
    known.delivered(A, 2000.0, 0)
    assert known.rate(A, 0) == pytest.approx(1300.0)
    assert known.weight(A, 0) == FLOOR  # next to nothing, compared with what is typical
    known.delivered(B, 2.0 * TYPICAL, 0)
    assert known.weight(B, 0) > 1.5


def test_failures_count_and_heal() -> None:
    known = Routes()
    for _ in range(4):
        known.failed(A, 100)
    low = known.success(A, 100)
    assert low == pytest.approx(0.7**4)
    assert known.success(A, 100 + HEAL_SECONDS) == pytest.approx(1 - (1 - low) / 2)
    assert known.success(A, 100 + 20 * HEAL_SECONDS) == pytest.approx(1.0)
    known.lied(A, 200)
    assert known.success(A, 200) == 0.0
    assert known.weight(A, 200) == FLOOR  # tried again one day
    known.delivered(A, TYPICAL, 200)
    assert known.success(A, 200) == pytest.approx(0.3)


def test_a_slow_peer_is_tried_again_later() -> None:
    known = Routes()
    known.delivered(A, TYPICAL / 100, 0)
    slow = known.weight(A, 0)
    assert slow < 0.03
    assert known.weight(A, HEAL_SECONDS) == pytest.approx(0.5, abs=0.05)
    assert known.weight(A, -5) == slow  # a clock that went back changes nothing


def test_the_draw_follows_the_weights() -> None:
    known = Routes()
    known.delivered(A, TYPICAL, 0)
    known.delivered(B, TYPICAL / 4, 0)
    chance = random.Random(1)
    drawn = Counter(known.draw([(A, 1.0), (B, 1.0)], 1, 0, chance)[0] for _ in range(2000))
    assert 3.0 < drawn[A] / drawn[B] < 5.0
    preferred = Counter(known.draw([(A, 0.25), (B, 1.0)], 1, 0, chance)[0] for _ in range(2000))
    assert 0.8 < preferred[A] / preferred[B] < 1.25
    assert sorted(known.draw([(A, 1.0), (B, 1.0), (C, 1.0)], 5, 0, chance)) == [A, B, C]
    assert known.draw([(A, 1.0)], 0, 0, chance) == []
    assert known.draw([], 3, 0, chance) == []


def test_memory_is_bounded() -> None:
    known = Routes(3)
    for number in range(10):
        known.delivered(bytes([number]), 1000.0, number)
        known.delivered(A, 1000.0, number)  # the one that is used most stays
    assert known.rate(A, 10) is not None
    assert known.rate(bytes([5]), 10) is None
