"""The log of a running node: one replica and one ledger, kept durable, fed by the own roles and by peers.

1. Commit before publish: an own entry, cut or grant is in the store before anything else sees it. A commit of unknown
   outcome blocks the place it was for until a restart.
2. The own feed grows only once ``ready`` is set (see ``node.log.own_head``). Reads and peers are served meanwhile.
3. What peers send is verified piece by piece: a bad piece is reported to the caller, who blames its sender, and the
   rest is taken. What cannot be judged yet waits, in ``node.log.intake``.
4. Where the disk refuses what peers sent, it is kept in memory and stored before anything else is; own entries fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from node.errors import UserError
from node.log.intake import Intake, add
from node.log.own_head import OwnHead
from node.store.log_store import Item, Store
from protocol import entry as entries
from protocol.constants import MAX_ENTRIES_PER_ANCHOR
from protocol.domain import Domain
from protocol.entry import NO_PREV, Entry
from protocol.errors import Error, Evidence, LocalError, PeerError
from protocol.feed import ForkProof
from protocol.identity import ENTRY, Identity, verify
from protocol.ledger import Ledger
from protocol.quorum import CertifiedCut, CertifiedGrant
from protocol.records import Record
from protocol.replica import Outcome, Replica

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREAD_FROM: Final = 32
"""Deliveries of so many objects (about 100 µs each) are verified in a thread."""

Making = Record | Callable[[list[Entry]], Record]
"""A payload, or a function that makes it from the entries made before it in the same ``append``."""


class NotReady(Error):
    """The log did not take an entry in time: the own head is not confirmed, or too many entries wait for a cut."""


@dataclass(frozen=True, slots=True)
class News:
    """What the log took in one go. ``own``: this node made it, so it is for this node to publish."""

    entries: tuple[Entry, ...] = ()
    cuts: tuple[CertifiedCut, ...] = ()
    grants: tuple[CertifiedGrant, ...] = ()
    forks: tuple[ForkProof, ...] = ()
    own: bool = False


@dataclass(frozen=True, slots=True)
class Own:
    """An own cut or grant, and the values that are stored in the same transaction. ``stored`` is called once that is
    durable, before anybody is told."""

    item: CertifiedCut | CertifiedGrant | None
    meta: Mapping[str, bytes]
    stored: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Received:
    """What became of a delivery: objects added; whether some wait for others; what is wrong with the rest."""

    added: int = 0
    waiting: bool = False
    errors: list[PeerError] = field(default_factory=list)


async def load(store: Store, domain: Domain) -> Replica:
    """The replica that the store holds. Raises ``UserError`` where what was stored breaks a rule."""
    replica = Replica(domain)
    for item in await store.load():
        try:
            outcome = add(replica, item)
        except Evidence:
            continue
        except PeerError as error:
            raise _damaged(str(error)) from None
        if outcome not in (Outcome.ADDED, Outcome.KNOWN, Outcome.FROZEN):
            raise _damaged(outcome.value)
    return replica


def _damaged(why: str) -> UserError:
    return UserError(
        f"the stored log is damaged: {why}", "delete the folder log in the data directory: peers give the log back"
    )


class LogService:
    """Owner of the replica. ``known`` are the peers this node knew at start, ``fresh`` says that its key is new."""

    def __init__(
        self,
        identity: Identity,
        replica: Replica,
        store: Store,
        *,
        known: Iterable[bytes] = (),
        fresh: bool = False,
        thread_from: int = THREAD_FROM,
    ) -> None:
        self.identity = identity
        self.domain = replica.domain
        self.replica = replica
        self.ledger = Ledger(replica)
        self.store = store
        self.ready = trio.Event()
        self.generation = 0
        self.disk_trouble: str | None = None
        """Why the disk refuses what peers sent; None where all is stored."""
        self.behind = False
        """Whether somebody showed an own entry that this node did not know: it was restored, or has a twin."""
        self._own_head = OwnHead(identity.node, self.domain.electors, known, fresh=fresh)
        self._thread_from = thread_from
        self._listeners: list[Callable[[News], None]] = []
        self._changed = trio.Event()
        self._lock = trio.Lock()
        self._unsaved: list[Item] = []
        self.intake = Intake(replica)
        self._settle()

    # Watching

    def subscribe(self, listener: Callable[[News], None]) -> None:
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

    def _tell(self, news: News) -> None:
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

    def heard(self, entry: Entry) -> None:
        """Somebody showed a verified entry of the own feed; appending stops until this node holds it too."""
        self._own_head.seen(entry.seq)
        self.behind = self.behind or entry.seq > self.own_seq
        if entry.seq > self.own_seq and self.ready.is_set():
            logger.error("another machine uses this node's key: it signed entry %d", entry.seq)
            self.ready = trio.Event()

    def told(self, peer: bytes) -> None:
        """``peer`` said where the own feed ends (``heard``), and what it offered was fetched."""
        self._own_head.told(peer)
        self._settle()

    def waits_for(self) -> str:
        """Why ``ready`` is not set, for people."""
        return self._own_head.missing()

    def _settle(self) -> None:
        if not self.ready.is_set() and self._own_head.settled(self.own_seq):
            self.ready.set()

    async def append(self, *payloads: Making, timeout: float = 60.0) -> list[Entry]:
        """Sign, store durably and then publish the own feed's next entries, all of them or none.

        Waits until ``ready``, and for the next cut where ``MAX_ENTRIES_PER_ANCHOR`` entries stand on the newest. Raises
        ``NotReady`` after ``timeout`` seconds of that, ``OSError`` where the disk refuses, ``LocalError`` where the
        feed can never grow again.
        """
        try:
            with trio.fail_after(timeout):
                while True:
                    await self.ready.wait()
                    seen = self.generation
                    async with self._lock:
                        if self.ready.is_set() and self._room() >= len(payloads):
                            # From here on it is done quickly and wholly, whatever happens to the caller.
                            with trio.CancelScope(shield=True):
                                return await self._append(payloads)
                    await self.wait_change(seen, timeout)
        except trio.TooSlowError:
            why = "too many entries wait for a cut" if self.ready.is_set() else self.waits_for()
            raise NotReady(f"no entry could be appended within {timeout:g} s: {why}") from None

    async def answer(self) -> None:
        """Return once the log could take something: nothing holds it, and its store answers."""
        async with self._lock:
            await self.store.meta("domain")

    def _room(self) -> int:
        """How many more own entries may stand on the newest cut."""
        anchor = self.replica.newest_cut_id
        tail = self.replica.entries(self.identity.node, self.own_seq + 1 - MAX_ENTRIES_PER_ANCHOR)
        return MAX_ENTRIES_PER_ANCHOR - sum(entry.anchor == anchor for entry in tail)

    async def _append(self, payloads: Sequence[Making]) -> list[Entry]:
        node = self.identity.node
        if self.replica.frozen(node):
            raise LocalError("this node's feed is frozen: two different entries were signed with its key")
        head = self.replica.heads.get(node)
        seq, prev = (0, NO_PREV) if head is None else (head.seq + 1, head.entry_id)
        made: list[Entry] = []
        for making in payloads:
            payload = making(made) if callable(making) else making
            anchor = self.replica.newest_cut_id
            made.append(entries.make(self.identity, self.domain.id, seq, prev, anchor, payload))
            seq, prev = seq + 1, made[-1].id
        await self._store(made, exclusive={entry.id for entry in made})
        for entry in made:
            if self.replica.add_entry(entry) is not Outcome.ADDED:
                raise LocalError(f"an own entry was not taken: {entry.kind} {entry.seq}")
        self._own_head.seen(made[-1].seq)
        self._tell(News(entries=tuple(made), own=True))
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
                if add(self.replica, item) is not Outcome.ADDED:
                    raise LocalError("an own cut or grant was not taken")
                self._tell(
                    News(cuts=(item,), own=True) if isinstance(item, CertifiedCut) else News(grants=(item,), own=True)
                )
                taken = self.intake.deliver()
                if taken.items:
                    await self._save_foreign(taken.items)
                    self._tell_foreign(taken.items)
                return item

    # What peers send

    async def receive(
        self,
        *,
        entries: Sequence[bytes] = (),
        cuts: Sequence[bytes] = (),
        grants: Sequence[bytes] = (),
        forks: Sequence[bytes] = (),
    ) -> Received:
        """Take encoded objects from a peer: verified, stored, and only then told to others. Never raises for them."""
        result = Received()

        def judge() -> tuple[list[Entry], list[CertifiedCut], list[CertifiedGrant | ForkProof]]:
            good = _verified(_parsed(entries, _entry, result), self.replica, result)
            new_cuts = _parsed(cuts, CertifiedCut.parse, result)
            others: list[CertifiedGrant | ForkProof] = [*_parsed(forks, ForkProof.parse, result)]
            others += _parsed(grants, CertifiedGrant.parse, result)
            return good, new_cuts, others

        if len(entries) + len(cuts) + len(grants) + len(forks) < self._thread_from:
            good, new_cuts, others = judge()
        else:
            good, new_cuts, others = await trio.to_thread.run_sync(judge)
        async with self._lock:
            with trio.CancelScope(shield=True):
                taken = self.intake.deliver(good, new_cuts, others)
                result.errors += taken.errors
                result.added = len(taken.items)
                result.waiting = self.intake.waits(good, new_cuts, others)
                if taken.items:
                    await self._save_foreign(taken.items)
                for entry in good:
                    if entry.author == self.identity.node:
                        self.heard(entry)
                self._settle()
                self._tell_foreign(taken.items)
        await trio.lowlevel.checkpoint()
        return result

    def _tell_foreign(self, taken: Sequence[Item]) -> None:
        if taken:
            self._tell(
                News(
                    tuple(item for item in taken if isinstance(item, Entry)),
                    tuple(item for item in taken if isinstance(item, CertifiedCut)),
                    tuple(item for item in taken if isinstance(item, CertifiedGrant)),
                    tuple(item for item in taken if isinstance(item, ForkProof)),
                )
            )

    # The disk

    async def _store(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        """Own objects, behind whatever of others' is not stored yet: they may stand on it."""
        await self.store.append([*self._unsaved, *items], meta, exclusive=exclusive)
        self._unsaved = []

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


def _entry(data: bytes) -> Entry:
    return entries.decode(data, verify=False)


def _parsed(items: Iterable[bytes], parse: Callable[[bytes], T], result: Received) -> list[T]:
    parsed = []
    for data in items:
        try:
            parsed.append(parse(data))
        except PeerError as error:
            result.errors.append(error)
    return parsed


def _verified(parsed: Sequence[Entry], replica: Replica, result: Received) -> list[Entry]:
    """Those that the replica does not hold and whose signatures are right."""
    good = []
    for entry in parsed:
        if replica.entry(entry.id) is None:
            try:
                verify(entry.author, ENTRY, entry.body, entry.signature, "entry")
                good.append(entry)
            except PeerError as error:
                result.errors.append(error)
    return good
