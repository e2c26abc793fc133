"""The accepted rollouts that no step has used yet: what inference nodes look at and the trainer's steps are made of.

1. The pool follows the ledger's decisions and the blobs of the lineage's steps, each once.
2. A batch is full (``Amount``) with ``groups_per_step`` groups with a signal. It is also full with ``GATHER_FACTOR``
   times as many groups of any kind: where no task teaches anything any more, nobody gathers without end.
3. A submission serves one step, and only while its policy lag is from 0 to ``async_level``. The oldest versions go
   first.
4. Groups without a signal are the trainer's to drop, and nobody else's.
5. A submission that its author made up is refused for good, one that nobody gives is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.net.requests import Unreachable
from node.peers.presences import Presences
from protocol.constants import GATHER_FACTOR, KEPT_VERSIONS, MAX_STEP_BLOB_BYTES
from protocol.domain import Recipe
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout, Step, StepBlob
from protocol.work import schedule
from protocol.work.rollout import Submission

FETCH_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Amount:
    """So many groups, ``signal`` of them with a signal."""

    groups: int = 0
    signal: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.groups + other.groups, self.signal + other.signal)

    def fills(self, batches: int, recipe: Recipe) -> bool:
        """Whether so many batches are full with it."""
        return max(self.signal, self.groups // GATHER_FACTOR) >= batches * recipe.groups_per_step

    def at_most(self, recipe: Recipe) -> Amount:
        """As much of it as one batch."""
        most = recipe.groups_per_step
        return Amount(min(self.groups, GATHER_FACTOR * most), min(self.signal, most))


class Pool:
    """Call ``update`` before reading the others."""

    def __init__(self, node: Node, blobs: BlobExchange, presences: Presences) -> None:
        self._node = node
        self._blobs = blobs
        self._presences = presences
        self._known_steps: set[bytes] = set()
        # What steps used, with the number of the version that the newest of them made.
        self._consumed: dict[bytes, int] = {}
        self._taken: set[bytes] = set()
        self._next_decision = 0
        self._generation = 0
        self._accepted: dict[bytes, Entry] = {}

    def take(self, rollouts: Iterable[bytes]) -> None:
        """A step of our own uses these rollouts; nobody knows of it yet."""
        self._taken.update(rollouts)

    def give_back(self, rollouts: Iterable[bytes]) -> None:
        """It was thrown away."""
        self._taken.difference_update(rollouts)

    def give_all_back(self) -> None:
        """No step of our own is under way any more."""
        self._taken.clear()

    def add_step(self, step: Entry, blob: StepBlob) -> None:
        """A step of our own: nothing to fetch."""
        assert isinstance(step.payload, Step)
        self._known_steps.add(step.id)
        used = {rollout for rollout, _ in blob.submissions}
        number, level = step.payload.number, self._node.domain.recipe.async_level
        self._consumed |= dict.fromkeys(used, number)
        # Older ones are of versions that nobody may use any more.
        self._consumed = {one: made for one, made in self._consumed.items() if made >= number - level - KEPT_VERSIONS}
        self._taken -= used

    async def update(self) -> None:
        """Take in new decisions and fetch new step blobs.

        A blob that nobody gives is asked for again at the next call; until then its rollouts count as unused.
        """
        self._read_decisions()
        # Older ones cannot have used what is still of use.
        level = self._node.domain.recipe.async_level
        recent = self._node.log.ledger.steps()[-level - 2 :]
        self._known_steps &= {step.id for step in recent}
        for step in recent:
            if step.id not in self._known_steps:
                await self._read_step(step)

    def _read_decisions(self) -> None:
        ledger = self._node.log.ledger
        if ledger.generation != self._generation:
            self._generation, self._next_decision = ledger.generation, 0
            self._accepted.clear()
        for entry, status in ledger.decisions(self._next_decision):
            if status.outcome == "accepted":
                self._accepted[entry.id] = entry
        self._next_decision = ledger.decided()

    async def _read_step(self, step: Entry) -> None:
        payload = step.payload
        assert isinstance(payload, Step)
        peers = [step.author, *(p for p in self._node.network.peers if p != step.author)]
        try:
            if payload.blob_size > MAX_STEP_BLOB_BYTES:
                raise PeerError("a step blob of an absurd size")
            data = await self._blobs.fetch(payload.blob, payload.blob_size, peers, timeout=5)
            self.add_step(step, StepBlob.parse(data))
        except PeerError as error:
            self._known_steps.add(step.id)
            self._node.network.blame(step.author, error)
        except Unreachable:
            await trio.lowlevel.checkpoint()

    def usable(self, number: int) -> Mapping[bytes, tuple[Entry, int]]:
        """Accepted and unused rollouts with their policy lag for a step from version ``number``, oldest version first.

        What is too old for that and for a step from the newest version is forgotten. ``number`` may be that of a
        version that is not published: should it be thrown away, a step from the one before needs what this one does
        not.
        """
        ledger, level = self._node.log.ledger, self._node.domain.recipe.async_level
        newest = ledger.newest_weights()
        published = None if newest is None else ledger.version_number(newest.id)
        oldest = (number if published is None else min(number, published)) - level
        found: dict[bytes, tuple[Entry, int]] = {}
        for entry in list(self._accepted.values()):
            assert isinstance(entry.payload, Rollout)
            version = ledger.version_number(entry.payload.weights)
            if entry.id in self._consumed or (version is not None and version < oldest):
                del self._accepted[entry.id]
            elif version is not None and entry.id not in self._taken and schedule.usable(number - version, level):
                found[entry.id] = (entry, number - version)
        return dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))

    def waiting(self, number: int) -> Amount:
        """What was announced, is still of use to a step from version ``number``, and not yet trained on.

        What nobody present will judge does not count: its validators may be gone for good. What those announce who were
        not right more often than wrong counts as one batch at most, or a few strangers who announce what they never
        made could keep everybody else waiting.
        """
        ledger, recipe = self._node.log.ledger, self._node.domain.recipe
        total, unproven = Amount(), Amount()
        for entry, _ in self.usable(number).values():
            total += amount(entry)
        accounts = ledger.accounts()
        judged: dict[tuple[bytes, ...], bool] = {}
        for entry in ledger.outstanding():
            assert isinstance(entry.payload, Rollout)
            version = ledger.version_number(entry.payload.weights)
            if version is None or not schedule.usable(number - version, recipe.async_level):
                continue
            due = ledger.due(entry)
            if due not in judged:
                judged[due] = self._presences.can_decide(due)
            if not judged[due]:
                continue
            account = accounts[entry.author]
            if entry.author == self._node.id or account.accepted > account.rejected + account.void:
                total += amount(entry)
            else:
                unproven += amount(entry)
        return total + unproven.at_most(recipe)


def amount(rollout: Entry) -> Amount:
    """What a ``rollout`` entry announces."""
    assert isinstance(rollout.payload, Rollout)
    return Amount(rollout.payload.groups, rollout.payload.signal)


@dataclass(frozen=True, slots=True)
class Gathered:
    """One accepted submission on its way into a step."""

    entry: Entry
    lag: int
    path: Path
    submission: Submission


@dataclass(slots=True)
class Gathering:
    """Fills one batch after the other."""

    node: Node
    blobs: BlobExchange
    pool: Pool
    batch: dict[bytes, Gathered] = field(default_factory=dict)
    unfit: set[bytes] = field(default_factory=set)
    """What is not to be tried again."""

    @property
    def amount(self) -> Amount:
        """How much is in the batch."""
        batch = [gathered.submission for gathered in self.batch.values()]
        return Amount(sum(len(each.groups) for each in batch), sum(each.signal for each in batch))

    @property
    def full(self) -> bool:
        """Whether a step can be made of it."""
        return self.amount.fills(1, self.node.domain.recipe)

    async def fill(self, number: int) -> bool:
        """Take in what was accepted since the last look, for a step from version ``number``; True once it is full."""
        await self.pool.update()
        usable = self.pool.usable(number)
        # What was gathered for another base, or before a step that another trainer made, may be too old or used by now.
        self.batch = {i: replace(g, lag=usable[i][1]) for i, g in self.batch.items() if i in usable}
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
                seen = await self.node.log.wait_change(seen, timeout=0.5)

    async def take(self, entry: Entry, lag: int) -> None:
        """Fetch one accepted submission into the batch, where that can be."""
        node = self.node
        if entry.id in self.batch or entry.id in self.unfit:
            return
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        try:
            # The validators fetched it to judge it, and hold it; its author may be busy or gone.
            peers = [*node.log.ledger.verdicts(entry.id), entry.author]
            data = await self.blobs.fetch(rollout.submission, rollout.size, peers, timeout=FETCH_TIMEOUT)
            submission = await trio.to_thread.run_sync(Submission.parse, data, self.node.domain.recipe)
        except PeerError as error:
            self.unfit.add(entry.id)
            node.network.blame(entry.author, error)
            return
        except Unreachable:
            return
        self.batch[entry.id] = Gathered(entry, lag, self.blobs.store.path(rollout.submission), submission)

    def hand_out(self) -> list[Gathered]:
        """The batch, for a step; the next one begins empty."""
        batch = list(self.batch.values())
        self.batch.clear()
        self.pool.take(g.entry.id for g in batch)
        return batch

    def give_back(self, batch: Sequence[Gathered]) -> None:
        """The step was thrown away for no fault of these."""
        self.pool.give_back(g.entry.id for g in batch)

    def refuse(self, batch: Sequence[Gathered]) -> None:
        """Never to be tried again."""
        self.unfit.update(g.entry.id for g in batch)

    def refused(self, number: int) -> bool:
        """Whether a step from version ``number`` could use what is not to be tried again: others count on it."""
        return not self.unfit.isdisjoint(self.pool.usable(number))
