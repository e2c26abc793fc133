"""Which grants count across amendments: electors who left office must not give terms away.

1. A grant counts while the rules (``protocol.log.amendment``) are in force by which it was made: those of the cut after
   its anchor. Its term is *settled* once a cut by the same rules covers a weights entry of its trainer and term; from
   then on it counts for good.
2. With a cut that changes the rules all grants of terms that are not settled are void. Whoever is in office by one
   needs another one, from the electors in force.
3. A weights entry that anchors on a cut of older rules than those of the cut that covers it, of a term that is not
   settled by then, is void as well: it makes no version, and it waits for no grant.

So what a grant means follows from the cuts alone, and no signature that comes late can change it.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.log.entry import Entry
from protocol.log.quorum import CertifiedGrant
from protocol.records import Weights


class Terms:
    """``grants`` are those that count, by term; ``highest`` is the highest term that ever did. For reading only."""

    def __init__(self, settled: Iterable[int] = (), highest: int = 0) -> None:
        self.grants: dict[int, CertifiedGrant] = {}
        self.settled: set[int] = set(settled)
        self.highest = highest
        self._voided: set[bytes] = set()

    def admits(self, term: int, made: int, now: int) -> bool:
        """Whether a grant that was made by rules number ``made`` counts where number ``now`` is in force."""
        return made == now or term in self.settled

    def add(self, certified: CertifiedGrant) -> None:
        """Take a grant of a term that none is held of."""
        term = certified.grant.term
        self.grants[term] = certified
        self.highest = max(self.highest, term)

    def void(self, entry: Entry, anchored: int, covering: int) -> bool:
        """Whether a weights entry is void that anchors on rules number ``anchored`` and is covered by ``covering``."""
        assert isinstance(entry.payload, Weights)
        return anchored < covering and entry.payload.term not in self.settled

    def cover(self, entries: Iterable[tuple[Entry, int]], covering: int) -> None:
        """Take notice of the weights entries, each with the number of the rules it anchors on, that the next cut
        covers, which is made by rules number ``covering``."""
        settled = set()
        for entry, anchored in entries:
            weights = entry.payload
            assert isinstance(weights, Weights)
            if self.void(entry, anchored, covering):
                self._voided.add(entry.id)
            elif weights.term in self.grants and self.grants[weights.term].grant.trainer == entry.author:
                settled.add(weights.term)
        self.settled |= settled

    def voided(self, entry: Entry) -> bool:
        """Whether a weights entry in memory was void when a cut covered it."""
        return entry.id in self._voided

    def forget(self) -> None:
        """What is final leaves memory, with everything that follows from it taken notice of."""
        self._voided.clear()

    def change_rules(self) -> bool:
        """The next cut follows other rules: void what is not settled; whether there was anything."""
        void = [term for term in self.grants if term not in self.settled]
        for term in void:
            del self.grants[term]
        return bool(void)
