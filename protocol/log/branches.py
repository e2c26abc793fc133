"""All authors' feeds as one node holds them: the branches that are visible, and where each of them ends.

1. An entry is taken when the one before it and the cut that it anchors on are held. An author's entries are a chain,
   and its first one follows its admission (``protocol.log.admission``).
2. A second signed entry for a place that is taken is ``Evidence``: the fork proof is kept for ever and freezes the
   author. Its feed then ends before the lowest place that a known proof names, or at its certified head where that
   is later, and is shown so (status 1). A cut with status 1 ends the feed at that row whatever else turns up.
3. Entries beyond such an end leave the log but wait aside (``protocol.log.frozen_entries``): a cut that certifies a
   branch brings it back.

What cuts say is the business of ``protocol.log.replica``: which of them there are, what they certify and whom they end.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from protocol.domain import Domain
from protocol.errors import PeerError
from protocol.log.admission import Admissions
from protocol.log.chain import Chain, FeedState
from protocol.log.endings import Endings
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof, evidence
from protocol.log.frozen_entries import FrozenEntries
from protocol.log.head_table import HeadTable
from protocol.log.heads import FROZEN, LIVE, Head


class Outcome(Enum):
    """What became of an object that was handed to the replica; true in a condition only where it was added."""

    ADDED = "added"
    KNOWN = "it is known already"
    MISSING_PREV = "the entry before it is missing"
    MISSING_ANCHOR = "the cut that it anchors on is missing"
    MISSING_CUT = "the cut before it is missing"
    MISSING_ENTRIES = "entries that it covers are missing"
    OUTDATED = "the electors who granted it left office before anything came of it"
    MISSING_GRANT = "the grant of a version is missing"
    OVER_BUDGET = "its author has spent its budget"
    FROZEN = "its author is frozen"
    BELOW = "it lies below what is in memory"

    def __bool__(self) -> bool:
        return self is Outcome.ADDED


class Branches:
    """The feeds of ``domain``'s log. Dictionaries and lists that are attributes are for reading only.

    ``forks`` maps authors. ``arrivals`` lists visible entries as they came, and ``rewrites`` counts how often entries
    had to leave it again (the list is a new one then).
    """

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.forks: dict[bytes, ForkProof] = {}
        self.arrivals: list[Entry] = []
        self.rewrites = 0
        self.endings = Endings()
        self.admissions = Admissions(domain)
        self._chains: dict[bytes, Chain] = {}
        self._heads = HeadTable()
        self._certified = HeadTable()
        # Authors whose heads have changed since somebody looked at them.
        self._stale: set[bytes] = set()
        self._by_id: dict[bytes, Entry] = {}
        self._aside = FrozenEntries()
        # The heights of the cuts that are held, and 0 for the domain's id.
        self._heights: dict[bytes, int] = {domain.id: 0}

    # Adding

    def add_entry(self, entry: Entry) -> Outcome:
        """Take a parsed entry. Raises ``PeerError`` where it breaks a rule, ``Evidence`` where it proves a fork that
        was not known (the proof is kept and the author frozen)."""
        if entry.domain != self.domain.id:
            raise PeerError("entry: it belongs to another domain")
        chain = self._feed(entry.author)
        if entry.seq < chain.next_seq:
            held = chain.at(entry.seq)
            if held is None:
                return Outcome.BELOW
            if held.id == entry.id:
                return Outcome.KNOWN
            proof = ForkProof.of(held, entry)
            self._aside.put(entry)
            if self.add_fork(proof):
                raise evidence(proof)
            return Outcome.FROZEN
        limit = self._limit(entry.author)
        if limit is not None and entry.seq >= limit:
            self._aside.put(entry)
            return Outcome.FROZEN
        if entry.seq > chain.next_seq or entry.prev != chain.state.head:
            return Outcome.MISSING_PREV
        height = self._heights.get(entry.anchor)
        if height is None:
            return Outcome.MISSING_ANCHOR
        if entry.seq == 0 and not self.admissions.by(entry.author, height):
            raise PeerError("join: no cut admitted its author before")
        chain.push(entry, height)
        self._chains[entry.author] = chain
        self._by_id[entry.id] = entry
        self.arrivals.append(entry)
        self._stale.add(entry.author)
        return Outcome.ADDED

    def add_fork(self, proof: ForkProof) -> Outcome:
        """Take a verified fork proof: ADDED where it is the first of its author or names a lower place."""
        if proof.domain != self.domain.id:
            raise PeerError("fork proof: it belongs to another domain")
        known = self.forks.get(proof.author)
        if known is not None and known.seq <= proof.seq:
            return Outcome.KNOWN
        self.forks[proof.author] = proof
        self._freeze(proof.author)
        return Outcome.ADDED

    # Reading

    def _feed(self, author: bytes) -> Chain:
        """The author's visible chain, an empty one where nothing of it is held."""
        return self._chains.get(author) or Chain(FeedState(author))

    @property
    def heads(self) -> dict[bytes, Head]:
        """The newest head held of each author."""
        self._refresh()
        return self._heads.rows

    @property
    def certified(self) -> dict[bytes, Head]:
        """The newest certified head of each author."""
        return self._certified.rows

    def heads_root(self) -> bytes:
        """The root over all heads held, certified or not."""
        self._refresh()
        return self._heads.root()

    def bucket_digests(self) -> list[bytes]:
        """The 256 digests over ``heads``."""
        self._refresh()
        return self._heads.digests()

    def heads_in(self, buckets: Iterable[int], after: bytes, most: int) -> list[Head]:
        """The heads of these buckets whose authors come behind ``after``, ascending, at most ``most``."""
        self._refresh()
        return self._heads.in_buckets(buckets, after, most)

    def entry(self, entry_id: bytes) -> Entry | None:
        """The visible entry of this id, if it is in memory."""
        return self._by_id.get(entry_id)

    def entries(self, author: bytes, first: int = 0, last: int | None = None) -> list[Entry]:
        """The author's visible entries ``first`` … ``last`` (both included; to its head where ``last`` is None), as far
        as they are in memory."""
        return self._feed(author).slice(first, last)

    def base_for(self, author: bytes) -> int:
        """The seq of the author's oldest entry that may be in memory."""
        return self._feed(author).base.next_seq

    def next_for(self, author: bytes) -> int:
        """The seq of the author's next entry."""
        return self._feed(author).next_seq

    def head_at(self, author: bytes, seq: int) -> Head | None:
        """The author's head as it was when ``seq`` was its newest entry, with today's status; None where it has no such
        entry, or that is below what is in memory."""
        state = self._feed(author).state_at(seq, self._heights)
        return None if state is None else Head(author, seq, state.head, state.ids.root, self._status(author))

    def id_at(self, author: bytes, seq: int) -> bytes | None:
        """The id of the author's visible entry at ``seq``, if it is in memory."""
        return self._feed(author).id_at(seq)

    def frozen(self, author: bytes) -> bool:
        """Whether the author's feed ended: it was forked, closed or rebound."""
        return self._status(author) == FROZEN

    def certified_head(self, author: bytes) -> int:
        """The highest seq of the author that a cut covers, -1 where none does."""
        head = self.certified.get(author)
        return -1 if head is None else head.seq

    def height(self, cut_id: bytes) -> int | None:
        """The height of a held cut, 0 for the domain's id, None for an unknown one."""
        return self._heights.get(cut_id)

    def _refresh(self) -> None:
        for author in self._stale:
            head = self.head_at(author, self.next_for(author) - 1)
            if head is None:
                self._heads.remove(author)
            else:
                self._heads.set(head)
        self._stale.clear()

    # Where feeds end

    def _status(self, author: bytes) -> int:
        certified = self.certified.get(author)
        ended = author in self.forks or author in self.endings.ended
        frozen = ended or (certified is not None and certified.status == FROZEN)
        return FROZEN if frozen else LIVE

    def _limit(self, author: bytes) -> int | None:
        """How many entries of a frozen author are visible at most; None for a live one."""
        certified = self.certified.get(author)
        if certified is not None and (certified.status == FROZEN or author in self.endings.ended):
            return certified.seq + 1
        proof = self.forks.get(author)
        if proof is None:
            return None
        return proof.seq if certified is None else max(proof.seq, certified.seq + 1)

    def _freeze(self, author: bytes) -> None:
        limit = self._limit(author)
        chain = self._chains.get(author)
        if limit is not None and chain is not None and chain.next_seq > limit:
            self._replace(author, self._rebuilt(chain, chain.slice(chain.final.next_seq, limit - 1)))
        self._stale.add(author)

    # Which branch is visible

    def _replace(self, author: bytes, chain: Chain) -> None:
        """Make ``chain`` the author's visible one; entries that are not on it wait aside."""
        old = self._chains.get(author)
        kept = {entry.id for entry in chain.entries}
        gone = [entry for entry in (old.entries if old is not None else ()) if entry.id not in kept]
        self._chains[author] = chain
        for entry in gone:
            del self._by_id[entry.id]
            self._aside.put(entry)
        if gone:
            self.rewrites += 1
            self.arrivals = [entry for entry in self.arrivals if entry.id in self._by_id]
        self._aside.remove(author, chain.entries)
        for entry in chain.entries:
            if entry.id not in self._by_id:
                self._by_id[entry.id] = entry
                self.arrivals.append(entry)
        self._stale.add(author)

    def _rebuilt(self, chain: Chain, above: Iterable[Entry]) -> Chain:
        """What is final of ``chain``, and then these entries."""
        new = chain.branch()
        for entry in above:
            height = self._heights.get(entry.anchor)
            if height is None:
                raise PeerError("cut: it covers an entry whose anchor is not below it")
            new.push(entry, height)
        return new

    def _switch(self, head: Head) -> Chain | None:
        """The chain that ends in ``head``, from entries that are visible and entries that wait aside."""
        path = list(self._aside.branch(head))
        below = path[-1] if path else None
        keep = head.seq + 1 if below is None else below.seq
        joint = head.entry_id if below is None else below.prev
        chain = self._feed(head.author)
        if keep < chain.final.next_seq:
            raise PeerError("cut: a row leaves the branch that is certified")
        if keep > 0 and chain.id_at(keep - 1) != joint:
            return None
        return self._rebuilt(chain, chain.slice(chain.final.next_seq, keep - 1) + path[::-1])

    # Memory

    def forget(self) -> None:
        """Drop the entries that are final from memory."""
        gone = 0
        for chain in self._chains.values():
            for entry in chain.forget():
                del self._by_id[entry.id]
                gone += 1
        if gone:
            self.arrivals = [entry for entry in self.arrivals if entry.id in self._by_id]

    def final_feeds(self) -> list[FeedState]:
        """The states of all feeds of which something is certified, at their certified heads."""
        return [self._chains[author].final for author in self._certified.rows]

    def uncertified(self) -> list[bytes]:
        """The ids of all entries in memory that no cut covers, whether they are visible or wait aside."""
        tails = [entry for chain in self._chains.values() for entry in chain.slice(chain.final.next_seq)]
        return [entry.id for entry in (*tails, *self._aside)]
