"""The delta child: makes the difference of two versions, and one version from another and their difference.

1. It works block by block (``DELTA_BLOCK_BYTES``), a few blocks at a time in threads: reading, hashing, compressing and
   writing let go of Python's lock. Its memory does not depend on the model's size.
2. ``describe`` hashes a new version's file into its manifest and, in the same pass, finds what changed. Where the
   difference is not clearly smaller than the whole it is given up early, and there is none.
3. ``apply`` writes into the room that the store made for the target: each chunk is hashed while it is still in the
   processor's cache, and only a right one is written and marked as verified. The base is only read. So it can be
   killed at any time and run again, and passes over what is there already.
4. It raises ``UserError`` for a delta that does not fit or is damaged: the daemon then fetches the whole.

It imports numpy and zstandard, no torch.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any, Final, TypeVar

import numpy as np
from blake3 import blake3

from node.errors import UserError
from node.workers import child_loop
from node.workers.child_messages import AppliedDelta, ApplyDelta, DescribedVersion, DescribeVersion
from node.workers.delta_blocks import SegmentDecoder, SegmentEncoder, value_type
from protocol.constants import CHUNK_BYTES, DELTA_BLOCK_BYTES
from protocol.errors import PeerError
from protocol.weights.delta import (
    DeltaManifest,
    Segment,
    block_count,
    block_size,
    largest_delta,
    parse_chunk_list,
    segments_at,
    unit_of,
)
from protocol.weights.manifest import Manifest, TensorInfo

SAMPLES: Final = 4
"""Blocks, spread over the whole, from which a difference that is too large is foreseen."""

MANIFEST: Final = "manifest"
WHOLE: Final = "whole.bin"
MARKS: Final = "chunks"
VERIFIED: Final = 1
"""What a version's folder holds, and the mark of a chunk that is here and right (``node.store.version_store``)."""

In = TypeVar("In")
Out = TypeVar("Out")


def describe(request: DescribeVersion) -> DescribedVersion:
    """The manifest of a file, and its difference to a base."""
    begun = time.perf_counter()
    infos = tuple(TensorInfo(*row) for row in request.tensors)
    size = sum(info.size for info in infos)
    found: _Difference | None = None
    with ExitStack() as stack:
        new = stack.enter_context(_Reader(Path(request.whole), size))
        if request.base is not None and request.delta is not None:
            before = _listed(Path(request.base), Manifest)
            if before.tensors == infos:
                old = stack.enter_context(_Reader(Path(request.base, WHOLE), size))
                found = stack.enter_context(_Difference(before, old, Path(request.delta)))
        if found is not None and not found.worth_it(new):
            found.abandon()

        def work(block: int) -> tuple[list[bytes], tuple[Segment, bytes] | None]:
            view = new.block(block)
            chunks = [blake3(view[at : at + CHUNK_BYTES]).digest() for at in range(0, len(view), CHUNK_BYTES)]
            return chunks, None if found is None else found.of_block(block, view)

        hashes: list[bytes] = []
        for chunks, encoded in _in_order(work, range(block_count(size)), request.threads):
            hashes += chunks
            if found is not None and encoded is not None:
                found.add(*encoded)
        manifest = Manifest(size, infos, tuple(hashes), request.checksum)
        listing = None if found is None else found.finish(manifest)
    return DescribedVersion(
        manifest=manifest.encode(),
        delta_manifest=None if listing is None else listing.encode(),
        changed=0 if listing is None else listing.changed,
        seconds=time.perf_counter() - begun,
    )


def apply(request: ApplyDelta) -> AppliedDelta:
    """Make a version from another and a delta.

    Raises ``UserError`` where the delta belongs to other versions or is damaged.
    """
    begun = time.perf_counter()
    delta, base, target = Path(request.delta), Path(request.base), Path(request.target)
    listing, made = _listed(delta, DeltaManifest), _listed(target, Manifest)
    try:
        listing.check(_listed(base, Manifest), made)
    except PeerError as error:
        raise UserError(str(error)) from None
    with ExitStack() as stack:
        difference = stack.enter_context(_Reader(delta / WHOLE, listing.size))
        old = stack.enter_context(_Reader(base / WHOLE, made.size))
        output = stack.enter_context((target / WHOLE).open("r+b", buffering=0))
        marks = stack.enter_context(_mapped(target / MARKS, len(made.chunks)))
        patcher = _Patcher(listing, made, difference, old, output.fileno(), marks)
        written, wrong = 0, list[int]()
        try:
            for done, bad in _in_order(patcher.block, range(block_count(made.size)), request.threads):
                written += done
                wrong += bad
        except PeerError as error:
            raise UserError(str(error)) from None
    return AppliedDelta(written, wrong, time.perf_counter() - begun)


class _Reader:
    """A file of known size that many threads read from, each into buffers of its own."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._own = local()
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        found = os.fstat(self._file).st_size
        if found != size:
            os.close(self._file)
            raise UserError(f"{path} has {found} bytes, not {size}")

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def block(self, block: int) -> memoryview:
        """The bytes of a block, good until this thread reads the next."""
        return self.read(block * DELTA_BLOCK_BYTES, block_size(self._size, block))

    def read(self, offset: int, size: int) -> memoryview:
        """So many bytes from ``offset``, good until this thread reads again."""
        buffer = getattr(self._own, "buffer", b"")
        if len(buffer) < size:
            self._own.buffer = buffer = bytearray(size)
        view = memoryview(buffer)[:size]
        got = 0
        while got < size:
            part = os.preadv(self._file, [view[got:]], offset + got)
            if not part:
                raise UserError(f"{self._path} became shorter")
            got += part
        return view


def _mapped(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        if os.fstat(file.fileno()).st_size < size:
            raise UserError(f"{path} is too short")
        return mmap.mmap(file.fileno(), size)


_Listing = TypeVar("_Listing", Manifest, DeltaManifest)


def _listed(folder: Path, kind: type[_Listing]) -> _Listing:
    path = folder / MANIFEST
    try:
        listing = parse_chunk_list(path.read_bytes())
    except (OSError, PeerError) as error:
        raise UserError(f"cannot read the manifest {path}: {error}") from None
    if not isinstance(listing, kind):
        raise UserError(f"{path} is a manifest of another kind")
    return listing


class _Difference:
    """A delta file in the making."""

    def __init__(self, base: Manifest, old: _Reader, path: Path) -> None:
        self._base = base
        self._old = old
        self._path = path
        self._unit = unit_of(base)
        self._own = local()
        self._file = path.open("wb")
        self._segments: list[Segment] = []
        self._hashes: list[bytes] = []
        self._pending = bytearray()
        self._size = 0
        self.abandoned = False

    def __enter__(self) -> _Difference:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self.abandoned:
            self._path.unlink(missing_ok=True)

    def worth_it(self, new: _Reader) -> bool:
        """Whether a few blocks let hope that the difference is small enough."""
        count = block_count(self._base.size)
        blocks = sorted({count * sample // SAMPLES for sample in range(SAMPLES)})
        size = sum(block_size(self._base.size, block) for block in blocks)
        found = [self.of_block(block, new.block(block)) for block in blocks]
        return sum(len(data) for _, data in (item for item in found if item)) <= largest_delta(size)

    def abandon(self) -> None:
        """There is to be no difference."""
        self.abandoned = True

    def of_block(self, block: int, new: memoryview) -> tuple[Segment, bytes] | None:
        """The block's segment; for many threads at once."""
        if self.abandoned:
            return None
        encoder: SegmentEncoder | None = getattr(self._own, "encoder", None)
        if encoder is None:
            self._own.encoder = encoder = SegmentEncoder(self._unit)
        return encoder.encode(block, self._old.block(block), new)

    def add(self, segment: Segment, data: bytes) -> None:
        """Write a segment; in the order of their blocks."""
        self._size += len(data)
        if self._size > largest_delta(self._base.size):
            self.abandon()
        if self.abandoned:
            return
        self._segments.append(segment)
        self._file.write(data)
        self._pending += data
        while len(self._pending) >= CHUNK_BYTES:
            self._hashes.append(blake3(self._pending[:CHUNK_BYTES]).digest())
            del self._pending[:CHUNK_BYTES]

    def finish(self, target: Manifest) -> DeltaManifest | None:
        """The manifest of what was written; None where that is nothing or too much."""
        if not self._segments:  # the same weights: they have the same manifest, and need no delta
            self.abandon()
        if self.abandoned:
            return None
        if self._pending:
            self._hashes.append(blake3(self._pending).digest())
        self._file.flush()
        return DeltaManifest(
            base=self._base.digest,
            target=target.digest,
            unit=self._unit,
            whole_size=target.size,
            size=self._size,
            segments=tuple(self._segments),
            chunks=tuple(self._hashes),
        )


@dataclass(eq=False)
class _Patcher:
    """Makes the target's blocks; for many threads at once."""

    _listing: DeltaManifest
    _target: Manifest
    _difference: _Reader
    _base: _Reader
    _output: int
    _marks: mmap.mmap

    def __post_init__(self) -> None:
        listed = self._listing.segments
        self._unit = self._listing.unit
        self._segments = {each.block: (each, at) for each, at in zip(listed, segments_at(listed), strict=True)}
        self._own = local()

    def block(self, block: int) -> tuple[int, list[int]]:
        """Write a block's chunks; returns how many, and the indices of those that are not what they should be."""
        first = block * (DELTA_BLOCK_BYTES // CHUNK_BYTES)
        last = min(first + DELTA_BLOCK_BYTES // CHUNK_BYTES, len(self._target.chunks))
        wanted = [index for index in range(first, last) if self._marks[index] != VERIFIED]
        if not wanted:
            return 0, []
        changes = self._changes(block)
        wrong = [index for index in wanted if not self._chunk(index, (index - first) * CHUNK_BYTES, changes)]
        return len(wanted) - len(wrong), wrong

    def _changes(self, block: int) -> tuple[Any, Any] | None:
        if block not in self._segments:
            return None
        segment, offset = self._segments[block]
        decoder: SegmentDecoder | None = getattr(self._own, "decoder", None)
        if decoder is None:
            self._own.decoder = decoder = SegmentDecoder(self._unit)
        data = bytes(self._difference.read(offset, segment.size))
        return decoder.decode(segment, data, block_size(self._target.size, block) // self._unit)

    def _chunk(self, index: int, within: int, changes: tuple[Any, Any] | None) -> bool:
        """Make one chunk, ``within`` bytes into its block; False where it came out wrong."""
        view = self._base.read(index * CHUNK_BYTES, self._target.chunk_size(index))
        if changes is not None:
            positions, differences = changes
            start = within // self._unit
            begin, end = np.searchsorted(positions, (start, start + len(view) // self._unit))
            values = np.frombuffer(view, value_type(self._unit))
            values[positions[begin:end] - start] += differences[begin:end]
        if blake3(view).digest() != self._target.chunks[index]:
            return False
        written = 0
        while written < len(view):
            written += os.pwrite(self._output, view[written:], index * CHUNK_BYTES + written)
        self._marks[index] = VERIFIED
        return True


def _in_order(work: Callable[[In], Out], items: Iterable[In], threads: int) -> Iterator[Out]:
    """``map(work, items)`` in so many threads, a few items ahead of the reader."""
    if threads <= 1:
        yield from map(work, items)
        return
    ahead: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) >= 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


if __name__ == "__main__":
    child_loop.run(lambda: [describe, apply])
