"""Sets of chunks and their bitmaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.chunkset import bitmap_of, bits, bits_of, span


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
