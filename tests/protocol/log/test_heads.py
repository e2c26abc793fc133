"""Heads: the root over them, buckets, and what to ask for."""

from __future__ import annotations

from hashlib import sha256
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.errors import PeerError
from protocol.log import merkle
from protocol.log.heads import (
    BUCKETS,
    EMPTY_BUCKET,
    FROZEN,
    HEAD,
    LIVE,
    MAX_RANGE,
    Head,
    RangeRequest,
    bucket,
    heads_root,
    plan,
)
from tests.protocol.builders import digest
from tests.protocol.reference_log import bucket_digests
from tests.protocol.strategies import heads

some_heads = st.lists(heads, max_size=12, unique_by=lambda head: head.author)


def head(author: str, seq: int, branch: str = "a", status: int = LIVE) -> Head:
    """The head of ``author`` at ``seq`` on a named branch."""
    return Head(digest(author), seq, digest(f"{author} {seq} {branch}"), digest("feed root"), status)


def by_author(*items: Head) -> dict[bytes, Head]:
    """The heads as a replica keeps them."""
    return {item.author: item for item in items}


@given(heads)
def test_a_head_reads_as_written(item: Head) -> None:
    assert Head.from_value(codec.decode(item.leaf(), max_bytes=200)) == item


@pytest.mark.parametrize("value", [[], None, [bytes(32), 0, bytes(32), bytes(32), 2], [bytes(31), 0, bytes(32), 0, 0]])
def test_other_values_are_no_head(value: object) -> None:
    with pytest.raises(PeerError):
        codec.check(value, HEAD, "head")


def test_no_heads_have_the_empty_root() -> None:
    assert heads_root([]) == sha256(b"").digest()
    assert bucket_digests([]) == [EMPTY_BUCKET] * BUCKETS


@given(some_heads, st.integers())
def test_order_does_not_matter(items: list[Head], seed: int) -> None:
    shuffled = list(items)
    Random(seed).shuffle(shuffled)
    assert heads_root(shuffled) == heads_root(items)
    assert bucket_digests(shuffled) == bucket_digests(items)
    assert heads_root(items) == merkle.root([item.leaf() for item in sorted(items, key=lambda item: item.author)])


@given(some_heads, heads)
def test_a_head_more_changes_the_root_and_one_bucket(items: list[Head], more: Head) -> None:
    if any(item.author == more.author for item in items):
        return
    before, after = bucket_digests(items), bucket_digests([*items, more])
    assert [number for number in range(BUCKETS) if before[number] != after[number]] == [bucket(more.author)]
    assert heads_root(items) != heads_root([*items, more])


def test_every_field_counts() -> None:
    item = head("a", 3)
    others = [
        Head(digest("b"), 3, item.entry_id, item.feed_root),
        Head(item.author, 4, item.entry_id, item.feed_root),
        Head(item.author, 3, digest("x"), item.feed_root),
        Head(item.author, 3, item.entry_id, digest("x")),
        Head(item.author, 3, item.entry_id, item.feed_root, FROZEN),
    ]
    assert len({heads_root([other]) for other in [item, *others]}) == 6


def test_what_is_longer_is_asked_for_from_where_ours_ends() -> None:
    ours = by_author(head("a", 3), head("b", 7), head("c", 2))
    theirs = [head("a", 5), head("b", 7), head("d", 1)]
    assert plan(ours, theirs) == [RangeRequest(digest("a"), 4, 5), RangeRequest(digest("d"), 0, 1)]


def test_a_long_feed_is_asked_for_in_pieces() -> None:
    assert plan({}, [head("a", 10_000)]) == [RangeRequest(digest("a"), 0, MAX_RANGE - 1)]


def test_what_is_shorter_or_equal_is_not_asked_for() -> None:
    ours = by_author(head("a", 3), head("b", 7))
    assert plan(ours, [head("a", 3), head("b", 2)]) == []
    assert plan(ours, [head("b", 2)], lambda author, seq: head("b", seq).entry_id) == []


def test_another_branch_is_asked_for_at_the_place_that_proves_the_fork() -> None:
    ours = by_author(head("a", 3), head("b", 7))
    asked = [RangeRequest(digest("a"), 3, 3), RangeRequest(digest("b"), 2, 2)]
    theirs = [head("a", 3, "other"), head("b", 2, "other")]
    assert plan(ours, theirs, lambda author, seq: head("b", seq).entry_id) == asked


def test_nothing_beyond_a_frozen_head_is_asked_for() -> None:
    ours = by_author(head("a", 3, status=FROZEN))
    assert plan(ours, [head("a", 5)]) == []
    # Both know of the fork, so the other one's longer feed is the certified one.
    assert plan(ours, [head("a", 5, status=FROZEN)]) == [RangeRequest(digest("a"), 4, 5)]
    assert plan(ours, [head("a", 3, "other", FROZEN)]) == [RangeRequest(digest("a"), 3, 3)]
