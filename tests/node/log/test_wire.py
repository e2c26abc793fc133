"""Messages of the log protocol: strict both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.log import wire
from node.log.wire import Summary
from protocol import codec
from protocol.errors import PeerError
from protocol.log.heads import RangeRequest

HASH = bytes(range(32))
SUMMARY = Summary(HASH, 3, HASH, 1, HASH)
REQUESTS = [
    ("hello", SUMMARY.to_value()),
    ("hello", Summary(HASH, 0, None, 0, HASH).to_value()),
    ("buckets", None),
    ("heads", [[0, 255], HASH]),
    ("ranges", [[HASH, 0, 2**62]]),
    ("cuts", 7),
    ("grants", 0),
    ("forks", HASH),
]


@pytest.mark.parametrize(("op", "argument"), REQUESTS)
def test_requests(op: str, argument: object) -> None:
    data = wire.request(op, argument)
    assert wire.parse_request(data) == (op, argument)
    for end in range(len(data)):
        with pytest.raises(PeerError):
            wire.parse_request(data[:end])


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("steal", None),
        ("hello", None),
        ("buckets", 1),
        ("heads", [[], HASH]),
        ("heads", [[256], HASH]),
        ("ranges", []),
        ("ranges", [[HASH, 0, 1]] * (wire.MAX_RANGES + 1)),
        ("ranges", [[HASH[1:], 0, 1]]),
        ("cuts", None),
        ("forks", b""),
    ],
)
def test_bad_requests(op: str, argument: object) -> None:
    with pytest.raises(PeerError):
        wire.parse_request(codec.encode([1, op, argument]))


def test_a_full_request_for_ranges_fits() -> None:
    wanted = [RangeRequest(HASH, 2**61, 2**62)] * wire.MAX_RANGES
    assert len(wire.ranges(wanted)) <= wire.MAX_REQUEST
    assert wire.parse_request(wire.ranges(wanted))[0] == "ranges"


def test_a_full_request_for_heads_fits() -> None:
    assert wire.parse_request(wire.request("heads", [list(range(256)), HASH]))[0] == "heads"


def test_a_full_answer_of_heads_fits() -> None:
    rows = [[HASH, 2**62, HASH, HASH, 1]] * wire.MAX_ROWS
    answer = codec.encode(rows)
    assert len(answer) <= wire.MAX_ANSWER
    assert wire.parse_answer("heads", answer) == rows


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for parse in (
        wire.parse_request,
        wire.parse_news,
        *(lambda d, op=op: wire.parse_answer(op, d) for op, _ in REQUESTS),
    ):
        try:
            parse(data)
        except PeerError:
            continue


@given(st.lists(st.lists(st.binary(max_size=60), max_size=4), min_size=4, max_size=4))
def test_news(parts: list[list[bytes]]) -> None:
    data = wire.news(*parts)
    assert data is not None
    assert list(wire.parse_news(data)) == parts


def test_long_news_are_not_gossiped() -> None:
    assert wire.news([bytes(4000)] * 60) is not None
    assert wire.news([bytes(4000)] * 70) is None
    assert wire.news([b""] * wire.MAX_NEWS) is None


def test_fitting() -> None:
    assert wire.fitting([]) == []
    big = bytes(2 * wire.ANSWER_BYTES)
    assert wire.fitting([big, b"x"]) == [big]
    assert wire.fitting([b"x", big]) == [b"x"]
    drawn = iter([big, big, big])
    assert wire.fitting(drawn) == [big]
    assert list(drawn) == [big]
    small = [bytes(1000)] * 2000
    fits = wire.fitting(small)
    assert len(codec.encode(fits)) <= wire.ANSWER_BYTES + 5
    assert len(fits) > 1000
