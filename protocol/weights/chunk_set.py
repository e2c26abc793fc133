"""Sets of chunks: integers in which bit i is chunk i, and the bitmaps that stand for them on the wire."""

from __future__ import annotations

from typing import Final

_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def bits_of(bitmap: bytes, chunks: int) -> int:
    """The set that a bitmap (chunk i is bit i, the most significant of a byte first) stands for; spare bits are cut."""
    return int.from_bytes(bitmap.translate(_REVERSED), "little") & ((1 << chunks) - 1)


def bitmap_of(chunks: int, count: int) -> bytes:
    """The bitmap of a set of ``count`` chunks."""
    return chunks.to_bytes((count + 7) // 8, "little").translate(_REVERSED)


def span(first: int, end: int) -> int:
    """The set of the chunks from ``first`` up to but without ``end``."""
    return ((1 << (end - first)) - 1) << first if end > first else 0


def lowest(chunks: int) -> int:
    """The first chunk of a set that is not empty."""
    return (chunks & -chunks).bit_length() - 1


def following(chunks: int, first: int, most: int) -> int:
    """How many chunks of a set follow each other from ``first`` on, up to ``most``."""
    window = (chunks >> first) & ((1 << most) - 1)
    return (~window & (window + 1)).bit_length() - 1
