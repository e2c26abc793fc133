"""Bringing bulk objects here, each once however many want it (``node.weights.object_transfer``).

An object is pinned and has its room on the disk before a byte of it is asked for. What has to go for it is what
retention can spare.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from node.context import Node
from node.store.version_store import VersionStore
from node.weights.bulk.bulk_process import BulkProcess
from node.weights.bulk.token_exchange import TokenExchange
from node.weights.delta_making import Rates
from node.weights.held import HeldVersions, Notice
from node.weights.object_transfer import AskHolders, ObjectTransfer, PeerSlots, Progress
from protocol.constants import CHUNK_BYTES
from protocol.weights.manifest import ChunkList

STALL: Final = 60.0


class Fetching:
    """Brings objects to one node. ``rates`` learns how fast they come."""

    def __init__(
        self,
        node: Node,
        versions: VersionStore,
        bulk: BulkProcess,
        tokens: TokenExchange,
        held: HeldVersions,
        notice: Notice,
        rates: Rates,
    ) -> None:
        self._versions = versions
        self._held = held
        self._rates = rates
        self._begin = partial(ObjectTransfer, node, versions, bulk, tokens, notice, PeerSlots())
        self._transfers: dict[bytes, ObjectTransfer] = {}
        self._making: dict[bytes, trio.Lock] = {}

    def progress(self, digest: bytes) -> Progress | None:
        """How far an object is that is on its way."""
        transfer = self._transfers.get(digest)
        return None if transfer is None else transfer.progress

    @asynccontextmanager
    async def alone(self, digest: bytes) -> AsyncIterator[None]:
        """Be the only one that makes an object whole, once nobody else does.

        A chunk that a delta has made right and another fetch still receives in place would be served meanwhile.
        """
        lock = self._making.setdefault(digest, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            statistics = lock.statistics()
            if not statistics.locked and not statistics.tasks_waiting and self._making.get(digest) is lock:
                del self._making[digest]

    def is_made(self, digest: bytes) -> bool:
        """Whether somebody makes an object whole at the moment."""
        return digest in self._making

    async def bring(self, listing: ChunkList, ask_holders: AskHolders, *, stall: float = STALL) -> None:
        """Make an object whole in the store, from those that ``ask_holders()`` names at each moment.

        Raises ``Unreachable`` where it does not arrive within ``stall`` seconds of the chunk before, ``NoRoom`` and
        other ``OSError`` where the disk refuses. Where it is on its way already this waits for that first.
        """
        digest = listing.digest
        while (other := self._transfers.get(digest)) is not None:
            await other.over.wait()  # what it leaves is in the store
        transfer = self._transfers[digest] = self._begin(listing, ask_holders, stall=stall)
        try:
            with self._versions.pin(digest):
                before, began = await self.make_room(listing), trio.current_time()
                await transfer.run()
        finally:
            del self._transfers[digest]
            transfer.over.set()
        came = (len(listing.chunks) - before) * CHUNK_BYTES
        self._rates.received(min(listing.size, came), trio.current_time() - began)

    async def make_room(self, listing: ChunkList) -> int:
        """Begin an object in the store, or take up what is there of it; how many of its chunks are.

        Raises ``NoRoom`` and other ``OSError`` where the disk refuses.
        """

        def inspect() -> tuple[list[bytes], int]:
            held = self._versions.open(listing.digest)
            return self._versions.held(), 0 if held is None else held.present()

        present, chunks = await trio.to_thread.run_sync(inspect)
        try:
            await trio.to_thread.run_sync(partial(self._versions.begin, listing, self._held.spare(present)))
        finally:
            await self._held.drop_gone()
        return chunks
