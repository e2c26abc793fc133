"""The weight manifest: what one version's weights are, and the hashes that its bytes are checked with.

1. The weights' bytes are the raw little-endian tensors, row-major, in the manifest's order, with nothing before,
   between or after them.
2. They are cut into chunks of ``CHUNK_BYTES``; the last may be shorter. A chunk's hash is BLAKE3 over its bytes, and
   the hash of the whole is BLAKE3 over the concatenated chunk hashes: a chunk is checked the moment it arrives.
3. A manifest is the canonical array ``[FORMAT, size, tensors, chunk hashes in one byte string, checksum]``, a tensor
   ``[name, dtype, shape]``. It is named by the BLAKE3 hash of its bytes, which a ``weights`` entry signs.
4. Names are unique and of letters, digits, ``_``, ``.`` and ``-``, and do not begin with a dot: they become keys and
   file names. The sizes of the tensors add up to ``size``, and there are exactly as many hashes as chunks.
5. The checksum does not depend on how an engine lays tensors out: it is the sum, modulo 2⁶³, over all values of
   ``L(bits)``, where bits are those of the value widened to float32 and L is the mixer of ``proofs.sampling`` (rule
   3 there). L(0) = 0, so padding with zeros changes nothing. A sum of 0 is written as 1; 0 is invalid.
   The manifest's tensors count once each; an engine that ties or fuses some of them counts each value once too.

``Manifest.parse`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Self

from blake3 import blake3

from protocol import codec
from protocol.codec import MAX_INT, Bytes, Fields, Formatted, Int, Many, Text
from protocol.constants import CHUNK_BYTES, MAX_MANIFEST_BYTES
from protocol.errors import LocalError, PeerError, ours

DTYPES: Final = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes a value of each tensor type."""

MAX_TENSORS: Final = 2**18
MAX_DIMENSIONS: Final = 8
MAX_NAME: Final = 200

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class TensorInfo(Fields):
    """A tensor: its name, type ("F32", "BF16" or "F16") and shape (empty for a single number)."""

    name: Annotated[str, Text(MAX_NAME)]
    dtype: Annotated[str, Text(8, tuple(DTYPES))]
    shape: Annotated[tuple[int, ...], Many(Int(1, 2**40), most=MAX_DIMENSIONS)]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


def _split(hashes: bytes) -> tuple[bytes, ...]:
    if len(hashes) % 32:
        raise PeerError(f"wrong number of chunk hashes ({len(hashes)} bytes)")
    return tuple(hashes[start : start + 32] for start in range(0, len(hashes), 32))


Hashes = Annotated[tuple[bytes, ...], Bytes(most=MAX_MANIFEST_BYTES, parse=_split, pack=b"".join)]


class ChunkList(Formatted):
    """What nodes pass to each other in bulk: ``size`` bytes in ``chunks`` with known hashes of 32 bytes (rule 2), and a
    name. A ``Manifest`` is one, a ``protocol.weights.delta.DeltaManifest`` is another."""

    __slots__ = ()
    WHAT: ClassVar[str] = ""
    if TYPE_CHECKING:
        size: int
        chunks: tuple[bytes, ...]
        _named: list[bytes]

    @property
    def digest(self) -> bytes:
        """The BLAKE3 hash (32 bytes) of the encoding, which names the list and its bytes everywhere."""
        if not self._named:
            self._named.append(blake3(self.encode()).digest())
        return self._named[0]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The list in ``data``; raises ``PeerError`` where a rule is broken."""
        made = cls.from_value(codec.parse(data, cls.ARRAY, max_bytes=MAX_MANIFEST_BYTES, what=cls.WHAT))
        if (problem := made.problem()) is not None:
            raise PeerError(f"{cls.WHAT}: {problem}")
        if len(made.chunks) != chunk_count(made.size):
            raise PeerError(f"{cls.WHAT}: wrong number of chunk hashes")
        made._named.append(blake3(data).digest())
        return made

    def problem(self) -> str | None:
        """What is wrong between fields that each fit their own schema, or None."""
        return None

    def encode(self) -> bytes:
        """The list's own bytes; ``LocalError`` for one that others would refuse."""
        data = codec.encode(self.to_value())
        with ours():
            self.parse(data)
        return data

    def chunk_size(self, index: int) -> int:
        """Bytes of chunk ``index``; ``LocalError`` where there is no such chunk."""
        if not 0 <= index < len(self.chunks):
            raise LocalError(f"there is no chunk {index} of {len(self.chunks)}")
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Manifest(ChunkList):
    """A manifest. ``size`` is in bytes, ``chunks`` are 32-byte hashes, ``checksum`` follows rule 5."""

    WHAT: ClassVar[str] = "manifest"

    size: Annotated[int, Int(1)]
    tensors: Annotated[tuple[TensorInfo, ...], Many(TensorInfo.ARRAY, most=MAX_TENSORS, least=1)]
    chunks: Hashes
    checksum: Annotated[int, Int(1, MAX_INT)]
    _named: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)
    """Its digest, once it is known: encoding that of a large model takes a tenth of a second."""

    @property
    def whole(self) -> bytes:
        """The hash of the whole (32 bytes)."""
        return whole_hash(self.chunks)

    @classmethod
    def of_file(
        cls, tensors: Iterable[tuple[str, str, Sequence[int]]], data: bytes | bytearray | memoryview, checksum: int
    ) -> Manifest:
        """The manifest of the weight bytes ``data`` that hold ``tensors``, rows of name, dtype and shape.

        ``LocalError`` where the two do not fit.
        """
        infos = tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        size = sum(info.size for info in infos)
        view = memoryview(data).cast("B")
        if len(view) != size:
            raise LocalError(f"the tensors take {size} bytes, but there are {len(view)}")
        return cls(size, infos, tuple(chunk_hashes(view)), checksum)

    def problem(self) -> str | None:
        for info in self.tensors:
            if not _NAME.fullmatch(info.name):
                return f"{info.name!r} is not a tensor's name"
        if len({info.name for info in self.tensors}) != len(self.tensors):
            return "two tensors have the same name"
        if sum(info.size for info in self.tensors) != self.size:
            return "the tensors do not add up to the size"
        return None

    def tensor_offsets(self) -> dict[str, tuple[int, int]]:
        """Where each tensor lies in the bytes: name → (offset, size), in order."""
        offsets: dict[str, tuple[int, int]] = {}
        offset = 0
        for tensor in self.tensors:
            offsets[tensor.name] = (offset, tensor.size)
            offset += tensor.size
        return offsets


def chunk_count(size: int) -> int:
    """The number of chunks of ``size`` bytes."""
    return -(-size // CHUNK_BYTES)


def chunk_hashes(data: bytes | bytearray | memoryview) -> list[bytes]:
    """The BLAKE3 hashes of the chunks of ``data``."""
    view = memoryview(data).cast("B")
    return [blake3(view[start : start + CHUNK_BYTES]).digest() for start in range(0, len(view), CHUNK_BYTES)]


def whole_hash(chunks: Sequence[bytes]) -> bytes:
    """The hash of the whole from its chunks' hashes."""
    return blake3(b"".join(chunks)).digest()


def verify_chunk(listing: ChunkList, index: int, data: bytes | bytearray | memoryview) -> None:
    """Raise ``PeerError`` unless ``data`` is chunk ``index``; ``LocalError`` where there is no such chunk."""
    size = listing.chunk_size(index)
    view = memoryview(data).cast("B")
    if len(view) != size:
        raise PeerError(f"chunk {index} has {len(view)} bytes, not {size}")
    if blake3(view).digest() != listing.chunks[index]:
        raise PeerError(f"chunk {index} has the wrong hash")
