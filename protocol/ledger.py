"""What the log says: who takes part, which versions stand, what was decided about each submission, who earned what.

1. The ledger reads a replica and follows it: every query first takes notice of what the replica took since. It
   decides nothing itself; all nodes whose replicas agree get the same answers.
2. Versions and submissions follow the rules of ``protocol.fold``; "final" answers use final entries only, those that a
   cut covers.
3. The validators of a version are those who, in the cut that its entry anchors on, have a standing ``role``
   entry "validator", and are named in the genesis or had in that cut the reputation that the policy asks for.
4. A node may infer with a version if its ``join`` is covered by the cut that the version's entry anchors on. So a
   version that anchors on the domain's id has no validators, and nobody may infer with it.
5. A node's standing role is that of its newest ``role`` entry; after ``join`` or ``leave`` it is "none".

Queries cost time in proportion to what is new, so they may be made many times a second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from protocol import identity
from protocol.credit import Account, Status, reputation
from protocol.domain import Domain
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.fold import Fold
from protocol.quorum import CertifiedGrant, Grant
from protocol.records import Join, Leave, Role, Rollout, Verdict
from protocol.replica import Replica


class Ledger:
    """The ledger over ``replica``. Ids and keys have 32 bytes; unknown ones get an empty answer, not an error."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._live = Fold(self)
        self._final = Fold(self)
        self._drawn: dict[bytes, bool] = {}
        # The reputations in each cut of those who stood as validators in it, where the policy asks for any.
        self._reputations: dict[bytes, dict[bytes, int]] = {}
        self._audiences: dict[bytes, frozenset[bytes]] = {}
        self._granted = 0
        self._cuts = 0
        self._accounts: dict[bool, tuple[tuple[int, int, int], dict[bytes, Account]]] = {}
        self._restart_live = False
        self._read_from_the_start()
        self.update()

    # Following the replica

    def on_entry(self, entry: Entry) -> None:
        """Take notice of an entry that the replica added. Optional: queries do so as well."""
        self.update()

    def update(self) -> None:
        """Take notice of whatever the replica took or dropped since the last time."""
        replica = self.replica
        if self._rewrites != replica.rewrites:
            self._read_from_the_start()
            self._restart_live = True
        fresh = replica.arrivals[self._cursor :]
        news = bool(fresh) or self._restart_live
        if not news and self._cuts == len(replica.cuts) and self._granted == len(replica.grants):
            return
        self._cursor += len(fresh)
        for entry in fresh:
            self._enrol(entry)
        if self._granted != len(replica.grants):
            self._granted = len(replica.grants)
            if replica.domain.policy.validator_reputation > 0:
                # Reputations of the past depend on the lineage, which a grant that comes late can change.
                self._cuts = 0
                self._reputations.clear()
                self._audiences.clear()
                self._final.restart(())
                self._restart_live = True
            self._final.refresh()
        while self._cuts < len(replica.cuts):
            self._finalise(self._cuts)
            self._cuts += 1
        if self._restart_live:
            self._restart_live = False
            self._live.restart(replica.arrivals)
        else:
            self._live.refresh()
            for entry in fresh:
                self._live.add(entry)

    def _read_from_the_start(self) -> None:
        self._rewrites = self.replica.rewrites
        self._cursor = 0
        self._joins: dict[bytes, Entry] = {}
        self._roles: dict[bytes, tuple[list[int], list[str]]] = {}

    def _enrol(self, entry: Entry) -> None:
        match entry.payload:
            case Join():
                self._joins[entry.author] = entry
            case Role(role):
                seqs, roles = self._roles.setdefault(entry.author, ([], []))
                seqs.append(entry.seq)
                roles.append(role)
            case Leave():
                seqs, roles = self._roles.setdefault(entry.author, ([], []))
                seqs.append(entry.seq)
                roles.append("none")
            case _:
                pass

    def _finalise(self, index: int) -> None:
        cut = self.replica.cuts[index].cut
        for head in cut.changes:
            first = self.replica.covered_at(cut.prev, head.author) + 1
            for entry in self.replica.entries(head.author, first, head.seq):
                self._final.add(entry)
        if self.domain.policy.validator_reputation > 0:
            self._reputations[cut.id] = {
                author: self._final.reputation_of(author)
                for author in self._roles
                if self._role_at(author, cut.id) == "validator"
            }

    # What the folds ask

    @property
    def domain(self) -> Domain:
        """The domain whose log this is."""
        return self.replica.domain

    @property
    def grants(self) -> Mapping[int, CertifiedGrant]:
        """The grants, by term."""
        return self.replica.grants

    def eligible(self, author: bytes, weights: Entry) -> bool:
        """Whether the author's join is covered by the cut that this weights entry anchors on."""
        return self.replica.covered_at(weights.anchor, author) >= 0

    def audience(self, weights: Entry) -> frozenset[bytes]:
        """The validators of the version that this weights entry names."""
        found = self._audiences.get(weights.id)
        if found is None:
            named, asked = self.domain.validators, self.domain.policy.validator_reputation
            reputations = self._reputations.get(weights.anchor, {})
            found = self._audiences[weights.id] = frozenset(
                author
                for author in self._roles
                if self._role_at(author, weights.anchor) == "validator"
                and (author in named or reputations.get(author, 0) >= asked)
            )
        return found

    def drawn(self, verdict: Entry, rollout: Rollout) -> bool:
        """Whether a verdict's draw is its author's signature over the submission's hash."""
        found = self._drawn.get(verdict.id)
        if found is None:
            assert isinstance(verdict.payload, Verdict)
            try:
                identity.verify(verdict.author, identity.DRAW, rollout.submission, verdict.payload.draw, "draw")
                found = True
            except PeerError:
                found = False
            self._drawn[verdict.id] = found
        return found

    # Nodes

    def authors(self) -> list[bytes]:
        """Everybody who joined, ascending."""
        self.update()
        return sorted(self._joins)

    def joined(self, author: bytes) -> bool:
        """Whether the author's join is held."""
        self.update()
        return author in self._joins

    def name(self, author: bytes) -> str:
        """The name that the author gave itself; empty for an unknown one."""
        self.update()
        join = self._joins.get(author)
        return join.payload.name if join is not None and isinstance(join.payload, Join) else ""

    def standing_role(self, author: bytes, at_cut: bytes | None = None) -> str:
        """The author's standing role, in the cut ``at_cut`` or, where that is None, in all that is held."""
        self.update()
        return self._role_at(author, at_cut)

    def _role_at(self, author: bytes, at_cut: bytes | None) -> str:
        seqs, roles = self._roles.get(author, ([], []))
        place = len(seqs) if at_cut is None else bisect_right(seqs, self.replica.covered_at(at_cut, author))
        return roles[place - 1] if place else "none"

    # Versions

    def grant(self) -> Grant | None:
        """The grant of the highest term."""
        return self.grants[max(self.grants)].grant if self.grants else None

    def lineage(self, final: bool = False) -> Sequence[Entry]:
        """The weights entries of the valid chain, oldest first; index and version number are the same."""
        return self._fold(final).lineage

    def newest_weights(self, final: bool = False) -> Entry | None:
        """The last entry of the lineage."""
        lineage = self._fold(final).lineage
        return lineage[-1] if lineage else None

    def weights(self, weights_id: bytes) -> Entry | None:
        """The weights entry of this id, if it stands on the lineage or once stood there."""
        return self._fold(False).legitimate.get(weights_id)

    def version_number(self, weights_id: bytes) -> int | None:
        """The number of a version on the lineage; None for anything else."""
        return self._fold(False).position(weights_id)

    def validators_of(self, weights_id: bytes) -> frozenset[bytes]:
        """The validators of a version."""
        entry = self.weights(weights_id)
        return frozenset() if entry is None else self.audience(entry)

    def may_validate(self, author: bytes) -> bool:
        """Whether verdicts of this author would count for versions to come, once it stands as a validator."""
        if author in self.domain.validators:
            return True
        account = self.accounts(final=True).get(author)
        return (reputation(0, 0) if account is None else account.reputation) >= self.domain.policy.validator_reputation

    def may_infer(self, author: bytes, weights_id: bytes) -> bool:
        """Whether submissions of this author and version count."""
        entry = self.weights(weights_id)
        return entry is not None and self.eligible(author, entry)

    def steps(self, final: bool = False) -> list[Entry]:
        """The step entries that made the versions of the lineage, oldest first."""
        return self._fold(final).steps()

    # Submissions

    def due(self, rollout: Entry) -> tuple[bytes, ...]:
        """The at most three validators that are due to audit the submission; none where it is refused without
        them, where its version has no validators, or while its version is unknown."""
        return self._fold(False).due(rollout.id)

    def rollout_status(self, rollout_id: bytes, final: bool = False) -> Status:
        """What was decided about a submission; "pending" for an unknown one."""
        return self._fold(final).status(rollout_id)

    def verdicts(self, rollout_id: bytes) -> Mapping[bytes, Entry]:
        """The verdict entries that count for a submission, by validator."""
        return self._fold(False).votes(rollout_id)

    def decisions(self, start: int = 0) -> list[tuple[Entry, Status]]:
        """(rollout entry, status) in the order in which decisions fell here, from index ``start`` on. Indices hold
        until ``generation`` changes."""
        return self._fold(False).decisions[start:]

    @property
    def generation(self) -> int:
        """How often the ledger began anew, because a fork or a late grant took away what it had counted."""
        return self._fold(False).restarts

    def pending_for(self, validator: bytes) -> list[Entry]:
        """The rollout entries of versions on the lineage that this validator is due to judge and has not judged."""
        return self._on_lineage(self._fold(False).open_for(validator))

    def outstanding(self) -> list[Entry]:
        """The rollout entries of versions on the lineage that are undecided and have due validators."""
        live = self._fold(False)
        return [entry for entry in self._on_lineage(live.undecided.values()) if live.due(entry.id)]

    def next_counter(self, author: bytes, weights_id: bytes) -> int:
        """The counter with which the author's next submission of this version begins."""
        return self._fold(False).next_counter(author, weights_id)

    # Accounts

    def accounts(self, final: bool = False) -> dict[bytes, Account]:
        """The account of everybody whose join is held (or final), ascending by author. See ``protocol.credit``."""
        fold = self._fold(final)
        state = (fold.restarts, fold.version, len(self._joins) if not final else len(self.replica.certified))
        known = self._accounts.get(final)
        if known is None or known[0] != state:
            authors = sorted(self.replica.certified if final else self._joins)
            known = self._accounts[final] = (state, fold.accounts(authors))
        return known[1]

    def _fold(self, final: bool) -> Fold:
        self.update()
        return self._final if final else self._live

    def _on_lineage(self, entries: Iterable[Entry]) -> list[Entry]:
        return [
            entry
            for entry in entries
            if isinstance(entry.payload, Rollout) and self._live.position(entry.payload.weights) is not None
        ]
