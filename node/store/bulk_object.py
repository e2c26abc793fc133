"""One bulk object on disk, open for reading and writing in place, with marks that two processes share.

``manifest`` is the chunk list, ``whole.bin`` the bytes (their full size from the start), ``chunks`` one byte a chunk:

1. MISSING (0), VERIFIED (1: since the daemon started) or CLAIMED (2: by an earlier run, and hearsay: the machine may
   have lost power between two writes; verified again, in place, when it is first needed).
2. ``whole.bin`` and ``chunks`` are mapped shared. What one process has verified the other may serve at once.
3. Whoever writes a chunk in place is the only one that does; it marks the chunk by ``check`` alone.

Every method does disk work, and may be called from any thread.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

from blake3 import blake3

from protocol.constants import CHUNK_BYTES
from protocol.weights.manifest import ChunkList

MISSING: Final = 0
VERIFIED: Final = 1
CLAIMED: Final = 2

_DIGITS: Final = bytes(ord("1") if mark == VERIFIED else ord("0") for mark in range(256))


class BulkObject:
    """An object of the store, whole or partial. ``listing`` is its chunk list, ``fd`` the descriptor of its bytes.

    Made by ``VersionStore``. The descriptor and the maps live as long as this does, also once the store has let the
    object go. Raises ``OSError``, for one where a file is missing or shorter than the list says.
    """

    def __init__(self, folder: Path, listing: ChunkList) -> None:
        self.listing = listing
        self.count = len(listing.chunks)
        self.fd = os.open(folder / "whole.bin", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(self.fd)
            if status.st_size != listing.size:
                raise FileNotFoundError(f"{folder}: whole.bin has {status.st_size} bytes, not {listing.size}")
            self.identity = (status.st_dev, status.st_ino)
            self._marks = self._map_marks(folder / "chunks")
            self._bytes = memoryview(mmap.mmap(self.fd, listing.size) if listing.size else bytearray())
        except BaseException:
            os.close(self.fd)
            raise

    def __del__(self) -> None:
        # Whatever still reads from the descriptor holds this object. The maps close themselves.
        if hasattr(self, "_bytes"):
            os.close(self.fd)

    def _map_marks(self, path: Path) -> mmap.mmap | bytearray:
        if not self.count:
            return bytearray()
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != self.count:
                raise FileNotFoundError(f"{path}: not one byte a chunk")
            return mmap.mmap(descriptor, self.count)
        finally:
            os.close(descriptor)

    def buffer(self, index: int) -> memoryview:
        """The bytes of chunk ``index`` as mapped. Raises ``LocalError`` where there is none."""
        start = index * CHUNK_BYTES
        return self._bytes[start : start + self.listing.chunk_size(index)]

    def check(self, index: int) -> bool:
        """Hash chunk ``index`` where it lies and mark it verified or missing; whether it is right."""
        right = blake3(self.buffer(index)).digest() == self.listing.chunks[index]
        self._marks[index] = VERIFIED if right else MISSING
        return right

    def take(self, index: int, data: memoryview) -> bool:
        """Hash what arrived as chunk ``index`` and write it where it is right; whether it is. Raises ``OSError``.

        A chunk that was just received is in the processor's cache, and writing it takes less than receiving it into the
        map, whose pages would have to be made ready one by one.
        """
        right = blake3(data).digest() == self.listing.chunks[index]
        if right:
            self._put(index, data)
            self._marks[index] = VERIFIED
        return right

    def has(self, index: int) -> bool:
        """Whether chunk ``index`` is here and right; a claim is verified first. False for one that does not exist."""
        if not 0 <= index < self.count:
            return False
        mark = self._marks[index]
        return mark == VERIFIED or (mark == CLAIMED and self.check(index))

    def verified(self) -> int:
        """How many chunks were verified so far."""
        return self._marks[:].count(VERIFIED)

    def present(self) -> int:
        """How many chunks were verified or are claimed by an earlier run."""
        return self.count - self._marks[:].count(MISSING)

    def bitmap(self) -> bytes:
        """Which chunks were verified so far: bit i, the most significant of a byte first, is chunk i."""
        if not self.count:
            return b""
        spare = -self.count % 8
        return (int(self._marks[:].translate(_DIGITS), 2) << spare).to_bytes((self.count + spare) // 8, "big")

    def missing(self) -> list[int]:
        """The chunks still to be fetched, ascending; claims are verified for it."""
        return [index for index in range(self.count) if not self.has(index)]

    def write(self, index: int, data: bytes) -> None:
        """Store a chunk that was verified elsewhere, unless it is here. Raises ``OSError``."""
        if not self.has(index):
            self._put(index, data)
            self._marks[index] = VERIFIED

    def _put(self, index: int, data: bytes | memoryview) -> None:
        """Write all of a chunk: a disk that is about to be full takes a part of it, and says no more than how much."""
        view, at = memoryview(data).cast("B"), index * CHUNK_BYTES
        while view:
            written = os.pwrite(self.fd, view, at)
            view, at = view[written:], at + written

    def read(self, index: int) -> bytes | None:
        """A copy of chunk ``index``; None where it is not here."""
        return bytes(self.buffer(index)) if self.has(index) else None

    def sync(self) -> None:
        """Make what was verified so far durable. Raises ``OSError``."""
        os.fsync(self.fd)
        if isinstance(self._marks, mmap.mmap):
            self._marks.flush()

    def demote(self) -> None:
        """Take what is marked as verified for a claim of an earlier run."""
        for index, mark in enumerate(self._marks[:]):
            if mark not in (MISSING, CLAIMED):
                self._marks[index] = CLAIMED
