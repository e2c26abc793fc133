"""Whether the trainer in office gets on with what there is for it: being heard is not enough to keep the office.

1. The clock runs while the newest cut covers a full batch that nobody trained on and whose files this elector could
   fetch itself: validators that accept what nobody can have cost no trainer its office.
2. It begins anew with each version. Weights that are announced again without a step do that once.
3. The office is idle once the clock stood at more than the genesis' ``patience_ms``, and at more than ``SLOWER`` times
   the median of the last ``INTERVALS`` times between versions.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.net.requests import Unreachable
from node.peers.own_state import OwnState
from node.roles.rollout_pool import Amount, Pool, amount
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout, Weights

SLOWER: Final = 3
INTERVALS: Final = 8
FETCH_SECONDS: Final = 5.0


class HolderProgress:
    """Runs beside an elector's watch over the office."""

    def __init__(self, node: Node, own: OwnState, pool: Pool, blobs: BlobExchange) -> None:
        self._node = node
        self._own = own
        self._pool = pool
        self._blobs = blobs
        self._interval = 2 * node.domain.timings.presence_ms / 1000
        self._patience = node.domain.timings.patience_ms / 1000
        self._newest: bytes | None = None
        self._came_at = trio.current_time()
        self._times: deque[float] = deque(maxlen=INTERVALS)
        self._again = False
        self._trainer: bytes | None = None
        self._since: float | None = None
        self._fetched: set[bytes] = set()

    def idle(self) -> bool:
        """Whether the holder had everything and made nothing for too long."""
        if self._since is None or self._own.paused():
            return False
        patience = max(self._patience, SLOWER * median(self._times) if self._times else 0.0)
        return trio.current_time() - self._since > patience

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await trio.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """Take notice of versions and batches."""
        ledger = self._node.log.ledger
        grant, newest = ledger.grant(), ledger.newest_weights()
        if grant is None or newest is None:
            self._since = None
            return
        if newest.id != self._newest:
            self._note_version(newest)
        if grant.trainer != self._trainer:  # a term that is renewed gives nobody more time
            self._trainer, self._since = grant.trainer, None
        if self._since is None and await self._full(newest):
            self._since = trio.current_time()

    def _note_version(self, newest: Entry) -> None:
        assert isinstance(newest.payload, Weights)
        now, made = trio.current_time(), newest.payload.step is not None
        if made and self._newest is not None:
            self._times.append(now - self._came_at)
        self._newest, self._came_at = newest.id, now
        if made or not self._again:
            self._since = None
        self._again = not made
        self._fetched.clear()

    async def _full(self, newest: Entry) -> bool:
        """Whether a batch is final, unused, and to be had."""
        node, recipe = self._node, self._node.domain.recipe
        await self._pool.update()
        number = node.log.ledger.version_number(newest.id)
        if number is None:
            return False
        final = [
            entry
            for entry, _ in self._pool.usable(number).values()
            if entry.seq <= node.log.replica.certified_head(entry.author)
        ]
        if not sum(map(amount, final), Amount()).fills(1, recipe):
            return False
        here = Amount()
        for entry in final:
            if await self._can_have(entry):
                here += amount(entry)
            if here.fills(1, recipe):
                return True
        return False

    async def _can_have(self, entry: Entry) -> bool:
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        if entry.id in self._fetched:
            return True
        peers = [entry.author, *(peer for peer in self._node.network.peers if peer != entry.author)]
        try:
            await self._blobs.fetch(rollout.submission, rollout.size, peers, timeout=FETCH_SECONDS)
        except (Unreachable, PeerError, OSError):
            return False
        self._fetched.add(entry.id)
        return True
