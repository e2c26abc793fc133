"""The difference between a version and its predecessor: what a delta file holds, and its manifest.

1. Both versions have the same tensors, so their bytes lie alike. The bytes are seen as little-endian unsigned values
   of ``unit`` bytes: 4 where every tensor is F32, else 2. They are cut into blocks of ``DELTA_BLOCK_BYTES``, whatever
   tensors they belong to; the last may be shorter. A block without a changed value takes no room.
2. Of each other block the delta file holds, one after the other, the *planes* of two streams, each plane a zstd frame
   (RFC 8878) of ``changed`` bytes that names its content size and no dictionary:
   a. *gaps*: how many unchanged values stand before each changed one, since the last changed one;
   b. *differences*: of d = (new − old) modulo 256^unit, read as a signed number and never 0, the number ``2·d − 1``
      where it is positive, else ``−2·d − 2``: 0 is −1, 1 is +1, 2 is −2, and so on.
   Plane i has byte i of every number of its stream, least significant first. A stream has as many planes as its
   largest number needs, and at least one.
3. A delta manifest is the canonical array ``[FORMAT, base, target, unit, whole size, size, segments, chunk hashes in
   one byte string]``: ``base`` and ``target`` are the digests of the two versions' manifests, ``size`` is the delta
   file's, cut into chunks as ``protocol.weights.manifest`` says. A segment is ``[block, changed, gap planes, difference
   planes]``, where planes are given by their frames' sizes.
4. Blocks ascend, no more values change than a block has, frames are not larger than what they hold needs, and add
   up to ``size``, which is at most half of the whole: a larger delta is never worth its trouble. So a manifest bounds
   all that reading its delta can take before the delta is read.
5. A node that holds an older version and lacks a few since then may take their deltas one after the other. It does so
   where that is expected to take less time than what it lacks of the whole; every version on the way is whole then,
   and is served.

``DeltaManifest.parse`` and ``parse_chunk_list`` raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, ClassVar, Final

from protocol.codec import Fields, Hash, Int, Many
from protocol.constants import DELTA_BLOCK_BYTES, MAX_MANIFEST_BYTES
from protocol.errors import PeerError
from protocol.weights.manifest import DTYPES, ChunkList, Hashes, Manifest, chunk_count

UNITS: Final = (2, 4)
MAX_GAP_PLANES: Final = 3
"""A block has at most 2^21 values."""

MAX_CHAIN: Final = 4
"""Deltas that a node takes one after the other: what is older than that is deleted soon (``KEPT_VERSIONS``)."""

_LARGEST_HEAD: Final = 128
"""Bytes that everything in a manifest but segments and hashes takes at most: two hashes, four numbers, and lengths."""
_LARGEST_SEGMENT: Final = 64
"""Bytes that a segment takes at most: nine numbers of at most five bytes, and three lengths."""
_PLANES: Final = Int(1, DELTA_BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Segment(Fields):
    """A block with changed values: its index, how many changed, and the bytes of the frames of both streams."""

    block: Annotated[int, Int(0, 2**32)]
    changed: Annotated[int, Int(1, DELTA_BLOCK_BYTES // UNITS[0])]
    gaps: Annotated[tuple[int, ...], Many(_PLANES, most=MAX_GAP_PLANES, least=1)]
    differences: Annotated[tuple[int, ...], Many(_PLANES, most=UNITS[-1], least=1)]

    @property
    def size(self) -> int:
        """Its bytes in the delta file."""
        return sum(self.gaps) + sum(self.differences)


@dataclass(frozen=True, slots=True)
class DeltaManifest(ChunkList):
    """What turns the version with manifest digest ``base`` into the one with ``target``. Sizes are in bytes."""

    WHAT: ClassVar[str] = "delta manifest"

    base: Hash
    target: Hash
    unit: Annotated[int, Int(UNITS[0], UNITS[-1])]
    whole_size: Annotated[int, Int(1)]
    size: Annotated[int, Int()]
    segments: Annotated[tuple[Segment, ...], Many(Segment.ARRAY, most=MAX_MANIFEST_BYTES)]
    chunks: Hashes
    _named: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def changed(self) -> int:
        """How many values change."""
        return sum(segment.changed for segment in self.segments)

    def problem(self) -> str | None:
        if self.unit not in UNITS or self.whole_size % self.unit:
            return "the whole does not consist of such values"
        before = -1
        for segment in self.segments:
            if not before < segment.block < block_count(self.whole_size):
                return "the blocks do not ascend, or there is no such block"
            before = segment.block
            if segment.changed > block_size(self.whole_size, segment.block) // self.unit:
                return "more values change than there are"
            if len(segment.differences) > self.unit:
                return "a difference has more bytes than a value"
            if any(size > largest_frame(segment.changed) for size in (*segment.gaps, *segment.differences)):
                return "a frame is larger than what it holds"
        if sum(segment.size for segment in self.segments) != self.size:
            return "the segments do not add up to the size"
        if self.size > largest_delta(self.whole_size):
            return "the delta is too large to be worth it"
        return None

    def check(self, base: Manifest, target: Manifest) -> None:
        """Raise ``PeerError`` unless this is a difference between exactly these two."""
        if (self.base, self.target) != (base.digest, target.digest):
            raise PeerError("the delta is one between other versions")
        if base.tensors != target.tensors or self.whole_size != target.size or self.unit != unit_of(target):
            raise PeerError("the delta does not fit the versions that it names")


def parse_chunk_list(data: bytes) -> Manifest | DeltaManifest:
    """Whichever of the two ``data`` is; raises ``PeerError`` where it is neither."""
    # An array of up to 15 fields has its length in its first byte, so the two are told apart before they are parsed.
    head = bytes([0x90 | len(DeltaManifest.ARRAY.fields)])
    return DeltaManifest.parse(data) if data[:1] == head else Manifest.parse(data)


def unit_of(manifest: Manifest) -> int:
    """Bytes of the values as which the weights of ``manifest`` are compared."""
    return min(DTYPES[tensor.dtype] for tensor in manifest.tensors)


def block_count(whole_size: int) -> int:
    """The number of blocks of a whole."""
    return -(-whole_size // DELTA_BLOCK_BYTES)


def block_size(whole_size: int, block: int) -> int:
    """Bytes of one of them."""
    return min(DELTA_BLOCK_BYTES, whole_size - block * DELTA_BLOCK_BYTES)


def largest_delta(whole_size: int) -> int:
    """Bytes that a delta may have at most."""
    return whole_size // 2


def largest_manifest(whole_size: int) -> int:
    """Bytes that the manifest of a delta to a whole of so many bytes may have: what is larger is refused unread, for
    reading it would take as long as its author likes."""
    segments = block_count(whole_size) * _LARGEST_SEGMENT
    return min(MAX_MANIFEST_BYTES, _LARGEST_HEAD + segments + 32 * chunk_count(largest_delta(whole_size)))


def largest_frame(content: int) -> int:
    """Bytes that a zstd frame of so many bytes of content may have (ZSTD_compressBound, and some room)."""
    return content + content // 128 + 64


def segments_at(segments: Sequence[Segment]) -> list[int]:
    """Where in the delta file each segment begins."""
    return list(accumulate((segment.size for segment in segments[:-1]), initial=0)) if segments else []


@dataclass(frozen=True, slots=True)
class Speed:
    """What a node expects of itself and its link: bytes a second received, hashed, and made from a base and a delta;
    and the seconds that it takes until the first of these is made."""

    receive: float
    hash: float
    apply: float
    start: float


def seconds_for_whole(missing: int, speed: Speed) -> float:
    """How long the ``missing`` bytes of a whole are expected to take: they are hashed while others arrive."""
    return missing / min(speed.receive, speed.hash)


def seconds_for_chain(deltas: Sequence[int], whole_size: int, speed: Speed) -> float:
    """How long deltas with so many missing bytes each are expected to take, received and applied in turn."""
    return speed.start + sum(deltas) / min(speed.receive, speed.hash) + len(deltas) * whole_size / speed.apply


def chain_pays(missing: int, deltas: Sequence[int], whole_size: int, speed: Speed) -> bool:
    """Whether to take the deltas from the newest version held and not the whole, of which ``missing`` bytes lack."""
    if not 0 < len(deltas) <= MAX_CHAIN:
        return False
    return seconds_for_chain(deltas, whole_size, speed) < seconds_for_whole(missing, speed)
