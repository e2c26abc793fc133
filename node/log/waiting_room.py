"""What arrived and cannot be judged yet waits here, within bounds, and is handed to the replica again and again.

1. A delivery is tried first and waits only where something it needs is missing, so a full waiting room never keeps out
   what comes in order. What finds no room is fetched again by anti-entropy.
2. Of two entries for one place the later delivery counts: what does not fit the held branch may have been rubbish.
3. A certificate by the electors that the replica knows is preferred to any other of its height or term: anybody can
   sign one with keys of its own.
4. What one peer delivered and waits takes up ``RoomBounds.peer_bytes`` at most; what comes beyond that is dropped.
5. A mistake in what waits is not the mistake of the peer whose delivery brought it to light: it is dropped in silence.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from types import MappingProxyType
from typing import Final, TypeVar

from node.store.log_rows import Item
from protocol.credit.ledger import Ledger
from protocol.errors import Evidence, PeerError
from protocol.log.branches import Outcome
from protocol.log.entry import NO_PREV, Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import MAX_RANGE, RangeRequest
from protocol.log.quorum import CertifiedCut, CertifiedGrant, check_quorum

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENTRY_COST: Final = 1000
"""What a waiting entry takes in memory beside its body."""

ANY_CUT: Final = b""
"""What an entry waits for that its author's budget does not pay for yet."""

WAITS: Final = frozenset({Outcome.MISSING_PREV, Outcome.MISSING_ANCHOR, Outcome.MISSING_GRANT, Outcome.OVER_BUDGET})
"""With these outcomes an entry may be taken later: but one without its grant is dropped with this delivery."""

CUTS_AT_ONCE: Final = 64
"""Waiting cuts whose entries are asked for together."""


@dataclass(frozen=True, slots=True)
class RoomBounds:
    """How much may wait."""

    entries: int = 8192
    """Entries that wait for an earlier entry or a cut: at most 34 MB."""
    peer_bytes: int = 16 << 20
    """Bytes of entries from one peer."""
    cuts: int = 1024
    cut_bytes: int = 16 << 20
    """Bytes of bodies of cuts, four of the largest: in memory it is some five times as much."""
    grants: int = 256


BOUNDS: Final = RoomBounds()


def add(ledger: Ledger, item: Item) -> Outcome:
    """Hand any object to the ledger's replica; raises what its method raises."""
    replica = ledger.replica
    match item:
        case Entry():
            return replica.add_entry(item, ledger)
        case CertifiedCut():
            return replica.add_cut(item, ledger)
        case CertifiedGrant():
            return replica.add_grant(item)
        case ForkProof():
            return replica.add_fork(item)


@dataclass(slots=True)
class Taken:
    """What one delivery brought: objects to store, in the order in which the replica took them, and its mistakes.
    ``delivered`` holds the identities (``id``) of the objects in it."""

    items: list[Item] = field(default_factory=list)
    errors: list[PeerError] = field(default_factory=list)
    delivered: set[int] = field(default_factory=set)


class WaitingRoom:
    """The waiting room before the replica of ``ledger``."""

    def __init__(self, ledger: Ledger, bounds: RoomBounds = BOUNDS) -> None:
        self._ledger = ledger
        self._replica = ledger.replica
        self._bounds = bounds
        self._entries: dict[bytes, dict[int, Entry]] = {}
        self._count = 0
        # Who delivered what waits, with its author and seq, and how many bytes of each peer do.
        self._origins: dict[bytes, tuple[bytes, bytes, int]] = {}
        self._bytes: Counter[bytes] = Counter()
        # Authors whose next entry waits for a cut, by the cut's id.
        self._anchored: dict[bytes, set[bytes]] = {}
        self._woken_at = 0
        # Authors whose entries are to be tried; True: all of them, and not only the next one.
        self._ready: dict[bytes, bool] = {}
        self._cuts: dict[int, CertifiedCut] = {}
        self._grants: dict[int, CertifiedGrant] = {}

    def deliver(
        self,
        entries: Sequence[Entry] = (),
        cuts: Sequence[CertifiedCut] = (),
        others: Sequence[CertifiedGrant | ForkProof] = (),
        origin: bytes = b"",
    ) -> Taken:
        """Hand over verified objects from the peer ``origin``, and what waits for them, until nothing more is taken."""
        taken = Taken(delivered={id(item) for group in (entries, cuts, others) for item in group})
        for item in others:
            if isinstance(item, CertifiedGrant):
                _prefer(self._grants, item.grant.term, item, self._trusted)
            elif self._add(item, taken) is Outcome.ADDED:
                taken.items.append(item)
        tried: set[bytes] = set()
        for entry in entries:
            # Nearly always it is the next one of its feed, and nothing of that waits.
            if entry.author in self._entries or entry.seq != self._replica.next_for(entry.author):
                self._put(entry, origin)
            else:
                outcome = self._add(entry, taken)
                if outcome is Outcome.MISSING_ANCHOR and self._next_cut_is(entry.anchor) and entry.anchor not in tried:
                    # What comes in the order of cuts brought all that this one waited for.
                    tried.add(entry.anchor)
                    self._drain_all(taken)
                    outcome = self._add(entry, taken)
                if outcome is Outcome.ADDED:
                    taken.items.append(entry)
                elif outcome in WAITS:
                    self._put(entry, origin)
        for cut in cuts:
            if cut.cut.height <= len(self._replica.cuts):
                self._add(cut, taken)
            else:
                _prefer(self._cuts, cut.cut.height, cut, self._trusted)
        # Cuts may have come by another way, as own ones do.
        for height in [height for height in self._cuts if height <= len(self._replica.cuts)]:
            self._add(self._cuts.pop(height), taken)
        self._wake(self._replica.newest_cut_id)
        self._drain_all(taken)
        self._make_room(entries, origin)
        return taken

    def holds(self, entry: Entry) -> bool:
        """Whether this entry waits here already, with the very signature: an id says nothing of that."""
        waiting = self._entries.get(entry.author, {}).get(entry.seq)
        return waiting is not None and (waiting.id, waiting.signature) == (entry.id, entry.signature)

    def waits(
        self,
        entries: Sequence[Entry],
        cuts: Sequence[CertifiedCut],
        others: Sequence[CertifiedGrant | ForkProof] = (),
    ) -> bool:
        """Whether some of these wait for something that is missing."""
        return (
            any(entry.seq in self._entries.get(entry.author, ()) for entry in entries)
            or any(cut.cut.height in self._cuts for cut in cuts)
            or any(isinstance(item, CertifiedGrant) and item.grant.term in self._grants for item in others)
        )

    def next_cut_waits(self) -> bool:
        """Whether the electors certified a further cut that waits here."""
        cut = self._cuts.get(len(self._replica.cuts) + 1)
        return cut is not None and self._trusted(cut)

    def missing_for_cuts(
        self, *, again: bool = False, asked: Mapping[bytes, int] = MappingProxyType({}), most: int | None = None
    ) -> list[RangeRequest]:
        """What to ask for so that the cuts that wait can be taken, in their order: for the next cut, and for as many
        behind it as leave room for what waits; no more cuts than it takes to find ``most`` entries.

        What waits here already is left out, or, ``again``, asked for as well: it may be of another branch than the one
        that a cut covers. ``asked`` says up to which seq the authors' entries are under way, which is left out as well.
        """
        replica = self._replica
        starts: dict[bytes, int] = {}
        goals: dict[bytes, int] = {}
        aside: dict[bytes, RangeRequest] = {}
        found: list[RangeRequest] = []
        total = fresh = 0
        believed = (height for height in sorted(self._cuts) if self._trusted(self._cuts[height]))
        for height in islice(believed, CUTS_AT_ONCE):
            for head in self._cuts[height].cut.changes:
                author = head.author
                if author not in starts:
                    wanted = replica.missing_for_head(head)
                    if wanted is None:
                        continue
                    if replica.frozen(author) or wanted.first_seq != replica.next_for(author):
                        aside.setdefault(author, wanted)
                        continue
                    first = wanted.first_seq if again else self._first_missing(author)
                    starts[author] = first
                    goals[author] = max(first - 1, asked.get(author, -1))
                    total += goals[author] + 1 - wanted.first_seq
                goal = min(head.seq, starts[author] + self._bounds.entries // 2)
                for first in range(goals[author] + 1, goal + 1, MAX_RANGE):
                    found.append(RangeRequest(author, first, min(first + MAX_RANGE - 1, goal)))
                fresh += max(goal - goals[author], 0)
                goals[author] = max(goal, goals[author])
            if total + fresh > self._bounds.entries // 2 or (most is not None and fresh >= most):
                break
        return [*aside.values(), *found]

    def _first_missing(self, author: bytes) -> int:
        """The seq of the author's first entry that neither is held nor waits, in a chain with what is held."""
        seq = self._replica.next_for(author)
        prev = NO_PREV if seq == 0 else self._replica.id_at(author, seq - 1)
        waiting = self._entries.get(author, {})
        while (entry := waiting.get(seq)) is not None and entry.prev == prev:
            prev, seq = entry.id, seq + 1
        return seq

    def _drain_all(self, taken: Taken) -> None:
        """Hand over what waits, until nothing more is taken."""
        progress = True
        while progress:
            self._drain_grants(taken)
            while self._ready:
                author, whole = self._ready.popitem()
                self._drain(author, whole, taken)
            progress = self._drain_cuts(taken) or bool(self._ready)

    # Entries

    def _put(self, entry: Entry, origin: bytes) -> None:
        self._remove(entry.author, entry.seq)
        self._entries.setdefault(entry.author, {})[entry.seq] = entry
        self._count += 1
        self._origins[entry.id] = (origin, entry.author, entry.seq)
        self._bytes[origin] += _size(entry)
        self._ready[entry.author] = True

    def _remove(self, author: bytes, seq: int) -> None:
        queue = self._entries.get(author)
        if queue is not None and (entry := queue.pop(seq, None)) is not None:
            self._count -= 1
            self._bytes[self._origins.pop(entry.id)[0]] -= _size(entry)
            if not queue:
                del self._entries[author]

    def _drain(self, author: bytes, whole: bool, taken: Taken) -> None:
        """Hand over an author's entries: as far as they go on from its feed, or ``whole``, all that are not ahead."""
        queue = self._entries.get(author)
        places = iter(sorted(queue or ())) if whole else count(self._replica.next_for(author))
        for seq in places:
            entry = None if queue is None else queue.get(seq)
            if entry is None:
                return
            outcome = self._add(entry, taken)
            if outcome is Outcome.ADDED:
                taken.items.append(entry)
            elif outcome in (Outcome.MISSING_ANCHOR, Outcome.OVER_BUDGET):
                # A budget grows with cuts: any of them may be the one.
                awaited = entry.anchor if outcome is Outcome.MISSING_ANCHOR else ANY_CUT
                self._anchored.setdefault(awaited, set()).add(author)
                return
            elif outcome is Outcome.MISSING_PREV:
                return
            self._remove(author, seq)

    def _wake(self, cut_id: bytes) -> None:
        height = len(self._replica.cuts)
        # What its author's budget does not pay for is tried again once a cut, not with each delivery.
        wakes = (cut_id,) if height == self._woken_at else (cut_id, ANY_CUT)
        self._woken_at = height
        for awaited in wakes:
            for author in self._anchored.pop(awaited, ()):
                self._ready.setdefault(author, False)

    def _make_room(self, entries: Sequence[Entry], origin: bytes) -> None:
        for entry in reversed(entries):
            if self._bytes[origin] <= self._bounds.peer_bytes:
                break
            if self.holds(entry):
                self._remove(entry.author, entry.seq)
        while self._count > self._bounds.entries:
            oldest = next(iter(self._entries))
            for seq in list(self._entries[oldest]):
                self._remove(oldest, seq)
        if len(self._anchored) > self._bounds.entries or not self._entries:
            self._anchored.clear()
            self._ready = dict.fromkeys(self._entries, True)
        self._bytes += Counter()  # drops those who have nothing here
        self._drop_cuts()
        for term in sorted(self._grants, key=lambda term: (not self._trusted(self._grants[term]), term))[
            self._bounds.grants :
        ]:
            del self._grants[term]

    # Cuts and grants

    def _drop_cuts(self) -> None:
        """Where too much waits, keep the lowest cuts, those first whose certificates are believed."""
        size = sum(len(cut.cut.body) for cut in self._cuts.values())
        if len(self._cuts) <= self._bounds.cuts and size <= self._bounds.cut_bytes:
            return
        room = self._bounds.cut_bytes
        order = sorted(self._cuts, key=lambda height: (not self._trusted(self._cuts[height]), height))
        for place, height in enumerate(order):
            room -= len(self._cuts[height].cut.body)
            if place >= self._bounds.cuts or room < 0:
                del self._cuts[height]

    def _drain_cuts(self, taken: Taken) -> bool:
        """Hand over the next cut, if it waits; whether it was taken."""
        replica = self._replica
        height = len(replica.cuts) + 1
        cut = self._cuts.get(height)
        if cut is None:
            return False
        rewrites, arrivals = replica.rewrites, len(replica.arrivals)
        outcome = self._add(cut, taken)
        if outcome in (Outcome.MISSING_CUT, Outcome.MISSING_ENTRIES, Outcome.MISSING_GRANT):
            return False
        del self._cuts[height]
        if outcome is not Outcome.ADDED:
            return False
        if (rewrites, arrivals) != (replica.rewrites, len(replica.arrivals)):
            # The cut brought entries of a frozen author back that stood aside and were not stored.
            for head in cut.cut.changes:
                if replica.frozen(head.author):
                    taken.items += replica.entries(head.author)
                if head.author in self._entries:
                    self._ready[head.author] = True
        taken.items.append(cut)
        self._wake(cut.cut.id)
        return True

    def _next_cut_is(self, cut_id: bytes) -> bool:
        """Whether the next cut waits here and is this one."""
        cut = self._cuts.get(len(self._replica.cuts) + 1)
        return cut is not None and cut.cut.id == cut_id

    def _drain_grants(self, taken: Taken) -> None:
        for term in sorted(self._grants):
            outcome = self._add(self._grants[term], taken)
            if outcome is Outcome.ADDED:
                taken.items.append(self._grants[term])
            if outcome is not Outcome.MISSING_CUT:
                del self._grants[term]

    def _trusted(self, certified: CertifiedCut | CertifiedGrant) -> bool:
        """Whether it is certified by the electors that the replica knows now."""
        height = certified.cut.height if isinstance(certified, CertifiedCut) else len(self._replica.cuts) + 1
        try:
            check_quorum(certified.votes, self._replica.electors_at(height), "certificate")
        except PeerError:
            return False
        return True

    def _add(self, item: Item, taken: Taken) -> Outcome | None:
        """Hand one object over; None where it broke a rule, which is noted."""
        try:
            return add(self._ledger, item)
        except Evidence as evidence:
            # Nobody is to blame for showing it: the proof is kept, and it speaks against its author alone.
            logger.warning("%s", evidence)
            taken.items.append(ForkProof.parse(evidence.proof))
        except PeerError as error:
            if id(item) in taken.delivered:
                taken.errors.append(error)
            else:
                logger.debug("dropped while it waited: %s", error)
        return None


def _size(entry: Entry) -> int:
    return len(entry.body) + ENTRY_COST


def _prefer(waiting: dict[int, T], place: int, new: T, trusted: Callable[[T], bool]) -> None:
    """Let ``new`` wait at its place, unless something better does."""
    if place not in waiting or trusted(new) or not trusted(waiting[place]):
        waiting[place] = new
