"""The table of heads says what the plain functions say, whatever happened to it."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.log.head_table import HeadTable
from protocol.log.heads import FROZEN, LIVE, Head, bucket, heads_root
from tests.protocol.builders import digest
from tests.protocol.reference_log import bucket_digests


def head(number: int, seq: int) -> Head:
    """A head of one of many authors, some of whom share buckets."""
    author = bytes([number % 5 * 60]) + digest(f"author {number}")[1:]
    return Head(author, seq, digest(f"{number} {seq}"), digest(f"root {number} {seq}"), LIVE if seq % 3 else FROZEN)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_it_agrees_with_the_plain_functions(seed: int) -> None:
    rng = Random(seed)
    table, plain = HeadTable(), dict[bytes, Head]()
    authors = rng.randrange(1, 40)
    for _ in range(rng.randrange(60)):
        for _ in range(rng.randrange(1, 6)):
            new = head(rng.randrange(authors), rng.randrange(10))
            if rng.random() < 0.1:
                table.remove(new.author)
                plain.pop(new.author, None)
            else:
                table.set(new)
                plain[new.author] = new
        changes = [head(number, 77) for number in range(rng.randrange(authors + 3)) if rng.random() < 0.3]
        changed = {**plain, **{new.author: new for new in changes}}
        if rng.random() < 0.6:
            assert table.root_with(changes) == heads_root(changed.values())
            assert table.root() == heads_root(plain.values())
        if rng.random() < 0.6:
            assert table.digests() == bucket_digests(plain.values())
        wanted = {number for number in range(256) if rng.random() < 0.5}
        after, most = rng.choice([bytes(32), head(0, 0).author, b"\xff" * 32]), rng.randrange(1, 50)
        expected = sorted(
            (row for row in plain.values() if bucket(row.author) in wanted and row.author > after),
            key=lambda row: row.author,
        )
        assert table.in_buckets(wanted, after, most) == expected[:most]
    assert table.rows == plain
    assert table.root() == heads_root(plain.values())


def test_an_empty_table() -> None:
    table = HeadTable()
    assert table.root() == heads_root([])
    assert table.digests() == bucket_digests([])
    assert table.root_with([head(1, 1)]) == heads_root([head(1, 1)])
    assert table.in_buckets(range(256), bytes(32), 5) == []
