"""Peer scores."""

from __future__ import annotations

import logging

import pytest

from node.net.peer_scores import MAX_PEERS, MAX_REASONS, Scores
from protocol.errors import PeerError

PEER = b"p" * 32


def test_mistakes_add_up_to_a_ban() -> None:
    scores = Scores(ban_score=30, ban_seconds=60)
    assert [scores.blame(PEER, PeerError("x"), 0.0) for _ in range(3)] == [False, False, True]
    assert scores.banned(PEER, 59.9)
    assert not scores.banned(PEER, 60.0)
    assert not scores.banned(b"q" * 32, 0.0)


@pytest.mark.parametrize(("later", "banned"), [(100.0, True), (101.0, False)])
def test_points_halve_with_time(later: float, banned: bool) -> None:
    scores = Scores(ban_score=15, half_life=100)
    assert not scores.blame(PEER, "x", 0.0)
    assert scores.blame(PEER, "x", later) == banned


def test_an_occasional_mistake_never_bans() -> None:
    scores = Scores(ban_score=100, half_life=300)
    assert not any(scores.blame(PEER, "x", 60.0 * minute) for minute in range(1000))


def test_a_share_of_a_mistake_counts_as_such() -> None:
    scores = Scores(ban_score=100)
    assert [scores.blame(PEER, "x", 0.0, 0.25) for _ in range(40)] == [False] * 39 + [True]


def test_each_ban_is_twice_as_long_up_to_a_limit() -> None:
    scores = Scores(ban_score=10, ban_seconds=10, max_ban=35)
    now = 0.0
    for seconds in (10, 20, 35, 35):
        assert scores.blame(PEER, "x", now)
        assert not scores.blame(PEER, "x", now + 1)  # during a ban nothing new begins
        assert scores.banned(PEER, now + seconds - 0.1)
        now += seconds
        assert not scores.banned(PEER, now)


def test_a_reason_is_logged_once_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    scores = Scores(ban_score=1e9)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            scores.blame(PEER, PeerError(f"reason {number}"), 2.0 * number)
            scores.blame(PEER, PeerError("the same"), 2.0 * number + 1)
    reasons = scores.reasons(PEER)
    assert sum(reasons.values()) == 200
    assert len(reasons) == MAX_REASONS + 1
    assert reasons["the same"] == 100
    assert len(caplog.records) == MAX_REASONS + 1


def test_long_reasons_are_cut() -> None:
    scores = Scores()
    scores.blame(PEER, "x" * 10_000, 0.0)
    assert scores.reasons(PEER) == {"x" * 120: 1}


def test_the_number_of_peers_is_bounded() -> None:
    scores = Scores()
    for number in range(MAX_PEERS + 10):
        scores.blame(number.to_bytes(32, "big"), "x", 0.0)
    assert scores.reasons((9).to_bytes(32, "big")) == {}
    assert scores.reasons((10).to_bytes(32, "big")) == {"x": 1}
