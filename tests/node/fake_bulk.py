"""A bulk child without a process, on trio's clock: it speaks the messages of the real one, reaches nobody itself, and
has the daemon fetch each chunk over its links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import trio

from node.store.version_store import VersionStore
from node.weights.bulk.bulk_messages import (
    BeginTransfer,
    ChildReady,
    Configure,
    FromChild,
    GiveChunk,
    GiveHaves,
    HolderRow,
    SetHolders,
    StopTransfer,
    Synchronize,
    Synchronized,
    ToChild,
    TransferDone,
    TransferProgress,
    WantFallback,
)
from node.workers import frames
from protocol.weights.chunk_set import bits_of

TICK = 0.05
PAUSE = 0.5
"""Seconds for which a holder that refused or failed is left alone, and between two questions what one has."""
AT_ONCE = 4


class FakeBulkChild:
    """One child, as ``node.weights.bulk.bulk_process`` sees it."""

    def __init__(self, sockets: Sequence[int]) -> None:
        del sockets
        self.pid = 1
        self._frames, self._to_daemon = trio.open_memory_channel[bytes](math.inf)
        self._dead = trio.Event()
        self._soon = trio.Event()
        self._store: VersionStore | None = None
        self._transfers: dict[bytes, FakeTransfer] = {}

    async def send(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()
        message: ToChild = frames.decode(frame[frames.HEADER_BYTES :], ToChild)
        match message:
            case Configure(versions=versions):
                self._store = VersionStore(Path(versions), owner=False)
                self.say(ChildReady())
            case Synchronize(call=call):
                self.say(Synchronized(call))
            case BeginTransfer(digest=digest):
                self._transfers[digest] = FakeTransfer(digest)
            case StopTransfer(digest=digest):
                self._transfers.pop(digest, None)
            case SetHolders() | GiveChunk() | GiveHaves():
                transfer = self._transfers.get(message.digest)
                if transfer is not None:
                    transfer.receive(message)
        self._soon.set()

    async def read_frame(self) -> bytes:
        return await self._to_daemon.receive()

    async def drain(self) -> None:
        """The child's life."""
        while True:
            with trio.move_on_after(TICK if self._transfers else math.inf):
                await self._soon.wait()
            self._soon = trio.Event()
            for digest, transfer in list(self._transfers.items()):
                assert self._store is not None
                held = self._store.open(digest)
                if held is not None:
                    for message in transfer.step(held.missing(), held.count):
                        self.say(message)

    async def wait_dead(self) -> None:
        await self._dead.wait()

    def how_it_ended(self) -> str:
        return "was ended"

    def kill(self) -> None:
        self._dead.set()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.kill()

    def say(self, message: FromChild) -> None:
        """Send a message to the daemon."""
        self._frames.send_nowait(frames.encode(message)[frames.HEADER_BYTES :])


class FakeTransfer:
    """One object on its way: each chunk is asked of the first holder that may have it, spared ones last."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._rows: list[HolderRow] = []
        self._haves: dict[bytes, bytes] = {}
        self._asked: dict[int, bytes] = {}
        self._polled: dict[bytes, float] = {}
        self._doubted: set[bytes] = set()
        self._not_before: dict[bytes, float] = {}
        self._have = -1
        self._why = "nobody holds it"

    def receive(self, message: SetHolders | GiveChunk | GiveHaves) -> None:
        match message:
            case SetHolders(rows=rows):
                self._rows = sorted(rows, key=lambda row: row.spared)
            case GiveHaves(node=node, bitmap=bitmap):
                self._haves[node] = bitmap
            case GiveChunk(node=node, index=index, outcome=outcome):
                self._asked.pop(index, None)
                if outcome == "lacks":
                    self._doubted.add(node)
                    self._haves.pop(node, None)
                if outcome != "ok":
                    pause = math.inf if outcome == "wrong" else PAUSE
                    self._not_before[node] = trio.current_time() + pause
                    self._why = outcome

    def step(self, missing: Sequence[int], count: int) -> list[FromChild]:
        """What the child says next, where these chunks of ``count`` are missing."""
        now, said = trio.current_time(), list[FromChild]()
        if count - len(missing) > self._have:
            self._have = count - len(missing)
            said.append(TransferProgress(self._digest, self._have, count, 0, len(self._rows), self._why))
        if not missing:
            return [*said, TransferDone(self._digest)]
        for row in self._rows:
            if self._not_before.get(row.node, 0.0) > now:
                continue
            if row.whole and row.node not in self._doubted:
                has = (1 << count) - 1
            else:
                has = bits_of(self._haves.get(row.node, b""), count)
                if self._polled.get(row.node, -math.inf) <= now - PAUSE:
                    self._polled[row.node] = now
                    said.append(WantFallback(self._digest, row.node, -1))
            for index in missing:
                if index not in self._asked and has >> index & 1 and [*self._asked.values()].count(row.node) < AT_ONCE:
                    self._asked[index] = row.node
                    said.append(WantFallback(self._digest, row.node, index))
        return said
