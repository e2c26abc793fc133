"""Whom the child knows of, and what it may ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import trio
import trio.testing

from node.errors import Busy, Unreachable
from node.net.blob_exchange import HAVE_PROTOCOL
from node.store.version_store import NoRoom, VersionStore
from node.weights.bulk.bulk_messages import (
    DiskRefused,
    FromChild,
    GiveChunk,
    GiveHaves,
    SetHolders,
    StopTransfer,
    ToChild,
    TransferFailed,
    WantFallback,
)
from node.weights.bulk.token_exchange import Route
from node.weights.fetching import MOST, REDRAW_IDLE, ObjectTransfer
from node.weights.held import Notice
from node.workers import frames
from protocol.errors import PeerError
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest
from tests.node.fake_bulk import FakeBulkChild
from tests.node.weights.bulk.nodes import Some, until
from tests.protocol.builders import key

MANIFEST = Manifest.of_file([("weights", "F32", (4,))], bytes(16), 1)
DIGEST = MANIFEST.digest
FAKES = [b"\0" + bytes([n]) * 31 for n in range(60)]
HONEST, AUTHOR = b"\xfe" * 32, b"\xff" * 32
SLOW, QUICK = FAKES[0], FAKES[1]


class Told(FakeBulkChild):
    """A child that does nothing but what the test says, and keeps what it hears."""

    made: Told

    def __init__(self, sockets: object) -> None:
        super().__init__(())
        self.messages: list[ToChild] = []
        Told.made = self

    async def send(self, frame: bytes) -> None:
        message: ToChild = frames.decode(frame[frames.HEADER_BYTES :], ToChild)
        self.messages.append(message)
        await super().send(frame)

    async def drain(self) -> None:
        await trio.sleep_forever()

    def rows(self) -> set[bytes]:
        """Whom it knows of."""
        (*_, newest) = (message for message in self.messages if isinstance(message, SetHolders))
        return {row.node for row in newest.rows}

    def kinds(self) -> Counter[type]:
        return Counter(map(type, self.messages))


class Links:
    """Everybody gives a token at once; one peer is slow over libp2p, and all are busy."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.blamed: list[bytes] = []

    async def request(self, peer: bytes, protocol: str, payload: bytes, *, timeout: float, max_response: int) -> bytes:
        self.asked.append(peer)
        await trio.sleep(30 if peer == SLOW or protocol == HAVE_PROTOCOL else 1)
        if protocol == HAVE_PROTOCOL:
            return b"\x80"
        raise Busy("busy")

    async def route(self, peer: bytes) -> Route:
        await trio.lowlevel.checkpoint()
        return Route("/ip4/192.0.2.1/tcp/1/http", "t", 1e9)

    def blame(self, peer: bytes, error: PeerError) -> None:
        self.blamed.append(peer)


class Bringing:
    """A transfer that a fake child is asked for."""

    def __init__(self, folder: Path) -> None:
        self.links: Any = Links()
        self.node: Any = Some(folder, key("node"), network=self.links, start=Told)
        self.versions = VersionStore(folder / "versions")
        self.versions.begin(MANIFEST)
        self.means: Any = SimpleNamespace(
            node=self.node, versions=self.versions, bulk=self.node.bulk, tokens=self.links, notice=Notice()
        )
        self.slots: WeakValueDictionary[bytes, trio.CapacityLimiter] = WeakValueDictionary()
        self.holders = {node: Holding() for node in FAKES[:20]}

    async def run(self, stall: float = 1000.0) -> None:
        await ObjectTransfer(self.means, self.slots, MANIFEST, lambda: self.holders, stall=stall).run()

    @property
    def child(self) -> Told:
        return Told.made

    def say(self, message: FromChild) -> None:
        """The child says something."""
        self.child.say(message)


@asynccontextmanager
async def bringing(folder: Path, faults: object) -> AsyncIterator[Bringing]:
    del faults  # which has work for threads done at once: no thread moves the mock clock
    made = Bringing(folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.node.bulk.run)
        yield made
        nursery.cancel_scope.cancel()


async def begun(made: Bringing, nursery: trio.Nursery) -> None:
    """Begin a transfer whose holders the child knows."""
    nursery.start_soon(made.run)
    await trio.sleep(1)
    assert made.child.rows()


async def test_liars_under_many_names_crowd_nobody_out(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    async with bringing(tmp_path, faults) as made, trio.open_nursery() as nursery:
        made.holders = {node: Holding() for node in FAKES}
        made.holders |= {HONEST: Holding(whole=False), AUTHOR: Holding(spared=True)}
        await begun(made, nursery)
        seen: set[bytes] = set()
        for _ in range(200):
            known = made.child.rows()
            assert len(known) == MOST
            assert AUTHOR in known
            seen |= known
            if HONEST in seen:
                break
            await trio.sleep(REDRAW_IDLE + 0.3)
        assert HONEST in seen
        before = made.child.kinds()[SetHolders]
        await trio.sleep(REDRAW_IDLE / 2)
        assert made.child.kinds()[SetHolders] <= before + 1  # nothing changes in between
        nursery.cancel_scope.cancel()


async def test_what_the_child_cannot_begin_fails_in_time(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    async with bringing(tmp_path, faults) as made:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def bring() -> None:
                with pytest.raises(Unreachable, match=r"1 chunks of .* are missing: it was not begun"):
                    await made.run(20.0)

            nursery.start_soon(bring)
            await trio.sleep(1)
            made.say(TransferFailed(DIGEST, "it was not begun"))
        assert trio.current_time() - began == pytest.approx(20, abs=1)
        await trio.sleep(1)
        assert made.child.kinds()[StopTransfer] == 1


async def test_our_own_disk_ends_it_at_once(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    async with bringing(tmp_path, faults) as made, trio.open_nursery() as nursery:

        async def bring() -> None:
            with pytest.raises(NoRoom, match="the disk is full"):
                await made.run()

        nursery.start_soon(bring)
        await trio.sleep(1)
        made.say(DiskRefused(DIGEST, 28, "No space left on device"))


async def test_where_no_child_runs_it_is_waited_for_and_then_fails(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    del faults
    made = Bringing(tmp_path)
    began = trio.current_time()
    with pytest.raises(Unreachable, match="the process that fetches weights does not run"):
        await made.run(20.0)
    assert trio.current_time() - began == pytest.approx(20, abs=0.1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.sleep(5)
        nursery.start_soon(made.node.bulk.run)
        await until(lambda: made.node.bulk.up and made.child.kinds()[SetHolders], 20)
        # A child that dies is waited for as well.
        first = made.child
        first.kill()
        await until(lambda: made.child is not first and made.child.kinds()[SetHolders], 20)
        nursery.cancel_scope.cancel()


async def test_a_slow_holder_is_asked_what_it_has_once_at_a_time(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    async with bringing(tmp_path, faults) as made, trio.open_nursery() as nursery:
        await begun(made, nursery)
        for _ in range(50):
            for node in FAKES[:20]:
                made.say(WantFallback(DIGEST, node, -1))
            await trio.sleep(0.5)
        assert sorted(made.links.asked) == FAKES[:20]
        await trio.sleep(31)
        assert made.child.kinds()[GiveHaves] == 20
        made.say(WantFallback(DIGEST, FAKES[0], -1))
        await trio.sleep(1)
        assert len(made.links.asked) == 21
        nursery.cancel_scope.cancel()


async def test_a_slow_peer_keeps_nobody_elses_chunks_away(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    async with bringing(tmp_path, faults) as made, trio.open_nursery() as nursery:
        await begun(made, nursery)
        for node, times in ((SLOW, 20), (QUICK, 4)):
            for _ in range(times):
                made.say(WantFallback(DIGEST, node, 0))
        await trio.sleep(3)
        given = [(m.node, m.outcome) for m in made.child.messages if isinstance(m, GiveChunk)]
        assert given == [(QUICK, "busy")] * 4
        assert made.links.asked.count(SLOW) == 2
        await trio.sleep(400)
        assert made.links.asked.count(SLOW) == 20
        assert not made.slots
        nursery.cancel_scope.cancel()


async def test_a_child_may_not_have_anybody_asked_for_anything(
    tmp_path: Path, faults: object, autojump_clock: trio.testing.MockClock
) -> None:
    async with bringing(tmp_path, faults) as made, trio.open_nursery() as nursery:
        await begun(made, nursery)
        made.say(WantFallback(DIGEST, HONEST, 0))  # no holder
        made.say(WantFallback(DIGEST, QUICK, 1))  # no such chunk
        made.say(WantFallback(bytes(32), QUICK, 0))  # no such transfer
        await trio.sleep(5)
        assert made.links.asked == []
        nursery.cancel_scope.cancel()
