"""What the log says: who takes part, which versions stand, what was decided about each submission, who earned what.

1. The ledger reads a replica and follows it: every query first takes notice of what the replica took since. It
   decides nothing itself; all nodes whose replicas agree get the same answers.
2. Versions follow the rules of ``protocol.credit.lineage``, submissions those of ``protocol.credit.fold``; "final"
   answers use final entries only, those that a cut covers, taken cut by cut.
3. The validators of a version are those who, in the cut that its entry anchors on, have a standing ``role``
   entry "validator", and are named then (by the genesis, or an amendment) or had in that cut the reputation that the
   policy asks for.
4. A node may infer with a version if its ``join`` is covered by the cut that the version's entry anchors on. So a
   version that anchors on the domain's id has no validators, and nobody may infer with it.
5. A node whose feed was closed or rebound (``protocol.log.recovery``) stands for nothing from that cut on; whoever goes
   on for it has its account.
6. What is final never changes, so the final fold never begins anew. Where a fork takes entries away that no cut
   covers, the live fold begins anew from the final one; so it does where so many entries became final since somebody
   last asked that to count them one by one would take longer.

Queries cost time in proportion to what is new, so they may be made many times a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from protocol.constants import MAX_UNJUDGED, MILLION
from protocol.credit.attendance import Attendance
from protocol.credit.fold import Closed, Fold
from protocol.credit.fold_state import copy_fold, fold_from_value, fold_to_value
from protocol.credit.history import History
from protocol.credit.lineage import Version
from protocol.credit.reputation import Account, reputation
from protocol.credit.sequential_test import NEWCOMER, Standing
from protocol.credit.submission_life import Decision, Life
from protocol.credit.verdict_draws import Draws
from protocol.domain import Domain
from protocol.errors import LocalError
from protocol.log.entry import Entry
from protocol.log.quorum import CertifiedCut, Cut, Grant
from protocol.log.replica import Replica
from protocol.records import Rollout, Verdict
from protocol.work.schedule import audit_share

BEHIND = 4096
"""Entries, of those that leave memory, that the live fold does not count one by one where it has not yet."""

MAX_AUDIENCES = 256


class Ledger:
    """The ledger over ``replica``. Ids and keys have 32 bytes; unknown ones get an empty answer, not an error."""

    def __init__(self, replica: Replica) -> None:
        if replica.cuts.lowest > 1:
            raise LocalError("a replica that has forgotten what is final needs the ledger of then")
        self.replica = replica
        self.generation = 0
        """How often the live fold began anew, because a fork took away what it had counted."""
        self._history = History()
        self._attendance = Attendance()
        self._live = Fold(self, live=True)
        self._final = Fold(self)
        self.draws = Draws()
        """What is known of verdicts' draws; whoever checks some elsewhere notes it."""
        self._audiences: dict[int, frozenset[bytes]] = {}
        # The number of grants that the final fold, and that the live one has taken notice of.
        self._granted = self._seen = 0
        self._cuts = 0
        self._cursor = 0
        self._rewrites = replica.rewrites
        # What cuts settled and the live fold has not taken over, and whether it has to begin anew.
        self._closed: list[Closed] = []
        self._stale = False
        # The seq of each author's next entry to become final.
        self._next: dict[bytes, int] = {}
        self._accounts: dict[bool, tuple[tuple[int, int, int, int], dict[bytes, Account]]] = {}
        self.final_entries = 0
        """How many entries cuts cover, as far as the ledger took notice."""
        self.forgotten = 0
        """How many of them have left memory."""
        self.summed_up = 0
        """How many they covered at the newest snapshot; for whoever takes snapshots."""
        self.update()

    # Snapshots

    def to_value(self) -> tuple[list[Any], list[Any], list[Any]]:
        """(history, attendance, final fold), ready for ``codec.encode``."""
        self.note_final()
        return self._history.to_value(), self._attendance.to_value(), fold_to_value(self._final)

    @classmethod
    def resume(cls, replica: Replica, history: Any, attendance: Any, fold: Any) -> Ledger:
        """A ledger over a replica that was just resumed, from the values that ``to_value`` gave then. Raises
        ``PeerError`` for values that do not fit."""
        self = cls(Replica(replica.domain))
        self.replica = replica
        self._history = History.from_value(history)
        self._attendance = Attendance.from_value(attendance)
        self._final = fold_from_value(fold, self)
        self._live = fold_from_value(fold, self, live=True)
        self._next = {author: head.seq + 1 for author, head in replica.certified.items()}
        self.final_entries = self.forgotten = self.summed_up = sum(self._next.values())
        self._cuts = len(replica.cuts)
        self._rewrites = replica.rewrites
        self._granted = self._seen = len(replica.grants)
        return self

    def forget(self) -> None:
        """Drop from memory what is final, with everything that follows from it taken notice of."""
        self.note_final()
        if self._stale or len(self.replica.arrivals) - self._cursor > BEHIND:
            self._stale = True
            self._closed.clear()
        else:
            self.update()
        self.replica.forget()
        self.forgotten = self.final_entries
        self._cursor = len(self.replica.arrivals)

    # Following the replica

    def update(self) -> None:
        """Take notice of whatever the replica took or dropped since the last time."""
        replica = self.replica
        self.note_final()
        if self._stale or self._rewrites != replica.rewrites:
            self._begin_anew()
            return
        arrived = len(replica.arrivals)
        if not self._closed and (self._cursor, self._seen) == (arrived, self._granted):
            return
        self._seen = self._granted
        self._live.refresh()
        for entry in islice(replica.arrivals, self._cursor, arrived):
            self._history.overlay(entry, self.replica.height(entry.anchor) or 0)
            self._live.add(entry)
        self._cursor = arrived
        for one in self._closed:
            self._live.adopt(one)
        self._closed.clear()

    def note_final(self) -> None:
        """Take notice of what became final since the last time."""
        replica = self.replica
        cuts = len(replica.cuts)
        if (self._cuts, self._granted) != (cuts, len(replica.grants)):
            self._granted = len(replica.grants)
            self._final.refresh()
            self._closed += [self._finalise(replica.cuts[index]) for index in range(self._cuts, cuts)]
            self._cuts = cuts

    def _begin_anew(self) -> None:
        """Make the live fold again, from the final one and what no cut covers."""
        self._rewrites, self._stale = self.replica.rewrites, False
        self._closed.clear()
        self._seen = self._granted
        self.generation += 1
        self._live = copy_fold(self._final, self)
        self._live.refresh()
        self._history.lift()
        for entry in self.replica.arrivals:
            if entry.seq >= self._next.get(entry.author, 0):
                self._history.overlay(entry, self.replica.height(entry.anchor) or 0)
                self._live.add(entry)
        self._cursor = len(self.replica.arrivals)

    def _finalise(self, certified: CertifiedCut) -> Closed:
        cut = certified.cut
        for head in cut.changes:
            first = self._next.get(head.author, 0)
            for entry in self.replica.entries(head.author, first, head.seq):
                if not isinstance(entry.payload, Rollout | Verdict):
                    self._history.add(entry, cut.height, self.replica.height(entry.anchor) or 0)
                    if self.replica.terms.voided(entry):
                        continue
                self._final.add(entry, cut.height)
            self.final_entries += head.seq + 1 - first
            self._next[head.author] = head.seq + 1
        closed = self._final.close(cut.height)
        self._note_absence(cut.height, closed)
        self._note_trust(cut)
        return closed

    def _note_absence(self, height: int, closed: Closed) -> None:
        """Note who lost its standing with a cut: electors heard nothing of it, or it left verdicts to others."""
        history = self._history
        for author in self.replica.absences.at(height):
            history.bar(author, height, height)
        for one in closed.attended:
            for validator in one.due:
                if self._attendance.note(one, validator, history.stands_since(validator)):
                    history.bar(validator, height, height + self._attendance.returns(validator))

    def _note_trust(self, cut: Cut) -> None:
        """Note in the history how far everybody is trusted after a cut, whose entries the final fold has taken and
        closed: the standing of everybody about whose submissions it decided or whose feed it ended, and, where the
        policy asks validators for any, the reputations of those who stand as validators, or did. What another author
        did who goes on for it (``protocol.log.recovery``) counts for whoever owns it in that cut."""
        history, endings, touched, height = self._history, self.replica.endings, self._final.touched, cut.height
        ended = endings.at(height)
        for author in ended:
            history.end(author, height)
        for author in {endings.owner(author, height) for author in (*touched, *ended)}:
            history.judge(author, height, self._final.standing([author, *endings.lost(author, height)]))
        if self.domain.policy.validator_reputation > 0:
            touched.update((head.author for head in cut.changes), ended)
            for author in {endings.owner(author, height) for author in touched}:
                if history.tracked(author) or history.role(author, height) == "validator":
                    account = self._final.account([author, *endings.lost(author, height)])
                    history.trust(author, height, account.reputation)
        touched.clear()

    def fold(self, final: bool = False) -> Fold:
        """The final fold, or the live one, with notice taken of everything. For reading only."""
        self.update()
        return self._final if final else self._live

    # What the folds ask

    @property
    def domain(self) -> Domain:
        """The domain whose log this is."""
        return self.replica.domain

    def eligible(self, author: bytes, height: int) -> bool:
        """Whether the author's join is covered by the cut of this height."""
        return self._history.joined_by(author, height)

    def audience(self, height: int) -> frozenset[bytes]:
        """The validators of the versions that anchor on the cut of this height."""
        found = self._audiences.get(height)
        if found is None:
            named, asked = self.replica.amendments.validators_at(height), self.domain.policy.validator_reputation
            if len(self._audiences) >= MAX_AUDIENCES:
                self._audiences.clear()
            found = self._audiences[height] = frozenset(
                author
                for author in self._history.validators(height)
                if author in named or self._history.reputation(author, height) >= asked
            )
        return found

    def drawn(self, verdict: Entry, rollout: Rollout) -> bool:
        """Whether a verdict's draw is its author's signature over the submission."""
        return self.draws.right(verdict, rollout)

    def share(self, author: bytes, height: int) -> int:
        """The share (micro) of the author's submissions that is replayed where the version anchors on this cut."""
        return audit_share(self._history.standing(author, height).tier, self.domain.policy.audit_share)

    def announced(self, rollout_id: bytes) -> Rollout | None:
        """The payload of a rollout entry whose submission is kept. Does not take notice of anything new."""
        found = self._final.submissions.get(rollout_id) or self._live.submissions.get(rollout_id)
        return None if found is None else found.rollout

    # Nodes

    def authors(self) -> list[bytes]:
        """Everybody who joined, ascending."""
        self.update()
        return sorted(self._history.authors())

    def joined(self, author: bytes) -> bool:
        """Whether the author's join is held."""
        self.update()
        return self._history.name(author) is not None

    def joined_at(self, author: bytes, cut_id: bytes) -> bool:
        """Whether the cut ``cut_id`` covers the author's join."""
        self.update()
        height = self.replica.height(cut_id)
        return height is not None and self.eligible(author, height)

    def name(self, author: bytes) -> str:
        """The name that the author gave itself; empty for an unknown one."""
        self.update()
        return self._history.name(author) or ""

    def standing_role(self, author: bytes, at_cut: bytes | None = None) -> str:
        """The author's standing role, in the cut ``at_cut`` or, where that is None, in all that is held."""
        self.update()
        if at_cut is None and author in self.replica.endings.ended:
            return "none"
        return self._history.role(author, None if at_cut is None else self.replica.height(at_cut) or 0)

    # Versions

    def grant(self) -> Grant | None:
        """The grant of the highest term."""
        grants = self.replica.grants
        return grants[max(grants)].grant if grants else None

    def lineage(self, final: bool = False) -> Sequence[Entry]:
        """The weights entries of the valid chain, oldest first, as far as they are kept
        (``protocol.credit.lineage.KEPT``)."""
        return self.fold(final).lineage.entries()

    def newest_weights(self, final: bool = False) -> Entry | None:
        """The last entry of the lineage."""
        lineage = self.fold(final).lineage
        return lineage.entry(lineage.line[-1]) if lineage.line else None

    def weights(self, weights_id: bytes) -> Entry | None:
        """The weights entry of this id, if it stands on the lineage or once stood there, and is kept."""
        return self.fold().lineage.entry(weights_id)

    def version_number(self, weights_id: bytes) -> int | None:
        """The number of a version on the lineage; None for anything else."""
        return self.fold().lineage.position(weights_id)

    def validators_of(self, weights_id: bytes) -> frozenset[bytes]:
        """The validators of a version."""
        version = self._version(weights_id)
        return frozenset() if version is None else self.audience(version.anchor_height)

    def may_validate(self, author: bytes) -> bool:
        """Whether verdicts of this member would count for versions to come, once it stands as a validator."""
        if not self.member(author):
            return False
        if author in self.replica.amendments.validators_at(len(self.replica.cuts) + 1):
            return True
        account = self.accounts(final=True).get(author)
        return (reputation(0, 0) if account is None else account.reputation) >= self.domain.policy.validator_reputation

    def may_train(self, author: bytes) -> bool:
        """Whether a term may be granted to this member: it is named, or its accepted work gives it standing."""
        if not self.member(author):
            return False
        rules, height = self.replica.amendments, len(self.replica.cuts) + 1
        offices = (rules.electors_at, rules.validators_at, rules.trainers_at)
        if author == self.domain.creator or any(author in named(height) for named in offices):
            return True
        account = self.accounts(final=True).get(author)
        asked = max(self.domain.policy.validator_reputation, reputation(0, 0))
        return account is not None and account.accepted > 0 and account.reputation >= asked

    def member(self, author: bytes) -> bool:
        """Whether a cut admitted this node, or the genesis or an amendment names it, and its feed goes on."""
        replica = self.replica
        if author not in replica.admissions.admitted or replica.frozen(author):
            return False
        return author in self.domain.named or self.joined(author)

    def returns_at(self, author: bytes) -> int:
        """The height of the first cut on which a ``role`` entry of the author may anchor to count; 0 for any."""
        self.note_final()
        return self._history.barred(author)

    # What the replica asks (``protocol.log.budget.Work``)

    def worked(self, author: bytes) -> int:
        """Its accepted submissions by the newest cut, and up to ``MAX_UNJUDGED`` that nobody judged yet."""
        self.note_final()
        tally = self._final.tallies.get(author)
        return 0 if tally is None else tally.accepted + min(tally.pending, MAX_UNJUDGED)

    def judges(self, author: bytes) -> bool:
        """Whether it is a validator of versions that anchor on the newest cut."""
        self.note_final()
        return author in self.audience(self._cuts)

    def may_infer(self, author: bytes, weights_id: bytes) -> bool:
        """Whether submissions of this author and version count."""
        version = self._version(weights_id)
        return version is not None and self.eligible(author, version.anchor_height)

    def _version(self, weights_id: bytes) -> Version | None:
        return self.fold().lineage.versions.get(weights_id)

    def steps(self, final: bool = False) -> list[Entry]:
        """The step entries that made the versions of the lineage, oldest first, as far as they are kept."""
        return self.fold(final).lineage.steps()

    def step_count(self) -> int:
        """How many steps made the versions of the lineage."""
        return self.fold().lineage.step_count

    # Submissions

    def due(self, rollout: Entry) -> tuple[bytes, ...]:
        """The at most three validators that are due to audit the submission; none where it is refused without
        them, where its version has no validators, or while its version is unknown."""
        life = self._life(rollout.id)
        return () if life is None else life.due

    def audited_share(self, rollout: Entry) -> int:
        """The share (micro) of the submission's groups that each of the due is to replay."""
        life = self._life(rollout.id)
        return MILLION if life is None else life.share

    def standing(self, author: bytes, weights_id: bytes) -> Standing:
        """What the log says of an author, in the cut that the version anchors on: for who judges what it made."""
        version = self._version(weights_id)
        return NEWCOMER if version is None else self._history.standing(author, version.anchor_height)

    def standing_at(self, author: bytes, height: int) -> Standing:
        """What the log says of an author in the cut of this height; of long ago, the oldest that is kept."""
        self.update()
        return self._history.standing(author, height)

    def verdicts(self, rollout_id: bytes) -> Mapping[bytes, Entry]:
        """The verdict entries that count for a submission, by validator."""
        life = self._life(rollout_id)
        return {} if life is None else life.votes

    def decisions(self, start: int = 0) -> list[tuple[Entry, Decision]]:
        """(rollout entry, status) in the order in which decisions fell here, from index ``start`` on, as far as they
        are kept (``protocol.credit.fold.KEPT_DECISIONS``). Indices hold until ``generation`` changes."""
        live = self.fold()
        return list(islice(live.decisions, max(start - live.dropped, 0), None))

    def decided(self) -> int:
        """The index of the next decision."""
        live = self.fold()
        return live.dropped + len(live.decisions)

    def pending_for(self, validator: bytes) -> list[Entry]:
        """The rollout entries of versions on the lineage that this validator is due to judge and has not judged."""
        return self._on_lineage(self.fold().open_for(validator))

    def outstanding(self) -> list[Entry]:
        """The rollout entries of versions on the lineage that are undecided and have due validators."""
        live = self.fold()
        return [entry for entry in self._on_lineage(live.undecided.values()) if live.submissions[entry.id].due]

    def next_counter(self, author: bytes, weights_id: bytes) -> int:
        """The counter with which the author's next submission of this version begins."""
        return self.fold().next_counter(author, weights_id)

    # Accounts

    def accounts(self, final: bool = False) -> dict[bytes, Account]:
        """The account of everybody whose join is held (or final), ascending by author. See
        ``protocol.credit.reputation``."""
        fold = self.fold(final)
        authors = self._history.names if final else self._history.authors()
        endings = self.replica.endings
        state = (self.generation, fold.version, len(list(authors)), endings.changes)
        known = self._accounts.get(final)
        if known is None or known[0] != state:
            accounts = {
                author: fold.account([author, *endings.lost(author)] if endings.owner(author) == author else ())
                for author in sorted(authors)
            }
            known = self._accounts[final] = (state, accounts)
        return known[1]

    def _life(self, rollout_id: bytes) -> Life | None:
        return self.fold().submissions.get(rollout_id)

    def _on_lineage(self, entries: Iterable[Entry]) -> list[Entry]:
        position = self._live.lineage.position
        return [
            entry
            for entry in entries
            if isinstance(entry.payload, Rollout) and position(entry.payload.weights) is not None
        ]
