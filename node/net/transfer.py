"""Blobs and weight chunks over requests: everything is verified on arrival and nothing waits for ever.

Wire (canonical codec): a blob range is asked for with ``[digest, offset, length]`` on ``/farflung/blob/1``, a chunk
with ``[manifest hash, index]`` on ``/farflung/chunk/1``; the answer is the bytes. A node that does not hold them
refuses, which is no fault.

1. A blob larger than ``CHUNK_BYTES`` is fetched in ranges of that size; each must arrive within the timeout, so a slow
   peer that makes progress is kept and a stalled one is left.
2. A blob that came from one peer and has the wrong hash is that peer's fault. One that was pieced together from several
   is fetched again from one at a time, so that the liar is found.
3. Chunks are spread over their holders, asked for elsewhere after a failure, and a holder that sent a wrong one is not
   asked again in that transfer.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio
from blake3 import blake3

from node.net.host import Network
from node.net.rpc import Refused, Unreachable
from protocol import codec
from protocol.constants import CHUNK_BYTES, MAX_BLOB_BYTES
from protocol.errors import PeerError

BLOB_PROTOCOL: Final = "/farflung/blob/1"
CHUNK_PROTOCOL: Final = "/farflung/chunk/1"

MAX_REQUEST: Final = 64

BLOB_REQUEST: Final = codec.Array(
    (("digest", codec.HASH), ("offset", codec.Int(0, MAX_BLOB_BYTES)), ("length", codec.Int(1, CHUNK_BYTES)))
)
CHUNK_REQUEST: Final = codec.Array((("manifest", codec.HASH), ("index", codec.Int(0, 2**32 - 1))))

HOLDER_PAUSE: Final = 0.5
"""Seconds for which a holder that failed or lacks a chunk is passed over, doubled with each failure in a row."""

MAX_PAUSE: Final = 8.0
IDLE: Final = 0.05
"""Seconds between looks for a holder while there is none."""

ReadBlob = Callable[[bytes], Awaitable[bytes | None] | bytes | None]
ReadChunk = Callable[[bytes, int], Awaitable[bytes | None] | bytes | None]


def serve_blobs(network: Network, read: ReadBlob, *, protocol: str = BLOB_PROTOCOL) -> None:
    """Serve blobs to all peers. ``read(BLAKE3 digest)``, plain or async, returns the whole blob or None."""
    kept: list[tuple[bytes, bytes]] = []  # the last blob of many ranges: its reader comes back at once

    async def handler(peer: bytes, request: bytes) -> bytes:
        digest, offset, length = codec.parse(request, BLOB_REQUEST, max_bytes=MAX_REQUEST, what="blob request")
        blob: bytes | None
        if kept and kept[0][0] == digest:
            blob = kept[0][1]
        else:
            found = read(digest)
            blob = await found if inspect.isawaitable(found) else found
        if blob is None:
            raise Refused("not held")
        if offset + length > len(blob):
            raise PeerError("blob request: a range beyond the blob")
        kept[:] = [(digest, blob)] if offset + length < len(blob) else []
        return blob[offset : offset + length]

    network.serve(protocol, handler, max_request=MAX_REQUEST)


def serve_chunks(
    network: Network,
    read: ReadChunk,
    *,
    protocol: str = CHUNK_PROTOCOL,
    may_have: Callable[[bytes], bool] = lambda peer: True,
) -> None:
    """Serve weight chunks to all peers that ``may_have`` them. ``read(manifest hash, index)``, plain or async, returns
    the chunk or None."""

    async def handler(peer: bytes, request: bytes) -> bytes:
        manifest, index = codec.parse(request, CHUNK_REQUEST, max_bytes=MAX_REQUEST, what="chunk request")
        if not may_have(peer):
            raise Refused("only nodes that joined this domain get its weights")
        found = read(manifest, index)
        chunk = await found if inspect.isawaitable(found) else found
        if chunk is None:
            raise Refused("not held")
        return chunk

    network.serve(protocol, handler, max_request=MAX_REQUEST)


async def fetch_blob(
    network: Network,
    peers: Sequence[bytes],
    digest: bytes,
    size: int,
    *,
    protocol: str = BLOB_PROTOCOL,
    timeout: float = 15.0,
) -> bytes:
    """The blob of ``size`` bytes whose BLAKE3 is ``digest``, from the first of ``peers`` that serve it.

    ``timeout`` bounds each range of at most 1 MiB, not the whole. Raises ``Unreachable`` when no peer had it; peers
    that sent something else are blamed.
    """
    if not 0 <= size <= MAX_BLOB_BYTES:
        raise PeerError(f"a blob of {size} bytes is too large")
    if size == 0:
        await trio.lowlevel.checkpoint()
        if blake3(b"").digest() != digest:
            raise PeerError("an empty blob with the hash of another")
        return b""
    whole = bytearray()
    sources: set[bytes] = set()
    failures: list[str] = []
    suspects: list[bytes] = []
    for peer in peers:
        error = await _read_ranges(network, peer, digest, size, whole, sources, protocol, timeout)
        if error is not None:
            failures.append(str(error))
            continue
        if blake3(whole).digest() == digest:
            return bytes(whole)
        failures.append("the bytes have another hash")
        if len(sources) == 1:
            network.blame(peer, PeerError("blob: the bytes have another hash"))
        else:
            suspects += sources
        whole.clear()
        sources.clear()
    for peer in dict.fromkeys(suspects):  # pieced together from several and wrong: ask each for the whole
        whole.clear()
        if await _read_ranges(network, peer, digest, size, whole, set(), protocol, timeout) is not None:
            continue
        if blake3(whole).digest() == digest:
            return bytes(whole)
        network.blame(peer, PeerError("blob: the bytes have another hash"))
    reasons = "; ".join(failures[-3:]) or "nobody to ask"
    raise Unreachable(f"blob {digest.hex()[:8]} ({size} bytes): {reasons}")


async def _read_ranges(
    network: Network,
    peer: bytes,
    digest: bytes,
    size: int,
    whole: bytearray,
    sources: set[bytes],
    protocol: str,
    timeout: float,
) -> Unreachable | PeerError | None:
    """Append the missing ranges to ``whole``; returns why ``peer`` could not complete it, or None."""
    while len(whole) < size:
        length = min(CHUNK_BYTES, size - len(whole))
        request = codec.encode([digest, len(whole), length])
        try:
            part = await network.request(peer, protocol, request, timeout=timeout, max_response=length)
            if len(part) != length:
                raise PeerError("blob: a range of another length")
        except Unreachable as error:
            return error
        except PeerError as error:
            network.blame(peer, error)
            return error
        sources.add(peer)
        whole += part
    return None


class _Holder:
    """What a transfer knows of one holder."""

    __slots__ = ("busy", "failures", "not_before", "seconds")

    def __init__(self) -> None:
        self.busy = 0
        self.failures = 0
        self.not_before = 0.0
        self.seconds = 0.0  # of a chunk, smoothed


class _Chunks:
    """The state of one chunk transfer."""

    def __init__(self, holders: Callable[[], Sequence[bytes]], wanted: Sequence[int]) -> None:
        self._list_holders = holders
        self.missing = list(dict.fromkeys(wanted))
        random.shuffle(self.missing)  # so that nodes that start together soon have chunks for each other
        self.holders: defaultdict[bytes, _Holder] = defaultdict(_Holder)
        self.lacks: dict[tuple[bytes, int], float] = {}
        self.liars: set[bytes] = set()
        self.progress = trio.current_time()
        self.in_flight = 0
        self.reasons: Counter[str] = Counter()

    def next(self) -> tuple[bytes, int] | None:
        """A (holder, chunk) to ask for now: the least busy and then fastest holder first."""
        now = trio.current_time()
        usable = [
            peer for peer in self._list_holders() if peer not in self.liars and self.holders[peer].not_before <= now
        ]
        usable.sort(key=lambda peer: (self.holders[peer].busy, self.holders[peer].seconds))
        for peer in usable:
            for position, index in enumerate(self.missing):
                if self.lacks.get((peer, index), 0.0) <= now:
                    del self.missing[position]
                    return peer, index
        return None

    def failed(self, peer: bytes, index: int, error: Unreachable) -> None:
        """Ask elsewhere; a holder that only lacks this chunk is still good for others."""
        self.missing.append(index)
        self.reasons[str(error)] += 1
        now, holder = trio.current_time(), self.holders[peer]
        if isinstance(error, Refused):
            self.lacks[peer, index] = now + HOLDER_PAUSE
        else:
            holder.failures += 1
            holder.not_before = now + min(HOLDER_PAUSE * 2 ** (holder.failures - 1), MAX_PAUSE)


async def fetch_chunks(
    network: Network,
    holders: Callable[[], Sequence[bytes]],
    manifest_hash: bytes,
    wanted: Sequence[int],
    verify: Callable[[int, bytes], None],
    store: Callable[[int, bytes], Awaitable[None] | None],
    *,
    parallel: int = 4,
    timeout: float = 15.0,
    stall: float = 60.0,
    protocol: str = CHUNK_PROTOCOL,
) -> None:
    """Fetch the chunks ``wanted`` of a manifest from those that ``holders()`` names at each moment.

    ``verify(index, data)`` raises ``PeerError`` for a wrong chunk: its sender is blamed and not asked again.
    ``store`` keeps a right one; a transfer that ends early has stored what arrived. ``parallel`` requests run at a
    time, each at most ``timeout`` seconds. Raises ``Unreachable`` after ``stall`` seconds without a new chunk.
    """
    state = _Chunks(holders, wanted)
    failure: list[Unreachable] = []

    async def work(scope: trio.CancelScope) -> None:
        while state.missing or state.in_flight:
            if trio.current_time() - state.progress > stall:
                reasons = "; ".join(reason for reason, _ in state.reasons.most_common(3)) or "nobody holds them"
                count = len(state.missing) + state.in_flight
                failure.append(Unreachable(f"{count} chunks of {manifest_hash.hex()[:8]} are missing: {reasons}"))
                scope.cancel()
            choice = state.next()
            if choice is None:
                await trio.sleep(IDLE)
                continue
            state.in_flight += 1
            try:
                await fetch(*choice)
            finally:
                state.in_flight -= 1

    async def fetch(peer: bytes, index: int) -> None:
        holder, started = state.holders[peer], trio.current_time()
        holder.busy += 1
        try:
            request = codec.encode([manifest_hash, index])
            data = await network.request(peer, protocol, request, timeout=timeout, max_response=CHUNK_BYTES)
            verify(index, data)
        except Unreachable as error:
            state.failed(peer, index, error)
            return
        except PeerError as error:
            state.missing.append(index)
            state.liars.add(peer)
            state.reasons[str(error)] += 1
            network.blame(peer, error)
            return
        finally:
            holder.busy -= 1
        holder.failures = 0
        holder.seconds = 0.7 * holder.seconds + 0.3 * (trio.current_time() - started)
        pending = store(index, data)
        if pending is not None:
            await pending
        state.progress = trio.current_time()

    store_error: list[Exception] = []

    async def guarded(scope: trio.CancelScope) -> None:
        try:
            await work(scope)
        except Exception as error:  # the caller's own, from verify or store: not to be wrapped in a group
            store_error.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(max(1, min(parallel, len(state.missing)))):
            nursery.start_soon(guarded, nursery.cancel_scope)
    for error in [*store_error, *failure]:
        raise error
