"""Sets of chunks and their bitmaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.weights.chunk_set import bitmap_of, bits_of, following, lowest, span
from tests.protocol.swarms import bits


@given(st.sets(st.integers(0, 199)), st.integers(200, 220))
def test_bitmaps(chunks: set[int], count: int) -> None:
    bitmap = bitmap_of(bits(chunks), count)
    assert len(bitmap) == -(-count // 8)
    assert {i for i in range(count) if bitmap[i // 8] >> (7 - i % 8) & 1} == chunks
    assert bits_of(bitmap, count) == bits(chunks)
    assert bits_of(b"\xff" * len(bitmap), count) == (1 << count) - 1  # spare bits are nobody's


@given(st.integers(0, 99), st.integers(0, 99))
def test_spans(first: int, end: int) -> None:
    assert span(first, end) == bits(range(first, end))


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 50))
def test_the_first_and_those_that_follow(chunks: set[int], most: int) -> None:
    first = lowest(bits(chunks))
    assert first == min(chunks)
    count = following(bits(chunks), first, most)
    assert 1 <= count <= most
    assert chunks >= set(range(first, first + count))
    assert count == most or first + count not in chunks
