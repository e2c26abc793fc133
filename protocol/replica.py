"""One domain's log in memory: which entries, cuts, grants and fork proofs a node holds, and what follows from them.

1. Objects may come in any order. What cannot be judged yet is answered with what is missing, not stored, and handed
   in again later; once everything was taken, the state is the same whatever the order was.
2. An entry is taken when the one before it and the cut that it anchors on are held. An author's entries are a chain.
3. A cut is taken when the cut before it and every entry that it covers are held, every row moves forward on the
   branch held, and the heads root recomputed from its rows is the one that it names.
4. A second signed entry for a place that is taken is ``Evidence``: the fork proof is kept for ever and freezes the
   author. Its feed then ends before the lowest place that a known proof names, or at its certified head where that
   is later, and is shown so (status 1). A cut with status 1 ends the feed at that row whatever else turns up.
5. Entries beyond such an end leave the log but wait aside: a cut that certifies a branch brings it back.
6. Grants are kept by term; what a grant means for the weights is the ledger's business. One is taken when its anchor
   is held.
7. Cuts and grants are certified by the electors in force: for a cut those of its height, for a grant those of the
   cut after its anchor.
8. A cut covers a weights entry only of a term whose grant is held, so that all replicas judge what is final alike.
9. A close or rebind (``protocol.recovery``) ends its target's feed at the certified head of the cut that covers it:
   the feed is shown as frozen from then on, and later cuts do nothing with its row but freeze it.

Of what the newest cut covers a replica needs no entries, only the state of each feed there: ``forget`` drops them. The
caller has stored them, and looks there for what is not in memory (Outcome.BELOW).

Nothing here verifies signatures: parsers did. The replica neither reads nor writes storage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from hashlib import sha256
from typing import Final

from protocol import codec
from protocol.amend import Amendments
from protocol.chain import Chain, Cuts
from protocol.domain import Domain, Thresholds
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.feed import FeedState, ForkProof, evidence
from protocol.heads import FROZEN, LIVE, MAX_RANGE, Head, RangeRequest
from protocol.headtable import HeadTable
from protocol.merkle import EMPTY_RANGE, CompactRange
from protocol.quorum import MAX_CHANGES, CertifiedCut, CertifiedGrant, Cut, check_quorum, moves
from protocol.records import Join
from protocol.recovery import Endings
from protocol.terms import Terms

MAX_SHELF: Final = 512
"""Entries of one frozen author that wait aside, beside those that a certified cut waits for: of these none is dropped.
Only entries no cut covers yet can come back from there."""


class Outcome(Enum):
    """What became of an object that was handed to the replica; true in a condition only where it was added."""

    ADDED = "added"
    KNOWN = "it is known already"
    MISSING_PREV = "the entry before it is missing"
    MISSING_ANCHOR = "the cut that it anchors on is missing"
    MISSING_CUT = "the cut before it is missing"
    MISSING_ENTRIES = "entries that it covers are missing"
    OUTDATED = "the electors who granted it left office before anything came of it"
    MISSING_GRANT = "the grant of a version that it covers is missing"
    FROZEN = "its author is frozen"
    BELOW = "it lies below what is in memory"

    def __bool__(self) -> bool:
        return self is Outcome.ADDED


class Replica:
    """The replica of ``domain``'s log. Dictionaries and lists that are attributes are for reading only.

    ``cuts`` are in order of height; ``grants`` maps terms, ``forks`` authors. ``arrivals`` lists visible entries as
    they came, and ``rewrites`` counts how often entries had to leave it again (the list is a new one then).
    """

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.amendments = Amendments(domain)
        self.cuts = Cuts()
        self.terms = Terms()
        self.forks: dict[bytes, ForkProof] = {}
        self.arrivals: list[Entry] = []
        self.rewrites = 0
        self._side: bytes | None = None
        self._chains: dict[bytes, Chain] = {}
        self._heads = HeadTable()
        self._certified = HeadTable()
        # The cut whose heads root was found right last: one that waits for entries is judged again and again.
        self._fits: bytes | None = None
        # Authors whose heads have changed since somebody looked at them.
        self._stale: set[bytes] = set()
        self._by_id: dict[bytes, Entry] = {}
        self._shelves: dict[bytes, dict[bytes, Entry]] = {}
        # The rows of the certified cut that waits for entries, and how many may wait aside before some are dropped.
        self._wanted: dict[bytes, Head] = {}
        self._room: dict[bytes, int] = {}
        self._heights: dict[bytes, int] = {domain.id: 0}
        self.cut_range = EMPTY_RANGE
        """The compact range over the bodies of all cuts (``protocol.checkpoint``)."""
        self.endings = Endings()
        self.commitments: dict[bytes, bytes] = {}
        """What each final join says of the author's recovery key."""
        # For each cut in memory, where the feeds that it moves were final up to.
        self._before: dict[bytes, dict[bytes, int]] = {}

    # Adding

    def add_entry(self, entry: Entry) -> Outcome:
        """Take a parsed entry. Raises ``PeerError`` where it breaks a rule, ``Evidence`` where it proves a fork that
        was not known (the proof is kept and the author frozen)."""
        if entry.domain != self.domain.id:
            raise PeerError("entry: it belongs to another domain")
        chain = self._chains.get(entry.author) or Chain(FeedState(entry.author))
        if entry.seq < chain.next_seq:
            held = chain.at(entry.seq)
            if held is None:
                return Outcome.BELOW
            if held.id == entry.id:
                return Outcome.KNOWN
            proof = ForkProof.of(held, entry)
            self._shelve(entry)
            if self.add_fork(proof):
                raise evidence(proof)
            return Outcome.FROZEN
        limit = self._limit(entry.author)
        if limit is not None and entry.seq >= limit:
            self._shelve(entry)
            return Outcome.FROZEN
        if entry.seq > chain.next_seq or entry.prev != chain.state.head:
            return Outcome.MISSING_PREV
        height = self._heights.get(entry.anchor)
        if height is None:
            return Outcome.MISSING_ANCHOR
        chain.push(entry, height)
        self._chains[entry.author] = chain
        self._by_id[entry.id] = entry
        self.arrivals.append(entry)
        self._show(entry.author)
        return Outcome.ADDED

    def add_fork(self, proof: ForkProof) -> Outcome:
        """Take a verified fork proof: ADDED where it is the first of its author or names a lower place."""
        if proof.domain != self.domain.id:
            raise PeerError("fork proof: it belongs to another domain")
        known = self.forks.get(proof.author)
        if known is not None and known.seq <= proof.seq:
            return Outcome.KNOWN
        self.forks[proof.author] = proof
        self._side = None
        self._freeze(proof.author)
        return Outcome.ADDED

    def add_grant(self, certified: CertifiedGrant) -> Outcome:
        """Take a verified grant. Raises ``PeerError`` for another one of a term that is granted."""
        if certified.grant.domain != self.domain.id:
            raise PeerError("grant: it belongs to another domain")
        height = self._heights.get(certified.grant.anchor)
        if height is None:
            return Outcome.MISSING_CUT
        check_quorum(certified.votes, self.electors_at(height + 1), "grant")
        term, number = certified.grant.term, self.amendments.number_at
        known = self.grants.get(term)
        if known is not None and known.grant.id == certified.grant.id:
            return Outcome.KNOWN
        if not self.terms.admits(term, number(height + 1), number(len(self.cuts) + 1)):
            return Outcome.OUTDATED
        if known is not None:
            raise PeerError(f"grant: term {term} is granted already")
        self.terms.add(certified)
        self._side = None
        return Outcome.ADDED

    def add_cut(self, certified: CertifiedCut) -> Outcome:
        """Take a verified cut, whole or not at all. Raises ``PeerError`` where it contradicts what is certified."""
        cut = certified.cut
        rebuilt: list[tuple[bytes, Chain]] = []
        if cut.domain == self.domain.id and cut.height == len(self.cuts) + 1:
            check_quorum(certified.votes, self.electors_at(cut.height), "cut")
        outcome = self.judge_cut(cut, rebuilt)
        if outcome is not Outcome.ADDED:
            if outcome is Outcome.MISSING_ENTRIES:
                self._wanted = {head.author: head for head in cut.changes}
            return outcome
        self._wanted = {}
        self._room.clear()
        for author, chain in rebuilt:
            self._replace(author, chain)
        versions = [(entry, self._rules_of(entry)) for entry in self.versions_in(cut)]
        self.terms.cover(versions, self.amendments.number_at(cut.height))
        if self.amendments.cover(cut.height, self._amends_in(cut)) and self.terms.change_rules():
            self.rewrites += 1
            self._side = None
        self._heights[cut.id] = cut.height
        self.cuts.append(certified)
        self.cut_range = self.cut_range.append(cut.body)
        covered: list[Entry] = []
        self._before[cut.id] = {head.author: self.certified_head(head.author) + 1 for head in cut.changes}
        for head in cut.changes:
            covered += self._chains[head.author].slice(self.certified_head(head.author) + 1, head.seq)
            self._certified.set(head)
            self._chains[head.author].cut(head.seq, self._heights)
            if head.status == FROZEN or head.author in self.forks:
                self._freeze(head.author)
        self._end(cut.height, covered)
        return Outcome.ADDED

    def _end(self, height: int, covered: list[Entry]) -> None:
        """End the feeds that the entries covered newly by the cut of ``height`` close or rebind."""
        for entry in covered:
            if isinstance(entry.payload, Join):
                self.commitments[entry.author] = entry.payload.recovery
        for author in self.endings.cover(height, covered, self.commitments.get):
            self._freeze(author)

    def judge_cut(self, cut: Cut, rebuilt: list[tuple[bytes, Chain]] | None = None) -> Outcome:
        """What ``add_cut`` would answer to a certificate of ``cut``, and raise; the replica stays as it is.

        ``rebuilt`` receives the chains that the cut would put in the place of visible ones.
        """
        if cut.domain != self.domain.id:
            raise PeerError("cut: it belongs to another domain")
        if cut.height <= len(self.cuts):
            if cut.id not in self._heights:
                raise PeerError(f"cut: height {cut.height} is taken by another one")
            return Outcome.KNOWN
        if cut.height > len(self.cuts) + 1:
            return Outcome.MISSING_CUT
        if cut.prev != self.newest_cut_id:
            raise PeerError("cut: it does not follow the newest one")
        if self._fits != cut.id:
            if self._certified.root_with(cut.changes) != cut.heads_root:
                raise PeerError("cut: the heads root is wrong")
            self._fits = cut.id
        for head in cut.changes:
            old = self.certified.get(head.author)
            if not moves(old, head):
                raise PeerError("cut: a row does not move forward")
            if old is not None and head.author in self.endings.ended and head.seq > old.seq:
                raise PeerError("cut: a row goes beyond the end of its feed")
            chain = self._chains.get(head.author)
            if chain is None or chain.id_at(head.seq) != head.entry_id:
                chain = self._switch(head)
                if chain is None:
                    return Outcome.MISSING_ENTRIES
                if rebuilt is not None:
                    rebuilt.append((head.author, chain))
            state = chain.state_at(head.seq, self._heights)
            if state is None or state.ids.root != head.feed_root:
                raise PeerError("cut: a feed root is wrong")
            if old is not None and chain.id_at(old.seq) != old.entry_id:
                raise PeerError("cut: a row leaves the branch that is certified")
            if self._ungranted(chain, -1 if old is None else old.seq) <= head.seq:
                return Outcome.MISSING_GRANT
        return Outcome.ADDED

    # Reading

    @property
    def newest_cut(self) -> CertifiedCut | None:
        """The cut of greatest height."""
        return self.cuts[-1] if self.cuts else None

    @property
    def newest_cut_id(self) -> bytes:
        """What a new entry anchors on: the newest cut's id, or the domain's before any."""
        return self.cuts[-1].cut.id if self.cuts else self.domain.id

    @property
    def grants(self) -> dict[int, CertifiedGrant]:
        """The grants that count, by term."""
        return self.terms.grants

    @property
    def heads(self) -> dict[bytes, Head]:
        """The newest head held of each author."""
        self._look()
        return self._heads.rows

    @property
    def certified(self) -> dict[bytes, Head]:
        """The newest certified head of each author."""
        return self._certified.rows

    def heads_root(self) -> bytes:
        """The root over all heads held, certified or not."""
        self._look()
        return self._heads.root()

    def bucket_digests(self) -> list[bytes]:
        """The 256 digests over ``heads``."""
        self._look()
        return self._heads.digests()

    def heads_in(self, buckets: Iterable[int], after: bytes, most: int) -> list[Head]:
        """The heads of these buckets whose authors come behind ``after``, ascending, at most ``most``."""
        self._look()
        return self._heads.in_buckets(buckets, after, most)

    def _look(self) -> None:
        for author in self._stale:
            head = self.head_at(author, self.next_for(author) - 1)
            if head is None:
                self._heads.remove(author)
            else:
                self._heads.set(head)
        self._stale.clear()

    def side_digest(self) -> bytes:
        """32 bytes that are equal where two replicas hold the same grants and know the same forks."""
        if self._side is None:
            # Kept, since every peer may ask for it, and anybody may make forks.
            grants = sorted((term, certified.grant.id) for term, certified in self.grants.items())
            forks = sorted((author, proof.seq) for author, proof in self.forks.items())
            self._side = sha256(codec.encode([grants, forks])).digest()
        return self._side

    def entry(self, entry_id: bytes) -> Entry | None:
        """The visible entry of this id, if it is in memory."""
        return self._by_id.get(entry_id)

    def entries(self, author: bytes, first: int = 0, last: int | None = None) -> list[Entry]:
        """The author's visible entries ``first`` … ``last`` (both included; to its head where ``last`` is None), as far
        as they are in memory."""
        chain = self._chains.get(author)
        return [] if chain is None else chain.slice(first, last)

    def base_for(self, author: bytes) -> int:
        """The seq of the author's oldest entry that may be in memory."""
        chain = self._chains.get(author)
        return 0 if chain is None else chain.base.next_seq

    def next_for(self, author: bytes) -> int:
        """The seq of the author's next entry."""
        chain = self._chains.get(author)
        return 0 if chain is None else chain.next_seq

    def head_at(self, author: bytes, seq: int) -> Head | None:
        """The author's head as it was when ``seq`` was its newest entry, with today's status; None where it has no such
        entry, or that is below what is in memory."""
        chain = self._chains.get(author)
        state = None if chain is None else chain.state_at(seq, self._heights)
        return None if state is None else Head(author, seq, state.head, state.ids.root, self._status(author))

    def id_at(self, author: bytes, seq: int) -> bytes | None:
        """The id of the author's visible entry at ``seq``, if it is in memory."""
        chain = self._chains.get(author)
        return None if chain is None else chain.id_at(seq)

    def frozen(self, author: bytes) -> bool:
        """Whether the author's feed ended: it was forked, closed or rebound."""
        return self._status(author) == FROZEN

    def electors_at(self, height: int) -> tuple[bytes, ...]:
        """The electors in force for the cut of ``height``, as far as the log is held."""
        return self.amendments.electors_at(height)

    def thresholds_at(self, height: int) -> Thresholds:
        """The thresholds in force at the cut of ``height``."""
        return self.amendments.thresholds_at(height)

    def uncovered(self) -> list[Head]:
        """The heads that the newest cut does not cover yet, ascending by author, at most ``MAX_CHANGES`` of them."""
        heads = [head for author, head in self.heads.items() if moves(self.certified.get(author), head)]
        return sorted(heads, key=lambda head: head.author)[:MAX_CHANGES]

    def reportable(self, ends: Mapping[bytes, int] | None = None) -> list[Head]:
        """The rows of an elector's report: ``uncovered``, each feed only up to a version whose grant is missing, and to
        before the seq that ``ends`` names for the author."""
        heads = []
        for author, head in self.heads.items():
            end = self._ungranted(self._chains[author], self.certified_head(author)) - 1
            if ends is not None and author in ends:
                end = min(end, ends[author] - 1)
            shown = head if head.seq <= end else self.head_at(author, end)
            if shown is not None and moves(self.certified.get(author), shown):
                heads.append(shown)
        return sorted(heads, key=lambda head: head.author)[:MAX_CHANGES]

    def versions_in(self, cut: Cut) -> list[Entry]:
        """The weights entries that ``cut``, the next one or one that was taken, makes final, as far as held."""
        found: list[Entry] = []
        for head in cut.changes:
            chain = self._chains.get(head.author)
            if chain is None or chain.id_at(head.seq) != head.entry_id:
                chain = self._switch(head)
            first = self._covered_before(cut, head.author)
            if chain is not None:
                made = (chain.at(seq) for seq, _ in chain.versions if first <= seq <= head.seq)
                found += [entry for entry in made if entry is not None]
        return found

    def _covered_before(self, cut: Cut, author: bytes) -> int:
        """The seq of the first entry of ``author`` that ``cut`` covers, a cut in memory or the next one."""
        before = self._before.get(cut.id)
        return self.certified_head(author) + 1 if before is None else before[author]

    def granted(self, author: bytes, seq: int) -> bool:
        """Whether a cut may cover the author's visible entries up to ``seq``: the grants of its versions are held."""
        chain = self._chains.get(author)
        return chain is None or self._ungranted(chain, self.certified_head(author)) > seq

    def certified_head(self, author: bytes) -> int:
        """The highest seq of the author that a cut covers, -1 where none does."""
        head = self.certified.get(author)
        return -1 if head is None else head.seq

    def height(self, cut_id: bytes) -> int | None:
        """The height of a held cut, 0 for the domain's id, None for an unknown one."""
        return self._heights.get(cut_id)

    def missing_for(self, cut: Cut) -> list[RangeRequest]:
        """What to ask for so that ``cut`` can be taken, at most ``MAX_RANGE`` entries an author at a time."""
        requests = []
        for head in cut.changes:
            chain = self._chains.get(head.author)
            if chain is not None and chain.id_at(head.seq) == head.entry_id:
                continue
            first = self.next_for(head.author)
            if head.seq < first or self.frozen(head.author):
                # The cut is on another branch, or past the end of the visible one: both part above what is certified.
                first = self.certified_head(head.author) + 1
                last = head.seq
                for held in self._waiting(head):
                    last = held.seq - 1
                # Half a range, so that its end is in an answer whatever the entries' size.
                first = max(first, last - MAX_RANGE // 2 + 1)
            else:
                last = min(head.seq, first + MAX_RANGE - 1)
            if first <= last:
                requests.append(RangeRequest(head.author, first, last))
        return requests

    def _amends_in(self, cut: Cut) -> list[Entry]:
        """The ``amend`` entries that the next cut, whose chains are in place, makes final."""
        found: list[Entry] = []
        for head in cut.changes:
            first = self.certified_head(head.author) + 1
            found += [entry for entry in self._chains[head.author].amends if first <= entry.seq <= head.seq]
        return found

    def _ungranted(self, chain: Chain, after: int) -> int:
        """The first seq above ``after`` of a version whose term's grant is missing; beyond the end where none is."""
        for seq, term in chain.versions[bisect_left(chain.versions, (after + 1,)) :]:
            if term not in self.grants and not self._void(chain, seq):
                return seq
        return max(chain.next_seq, after + 1)

    def _void(self, chain: Chain, seq: int) -> bool:
        """Whether the weights entry there needs no grant, for the next cut makes nothing of it."""
        entry = chain.at(seq)
        covering = self.amendments.number_at(len(self.cuts) + 1)
        return entry is not None and self.terms.void(entry, self._rules_of(entry), covering)

    def _rules_of(self, entry: Entry) -> int:
        """The number of the rules that an entry anchors on: those of the cut after its anchor."""
        return self.amendments.number_at(self._heights[entry.anchor] + 1)

    # Forks

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
        self._show(author)

    def _replace(self, author: bytes, chain: Chain) -> None:
        """Make ``chain`` the author's visible one; entries that are not on it wait aside."""
        old = self._chains.get(author)
        kept = {entry.id for entry in chain.entries}
        gone = [entry for entry in (old.entries if old is not None else ()) if entry.id not in kept]
        self._chains[author] = chain
        for entry in gone:
            del self._by_id[entry.id]
            self._shelve(entry)
        if gone:
            self.rewrites += 1
            self.arrivals = [entry for entry in self.arrivals if entry.id in self._by_id]
        shelf = self._shelves.get(author, {})
        for entry in chain.entries:
            shelf.pop(entry.id, None)
            if entry.id not in self._by_id:
                self._by_id[entry.id] = entry
                self.arrivals.append(entry)
        self._show(author)

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
        path = list(self._waiting(head))
        below = path[-1] if path else None
        keep = head.seq + 1 if below is None else below.seq
        joint = head.entry_id if below is None else below.prev
        chain = self._chains.get(head.author) or Chain(FeedState(head.author))
        if keep < chain.final.next_seq:
            raise PeerError("cut: a row leaves the branch that is certified")
        if keep > 0 and chain.id_at(keep - 1) != joint:
            return None
        return self._rebuilt(chain, chain.slice(chain.final.next_seq, keep - 1) + path[::-1])

    def _waiting(self, head: Head) -> Iterator[Entry]:
        """The entries that wait aside on the branch of ``head``, from it downwards without a gap."""
        shelf = self._shelves.get(head.author, {})
        wanted, seq = head.entry_id, head.seq
        while (entry := shelf.get(wanted)) is not None and entry.seq == seq:
            yield entry
            wanted, seq = entry.prev, seq - 1

    def _shelve(self, entry: Entry) -> None:
        author = entry.author
        shelf = self._shelves.setdefault(author, {})
        shelf[entry.id] = entry
        if len(shelf) <= self._room.get(author, MAX_SHELF):
            return
        wanted = self._wanted.get(author)
        if wanted is None:
            del shelf[next(iter(shelf))]
            return
        # What leads to a certified row is fetched from the row downwards, the newest half may be what just comes.
        needed = {below.id for below in self._waiting(wanted)}
        others = [entry_id for entry_id in shelf if entry_id not in needed]
        for gone in others[: -MAX_SHELF // 2]:
            del shelf[gone]
        self._room[author] = len(needed) + MAX_SHELF

    def _show(self, author: bytes) -> None:
        self._stale.add(author)

    # Memory

    def forget(self) -> None:
        """Drop from memory what the newest cut covers, and older cuts: what follows from them stays."""
        gone = 0
        for chain in self._chains.values():
            for entry in chain.forget():
                del self._by_id[entry.id]
                gone += 1
        if gone:
            self.arrivals = [entry for entry in self.arrivals if entry.id in self._by_id]
        self.cuts.forget(len(self.cuts))
        self._before.clear()

    def final_feeds(self) -> list[FeedState]:
        """The states of all feeds of which something is certified, at their certified heads."""
        return [self._chains[author].final for author in self._certified.rows]

    def cut_ids(self) -> list[bytes]:
        """The ids of all cuts, in order of height."""
        return list(self._heights)[1:]

    def uncertified(self) -> list[bytes]:
        """The ids of all entries in memory that no cut covers, whether they are visible or wait aside."""
        tails = [entry for chain in self._chains.values() for entry in chain.slice(chain.final.next_seq)]
        aside = [entry for shelf in self._shelves.values() for entry in shelf.values()]
        return [entry.id for entry in (*tails, *aside)]

    @classmethod
    def resume(
        cls,
        domain: Domain,
        feeds: Iterable[FeedState],
        frozen: Collection[bytes],
        recoveries: Sequence[bytes],
        endings: Endings,
        cut_ids: Sequence[bytes],
        cut_range: CompactRange,
        newest: CertifiedCut,
    ) -> Replica:
        """A replica that holds in memory nothing but the newest cut, the last of ``cut_ids``, and what follows from it.

        ``feeds`` are as ``final_feeds`` gave them, ``frozen`` the authors whose certified head has status 1,
        ``recoveries`` the commitments of the feeds' joins, in their order. Raises
        ``PeerError`` where the parts do not fit each other.
        """
        self = cls(domain)
        for height, cut_id in enumerate(cut_ids, 1):
            self._heights[cut_id] = height
        if not cut_ids or cut_ids[-1] != newest.cut.id or newest.cut.height != len(cut_ids):
            raise PeerError("snapshot: the cuts do not fit")
        if cut_range.size != len(cut_ids):
            raise PeerError("snapshot: the tree over the cuts does not fit")
        self.cut_range = cut_range
        self.cuts.resume(newest)
        self.endings = endings
        feeds = list(feeds)
        if len(feeds) != len(recoveries):
            raise PeerError("snapshot: a commitment to a recovery key is missing")
        for state, recovery in zip(feeds, recoveries, strict=True):
            self.commitments[state.author] = recovery
            self._chains[state.author] = Chain(state)
            status = FROZEN if state.author in frozen else LIVE
            self._certified.set(Head(state.author, state.next_seq - 1, state.head, state.ids.root, status))
            self._show(state.author)
        if self._certified.root() != newest.cut.heads_root:
            raise PeerError("snapshot: the heads do not fit the cut")
        return self
