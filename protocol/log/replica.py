"""One domain's log in memory: which entries, cuts, grants and fork proofs a node holds, and what follows from them.

1. Objects may come in any order. What cannot be judged yet is answered with what is missing, not stored, and handed
   in again later; once everything was taken, the state is the same whatever the order was.
2. Which entries are in the log, and where forks end a feed, is the business of ``protocol.log.branches``.
3. A cut is taken when the cut before it and every entry that it covers are held, every row moves forward on the
   branch held, and the heads root recomputed from its rows is the one that it names.
4. Grants are kept by term; what a grant means for the weights is the ledger's business. One is taken when its anchor
   is held.
5. Cuts and grants are certified by the electors in force: for a cut those of its height, for a grant those of the
   cut after its anchor.
6. A weights entry is taken where the grant of its author's term is held, or where it can make no version any more: one
   outside its author's term makes nothing wait, and nothing follows it. A cut covers no other.
7. A close or rebind (``protocol.log.recovery``) ends its target's feed at the certified head of the cut that covers it:
   the feed is shown as frozen from then on, and later cuts do nothing with its row but freeze it.

8. A cut covers no more of an author's feed than its budget pays for (``protocol.log.budget``), and an entry that it
   would not pay for today is not taken. It admits keys (``protocol.log.admission``) and ends the standing of those who
   are gone (``protocol.log.absence``).

Of what the newest cut covers a replica needs no entries, only the state of each feed there: ``forget`` drops them. The
caller has stored them, and looks there for what is not in memory (Outcome.BELOW).

Nothing here verifies signatures: parsers did. The replica neither reads nor writes storage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256

from protocol import codec
from protocol.domain import Domain, Thresholds
from protocol.errors import PeerError
from protocol.log.absence import Absences
from protocol.log.amendment import Amendments
from protocol.log.branches import Branches, Outcome
from protocol.log.budget import UNBOUNDED, Budgets, Work, affordable, costs
from protocol.log.chain import Chain, Cuts, FeedState
from protocol.log.endings import Endings
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.grants import Terms
from protocol.log.heads import FROZEN, LIVE, MAX_RANGE, Head, RangeRequest
from protocol.log.merkle import EMPTY_RANGE, CompactRange
from protocol.log.quorum import MAX_CHANGES, CertifiedCut, CertifiedGrant, Cut, check_quorum, moves
from protocol.records import Amend, Join, Weights


class Replica(Branches):
    """The replica of ``domain``'s log. Dictionaries and lists that are attributes are for reading only.

    ``cuts`` are in order of height; ``grants`` maps terms.
    """

    def __init__(self, domain: Domain) -> None:
        super().__init__(domain)
        self.amendments = Amendments(domain)
        self.absences = Absences(domain.id)
        self.budgets = Budgets(domain.admission.budget)
        self.cuts = Cuts()
        self.terms = Terms()
        self._side: bytes | None = None
        # The cut whose heads root was found right last: one that waits for entries is judged again and again.
        self._fits: bytes | None = None
        self.cut_range = EMPTY_RANGE
        """The compact range over the bodies of all cuts (``protocol.log.checkpoint``)."""
        self.commitments: dict[bytes, bytes] = {}
        """What each final join says of the author's recovery key."""
        # For each cut in memory, where the feeds that it moves were final up to.
        self._before: dict[bytes, dict[bytes, int]] = {}

    # Adding. ``work`` is what authors did by the newest cut: the ledger over this replica.

    def add_entry(self, entry: Entry, work: Work = UNBOUNDED) -> Outcome:
        """Take a parsed entry; see ``Branches.add_entry``."""
        if entry.seq == self.next_for(entry.author) and entry.anchor in self._heights:
            obstacle = self.obstacle([entry], work)
            if obstacle is not None:
                return obstacle
        return super().add_entry(entry)

    def obstacle(self, entries: Sequence[Entry], work: Work) -> Outcome | None:
        """What keeps an author's next entries, whose anchors are held, from being taken: a missing grant, or a spent
        budget."""
        for entry in entries:
            if isinstance(entry.payload, Weights):
                grant = self.grants.get(entry.payload.term)
                own = grant is not None and grant.grant.trainer == entry.author
                if not own and not self._makes_nothing(entry):
                    return Outcome.MISSING_GRANT
        author = entries[0].author
        left, first = self._left(author, work), self.certified_head(author) + 1
        if self.next_for(author) - first + len(entries) <= left:
            return None
        waiting = [*self.entries(author, first), *entries]
        afforded = affordable(waiting, left, self.terms, work)
        return None if afforded == len(waiting) else Outcome.OVER_BUDGET

    def _left(self, author: bytes, work: Work) -> int:
        cuts = len(self.cuts)
        elector = author in self.electors_at(cuts + 1)
        return self.budgets.left(author, cuts - self.admissions.admitted.get(author, 0), work, elector=elector)

    def add_fork(self, proof: ForkProof) -> Outcome:
        """Take a verified fork proof: ADDED where it is the first of its author or names a lower place."""
        outcome = super().add_fork(proof)
        if outcome is Outcome.ADDED:
            self._side = None
        return outcome

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

    def add_cut(self, certified: CertifiedCut, work: Work = UNBOUNDED) -> Outcome:
        """Take a verified cut, whole or not at all. Raises ``PeerError`` where it contradicts what is certified."""
        cut = certified.cut
        rebuilt: list[tuple[bytes, Chain]] = []
        if cut.domain == self.domain.id and cut.height == len(self.cuts) + 1:
            check_quorum(certified.votes, self.electors_at(cut.height), "cut")
        outcome = self.judge_cut(cut, rebuilt, work)
        if outcome is not Outcome.ADDED:
            if outcome is Outcome.MISSING_ENTRIES:
                self._aside.want(cut.changes)
            return outcome
        self._aside.satisfied()
        for author, chain in rebuilt:
            self._replace(author, chain)
        covered: list[Entry] = []
        for head in cut.changes:
            new = self._chains[head.author].slice(self.certified_head(head.author) + 1, head.seq)
            self.budgets.cover(head.author, sum(costs(entry, self.terms, work) for entry in new))
            covered += new
        amends = [entry for entry in covered if isinstance(entry.payload, Amend)]
        versions = [(entry, self._rules_of(entry)) for entry in self.versions_in(cut)]
        self.terms.cover(versions, self.amendments.number_at(cut.height))
        amended = self.amendments.cover(cut.height, amends)
        if amended and self.terms.change_rules():
            self.rewrites += 1
            self._side = None
        self._heights[cut.id] = cut.height
        self.cuts.append(certified)
        self.cut_range = self.cut_range.append(cut.body)
        self._before[cut.id] = {head.author: self.certified_head(head.author) + 1 for head in cut.changes}
        for head in cut.changes:
            self._certified.set(head)
            self._chains[head.author].cut(head.seq, self._heights)
            if head.status == FROZEN or head.author in self.forks:
                self._freeze(head.author)
        self._end(cut.height, covered)
        electors = self.electors_at(cut.height)
        self.admissions.cover(cut.height, cut.tickets, covered, electors)
        self.absences.cover(cut.height, covered, electors, self.height)
        if amended:
            rules = self.amendments
            for keys in (rules.electors_at, rules.validators_at, rules.trainers_at):
                self.admissions.name(cut.height, keys(cut.height + 1))
        return Outcome.ADDED

    def _end(self, height: int, covered: list[Entry]) -> None:
        """End the feeds that the entries covered newly by the cut of ``height`` close or rebind."""
        for entry in covered:
            if isinstance(entry.payload, Join):
                self.commitments[entry.author] = entry.payload.recovery
        for author in self.endings.cover(height, covered, self.commitments.get):
            self._freeze(author)

    def judge_cut(self, cut: Cut, rebuilt: list[tuple[bytes, Chain]] | None = None, work: Work = UNBOUNDED) -> Outcome:
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
            self.admissions.check(cut.tickets, cut.height, self.height)
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
            new = chain.slice(0 if old is None else old.seq + 1, head.seq)
            if affordable(new, self._left(head.author, work), self.terms, work) < len(new):
                raise PeerError("cut: it covers more of a feed than its author's budget pays for")
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

    def side_digest(self) -> bytes:
        """32 bytes that are equal where two replicas hold the same grants and know the same forks."""
        if self._side is None:
            # Kept, since every peer may ask for it, and anybody may make forks.
            grants = sorted((term, certified.grant.id) for term, certified in self.grants.items())
            forks = sorted((author, proof.seq) for author, proof in self.forks.items())
            self._side = sha256(codec.encode([grants, forks])).digest()
        return self._side

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

    def reportable(self, ends: Mapping[bytes, int] | None = None, work: Work = UNBOUNDED) -> list[Head]:
        """The rows of an elector's report: ``uncovered``, each feed only up to a version whose grant is missing, as far
        as its author's budget goes, and to before the seq that ``ends`` names for the author."""
        heads = []
        for author, head in self.heads.items():
            certified = self.certified_head(author)
            end = self._ungranted(self._chains[author], certified) - 1
            if head.seq > certified:
                waiting = self.entries(author, certified + 1)
                end = min(end, certified + affordable(waiting, self._left(author, work), self.terms, work))
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

    def missing_for_head(self, head: Head) -> RangeRequest | None:
        """What to ask for so that a cut with this row can be taken, at most ``MAX_RANGE`` entries; None where they are
        held."""
        if self.id_at(head.author, head.seq) == head.entry_id:
            return None
        first = self.next_for(head.author)
        if head.seq < first or self.frozen(head.author):
            # The cut is on another branch, or past the end of the visible one: both part above what is certified.
            first = self.certified_head(head.author) + 1
            last = head.seq
            for held in self._aside.branch(head):
                last = held.seq - 1
            # Half a range, so that its end is in an answer whatever the entries' size.
            first = max(first, last - MAX_RANGE // 2 + 1)
        else:
            last = min(head.seq, first + MAX_RANGE - 1)
        return RangeRequest(head.author, first, last) if first <= last else None

    def _ungranted(self, chain: Chain, after: int) -> int:
        """The first seq above ``after`` of a version whose term's grant is missing; beyond the end where none is."""
        for seq, term in chain.versions[bisect_left(chain.versions, (after + 1,)) :]:
            if term not in self.grants and not self._void(chain, seq):
                return seq
        return max(chain.next_seq, after + 1)

    def _void(self, chain: Chain, seq: int) -> bool:
        entry = chain.at(seq)
        return entry is not None and self._makes_nothing(entry)

    def _makes_nothing(self, entry: Entry) -> bool:
        """Whether a weights entry needs no grant, for the next cut makes nothing of it."""
        return self.terms.void(entry, self._rules_of(entry), self.amendments.number_at(len(self.cuts) + 1))

    def _rules_of(self, entry: Entry) -> int:
        """The number of the rules that an entry anchors on: those of the cut after its anchor."""
        return self.amendments.number_at(self._heights[entry.anchor] + 1)

    # Memory

    def forget(self) -> None:
        """Drop from memory what the newest cut covers, and older cuts: what follows from them stays."""
        super().forget()
        self.cuts.forget(len(self.cuts))
        self._before.clear()
        self.terms.forget()
        self.absences.forget()

    def cut_ids(self) -> list[bytes]:
        """The ids of all cuts, in order of height."""
        return list(self._heights)[1:]

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
            self._stale.add(state.author)
        if self._certified.root() != newest.cut.heads_root:
            raise PeerError("snapshot: the heads do not fit the cut")
        return self
