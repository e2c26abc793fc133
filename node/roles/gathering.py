"""What the trainer's next step is made of: accepted submissions, fetched and counted.

1. A submission serves one step, and only while its policy lag is from 0 to ``async_level``. The oldest versions go
   first.
2. Groups without a signal are the trainer's to drop, and nobody else's. They fill no batch: it is full
   (``node.roles.rollout_pool``) with ``groups_per_step`` groups that have one, or with so many groups in all that
   waiting for more is no use.
3. A submission that its author made up is refused for good, one that nobody gives is asked for again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from node.net.requests import Unreachable
from node.roles.rollout_pool import Amount
from node.roles.workbench import Workbench
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout
from protocol.work.rollout import Submission

FETCH_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Gathered:
    """One accepted submission on its way into a step."""

    entry: Entry
    lag: int
    path: Path
    submission: Submission


class Gathering:
    """Fills one batch after the other."""

    def __init__(self, bench: Workbench) -> None:
        self._node = bench.node
        self._bench = bench
        self._recipe = bench.node.domain.recipe
        self._batch: dict[bytes, Gathered] = {}
        self._refused: set[bytes] = set()

    @property
    def amount(self) -> Amount:
        """How much is in the batch."""
        return amount(self._batch.values())

    @property
    def full(self) -> bool:
        """Whether a step can be made of it."""
        return self.amount.fills(1, self._recipe)

    async def fill(self, number: int) -> bool:
        """Take in what was accepted since the last look, for a step from version ``number``; True once it is full."""
        await self._bench.pool.update()
        usable = self._bench.pool.usable(number)
        # What was gathered for another base, or before a step that another trainer made, may be too old or used by now.
        self._batch = {i: replace(g, lag=usable[i][1]) for i, g in self._batch.items() if i in usable}
        for entry, lag in usable.values():
            if self.full:
                break
            await self.take(entry, lag)
        return self.full

    async def keep_filling(self, number: int) -> None:
        """Go on filling it, for ever: the batch of the next step comes in while this one is trained.

        Where the disk refuses, it ends: that is to be told when no training would be lost by it.
        """
        seen = 0
        with suppress(OSError):
            while True:
                if not self.full:
                    await self.fill(number)
                seen = await self._node.log.wait_change(seen, timeout=0.5)

    async def take(self, entry: Entry, lag: int) -> None:
        """Fetch one accepted submission into the batch, where that can be."""
        node, bench = self._node, self._bench
        if entry.id in self._batch or entry.id in self._refused:
            return
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        try:
            # The validators fetched it to judge it, and hold it; its author may be busy or gone.
            peers = [*node.log.ledger.verdicts(entry.id), entry.author]
            data = await bench.blobs.fetch(rollout.submission, rollout.size, peers, timeout=FETCH_TIMEOUT)
            submission = await trio.to_thread.run_sync(Submission.parse, data, self._recipe)
        except PeerError as error:
            self._refused.add(entry.id)
            node.network.blame(entry.author, error)
            return
        except Unreachable:
            return
        self._batch[entry.id] = Gathered(entry, lag, bench.blobs.store.path(rollout.submission), submission)

    def hand_out(self) -> list[Gathered]:
        """The batch, for a step; the next one begins empty."""
        batch = list(self._batch.values())
        self._batch.clear()
        self._bench.pool.take(g.entry.id for g in batch)
        return batch

    def give_back(self, batch: Sequence[Gathered]) -> None:
        """The step was thrown away for no fault of these."""
        self._bench.pool.give_back(g.entry.id for g in batch)

    def refuse(self, batch: Sequence[Gathered]) -> None:
        """Never to be tried again."""
        self._refused.update(g.entry.id for g in batch)

    def refused(self, number: int) -> bool:
        """Whether a step from version ``number`` could use what is not to be tried again: others count on it."""
        return not self._refused.isdisjoint(self._bench.pool.usable(number))


def amount(batch: Collection[Gathered]) -> Amount:
    """How much is in a batch."""
    return Amount(sum(len(g.submission.groups) for g in batch), sum(g.submission.signal for g in batch))
