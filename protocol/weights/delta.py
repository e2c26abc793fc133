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
from typing import Final

from blake3 import blake3

from protocol import codec
from protocol.codec import Array, Bytes, Int, Many
from protocol.constants import DELTA_BLOCK_BYTES, FORMAT, MAX_MANIFEST_BYTES
from protocol.errors import LocalError, PeerError
from protocol.weights.manifest import DTYPES, Manifest, chunk_count, size_of_chunk

UNITS: Final = (2, 4)
MAX_GAP_PLANES: Final = 3
"""A block has at most 2^21 values."""

MAX_CHAIN: Final = 4
"""Deltas that a node takes one after the other: what is older than that is deleted soon (``KEPT_VERSIONS``)."""

_FIELDS: Final = 8
_LARGEST_HEAD: Final = 128
"""Bytes that everything in a manifest but segments and hashes takes at most: two hashes, four numbers, and lengths."""
_LARGEST_SEGMENT: Final = 64
"""Bytes that a segment takes at most: nine numbers of at most five bytes, and three lengths."""
_PLANES: Final = Int(1, DELTA_BLOCK_BYTES)
_SCHEMA: Final = Array(
    (
        ("format", Int(FORMAT, FORMAT)),
        ("base", codec.HASH),
        ("target", codec.HASH),
        ("unit", Int(UNITS[0], UNITS[-1])),
        ("whole size", Int(1)),
        ("size", Int()),
        (
            "segments",
            Many(
                Array(
                    (
                        ("block", Int(0, 2**32)),
                        ("changed", Int(1, DELTA_BLOCK_BYTES // UNITS[0])),
                        ("gaps", Many(_PLANES, most=MAX_GAP_PLANES, least=1)),
                        ("differences", Many(_PLANES, most=UNITS[-1], least=1)),
                    )
                ),
                most=MAX_MANIFEST_BYTES,
            ),
        ),
        ("chunks", Bytes(most=MAX_MANIFEST_BYTES)),
    )
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A block with changed values: its index, how many changed, and the bytes of the frames of both streams."""

    block: int
    changed: int
    gaps: tuple[int, ...]
    differences: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes in the delta file."""
        return sum(self.gaps) + sum(self.differences)


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """What turns the version with manifest digest ``base`` into the one with ``target``. Sizes are in bytes."""

    base: bytes
    target: bytes
    unit: int
    whole_size: int
    size: int
    segments: tuple[Segment, ...]
    chunks: tuple[bytes, ...]
    _named: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)
    """Its digest, once it is known."""

    @property
    def digest(self) -> bytes:
        """The BLAKE3 hash (32 bytes) of the encoded manifest, which names the delta."""
        if not self._named:
            self._named.append(blake3(self.encode()).digest())
        return self._named[0]

    @property
    def changed(self) -> int:
        """How many values change."""
        return sum(segment.changed for segment in self.segments)

    @classmethod
    def parse(cls, data: bytes) -> DeltaManifest:
        """The delta manifest in ``data``; raises ``PeerError`` where a rule is broken."""
        value = codec.parse(data, _SCHEMA, max_bytes=MAX_MANIFEST_BYTES, what="delta manifest")
        _, base, target, unit, whole_size, size, rows, chunks = value
        if unit not in UNITS or whole_size % unit:
            raise PeerError("delta manifest: the whole does not consist of such values")
        segments = tuple(Segment(block, changed, tuple(gaps), tuple(diffs)) for block, changed, gaps, diffs in rows)
        before = -1
        for segment in segments:
            if not before < segment.block < block_count(whole_size):
                raise PeerError("delta manifest: the blocks do not ascend, or there is no such block")
            before = segment.block
            _check_segment(segment, block_size(whole_size, segment.block) // unit, unit)
        if sum(segment.size for segment in segments) != size:
            raise PeerError("delta manifest: the segments do not add up to the size")
        if size > largest_delta(whole_size):
            raise PeerError("delta manifest: the delta is too large to be worth it")
        if len(chunks) != 32 * chunk_count(size):
            raise PeerError("delta manifest: wrong number of chunk hashes")
        hashes = tuple(chunks[start : start + 32] for start in range(0, len(chunks), 32))
        manifest = cls(base, target, unit, whole_size, size, segments, hashes)
        manifest._named.append(blake3(data).digest())
        return manifest

    def encode(self) -> bytes:
        """The manifest's bytes; ``LocalError`` for one that others would refuse."""
        rows = [[s.block, s.changed, list(s.gaps), list(s.differences)] for s in self.segments]
        fields = [self.base, self.target, self.unit, self.whole_size, self.size, rows, b"".join(self.chunks)]
        data = codec.encode([FORMAT, *fields])
        try:
            self.parse(data)
        except PeerError as error:
            raise LocalError(str(error)) from None
        return data

    def chunk_size(self, index: int) -> int:
        """Bytes of chunk ``index``; ``LocalError`` where there is no such chunk."""
        return size_of_chunk(self, index)

    def check(self, base: Manifest, target: Manifest) -> None:
        """Raise ``PeerError`` unless this is a difference between exactly these two."""
        if (self.base, self.target) != (base.digest, target.digest):
            raise PeerError("the delta is one between other versions")
        if base.tensors != target.tensors or self.whole_size != target.size or self.unit != unit_of(target):
            raise PeerError("the delta does not fit the versions that it names")


def _check_segment(segment: Segment, values: int, unit: int) -> None:
    if segment.changed > values:
        raise PeerError("delta manifest: more values change than there are")
    if len(segment.differences) > unit:
        raise PeerError("delta manifest: a difference has more bytes than a value")
    if any(size > largest_frame(segment.changed) for size in (*segment.gaps, *segment.differences)):
        raise PeerError("delta manifest: a frame is larger than what it holds")


def parse_chunk_list(data: bytes) -> Manifest | DeltaManifest:
    """Whichever of the two ``data`` is; raises ``PeerError`` where it is neither."""
    # An array of up to 15 fields has its length in its first byte, so the two are told apart before they are parsed.
    return DeltaManifest.parse(data) if data[:1] == bytes([0x90 | _FIELDS]) else Manifest.parse(data)


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
    offsets, offset = [], 0
    for segment in segments:
        offsets.append(offset)
        offset += segment.size
    return offsets


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
