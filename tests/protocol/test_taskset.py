"""Task sets: strict, canonical, and the same question for everybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import FORMAT, MAX_SET_BYTES
from protocol.errors import LocalError, PeerError
from protocol.taskset import MAX_ITEM, TaskSet
from protocol.work.rollout import pack

ITEMS = st.sets(st.integers(0, MAX_ITEM), min_size=1, max_size=50)


@given(ITEMS)
def test_what_is_made_reads_as_itself(items: set[int]) -> None:
    made = TaskSet.of(items)
    assert TaskSet.parse(made.encode()) == made
    assert set(made.items) == items


@given(ITEMS, st.integers(0, MAX_ITEM))
def test_a_drawn_number_stands_for_an_item_of_the_set(items: set[int], drawn: int) -> None:
    made = TaskSet.of(items)
    assert made.pick(drawn) == sorted(items)[drawn % len(items)]


def test_its_bytes() -> None:
    assert TaskSet.of([300, 7]).encode() == bytes([0x92, 1, 0xC4, 8, 7, 0, 0, 0, 0x2C, 1, 0, 0])


@pytest.mark.parametrize(
    "data",
    [
        codec.encode([FORMAT, b""]),
        codec.encode([FORMAT, pack([2, 1])]),
        codec.encode([FORMAT, pack([1, 1])]),
        codec.encode([FORMAT, pack([MAX_ITEM + 1])]),
        codec.encode([FORMAT, pack([1, 2])[:-1]]),
        codec.encode([FORMAT + 1, pack([1])]),
        codec.encode([FORMAT, [1]]),
        codec.encode([FORMAT, pack([1])]) + b"\0",
        b"",
    ],
)
def test_what_breaks_a_rule_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        TaskSet.parse(data)


@pytest.mark.parametrize("items", [[], [1, 1], [-1], [MAX_ITEM + 1]])
def test_what_others_would_refuse_is_not_made(items: list[int]) -> None:
    with pytest.raises(LocalError):
        TaskSet.of(items)


def test_a_set_has_a_largest_size() -> None:
    TaskSet.of(range(MAX_SET_BYTES // 4 - 8)).encode()
    with pytest.raises(LocalError, match="too large"):
        TaskSet.of(range(MAX_SET_BYTES // 4)).encode()
