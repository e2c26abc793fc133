"""One block of a delta: which of its values changed and how, as compressed planes (``protocol.weights.delta``, rule 2).

Arrays of a block of N values of ``unit`` bytes, of which C changed: values ``<u2`` or ``<u4`` [N], positions int64 [C],
strictly ascending, differences of the values' type [C], modulo 256^unit and never 0. Needs numpy and zstandard, no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from protocol.errors import PeerError
from protocol.weights.delta import Segment

LEVEL: Final = 3
"""zstd's level. The planes are close to random, so that higher ones cost time and gain nothing."""

Values = npt.NDArray[np.unsignedinteger[Any]]
Positions = npt.NDArray[np.int64]


class SegmentEncoder:
    """Encodes blocks, one at a time; not for two threads at once."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._type = value_type(unit)
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)

    def encode(self, block: int, base: memoryview, target: memoryview) -> tuple[Segment, bytes] | None:
        """The segment that turns the bytes ``base`` of this block into ``target``, and its bytes in the delta file.

        None where nothing changed.
        """
        old, new = np.frombuffer(base, self._type), np.frombuffer(target, self._type)
        positions = np.flatnonzero(old != new)
        if not len(positions):
            return None
        gaps = np.diff(positions, prepend=-1) - 1
        frames = [self._frames(gaps), self._frames(_folded(new[positions] - old[positions], self._unit))]
        sizes = [tuple(len(frame) for frame in stream) for stream in frames]
        segment = Segment(block, len(positions), sizes[0], sizes[1])
        return segment, b"".join(frame for stream in frames for frame in stream)

    def _frames(self, numbers: npt.NDArray[Any]) -> list[bytes]:
        """The planes of ``numbers`` (non-negative), compressed."""
        planes = max(1, -(-int(numbers.max()).bit_length() // 8))
        octets = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
        return [self._compressor.compress(octets[:, plane].tobytes()) for plane in range(planes)]


class SegmentDecoder:
    """Decodes blocks, one at a time; not for two threads at once."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._decompressor = zstandard.ZstdDecompressor()

    def decode(self, segment: Segment, data: bytes, values: int) -> tuple[Positions, Values]:
        """Positions and differences that ``data``, the segment's bytes, holds for a block of so many values.

        Raises ``PeerError`` for anything that no ``SegmentEncoder`` makes of two blocks; never takes more memory than
        the segment's own numbers say.
        """
        if len(data) != segment.size:
            raise PeerError(f"delta: block {segment.block} is cut short")
        view = memoryview(data)
        split = sum(segment.gaps)
        gaps = self._numbers(segment, segment.gaps, view[:split])
        folded = self._numbers(segment, segment.differences, view[split:])
        positions = np.cumsum(gaps + 1) - 1
        if positions[-1] >= values:
            raise PeerError(f"delta: a position lies beyond the end of block {segment.block}")
        if int(folded.max()) > 256**self._unit - 2:
            raise PeerError(f"delta: block {segment.block} has a difference of 0")
        return positions, _unfolded(folded, self._unit)

    def _numbers(self, segment: Segment, sizes: Sequence[int], frames: memoryview) -> Positions:
        """The numbers of one stream."""
        numbers = np.zeros((segment.changed, 8), np.uint8)
        for plane, size in enumerate(sizes):
            numbers[:, plane] = np.frombuffer(self._content(segment, frames[:size]), np.uint8)
            frames = frames[size:]
        if len(sizes) > 1 and not numbers[:, len(sizes) - 1].any():
            raise PeerError(f"delta: block {segment.block} has a plane of nothing")
        return numbers.reshape(-1).view("<i8").astype(np.int64, copy=False)

    def _content(self, segment: Segment, frame: memoryview) -> bytes:
        """The content of a frame: one byte a changed value."""
        try:
            # The size that the frame claims is looked at before room is made for it.
            claimed = zstandard.get_frame_parameters(frame)
            if claimed.content_size != segment.changed or claimed.dict_id:
                raise PeerError(f"delta: a frame of block {segment.block} has another size than the block's changes")
            content = self._decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PeerError(f"delta: block {segment.block} is not compressed as it should be ({error})") from None
        if len(content) != segment.changed:
            raise PeerError(f"delta: a frame of block {segment.block} holds less than it claims")
        return content


def value_type(unit: int) -> np.dtype[Any]:
    """numpy's type of values of so many bytes."""
    return np.dtype(f"<u{unit}")


def _folded(differences: Values, unit: int) -> npt.NDArray[np.int64]:
    """Differences as small non-negative numbers: −1, 1, −2, 2, … become 0, 1, 2, 3, …"""
    signed = differences.view(f"<i{unit}").astype(np.int64)
    return np.where(signed > 0, 2 * signed - 1, -2 * signed - 2)


def _unfolded(folded: npt.NDArray[np.int64], unit: int) -> Values:
    """The inverse of ``_folded``."""
    half = (folded >> 1) + 1
    return np.where(folded & 1, half, -half).astype(value_type(unit))
