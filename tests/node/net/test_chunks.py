"""Weights over libp2p: a swarm over real streams."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from node.errors import Unreachable
from node.net import chunks
from node.net.blob_exchange import CHUNK_PROTOCOL, HAVE_PROTOCOL, serve_chunks, serve_haves
from node.net.chunks import Store, fetch
from node.net.host import Network
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.weights.chunk_set import bitmap_of, bits
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest, verify_chunk
from protocol.weights.routes import Routes
from tests.node.net.helpers import network, never

COUNT = 8
DATA = random.Random(1).randbytes((COUNT - 1) * CHUNK_BYTES + 1000)
MANIFEST = Manifest.of_file([("weights", "F16", (len(DATA) // 2,))], DATA, 1)
ALL = (1 << COUNT) - 1


def chunk(index: int) -> bytes:
    return DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class Receiver:
    """Keeps chunks."""

    def __init__(self, has: int = 0) -> None:
        self.kept = {index: chunk(index) for index in range(COUNT) if has >> index & 1}
        self.store = Store(MANIFEST, self.missing, self.write)

    def missing(self) -> list[int]:
        return [index for index in range(COUNT) if index not in self.kept]

    def write(self, index: int, data: bytes) -> None:
        verify_chunk(MANIFEST, index, data)
        assert index not in self.kept
        self.kept[index] = data

    def complete(self) -> bool:
        return b"".join(self.kept[index] for index in sorted(self.kept)) == DATA


def serve(holder: Network, has: int = ALL) -> None:
    serve_chunks(holder, lambda name, index: chunk(index) if has >> index & 1 else None)
    serve_haves(holder, lambda name: bitmap_of(has, COUNT) if name == MANIFEST.digest else None)


@asynccontextmanager
async def networks(count: int) -> AsyncIterator[list[Network]]:
    """``count`` networks, the first connected to all others."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(network(number + 1)) for number in range(count)]
        for other in opened[1:]:
            await opened[0].connect(other.addresses[0], 5)
        yield opened


async def get(asker: Network, holders: Mapping[Network, Holding], receiver: Receiver, *, stall: float = 20.0) -> None:
    named = {holder.node: holding for holder, holding in holders.items()}
    await fetch(asker, receiver.store, lambda: named, routes=Routes(), chance=random.Random(1), stall=stall)


async def test_chunks_are_spread_over_their_holders() -> None:
    receiver = Receiver()
    async with networks(3) as (asker, *holders):
        for holder in holders:
            serve(holder)
        await get(asker, dict.fromkeys(holders, Holding()), receiver)
        assert receiver.complete()
        assert all(holder.counts[CHUNK_PROTOCOL].requests_received >= 2 for holder in holders)
        # The last chunk may be asked for twice, where its holder is slow on a busy machine.
        assert sum(holder.counts[CHUNK_PROTOCOL].requests_received for holder in holders) in (COUNT, COUNT + 1)


async def test_partial_holders_complete_each_other_and_are_asked_for_what_they_have_only() -> None:
    receiver = Receiver(has=0b11)
    async with networks(3) as (asker, one, other):
        serve(one, 0b01010111)
        serve(other, 0b10101000)
        await get(asker, dict.fromkeys([one, other], Holding(whole=False)), receiver)
        assert receiver.complete()
        assert one.counts[CHUNK_PROTOCOL].requests_received == 3
        assert other.counts[CHUNK_PROTOCOL].requests_received == 3


async def test_one_that_was_taken_for_whole_and_is_not() -> None:
    receiver = Receiver()
    async with networks(3) as (asker, half, whole):
        serve(half, 0b00001111)
        serve(whole)
        await get(asker, dict.fromkeys([half, whole], Holding()), receiver)
        assert receiver.complete()
        assert asker.scores.reasons(half.node) == {}


async def test_a_liar_is_blamed_and_the_rest_arrives() -> None:
    receiver = Receiver()
    async with networks(3) as (asker, liar, honest):
        serve_chunks(liar, lambda name, index: bytes(len(chunk(index))))
        serve(honest)
        await get(asker, dict.fromkeys([liar, honest], Holding()), receiver)
        assert receiver.complete()
        assert 1 <= liar.counts[CHUNK_PROTOCOL].requests_received <= 4
        assert all("has the wrong hash" in reason for reason in asker.scores.reasons(liar.node))
        assert asker.scores.reasons(liar.node)


async def test_a_holder_that_does_not_answer_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "TIMEOUT", 0.3)
    receiver = Receiver()
    async with networks(3) as (asker, slow, holder):
        slow.serve(CHUNK_PROTOCOL, never, max_request=64)
        serve(holder)
        await get(asker, dict.fromkeys([slow, holder], Holding()), receiver)
        assert receiver.complete()


async def test_a_holder_that_takes_its_time_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "POLL", 0.02)
    async with networks(2) as (asker, silent):
        silent.serve(HAVE_PROTOCOL, never, max_request=32)
        with pytest.raises(Unreachable):
            await get(asker, {silent: Holding(whole=False)}, Receiver(), stall=0.5)
        assert silent.counts[HAVE_PROTOCOL].requests_received == 1


async def test_nobody_has_them() -> None:
    async with networks(2) as (asker, empty):
        serve(empty, 0)
        with pytest.raises(Unreachable, match=r"8 chunks of .* are missing: .*not held"):
            await get(asker, {empty: Holding()}, Receiver(), stall=0.3)
        with pytest.raises(Unreachable, match="nobody holds them"):
            await get(asker, {}, Receiver(), stall=0.1)


async def test_an_error_of_the_disk_comes_out_unwrapped() -> None:
    receiver = Receiver()

    def full(index: int, data: bytes) -> None:
        raise OSError("disk full")

    async with networks(2) as (asker, holder):
        serve(holder)
        broken = Store(MANIFEST, receiver.missing, full)
        with pytest.raises(OSError, match="disk full"):
            await fetch(
                asker,
                broken,
                lambda: {holder.node: Holding()},
                routes=Routes(),
                chance=random.Random(1),
                stall=5,
            )


async def test_nothing_missing_is_nothing_done() -> None:
    async with networks(1) as (asker,):
        await get(asker, {}, Receiver(has=ALL))


async def test_a_bitmap_of_another_length_is_a_fault() -> None:
    async def rubbish(peer: bytes, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""

    async with networks(2) as (asker, holder):
        holder.serve(HAVE_PROTOCOL, rubbish, max_request=32)
        with pytest.raises(PeerError, match="another length"):
            await chunks.ask_have(asker, holder.node, MANIFEST)
        assert bits([0, 7]) == 0b10000001
