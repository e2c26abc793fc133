"""The way of what peers send into the log: parsed, verified, handed to the replica, stored, and only then told others.

1. A bad piece is reported to the caller, who blames its sender, and the rest is taken. What cannot be judged yet waits,
   in ``node.log.waiting_room``.
2. Signatures of large deliveries, and the draws of their verdicts, are checked elsewhere and on all cores
   (``Checking``). All is parsed in the loop, a little at a time: a thread that parses and a loop that runs keep each
   other waiting for the interpreter's lock.
3. What is held already is not verified again, nor is what waits: it was when it came.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from node.log.signature_check import Check
from node.log.signature_checkers import Checking, check_in_threads
from node.log.waiting_room import BOUNDS, RoomBounds, WaitingRoom
from node.store.log_rows import Item
from node.store.log_store import LogStore
from protocol.credit.ledger import Ledger
from protocol.errors import PeerError
from protocol.identity import DRAW, ENTRY, verify
from protocol.log import entry as entry_rules
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.records import Rollout, Verdict
from protocol.work.schedule import draw_message

T = TypeVar("T")

Keep = Callable[[Sequence[Item], Sequence[Entry]], Awaitable[None]]
"""Stores what was taken and tells of it; the second are all good entries of the delivery."""

THREAD_FROM: Final = 32
"""Signatures of deliveries of so many objects (about 100 µs each) are checked elsewhere."""

PARSED_AT_ONCE: Final = 64
"""Entries that are parsed without a pause for others: a millisecond or two."""


@dataclass(slots=True)
class Received:
    """What became of a delivery: objects added; whether some wait for others; what is wrong with the rest."""

    added: int = 0
    waiting: bool = False
    errors: list[PeerError] = field(default_factory=list)


class Intake:
    """The intake of the log of ``ledger``, which ``lock`` keeps as it is for who holds it, stored in ``store`` by
    ``keep``. Signatures are checked with ``checking`` where a delivery has ``thread_from`` objects."""

    def __init__(
        self,
        ledger: Ledger,
        store: LogStore,
        lock: trio.Lock,
        keep: Keep,
        *,
        thread_from: int = THREAD_FROM,
        checking: Checking = check_in_threads,
        bounds: RoomBounds = BOUNDS,
    ) -> None:
        self.room = WaitingRoom(ledger, bounds)
        self._ledger = ledger
        self._replica = ledger.replica
        self._store = store
        self._lock = lock
        self._keep = keep
        self._thread_from = thread_from
        self._checking = checking

    async def receive(
        self,
        *,
        entries: Sequence[bytes] = (),
        cuts: Sequence[bytes] = (),
        grants: Sequence[bytes] = (),
        forks: Sequence[bytes] = (),
        origin: bytes = b"",
    ) -> Received:
        """Take encoded objects from the peer ``origin``. Never raises for them, nor for what the disk refuses."""
        result = Received()
        others: list[CertifiedGrant | ForkProof] = []
        new_cuts: list[CertifiedCut] = []

        def parse_sides() -> None:
            new_cuts.extend(_parsed(cuts, CertifiedCut.parse, result))
            others.extend(_parsed(forks, ForkProof.parse, result))
            others.extend(_parsed(grants, CertifiedGrant.parse, result))

        if len(entries) + len(cuts) + len(grants) + len(forks) < self._thread_from:
            parse_sides()
            good = self._judged(entries, result)
        else:
            if cuts or grants or forks:
                await trio.to_thread.run_sync(parse_sides)
            good = await self._judged_elsewhere(entries, result)
        async with self._lock:
            with trio.CancelScope(shield=True):
                good, proofs = await self._apart(good)
                others += proofs
                taken = self.room.deliver(good, new_cuts, others, origin)
                result.errors += taken.errors
                result.added = len(taken.items)
                result.waiting = self.room.waits(good, new_cuts, others)
                if len(taken.items) >= self._thread_from:
                    await check_draws(self._ledger, taken.items, self._announced, self._checking)
                await self._keep(taken.items, good)
        await trio.lowlevel.checkpoint()
        return result

    async def _apart(self, good: list[Entry]) -> tuple[list[Entry], list[ForkProof]]:
        """Of these entries those for places that may be in memory, and what the others prove of forks."""
        below = [entry for entry in good if entry.seq < self._replica.base_for(entry.author)]
        if not below:
            return good, []
        proofs = []
        try:
            ids = await self._store.ids_at([(entry.author, entry.seq) for entry in below])
            rivals = [entry for entry in below if ids.get((entry.author, entry.seq), entry.id) != entry.id]
            stored = await self._store.entries_at([(entry.author, entry.seq) for entry in rivals]) if rivals else {}
            for entry in rivals:
                held = stored.get((entry.author, entry.seq), ())
                if held and all(other.id != entry.id for other in held):
                    proofs.append(ForkProof.of(held[0], entry))
        except OSError:
            # The store tells of it. A fork that goes unseen here is somebody else's to prove.
            proofs.clear()
        return [entry for entry in good if entry.seq >= self._replica.base_for(entry.author)], proofs

    async def _judged_elsewhere(self, data: Sequence[bytes], result: Received) -> list[Entry]:
        """Parse here, and have all signatures checked."""
        new: list[Entry] = []
        for start in range(0, len(data), PARSED_AT_ONCE):
            parsed = _parsed(data[start : start + PARSED_AT_ONCE], _entry, result)
            new += [entry for entry in parsed if self._replica.entry(entry.id) is None]
            await trio.lowlevel.checkpoint()
        # What waits was verified when it came.
        unknown = [entry for entry in new if not self.room.holds(entry)]
        drawn = draws_of(self._ledger, unknown, self._announced)
        checks: list[Check] = [(entry.author, ENTRY, entry.body, entry.signature) for entry in unknown]
        right = await self._checking([*checks, *map(_draw, drawn)])
        bad = {id(entry) for entry, fits in zip(unknown, right, strict=False) if not fits}
        for (entry, _), fits in zip(drawn, right[len(unknown) :], strict=True):
            if id(entry) not in bad:
                self._ledger.draws.note(entry.id, fits)
        result.errors += [PeerError("entry: the signature is wrong") for _ in bad]
        return [entry for entry in new if id(entry) not in bad]

    def _announced(self, rollout_id: bytes) -> Rollout | None:
        entry = self._replica.entry(rollout_id)
        if entry is not None and isinstance(entry.payload, Rollout):
            return entry.payload
        return self._ledger.announced(rollout_id)

    def _judged(self, data: Sequence[bytes], result: Received) -> list[Entry]:
        """The entries that are new here and whose signatures are right."""
        good = []
        for entry in _parsed(data, _entry, result):
            if self._replica.entry(entry.id) is None:
                try:
                    # What waits was verified when it came.
                    if not self.room.holds(entry):
                        verify(entry.author, ENTRY, entry.body, entry.signature, "entry")
                    good.append(entry)
                except PeerError as error:
                    result.errors.append(error)
        return good


Find = Callable[[bytes], Rollout | None]
"""The payload of a rollout entry by its id, if it is at hand."""


def draws_of(ledger: Ledger, items: Iterable[Item], find: Find) -> list[tuple[Entry, Rollout]]:
    """The verdicts among ``items`` whose draws are not checked yet, with their submissions, as far as at hand."""
    some = [item for item in items if isinstance(item, Entry)]
    rollouts = {entry.id: entry.payload for entry in some if isinstance(entry.payload, Rollout)}
    pairs: list[tuple[Entry, Rollout]] = []
    for entry in some:
        if isinstance(entry.payload, Verdict) and entry.id not in ledger.draws:
            rollout = rollouts.get(entry.payload.rollout) or find(entry.payload.rollout)
            if rollout is not None:
                pairs.append((entry, rollout))
    return pairs


async def check_draws(ledger: Ledger, items: Iterable[Item], find: Find, checking: Checking = check_in_threads) -> None:
    """Check the draws of verdicts whose submissions are at hand: the ledger would do it one by one, in the loop."""
    pairs = draws_of(ledger, items, find)
    if pairs:
        for (entry, _), right in zip(pairs, await checking([*map(_draw, pairs)]), strict=True):
            ledger.draws.note(entry.id, right)


def _draw(pair: tuple[Entry, Rollout]) -> Check:
    verdict, rollout = pair
    assert isinstance(verdict.payload, Verdict)
    return verdict.author, DRAW, draw_message(rollout.submission, verdict.payload.rollout), verdict.payload.draw


def _entry(data: bytes) -> Entry:
    return entry_rules.decode(data, verify=False)


def _parsed(items: Iterable[bytes], parse: Callable[[bytes], T], result: Received) -> list[T]:
    parsed = []
    for data in items:
        try:
            parsed.append(parse(data))
        except PeerError as error:
            result.errors.append(error)
    return parsed
