"""What a set of entries says about versions and submissions, kept up to date entry by entry.

The ledger runs two folds: one over all entries that it sees, one over the final ones. The result depends on the set
of entries and grants only, never on the order in which they come (within a feed they come in order).

Lineage
 1. Grants count in order of their terms. A grant counts where its base is on the lineage, with the term and number
    that the grant names; what followed the base leaves the lineage. Before version 0 the base is the domain's id.
 2. The lineage goes on with the weights entry by the grant's trainer, of its term, that names the newest one as
    predecessor and has the next number. Of several such entries the one of lowest seq counts.
 3. Version 0 has the manifest and the hash of the whole that the genesis names.
 4. A version that ever stood on the lineage of some grant is legitimate: submissions made with it are judged.

Submissions
 5. An author's submissions are taken up in feed order. One that names weights which are not legitimate (yet) waits,
    and so do those after it.
 6. Counters run from 0 per (author, version): the first gap voids it and all that follows ("gap"); counters that
    were used already are void ("duplicate").
 7. The author's join must be covered by the cut that the weights anchor on, and it never goes back to an older
    version, else the submission is void ("ineligible"). One that announces more than the recipe allows is hard-rejected
    ("malformed").
 8. Of each due validator the verdict of lowest seq counts, if its draw is its signature over the submission's
    hash. The outcome that a majority of the due gave is the decision, with severity hard where a majority said so,
    and the reason that most of those gave (the first in the alphabet among equals). Where all have spoken without
    a majority the submission is void ("undecidable").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protocol.credit import PENDING, Account, Status, Tally
from protocol.domain import Domain
from protocol.entry import Entry
from protocol.quorum import CertifiedGrant, Grant
from protocol.records import Rollout, Step, Verdict, Weights
from protocol.rollout import max_bytes
from protocol.schedule import due_validators


class Rules(Protocol):
    """What a fold asks the ledger."""

    @property
    def domain(self) -> Domain:
        """The domain whose log this is."""

    @property
    def grants(self) -> Mapping[int, CertifiedGrant]:
        """The grants, by term."""

    def eligible(self, author: bytes, weights: Entry) -> bool:
        """Whether the author's join is covered by the cut that the weights anchor on."""

    def audience(self, weights: Entry) -> frozenset[bytes]:
        """The validators of this version."""

    def drawn(self, verdict: Entry, rollout: Rollout) -> bool:
        """Whether the verdict's draw is its author's signature over the submission's hash."""


@dataclass(slots=True)
class _Submission:
    entry: Entry
    rollout: Rollout
    counters: str | None
    early: list[Entry]
    due: tuple[bytes, ...] | None = None
    votes: dict[bytes, Entry] = field(default_factory=dict)
    status: Status = PENDING


class Fold:
    """The fold. Attributes are for reading only: ``lineage`` (weights entries, oldest first), ``legitimate`` (id →
    weights entry), ``decisions`` ((rollout entry, status), in the order in which they fell), ``undecided`` (id →
    rollout entry), ``restarts`` (how often it began anew, with a new ``decisions``)."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.restarts = -1
        self._entries: list[Entry] = []
        self._clear()

    def _clear(self) -> None:
        self.restarts += 1
        self.version = 0
        self.lineage: list[Entry] = []
        self.legitimate: dict[bytes, Entry] = {}
        self.decisions: list[tuple[Entry, Status]] = []
        self.undecided: dict[bytes, Entry] = {}
        self._positions: dict[bytes, int] = {}
        self._weights: dict[bytes, Entry] = {}
        self._slots: dict[tuple[bytes, int, int, bytes | None], Entry] = {}
        self._steps: dict[bytes, Entry] = {}
        self._granted = 0
        self._leading: Grant | None = None
        # The bases of grants that do not count while those are not on the lineage.
        self._passed_over: set[bytes] = set()
        self._submissions: dict[bytes, _Submission] = {}
        self._queues: dict[bytes, list[_Submission]] = {}
        self._cursors: dict[bytes, int] = {}
        self._newest_used: dict[bytes, tuple[int, int]] = {}
        self._waiting: dict[bytes, set[bytes]] = {}
        self._counters: dict[tuple[bytes, bytes], tuple[int, bool]] = {}
        self._early: dict[bytes, list[Entry]] = {}
        self._open: dict[bytes, dict[bytes, Entry]] = {}
        self._tallies: dict[bytes, Tally] = {}

    def restart(self, entries: Iterable[Entry]) -> None:
        """Begin anew with these entries."""
        self._clear()
        self._entries = list(entries)
        for entry in self._entries:
            if isinstance(entry.payload, Weights):
                self._register(entry, entry.payload)
        self._find_lineage()
        for entry in self._entries:
            self._take(entry)

    def add(self, entry: Entry) -> None:
        """Take one more entry; an author's entries come in order."""
        self._entries.append(entry)
        if isinstance(entry.payload, Weights):
            self._register(entry, entry.payload)
            self._extend(entry, entry.payload)
        else:
            self._take(entry)

    def refresh(self) -> None:
        """Take notice of new grants."""
        if len(self._rules.grants) != self._granted:
            self._find_lineage()

    def _take(self, entry: Entry) -> None:
        self.version += 1
        match entry.payload:
            case Step():
                self._steps[entry.id] = entry
            case Rollout() as rollout:
                self._add_rollout(entry, rollout)
            case Verdict() as verdict:
                submission = self._submissions.get(verdict.rollout)
                if submission is None:
                    self._early.setdefault(verdict.rollout, []).append(entry)
                elif submission.due is None:
                    submission.early.append(entry)
                else:
                    self._count(submission, entry, verdict)
            case _:
                pass

    # Lineage

    def _register(self, entry: Entry, weights: Weights) -> None:
        self.version += 1
        self._weights[entry.id] = entry
        model = self._rules.domain.model
        genesis = (model.manifest.hash, model.manifest.size, model.whole)
        if weights.number > 0 or (weights.manifest, weights.manifest_size, weights.whole) == genesis:
            self._slots.setdefault((entry.author, weights.term, weights.number, weights.predecessor), entry)

    def _extend(self, entry: Entry, weights: Weights) -> None:
        self.refresh()
        grant = self._rules.grants.get(weights.term)
        if grant is None or grant.grant.trainer != entry.author or entry.id in self.legitimate:
            return
        if grant.grant is self._leading:
            before = len(self.lineage)
            self._follow(self._leading, self.lineage, self.legitimate, self._positions)
            if any(made.id in self._passed_over for made in self.lineage[before:]):
                self._find_lineage()
            else:
                self._wake()
        else:
            self._find_lineage()

    def _find_lineage(self) -> None:
        self._granted = len(self._rules.grants)
        lineage: list[Entry] = []
        legitimate: dict[bytes, Entry] = {}
        positions: dict[bytes, int] = {}
        self._leading = None
        self._passed_over = set()
        for term in sorted(self._rules.grants):
            grant = self._rules.grants[term].grant
            keep = 0
            if grant.base != self._rules.domain.id:
                if grant.base not in positions:
                    self._passed_over.add(grant.base)
                    continue
                keep = positions[grant.base] + 1
                base = lineage[keep - 1].payload
                assert isinstance(base, Weights)
                if (base.term, base.number) != (grant.base_term, grant.base_number):
                    continue
            for entry in lineage[keep:]:
                del positions[entry.id]
            del lineage[keep:]
            self._leading = grant
            self._follow(grant, lineage, legitimate, positions)
        lost = self.legitimate.keys() - legitimate.keys()
        self.lineage, self.legitimate, self._positions = lineage, legitimate, positions
        self.version += 1
        if lost:
            # A grant whose base came late can overrule a later one; what was decided on the strength of that falls.
            self.restart(self._entries)
        else:
            self._wake()

    def _follow(
        self, grant: Grant, lineage: list[Entry], legitimate: dict[bytes, Entry], positions: dict[bytes, int]
    ) -> None:
        """Append to ``lineage`` what the grant's trainer made of its newest version."""
        while True:
            number, predecessor = (len(lineage), lineage[-1].id) if lineage else (0, None)
            entry = self._slots.get((grant.trainer, grant.term, number, predecessor))
            if entry is None:
                return
            positions[entry.id] = number
            lineage.append(entry)
            legitimate[entry.id] = entry

    def _wake(self) -> None:
        """Go on with the authors whose next submission waited for weights that are legitimate now."""
        for weights in [weights for weights in self._waiting if weights in self.legitimate]:
            for author in self._waiting.pop(weights, ()):
                self._advance(author)

    # Submissions

    def _add_rollout(self, entry: Entry, rollout: Rollout) -> None:
        slot = (entry.author, rollout.weights)
        expected, broken = self._counters.get(slot, (0, False))
        counters = None
        if broken or rollout.first_counter > expected:
            counters, broken = "gap", True
        elif rollout.first_counter < expected:
            counters = "duplicate"
        else:
            expected += rollout.groups
        self._counters[slot] = (expected, broken)
        submission = _Submission(entry, rollout, counters, self._early.pop(entry.id, []))
        self._submissions[entry.id] = submission
        self.undecided[entry.id] = entry
        self._tally(entry.author).pending += 1
        self._queues.setdefault(entry.author, []).append(submission)
        self._advance(entry.author)

    def _advance(self, author: bytes) -> None:
        queue = self._queues[author]
        cursor = self._cursors.get(author, 0)
        while cursor < len(queue):
            weights = self.legitimate.get(queue[cursor].rollout.weights)
            if weights is None:
                self._waiting.setdefault(queue[cursor].rollout.weights, set()).add(author)
                break
            self._take_up(queue[cursor], weights)
            cursor += 1
        self._cursors[author] = cursor

    def _take_up(self, submission: _Submission, weights: Entry) -> None:
        entry, rollout = submission.entry, submission.rollout
        assert isinstance(weights.payload, Weights)
        made_with = (weights.payload.term, weights.payload.number)
        newest_used = self._newest_used.get(entry.author, (0, 0))
        self._newest_used[entry.author] = max(made_with, newest_used)
        submission.due = ()
        if made_with < newest_used or not self._rules.eligible(entry.author, weights):
            self._decide(submission, Status("void", "soft", "ineligible"))
        elif submission.counters is not None:
            self._decide(submission, Status("void", "soft", submission.counters))
        elif self._oversized(rollout):
            self._decide(submission, Status("rejected", "hard", "malformed"))
        else:
            validators = self._rules.audience(weights)
            submission.due = due_validators(weights.id, entry.author, rollout.first_counter, validators)
            for validator in submission.due:
                self._open.setdefault(validator, {})[entry.id] = entry
            for verdict in submission.early:
                assert isinstance(verdict.payload, Verdict)
                self._count(submission, verdict, verdict.payload)
        submission.early = []

    def _oversized(self, rollout: Rollout) -> bool:
        recipe = self._rules.domain.recipe
        return (
            rollout.groups > recipe.groups_per_submission
            or rollout.responses != rollout.groups * recipe.group_size
            or rollout.tokens > rollout.responses * recipe.max_response_tokens
            or rollout.size > max_bytes(recipe)
        )

    def _count(self, submission: _Submission, entry: Entry, verdict: Verdict) -> None:
        due = submission.due or ()
        if entry.author not in due or entry.author in submission.votes:
            return
        if not self._rules.drawn(entry, submission.rollout):
            return
        submission.votes[entry.author] = entry
        self._open[entry.author].pop(submission.entry.id, None)
        if submission.status is not PENDING:
            self._tally(entry.author).audit(submission.status, submission.rollout, verdict)
            return
        status = decision([vote.payload for vote in submission.votes.values()], len(due))
        if status is not None:
            self._decide(submission, status)
            for validator, vote in submission.votes.items():
                assert isinstance(vote.payload, Verdict)
                self._tally(validator).audit(status, submission.rollout, vote.payload)

    def _decide(self, submission: _Submission, status: Status) -> None:
        submission.status = status
        del self.undecided[submission.entry.id]
        self.decisions.append((submission.entry, status))
        self._tally(submission.entry.author).decide(status, submission.rollout)

    def _tally(self, author: bytes) -> Tally:
        return self._tallies.setdefault(author, Tally())

    # Reading

    def position(self, weights: bytes) -> int | None:
        """The number of a version on the lineage, None for any other."""
        return self._positions.get(weights)

    def status(self, rollout: bytes) -> Status:
        """What was decided about the submission that this entry announces."""
        submission = self._submissions.get(rollout)
        return PENDING if submission is None else submission.status

    def due(self, rollout: bytes) -> tuple[bytes, ...]:
        """The validators that are due, none where the submission is refused without them or not taken up yet."""
        submission = self._submissions.get(rollout)
        return () if submission is None else submission.due or ()

    def votes(self, rollout: bytes) -> Mapping[bytes, Entry]:
        """The verdict entries that count, by validator."""
        submission = self._submissions.get(rollout)
        return {} if submission is None else submission.votes

    def open_for(self, validator: bytes) -> Iterable[Entry]:
        """The rollout entries that this validator is due to judge and has not judged."""
        return self._open.get(validator, {}).values()

    def next_counter(self, author: bytes, weights: bytes) -> int:
        """The counter with which the author's next submission of this version begins."""
        return self._counters.get((author, weights), (0, False))[0]

    def steps(self) -> list[Entry]:
        """The step entries that made the versions of the lineage, oldest first."""
        found = []
        for entry in self.lineage:
            step = self._step_of(entry)
            if step is not None:
                found.append(step)
        return found

    def reputation_of(self, author: bytes) -> int:
        """The author's reputation in micro."""
        return self._tallies.get(author, Tally()).account(0).reputation

    def accounts(self, authors: Iterable[bytes]) -> dict[bytes, Account]:
        """The accounts of these authors."""
        trained: Counter[bytes] = Counter()
        for step in self.steps():
            assert isinstance(step.payload, Step)
            trained[step.author] += step.payload.trained
        return {author: self._tallies.get(author, Tally()).account(trained[author]) for author in authors}

    def _step_of(self, entry: Entry) -> Entry | None:
        weights = entry.payload
        assert isinstance(weights, Weights)
        step = self._steps.get(weights.step) if weights.step is not None else None
        if step is None or step.author != entry.author:
            return None
        made = step.payload
        assert isinstance(made, Step)
        if (made.term, made.number, made.base) != (weights.term, weights.number, weights.predecessor):
            return None
        return step


def decision(verdicts: Sequence[object], due: int) -> Status | None:
    """What these counting verdicts of ``due`` validators decide, or None while they do not."""
    votes = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    outcomes = Counter(verdict.outcome for verdict in votes)
    majority = due // 2 + 1
    for outcome, count in outcomes.items():
        if count >= majority:
            agreeing = [verdict for verdict in votes if verdict.outcome == outcome]
            severity = "none" if outcome == "accepted" else "soft"
            if sum(verdict.severity == "hard" for verdict in agreeing) >= majority:
                severity = "hard"
            reasons = Counter(verdict.reason for verdict in agreeing)
            return Status(outcome, severity, min(reasons, key=lambda reason: (-reasons[reason], reason)))
    return Status("void", "soft", "undecidable") if len(votes) >= due else None
