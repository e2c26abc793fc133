"""The log of a running node: one replica and one ledger, kept durable, fed by the own roles and by peers.

1. Commit before publish: an own entry, cut or grant is in the store before anything else sees it. A commit of unknown
   outcome blocks the place it was for until a restart.
2. The own feed grows only once ``ready`` is set (see ``node.log.own_head``). Reads and peers are served meanwhile.
3. What peers send comes by ``node.log.intake``.
4. Where the disk refuses what peers sent, it is kept in memory and stored before anything else is; own entries fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import trio

from node.log.checkpoint_exchange import Checkpoints
from node.log.intake import THREAD_FROM, Intake
from node.log.log_opening import SNAPSHOT_ENTRIES, sum_up
from node.log.own_head import OwnHead
from node.log.signature_checkers import Checking, check_in_threads
from node.log.waiting_room import BOUNDS, RoomBounds, add
from node.store.log_rows import Item
from node.store.log_store import LogStore
from protocol.constants import MAX_ENTRIES_PER_ANCHOR
from protocol.credit.ledger import Ledger
from protocol.errors import Error, LocalError
from protocol.identity import Identity
from protocol.log import entry as entries
from protocol.log.branches import Outcome
from protocol.log.entry import NO_PREV, Entry
from protocol.log.heads import RangeRequest
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.log.replica import Replica
from protocol.records import Record

logger = logging.getLogger(__name__)

T = TypeVar("T")

Making = Record | Callable[[list[Entry]], Record]
"""A payload, or a function that makes it from the entries made before it in the same ``append``."""


class NotReady(Error):
    """The log did not take an entry in time: the own head is not confirmed, or too many entries wait for a cut."""


@dataclass(frozen=True, slots=True)
class LogNews:
    """What the log took in one go. ``own``: this node made it, so it is for this node to publish."""

    items: tuple[Item, ...] = ()
    own: bool = False

    def of(self, kind: type[T]) -> list[T]:
        """The items of this class."""
        return [item for item in self.items if isinstance(item, kind)]


@dataclass(frozen=True, slots=True)
class Own:
    """An own cut or grant, and the values that are stored in the same transaction. ``stored`` is called once that is
    durable, before anybody is told."""

    item: CertifiedCut | CertifiedGrant | None
    meta: Mapping[str, bytes]
    stored: Callable[[], None] = lambda: None


class LogService:
    """Owner of the replica. ``known`` are the peers this node knew at start, ``fresh`` says that its key is new.

    ``checking`` checks the signatures of large deliveries. ``archive`` False: the bodies of final entries are removed
    once a snapshot sums them up. ``bounds`` are those of what waits, ``snapshot_entries`` as for ``sum_up``.
    """

    def __init__(
        self,
        identity: Identity,
        log: Ledger | Replica,
        store: LogStore,
        *,
        known: Iterable[bytes] = (),
        fresh: bool = False,
        thread_from: int = THREAD_FROM,
        archive: bool = True,
        checking: Checking = check_in_threads,
        bounds: RoomBounds = BOUNDS,
        snapshot_entries: int = SNAPSHOT_ENTRIES,
    ) -> None:
        self.identity = identity
        self.ledger = log if isinstance(log, Ledger) else Ledger(log)
        self.replica = replica = self.ledger.replica
        self.domain = replica.domain
        self.store = store
        self.ready = trio.Event()
        self.generation = 0
        self.height_claimed = 0
        """The height of the newest cut that some peer says it holds, for people."""
        self.disk_trouble: str | None = None
        """Why the disk refuses what peers sent; None where all is stored."""
        self.behind = False
        """Whether somebody showed an own entry that this node did not know: it was restored, or has a twin."""
        self.checkpoints = Checkpoints(replica, store)
        self._level = False
        self._own_head = OwnHead(identity.node, replica.electors_at(len(replica.cuts) + 1), known, fresh=fresh)
        self._listeners: list[Callable[[LogNews], None]] = []
        self._changed = trio.Event()
        self._lock = trio.Lock()
        self._unsaved: list[Item] = []
        self._archive = archive
        self._snapshot_entries = snapshot_entries
        self._pruned: dict[bytes, int] = {}
        self.intake = Intake(
            self.ledger, store, self._lock, self._keep, thread_from=thread_from, checking=checking, bounds=bounds
        )
        self._confirm()

    # Watching

    def subscribe(self, listener: Callable[[LogNews], None]) -> None:
        """Call ``listener`` after every change; it must neither block nor raise."""
        self._listeners.append(listener)

    async def wait_change(self, seen: int, timeout: float) -> int:
        """Return the generation as soon as it differs from ``seen``, or after ``timeout`` seconds."""
        if self.generation == seen:
            with trio.move_on_after(timeout):
                await self._changed.wait()
        else:
            await trio.lowlevel.checkpoint()
        return self.generation

    def _notify(self, news: LogNews) -> None:
        self.generation += 1
        self._changed.set()
        self._changed = trio.Event()
        for listener in self._listeners:
            listener(news)

    # The own feed

    @property
    def own_seq(self) -> int:
        """The seq of this node's newest entry, -1 before its ``join``."""
        return self.replica.next_for(self.identity.node) - 1

    def on_own_entry(self, entry: Entry) -> None:
        """Somebody showed a verified entry of the own feed; appending stops until this node holds it too."""
        self._own_head.seen(entry.seq)
        self.behind = self.behind or entry.seq > self.own_seq
        if entry.seq > self.own_seq and self.ready.is_set():
            logger.error("another machine uses this node's key: it signed entry %d", entry.seq)
            self.ready = trio.Event()

    def on_own_head(self, peer: bytes) -> None:
        """``peer`` said where the own feed ends (``on_own_entry``), and what it offered was fetched."""
        self._own_head.confirm(peer)
        self._confirm()

    def on_level(self, peer: bytes) -> None:
        """A round with ``peer`` left nothing that it holds and this node does not."""
        if not self._level and self.ledger.member(peer):
            self._level = True
            self._notify(LogNews())

    def level(self) -> bool:
        """Whether this node's log was level with a member's since its start; nobody else has one before the first
        cut that covers more than one feed, or where no other member is known."""
        return self._level or all(author == self.identity.node for author in self.replica.heads)

    def waits_for(self) -> str:
        """Why ``ready`` is not set, for people."""
        return self._own_head.missing()

    def _confirm(self) -> None:
        if not self.ready.is_set() and self._own_head.confirmed(self.own_seq):
            self.ready.set()

    async def append(self, *payloads: Making, timeout: float = 60.0) -> list[Entry]:
        """Sign, store durably and then publish the own feed's next entries, all of them or none.

        Waits until ``ready``, and for the next cut where ``MAX_ENTRIES_PER_ANCHOR`` entries stand on the newest. Raises
        ``NotReady`` after ``timeout`` seconds of that, ``OSError`` where the disk refuses, ``LocalError`` where the
        feed can never grow again.
        """
        why = self.waits_for()
        try:
            with trio.fail_after(timeout):
                while True:
                    why = self.waits_for()
                    await self.ready.wait()
                    why = "the log is busy"
                    seen = self.generation
                    async with self._lock:
                        if self.ready.is_set():
                            found = self._made(payloads)
                            if not isinstance(found, str):
                                # From here on it is done quickly and wholly, whatever happens to the caller.
                                with trio.CancelScope(shield=True):
                                    return await self._append(found)
                            why = found
                    await self.wait_change(seen, timeout)
        except trio.TooSlowError:
            raise NotReady(f"no entry could be appended within {timeout:g} s: {why}") from None

    def over(self) -> str | None:
        """Why the own feed can never grow again, in one line; None while it can."""
        node = self.identity.node
        ending = self.replica.endings.ended.get(node)
        if ending is not None:
            owner = self.replica.endings.owner(node)
            if owner != node:
                return f"this node was moved with its recovery key: node {owner.hex()} goes on with its credit"
            return "this node was closed with its recovery key: nothing that it signs counts any more"
        if self.replica.frozen(node):
            return "this node's feed is frozen: two different entries were signed with its key"
        return None

    async def answer(self) -> None:
        """Return once the log could take something: nothing holds it, and its store answers, if only that it fails."""
        async with self._lock:
            with suppress(OSError):
                await self.store.meta("domain")

    def _made(self, payloads: Sequence[Making]) -> list[Entry] | str:
        """The own feed's next entries, or why they cannot be appended yet."""
        node, replica = self.identity.node, self.replica
        over = self.over()
        if over is not None:
            raise LocalError(over)
        if self.own_seq < 0 and not replica.admissions.by(node, len(replica.cuts)):
            return "no cut admitted this node yet"
        anchor = replica.newest_cut_id
        tail = replica.entries(node, self.own_seq + 1 - MAX_ENTRIES_PER_ANCHOR)
        if sum(entry.anchor == anchor for entry in tail) + len(payloads) > MAX_ENTRIES_PER_ANCHOR:
            return "too many entries wait for a cut"
        head = replica.heads.get(node)
        seq, prev = (0, NO_PREV) if head is None else (head.seq + 1, head.entry_id)
        made: list[Entry] = []
        for making in payloads:
            payload = making(made) if callable(making) else making
            made.append(entries.make(self.identity, self.domain.id, seq, prev, anchor, payload))
            seq, prev = seq + 1, made[-1].id
        obstacle = replica.obstacle(made, self.ledger)
        return made if obstacle is None else str(obstacle.value)

    async def _append(self, made: list[Entry]) -> list[Entry]:
        await self._store(made, exclusive={entry.id for entry in made})
        for entry in made:
            if add(self.ledger, entry) is not Outcome.ADDED:
                raise LocalError(f"an own entry was not taken: {entry.kind} {entry.seq}")
        self._own_head.seen(made[-1].seq)
        self._notify(LogNews(tuple(made), own=True))
        return made

    async def commit(self, make: Callable[[], Own | None]) -> CertifiedCut | CertifiedGrant | None:
        """Store an own cut or grant with what belongs to it, or that alone, then take and publish it: for the elector.

        ``make`` runs while nothing else changes the log; None means that there is nothing to commit. Raises ``OSError``
        where the disk refuses.
        """
        async with self._lock:
            with trio.CancelScope(shield=True):
                made = make()
                if made is None:
                    return None
                item = made.item
                await self._store([] if item is None else [item], made.meta)
                made.stored()
                if item is None:
                    return None
                if add(self.ledger, item) is not Outcome.ADDED:
                    raise LocalError("an own cut or grant was not taken")
                self._notify(LogNews((item,), own=True))
                await self._keep(self.intake.room.deliver().items)
                await self._sum_up()
                return item

    # What peers send

    async def _keep(self, taken: Sequence[Item], good: Sequence[Entry] = ()) -> None:
        """Store what the replica took, and tell of it; ``good`` may be of the own feed. Called with the lock held."""
        if taken:
            await self._save_foreign(taken)
        for entry in good:
            if entry.author == self.identity.node:
                self.on_own_entry(entry)
        self._confirm()
        if taken:
            self._notify(LogNews(tuple(taken)))
        if any(isinstance(item, CertifiedCut) for item in taken):
            await self._sum_up()

    async def _save_foreign(self, taken: Sequence[Item]) -> None:
        self._unsaved += taken
        try:
            await self.store.append(self._unsaved)
        except OSError as error:
            if self.disk_trouble is None:
                logger.error("the log is not stored: %s", error)
            self.disk_trouble = str(error)
        else:
            self._unsaved = []
            self.disk_trouble = None

    async def _store(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        """Own objects, behind whatever of others' is not stored yet: they may stand on it."""
        await self.store.append([*self._unsaved, *items], meta, exclusive=exclusive)
        self._unsaved = []

    # Snapshots

    async def _sum_up(self) -> None:
        """Where enough became final, store a snapshot, and let go of what it sums up."""
        more = self.intake.room.next_cut_waits()
        if (
            not self._unsaved
            and await sum_up(self.ledger, self.store, self._snapshot_entries, more=more)
            and not self._archive
        ):
            await self._prune()

    async def _prune(self) -> None:
        """Remove from the disk the bodies of what a snapshot sums up, but for each feed's newest: it is what tells an
        author that was restored from a backup where its feed ends."""
        ends = {author: self.replica.base_for(author) - 1 for author in self.replica.certified}
        ranges = [
            RangeRequest(author, self._pruned.get(author, 0), end - 1)
            for author, end in ends.items()
            if end > self._pruned.get(author, 0)
        ]
        try:
            await self.store.prune(ranges)
        except OSError as error:
            logger.warning("old entries are not removed: %s", error)
        else:
            self._pruned = ends
