"""Blobs and weight chunks over requests: everything is verified on arrival and nothing waits for ever.

Wire (canonical codec): a blob range is asked for with ``[digest, offset, length]`` on ``/farflung/blob/1``, a chunk
with ``[manifest hash, index]`` on ``/farflung/chunk/1``; the answer is the bytes. A node that does not hold them
refuses, which is no fault. Which chunks it has it says on ``/farflung/have/1``: the request is the manifest hash, the
answer a bitmap (chunk i is bit i, the most significant of a byte first).

1. A blob larger than ``CHUNK_BYTES`` is fetched in ranges of that size; each must arrive within the timeout, so a slow
   peer that makes progress is kept and a stalled one is left.
2. A blob that came from one peer and has the wrong hash is that peer's fault. One that was pieced together from several
   is fetched again from one at a time, so that the liar is found.
3. Chunks go over these requests one at a time, and only where no direct connection carries weights; who is asked for
   which is decided elsewhere (``node.weights``).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import trio
from blake3 import blake3

from node.net.host import Network
from node.net.requests import Refused, Unreachable
from node.store.blob_store import BlobStore
from protocol import codec
from protocol.constants import CHUNK_BYTES, MAX_BLOB_BYTES
from protocol.errors import PeerError

BLOB_PROTOCOL: Final = "/farflung/blob/1"
CHUNK_PROTOCOL: Final = "/farflung/chunk/1"
HAVE_PROTOCOL: Final = "/farflung/have/1"

MAX_REQUEST: Final = 64
CHUNK_SECONDS: Final = 30.0
"""That a chunk may take: a stream carries 35 KB a second, or another holder is asked."""

BLOB_REQUEST: Final = codec.Array(
    (("digest", codec.HASH), ("offset", codec.Int(0, MAX_BLOB_BYTES)), ("length", codec.Int(1, CHUNK_BYTES)))
)
CHUNK_REQUEST: Final = codec.Array((("manifest", codec.HASH), ("index", codec.Int(0, 2**32 - 1))))

Found = Awaitable[bytes | None] | bytes | None
"""What a read gives, plain or async: None for what is not held."""


async def _held(found: Found) -> bytes:
    """What was found; raises ``Refused`` where that is nothing."""
    data = await found if inspect.isawaitable(found) else found
    if data is None:
        raise Refused("not held")
    return data


def serve_blobs(
    network: Network,
    read: Callable[[bytes, int, int], Found],
    *,
    may_read: Callable[[bytes, bytes], bool] = lambda peer, digest: True,
) -> None:
    """Serve blobs to all peers that ``may_read(peer, digest)``. ``read(BLAKE3 digest, offset, length)`` gives
    that much of the blob, less where it ends before: a request costs what it asks for."""

    async def handler(peer: bytes, request: bytes) -> bytes:
        digest, offset, length = codec.parse(request, BLOB_REQUEST, max_bytes=MAX_REQUEST, what="blob request")
        if not may_read(peer, digest):
            raise Refused("only nodes that joined this domain get its blobs")
        part = await _held(read(digest, offset, length))
        if len(part) < length:
            raise PeerError("blob request: a range beyond the blob")
        return part

    network.serve(BLOB_PROTOCOL, handler, max_request=MAX_REQUEST)


def serve_chunks(
    network: Network,
    read: Callable[[bytes, int], Found],
    *,
    may_have: Callable[[bytes], bool] = lambda peer: True,
) -> None:
    """Serve weight chunks to all peers that ``may_have`` them. ``read(manifest hash, index)`` gives the chunk."""

    async def handler(peer: bytes, request: bytes) -> bytes:
        manifest, index = codec.parse(request, CHUNK_REQUEST, max_bytes=MAX_REQUEST, what="chunk request")
        if not may_have(peer):
            raise Refused("only nodes that joined this domain get its weights")
        return await _held(read(manifest, index))

    network.serve(CHUNK_PROTOCOL, handler, max_request=MAX_REQUEST)


def serve_haves(
    network: Network, read: Callable[[bytes], Found], *, may_have: Callable[[bytes], bool] = lambda peer: True
) -> None:
    """Tell all peers that ``may_have`` them which chunks are here. ``read(manifest hash)`` gives the bitmap."""

    async def handler(peer: bytes, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if len(request) != 32:
            raise PeerError("have request: not a hash")
        if not may_have(peer):
            raise Refused("only nodes that joined this domain get its weights")
        return await _held(read(request))

    network.serve(HAVE_PROTOCOL, handler, max_request=32)


async def fetch_chunk(
    network: Network, peer: bytes, digest: bytes, index: int, *, timeout: float = CHUNK_SECONDS
) -> bytes:
    """Chunk ``index`` as ``peer`` gives it, not verified. Raises ``Unreachable`` (``Refused``) or ``PeerError``."""
    request = codec.encode([digest, index])
    return await network.request(peer, CHUNK_PROTOCOL, request, timeout=timeout, max_response=CHUNK_BYTES)


async def fetch_haves(network: Network, peer: bytes, digest: bytes, chunks: int) -> bytes:
    """The bitmap of those of an object's ``chunks`` that ``peer`` has. Raises ``Unreachable`` (``Refused``) or
    ``PeerError``."""
    size = (chunks + 7) // 8
    bitmap = await network.request(peer, HAVE_PROTOCOL, digest, timeout=CHUNK_SECONDS, max_response=size)
    if len(bitmap) != size:
        raise PeerError("have: a bitmap of another length")
    return bitmap


async def fetch_blob(
    network: Network, peers: Sequence[bytes], digest: bytes, size: int, *, timeout: float = 15.0
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

    async def read_on(peer: bytes) -> Unreachable | PeerError | None:
        """Append the missing ranges to ``whole``; why ``peer`` could not complete it, or None."""
        while len(whole) < size:
            length = min(CHUNK_BYTES, size - len(whole))
            request = codec.encode([digest, len(whole), length])
            try:
                part = await network.request(peer, BLOB_PROTOCOL, request, timeout=timeout, max_response=length)
                if len(part) != length:
                    raise PeerError("blob: a range of another length")
            except Unreachable as error:
                return error
            except PeerError as error:
                network.blame(peer, error)
                return error
            sources.add(peer)
            whole.extend(part)
        return None

    for peer in peers:
        error = await read_on(peer)
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
        if await read_on(peer) is not None:
            continue
        if blake3(whole).digest() == digest:
            return bytes(whole)
        network.blame(peer, PeerError("blob: the bytes have another hash"))
    reasons = "; ".join(failures[-3:]) or "nobody to ask"
    raise Unreachable(f"blob {digest.hex()[:8]} ({size} bytes): {reasons}")


class BlobExchange:
    """The blobs of one node: in its ``store``, and wherever peers have them."""

    def __init__(self, store: BlobStore, network: Network) -> None:
        self.store = store
        self._network = network

    async def put(self, data: bytes) -> bytes:
        """Store ``data`` durably and return its hash. Raises ``OSError``."""
        return await self.store.put_async(data)

    async def fetch(self, digest: bytes, size: int, peers: Sequence[bytes] | None = None, *, timeout: float) -> bytes:
        """The bytes of a blob: from the store, else from the first of ``peers`` (None: all that are connected) that
        has it, and then kept. Raises as ``fetch_blob``, and ``OSError``."""
        data = await self.store.get_async(digest)
        if data is None:
            asked = list(self._network.peers) if peers is None else peers
            data = await fetch_blob(self._network, asked, digest, size, timeout=timeout)
            await self.store.put_async(data)
        return data

    async def path(self, digest: bytes, size: int) -> Path:
        """The local file of a blob that the domain names, fetched from any peer where it is not held yet."""
        if not self.store.has(digest):
            await self.fetch(digest, size, timeout=60)
        return self.store.path(digest)
