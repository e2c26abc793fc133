"""Blobs and chunks between peers."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from blake3 import blake3

from node.net.blob_exchange import (
    BLOB_PROTOCOL,
    CHUNK_PROTOCOL,
    HAVE_PROTOCOL,
    fetch_blob,
    fetch_haves,
    serve_blobs,
    serve_chunks,
    serve_haves,
)
from node.net.host import Network
from node.net.requests import Refused, Unreachable
from node.store.blob_store import BlobStore
from protocol import codec
from protocol.errors import PeerError
from tests.node.fake_children import CONFIG, Faults
from tests.node.fakes import open_cluster
from tests.node.net.helpers import network, never

SMALL = b"a small blob"
LARGE = bytes(range(251)) * 10_000  # 2.5 MB: three ranges
MANIFEST = b"m" * 32
CHUNKS = [bytes([number]) * 2000 for number in range(12)]


def digest(data: bytes) -> bytes:
    return blake3(data).digest()


@asynccontextmanager
async def networks(count: int) -> AsyncIterator[list[Network]]:
    """``count`` networks, the first connected to all others."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(network(number + 1)) for number in range(count)]
        for other in opened[1:]:
            await opened[0].connect(other.addresses[0], 5)
        yield opened


def ranges(held: Mapping[bytes, bytes]) -> Callable[[bytes, int, int], bytes | None]:
    """Reads these blobs."""

    def read(name: bytes, offset: int, length: int) -> bytes | None:
        return held[name][offset : offset + length] if name in held else None

    return read


def impatient(monkeypatch: pytest.MonkeyPatch, asker: Network, slow: Network) -> None:
    """Let ``asker`` give up on ``slow`` soon and on no other, however busy the machine is."""
    stock = asker.request

    async def request(peer: bytes, protocol: str, payload: bytes, *, timeout: float, max_response: int) -> bytes:
        patience = 0.05 if peer == slow.node else timeout
        return await stock(peer, protocol, payload, timeout=patience, max_response=max_response)

    monkeypatch.setattr(asker, "request", request)


async def test_blobs_small_large_and_empty() -> None:
    held = {digest(blob): blob for blob in (SMALL, LARGE)}
    async with networks(2) as (asker, holder):
        serve_blobs(holder, ranges(held))
        for blob in (SMALL, LARGE, b""):
            assert await fetch_blob(asker, [holder.node], digest(blob), len(blob)) == blob
        assert holder.counts[BLOB_PROTOCOL].requests_received == 4


async def test_a_reader_may_be_asynchronous_and_reads_what_is_asked_for() -> None:
    read: list[tuple[int, int]] = []

    async def take(name: bytes, offset: int, length: int) -> bytes | None:
        read.append((offset, length))
        await trio.lowlevel.checkpoint()
        return LARGE[offset : offset + length]

    async with networks(2) as (asker, holder):
        serve_blobs(holder, take)
        assert await fetch_blob(asker, [holder.node], digest(LARGE), len(LARGE)) == LARGE
        assert read == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, len(LARGE) - (2 << 20))]


async def test_the_ranges_of_large_blobs_cost_what_they_are(tmp_path: Path) -> None:
    """Neither readers that take turns nor requests for a byte of each make a node read, or hold, all of them."""
    store = BlobStore(tmp_path / "blobs")
    names = [store.put(bytes([fill]) * (8 << 20)) for fill in range(8)]
    async with networks(2) as (asker, holder):
        serve_blobs(holder, partial(trio.to_thread.run_sync, store.get_range))
        for name in names:  # hashed once, a piece at a time
            request = codec.encode([name, 0, 1])
            await asker.request(holder.node, BLOB_PROTOCOL, request, timeout=10, max_response=1)
        tracemalloc.start()
        try:
            async with trio.open_nursery() as nursery:
                for number, name in enumerate(names):
                    request = codec.encode([name, number << 20, 1])
                    ask = partial(asker.request, timeout=10, max_response=1)
                    nursery.start_soon(ask, holder.node, BLOB_PROTOCOL, request)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


async def test_a_peer_without_the_blob_is_passed_over_without_blame() -> None:
    async with networks(3) as (asker, empty, holder):
        serve_blobs(empty, ranges({}))
        serve_blobs(holder, ranges({digest(LARGE): LARGE}))
        assert await fetch_blob(asker, [empty.node, holder.node], digest(LARGE), len(LARGE)) == LARGE
        assert asker.scores.reasons(empty.node) == {}
        with pytest.raises(Unreachable, match="not held"):
            await fetch_blob(asker, [empty.node], digest(LARGE), len(LARGE))
        with pytest.raises(Unreachable, match="nobody to ask"):
            await fetch_blob(asker, [], digest(LARGE), len(LARGE))


async def test_a_liar_is_blamed_and_the_next_is_asked() -> None:
    async with networks(3) as (asker, liar, holder):
        serve_blobs(liar, ranges({digest(LARGE): LARGE[:-1] + b"!"}))
        serve_blobs(holder, ranges({digest(LARGE): LARGE}))
        assert await fetch_blob(asker, [liar.node, holder.node], digest(LARGE), len(LARGE)) == LARGE
        assert asker.scores.reasons(liar.node) == {"blob: the bytes have another hash": 1}
        assert asker.scores.reasons(holder.node) == {}


async def test_a_peer_that_breaks_off_is_completed_by_another() -> None:
    asked = 0

    async def breaks_off(peer: bytes, request: bytes) -> bytes:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise Refused("not held any more")
        return LARGE[: 1 << 20]

    async with networks(3) as (asker, first, second):
        first.serve(BLOB_PROTOCOL, breaks_off, max_request=64)
        serve_blobs(second, ranges({digest(LARGE): LARGE}))
        assert await fetch_blob(asker, [first.node, second.node], digest(LARGE), len(LARGE)) == LARGE
        assert second.counts[BLOB_PROTOCOL].requests_received == 2


async def test_a_liar_among_several_sources_is_found() -> None:
    asked = 0

    async def lies_and_breaks_off(peer: bytes, request: bytes) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise Refused("not held any more")
        return bytes(1 << 20) if asked < 5 else bytes(len(LARGE) - (2 << 20))

    async with networks(3) as (asker, liar, honest):
        liar.serve(BLOB_PROTOCOL, lies_and_breaks_off, max_request=64)
        serve_blobs(honest, ranges({digest(LARGE): LARGE}))
        assert await fetch_blob(asker, [liar.node, honest.node], digest(LARGE), len(LARGE)) == LARGE
        assert asker.scores.reasons(honest.node) == {}


async def test_a_range_of_another_length_is_blamed() -> None:
    async def short(peer: bytes, request: bytes) -> bytes:
        return b"short"

    async with networks(2) as (asker, liar):
        liar.serve(BLOB_PROTOCOL, short, max_request=64)
        with pytest.raises(Unreachable, match="another length"):
            await fetch_blob(asker, [liar.node], digest(LARGE), len(LARGE))
        assert asker.scores.reasons(liar.node) == {"blob: a range of another length": 1}


async def test_a_stalled_peer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with networks(3) as (asker, slow, holder):
        impatient(monkeypatch, asker, slow)
        slow.serve(BLOB_PROTOCOL, never, max_request=64)
        serve_blobs(holder, ranges({digest(SMALL): SMALL}))
        found = await fetch_blob(asker, [slow.node, holder.node], digest(SMALL), len(SMALL))
        assert found == SMALL


@pytest.mark.parametrize("request_bytes", [b"", b"\xff", b"\x93\xc4\x01x\x00\x01", bytes(60)])
async def test_rubbish_requests_are_blamed(request_bytes: bytes) -> None:
    async with networks(2) as (asker, holder):
        serve_blobs(holder, lambda name, offset, length: SMALL[offset : offset + length])
        serve_chunks(holder, lambda manifest, index: CHUNKS[0])
        for protocol in (BLOB_PROTOCOL, CHUNK_PROTOCOL):
            with pytest.raises(Refused):
                await asker.request(holder.node, protocol, request_bytes, timeout=5, max_response=64)
        assert sum(holder.scores.reasons(asker.node).values()) == 2


async def test_a_blob_too_large_for_anybody() -> None:
    async with networks(1) as (asker,):
        with pytest.raises(PeerError):
            await fetch_blob(asker, [], bytes(32), 1 << 40)


async def test_a_private_domains_chunks_are_for_those_who_joined() -> None:
    async with networks(2) as (asker, holder):
        members: set[bytes] = set()
        serve_chunks(holder, lambda name, index: b"chunk", may_have=members.__contains__)
        request = codec.encode([MANIFEST, 0])
        with pytest.raises(Refused, match="only nodes that joined"):
            await asker.request(holder.node, CHUNK_PROTOCOL, request, timeout=5, max_response=5)
        members.add(asker.node)
        assert await asker.request(holder.node, CHUNK_PROTOCOL, request, timeout=5, max_response=5) == b"chunk"


async def test_a_private_domains_blobs_and_bitmaps_are_for_those_who_joined() -> None:
    async with networks(2) as (asker, holder):
        members: set[bytes] = set()
        genesis = digest(SMALL)
        held = {genesis: SMALL, digest(LARGE): LARGE}
        serve_blobs(holder, ranges(held), may_read=lambda peer, name: peer in members or name == genesis)
        serve_haves(holder, lambda name: b"\xa0", may_have=members.__contains__)
        assert await fetch_blob(asker, [holder.node], genesis, len(SMALL)) == SMALL
        with pytest.raises(Unreachable, match="only nodes that joined"):
            await fetch_blob(asker, [holder.node], digest(LARGE), len(LARGE))
        with pytest.raises(Refused, match="only nodes that joined"):
            await asker.request(holder.node, HAVE_PROTOCOL, MANIFEST, timeout=5, max_response=1)
        assert holder.scores.reasons(asker.node) == {}
        members.add(asker.node)
        assert await fetch_blob(asker, [holder.node], digest(LARGE), len(LARGE)) == LARGE
        assert await asker.request(holder.node, HAVE_PROTOCOL, MANIFEST, timeout=5, max_response=1) == b"\xa0"


async def test_a_holder_tells_which_chunks_it_has() -> None:
    async with networks(2) as (asker, holder):
        serve_haves(holder, lambda name: b"\xa0" if name == MANIFEST else None)
        assert await asker.request(holder.node, HAVE_PROTOCOL, MANIFEST, timeout=5, max_response=1) == b"\xa0"
        with pytest.raises(Refused, match="not held"):
            await asker.request(holder.node, HAVE_PROTOCOL, bytes(32), timeout=5, max_response=1)
        with pytest.raises(Refused, match="not a hash"):
            await asker.request(holder.node, HAVE_PROTOCOL, b"short", timeout=5, max_response=1)
        assert holder.scores.reasons(asker.node) == {"have request: not a hash": 1}


async def test_a_bitmap_of_another_length_is_a_fault() -> None:
    async with networks(2) as (asker, holder):
        serve_haves(holder, lambda name: b"\xa0")
        assert await fetch_haves(asker, holder.node, MANIFEST, 8) == b"\xa0"
        with pytest.raises(PeerError, match="another length"):
            await fetch_haves(asker, holder.node, MANIFEST, 9)


async def test_a_file_of_the_domain_is_fetched_once_from_whoever_has_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        lacking = (await cluster.node("a")).parts.blobs
        blobs = (await cluster.node("b")).parts.blobs
        blob = cluster.domain.model.config
        path = await blobs.path(blob.hash, blob.size)
        assert path.read_bytes() == CONFIG
        for name in ("elector", "a"):
            cluster.crash(name)
        assert await blobs.path(blob.hash, blob.size) == path
        assert await blobs.fetch(blob.hash, blob.size, [], timeout=1) == CONFIG
        with pytest.raises(Unreachable, match="nobody to ask"):
            await lacking.fetch(blob.hash, blob.size, [], timeout=1)
