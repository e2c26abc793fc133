"""Warnings at a bounded rate."""

from __future__ import annotations

import logging

import pytest

from node.net.peer_scores import Scores
from node.net.sparing_log import SparingLog


def test_lines_beyond_the_rate_are_counted_and_told_with_the_next(caplog: pytest.LogCaptureFixture) -> None:
    sparing = SparingLog(logging.getLogger("test"), lines=2, per_second=1)
    for number in range(5):
        sparing.warning(0.0, "%d", number)
    sparing.warning(0.5, "%d", 5)
    sparing.warning(1.0, "%d", 6)
    sparing.warning(2.0, "%d", 7)
    assert caplog.messages == ["0", "1", "6 (4 other warnings about peers were left out)", "7"]


def test_garbage_of_a_thousand_fresh_origins_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    scores = Scores()
    for number in range(1000):
        scores.blame(number.to_bytes(32, "big"), "not a presence", number / 500)
    assert len(caplog.messages) == 11
    assert "(490 other warnings" in caplog.messages[-1]
    scores.blame(bytes(32), "another", 3.0)
    assert "(499 other warnings" in caplog.messages[-1]
