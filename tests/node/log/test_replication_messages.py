"""Messages of the log protocol: strict both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.log import replication_messages
from node.log.replication_messages import LogSummary
from protocol import codec
from protocol.constants import FORMAT
from protocol.errors import PeerError

HASH = bytes(range(32))
SUMMARY = LogSummary(HASH, 3, HASH, 1, HASH)
REQUESTS = [
    ("hello", SUMMARY.to_value()),
    ("hello", LogSummary(HASH, 0, None, 0, HASH).to_value()),
    ("buckets", None),
    ("heads", [[0, 255], HASH]),
    ("ranges", [[HASH, 0, 2**62]]),
    ("cuts", 7),
    ("grants", 0),
    ("forks", HASH),
]


@pytest.mark.parametrize(("op", "argument"), REQUESTS)
def test_requests(op: str, argument: object) -> None:
    data = replication_messages.request(op, argument)
    assert replication_messages.parse_request(data) == (op, argument)
    for end in range(len(data)):
        with pytest.raises(PeerError):
            replication_messages.parse_request(data[:end])


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("steal", None),
        ("hello", None),
        ("buckets", 1),
        ("heads", [[], HASH]),
        ("heads", [[256], HASH]),
        ("ranges", []),
        ("ranges", [[HASH, 0, 1]] * (replication_messages.MAX_RANGES + 1)),
        ("ranges", [[HASH[1:], 0, 1]]),
        ("cuts", None),
        ("forks", b""),
    ],
)
def test_bad_requests(op: str, argument: object) -> None:
    with pytest.raises(PeerError):
        replication_messages.parse_request(codec.encode([1, op, argument]))


def test_a_full_request_for_ranges_fits() -> None:
    wanted = replication_messages.request("ranges", [[HASH, 2**61, 2**62]] * replication_messages.MAX_RANGES)
    assert len(wanted) <= replication_messages.MAX_REQUEST
    assert replication_messages.parse_request(wanted)[0] == "ranges"


def test_a_full_request_for_heads_fits() -> None:
    assert (
        replication_messages.parse_request(replication_messages.request("heads", [list(range(256)), HASH]))[0]
        == "heads"
    )


def test_a_full_answer_of_heads_fits() -> None:
    rows = [[HASH, 2**62, HASH, HASH, 1]] * replication_messages.MAX_ROWS
    answer = codec.encode(rows)
    assert len(answer) <= replication_messages.MAX_ANSWER
    assert replication_messages.parse_answer("heads", answer) == rows


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for parse in (
        replication_messages.parse_request,
        replication_messages.News.parse,
        *(lambda d, op=op: replication_messages.parse_answer(op, d) for op, _ in REQUESTS),
    ):
        try:
            parse(data)
        except PeerError:
            continue


@given(st.lists(st.lists(st.binary(max_size=60), max_size=4), min_size=4, max_size=4))
def test_news(parts: list[list[bytes]]) -> None:
    data = replication_messages.News(*parts).encode()
    assert data is not None
    assert data == codec.encode([FORMAT, *parts])
    read = replication_messages.News.parse(data)
    assert [list(part) for part in (read.entries, read.cuts, read.grants, read.forks)] == parts


def test_long_news_are_not_gossiped() -> None:
    assert replication_messages.News([bytes(4000)] * 60).encode() is not None
    assert replication_messages.News([bytes(4000)] * 70).encode() is None
    assert replication_messages.News([b""] * replication_messages.MAX_NEWS).encode() is None


def test_fitting() -> None:
    assert replication_messages.fitting([]) == []
    big = bytes(2 * replication_messages.ANSWER_BYTES)
    assert replication_messages.fitting([big, b"x"]) == [big]
    assert replication_messages.fitting([b"x", big]) == [b"x"]
    drawn = iter([big, big, big])
    assert replication_messages.fitting(drawn) == [big]
    assert list(drawn) == [big]
    small = [bytes(1000)] * 2000
    fits = replication_messages.fitting(small)
    assert len(codec.encode(fits)) <= replication_messages.ANSWER_BYTES + 5
    assert len(fits) > 1000
