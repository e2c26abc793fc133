"""What arrived and cannot be judged yet waits here, within bounds, and is handed to the replica again and again.

1. A delivery is tried first and waits only where something it needs is missing, so a full waiting room never keeps out
   what comes in order. What finds no room is fetched again by anti-entropy.
2. Of two entries for one place the later delivery counts: what does not fit the held branch may have been rubbish.
3. A certificate by the electors that the replica knows is preferred to any other of its height or term: anybody can
   sign one with keys of its own.
4. A mistake in what waits is not the mistake of the peer whose delivery brought it to light: it is dropped in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from node.store.log_store import Item
from protocol.entry import Entry
from protocol.errors import Evidence, PeerError
from protocol.feed import ForkProof
from protocol.heads import RangeRequest
from protocol.quorum import CertifiedCut, CertifiedGrant, check_quorum
from protocol.replica import Outcome, Replica

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING_ENTRIES: Final = 8192
"""Entries that wait for an earlier entry or a cut: at most 34 MB."""

MAX_WAITING_CUTS: Final = 1024
MAX_WAITING_GRANTS: Final = 256
CUTS_AT_ONCE: Final = 64
"""Waiting cuts whose entries are asked for together."""


def add(replica: Replica, item: Item) -> Outcome:
    """Hand any object to the replica; raises what its method raises."""
    match item:
        case Entry():
            return replica.add_entry(item)
        case CertifiedCut():
            return replica.add_cut(item)
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


class Intake:
    """The waiting room before ``replica``."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._entries: dict[bytes, dict[int, Entry]] = {}
        self._count = 0
        self._cuts: dict[int, CertifiedCut] = {}
        self._grants: dict[int, CertifiedGrant] = {}

    def deliver(
        self,
        entries: Sequence[Entry] = (),
        cuts: Sequence[CertifiedCut] = (),
        others: Sequence[CertifiedGrant | ForkProof] = (),
    ) -> Taken:
        """Hand over verified objects and everything that waits, until nothing more is taken."""
        taken = Taken(delivered={id(item) for group in (entries, cuts, others) for item in group})
        for item in others:
            if isinstance(item, CertifiedGrant):
                _prefer(self._grants, item.grant.term, item, self._trusted)
            elif self._add(item, taken) is Outcome.ADDED:
                taken.items.append(item)
        queues = self._entries
        for entry in entries:
            queues.setdefault(entry.author, {})[entry.seq] = entry
        for cut in cuts:
            _prefer(self._cuts, cut.cut.height, cut, self._trusted)
        progress = True
        while progress:
            self._drain_grants(taken)
            for queue in queues.values():
                self._drain(queue, taken)
            progress = self._drain_cuts(taken)
        self._entries = {author: queue for author, queue in queues.items() if queue}
        self._count = sum(map(len, self._entries.values()))
        while self._count > MAX_WAITING_ENTRIES:
            oldest = next(iter(self._entries))
            self._count -= len(self._entries.pop(oldest))
        for height in sorted(self._cuts)[MAX_WAITING_CUTS:]:
            del self._cuts[height]
        for term in sorted(self._grants, key=lambda term: (not self._trusted(self._grants[term]), term))[
            MAX_WAITING_GRANTS:
        ]:
            del self._grants[term]
        return taken

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

    def missing_for_cuts(self) -> list[RangeRequest]:
        """What to ask for so that the cuts that wait can be taken, one range an author."""
        merged: dict[bytes, RangeRequest] = {}
        believed = (height for height in sorted(self._cuts) if self._trusted(self._cuts[height]))
        for height in islice(believed, CUTS_AT_ONCE):
            for wanted in self._replica.missing_for(self._cuts[height].cut):
                known = merged.setdefault(wanted.author, wanted)
                if known.first_seq == wanted.first_seq and known.last_seq < wanted.last_seq:
                    merged[wanted.author] = wanted
        return list(merged.values())

    def _drain(self, queue: dict[int, Entry], taken: Taken) -> None:
        for seq in sorted(queue):
            outcome = self._add(queue[seq], taken)
            if outcome is Outcome.ADDED:
                taken.items.append(queue[seq])
            elif outcome in (Outcome.MISSING_PREV, Outcome.MISSING_ANCHOR):
                return
            del queue[seq]

    def _drain_cuts(self, taken: Taken) -> bool:
        replica = self._replica
        progress = False
        for height in sorted(self._cuts):
            cut = self._cuts[height]
            rewrites, arrivals = replica.rewrites, len(replica.arrivals)
            outcome = self._add(cut, taken)
            if outcome is Outcome.ADDED:
                if (rewrites, arrivals) != (replica.rewrites, len(replica.arrivals)):
                    # The cut brought entries of a frozen author back that stood aside and were not stored.
                    for head in cut.cut.changes:
                        if replica.frozen(head.author):
                            taken.items += replica.entries(head.author)
                taken.items.append(cut)
                progress = True
            elif outcome in (Outcome.MISSING_CUT, Outcome.MISSING_ENTRIES, Outcome.MISSING_GRANT):
                break
            del self._cuts[height]
        return progress

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
            return add(self._replica, item)
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


def _prefer(waiting: dict[int, T], place: int, new: T, trusted: Callable[[T], bool]) -> None:
    """Let ``new`` wait at its place, unless something better does."""
    if place not in waiting or trusted(new) or not trusted(waiting[place]):
        waiting[place] = new
