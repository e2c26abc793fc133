"""What was decided about each submission, and what everybody's work adds up to, kept up to date entry by entry.

The ledger runs two folds: a live one over all entries that it sees, and a final one over those that cuts cover, cut by
cut. Which versions there are is the business of ``protocol.credit.lineage``.

1. An author's submissions are taken up in feed order. One that names weights which are not legitimate (yet) waits,
   and so do those after it.
2. What decides about a submission taken by itself, its counters, its size and its verdicts, says
   ``protocol.credit.decision``.
3. The author's join must be covered by the cut that the weights anchor on, and it never goes back to an older
   version, else the submission is void ("ineligible").
4. Of each due validator the verdict of lowest seq counts, if its draw is its signature over the submission.
5. With the cut ``VERDICT_CUTS`` above the one that made it final a submission is closed. If it is undecided, it lapses.
   Verdicts that become final later count for nothing, and so do those that were final for ``VERDICT_CUTS`` cuts before
   their submission was.
6. What the final fold decided stands: the live one, which may have seen verdicts in another order, adopts it.

The fold forgets what nothing can change any more and nobody asks for: closed submissions, and those that all due
validators have judged, once their version is ``KEPT_VERSIONS`` behind. The live one keeps what the final one may still
decide otherwise.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Protocol

from protocol.constants import KEPT_VERSIONS, VERDICT_CUTS
from protocol.credit.attendance import Attended
from protocol.credit.decision import Counting, decision, lapsed, oversized
from protocol.credit.lineage import Lineage, Version
from protocol.credit.reputation import Account, Tally
from protocol.credit.sequential_test import NEWCOMER, Standing
from protocol.credit.submission_life import OPEN, OVER, UNDECIDED, Decision, Event, Life, State
from protocol.log.entry import Entry
from protocol.log.replica import Replica
from protocol.records import Rollout, Step, Verdict, Weights
from protocol.work.schedule import due_validators

KEPT_DECISIONS: Final = 4096
"""Decisions that are listed, and decided submissions that are kept, the newest."""


class Rules(Protocol):
    """What a fold asks the ledger."""

    @property
    def replica(self) -> Replica:
        """The log."""

    def eligible(self, author: bytes, height: int) -> bool:
        """Whether the author's join is covered by the cut of this height."""

    def audience(self, height: int) -> frozenset[bytes]:
        """The validators of versions that anchor on the cut of this height."""

    def drawn(self, verdict: Entry, rollout: Rollout) -> bool:
        """Whether the verdict's draw is its author's signature over the submission."""

    def share(self, author: bytes, height: int) -> int:
        """The share (micro) of the author's submissions that is replayed where the version anchors on this cut."""


@dataclass(frozen=True, slots=True)
class Closed:
    """What a cut decided: the decisions that fell for good, by rollout id; the submissions that it closed, each with
    the verdicts that count, and those of them that were never taken up; (rollout id, verdict id) of verdicts whose
    submission did not come in time; and who of the due attended to those submissions."""

    decided: Mapping[bytes, Decision]
    unread: Sequence[bytes]
    submissions: Mapping[bytes, frozenset[bytes]]
    verdicts: Sequence[tuple[bytes, bytes]]
    attended: Sequence[Attended] = ()


class Fold:
    """The final fold, or the ``live`` one. Attributes are for reading only: ``lineage``; ``submissions`` (rollout id →
    its life, oldest first); ``undecided`` (id → rollout entry); ``dropped``, how many decisions are not listed any
    more; ``rejected``, the responses of submissions that were not accepted; ``version``, which changes with all."""

    def __init__(self, rules: Rules, lineage: Lineage | None = None, *, live: bool = False) -> None:
        self._rules = rules
        self._live = live
        self.lineage = Lineage(rules.replica) if lineage is None else lineage
        self.version = 0
        self.decisions: deque[tuple[Entry, Decision]] = deque()
        self.dropped = 0
        self.rejected = 0
        self.submissions: dict[bytes, Life] = {}
        self.undecided: dict[bytes, Entry] = {}
        self.tallies: dict[bytes, Tally] = {}
        self.counting: dict[bytes, Counting] = {}
        self.early: dict[bytes, dict[bytes, Entry]] = {}
        """Verdicts whose submission has not come, by rollout id and verdict id."""
        self.closing: dict[int, list[tuple[bytes, bytes | None]]] = {}
        """(rollout id, None) and (rollout id, id of an early verdict) by the height of the cut that made them final."""
        self.touched: set[bytes] = set()
        """Whose reputation may have changed since somebody emptied the set."""
        self._queues: dict[bytes, deque[Life]] = {}
        self._waiting: dict[bytes, set[bytes]] = {}
        self._open: dict[bytes, dict[bytes, Entry]] = {}
        # Submissions that are over, the first to be so first, to be forgotten.
        self._over: dict[bytes, None] = {}
        self._forgotten_at = 0
        # In the final fold what was decided since the last cut, in the live one what the final one has not decided.
        self._decided: dict[bytes, Decision] = {}

    def add(self, entry: Entry, height: int | None = None) -> None:
        """Take one more entry, that the cut of ``height`` made final; an author's entries come in order."""
        self.version += 1
        match entry.payload:
            case Rollout():
                if height is not None:
                    self.closing.setdefault(height, []).append((entry.id, None))
                self._add_rollout(entry)
            case Verdict() as verdict:
                self._add_verdict(entry, verdict, height)
            case Weights() as weights:
                self.refresh()
                self._wake(self.lineage.add_weights(entry, weights))
            case Step():
                self.lineage.add_step(entry)
            case _:
                pass

    def refresh(self) -> None:
        """Take notice of new grants."""
        if not self.lineage.knows_grants():
            self.version += 1
            self._wake(self.lineage.see_grants())

    def _wake(self, fresh: Sequence[bytes]) -> None:
        """Go on with the authors whose next submission waited for weights that are legitimate now."""
        if fresh:
            self.version += 1
            for weights in fresh:
                for author in sorted(self._waiting.pop(weights, ())):
                    self._advance(author)
            self._forget()

    # Submissions

    def _add_rollout(self, entry: Entry) -> None:
        submission = Life(entry, self.early.pop(entry.id, {}))
        self.submissions[entry.id] = submission
        self.undecided[entry.id] = entry
        self._tally(entry.author).pending += 1
        self._queues.setdefault(entry.author, deque()).append(submission)
        self._advance(entry.author)

    def _add_verdict(self, entry: Entry, verdict: Verdict, height: int | None) -> None:
        submission = self.submissions.get(verdict.rollout)
        if submission is None:
            self.early.setdefault(verdict.rollout, {})[entry.id] = entry
            if height is not None:
                self.closing.setdefault(height, []).append((verdict.rollout, entry.id))
        elif submission.state is State.ANNOUNCED:
            submission.early[entry.id] = entry
        else:
            self._count(submission, entry)

    def _advance(self, author: bytes) -> None:
        queue = self._queues.get(author)
        while queue:
            wanted = queue[0].rollout.weights
            version = self.lineage.versions.get(wanted)
            if version is None:
                self._waiting.setdefault(wanted, set()).add(author)
                return
            self._take_up(queue.popleft(), version)
        self._queues.pop(author, None)

    def _take_up(self, submission: Life, version: Version) -> None:
        entry = submission.entry
        problem = self._problem(submission, version)
        if problem is not None:
            self._decide(submission, problem, Event.REFUSED)
        else:
            submission.on(Event.TAKEN_UP)
            validators = self._rules.audience(version.anchor_height)
            rollout = submission.rollout
            submission.share = self._rules.share(entry.author, version.anchor_height)
            submission.due = due_validators(version.id, entry.author, rollout.first_counter, validators)
            for validator in submission.due:
                self._open.setdefault(validator, {})[entry.id] = entry
            for verdict in submission.early.values():
                self._count(submission, verdict)
        submission.early = {}

    def _problem(self, submission: Life, version: Version) -> Decision | None:
        """What decides about the submission without any validator."""
        author, rollout = submission.entry.author, submission.rollout
        made_with = (version.term, version.number)
        counting = self.counting.get(author)
        if counting is not None and made_with < counting.made_with:
            return Decision("void", "soft", "ineligible")
        if counting is None or counting.weights != version.id:
            counting = self.counting[author] = Counting(version.id, made_with)
        counters = counting.take(rollout)
        if not self._rules.eligible(author, version.anchor_height):
            return Decision("void", "soft", "ineligible")
        if counters is not None:
            return Decision("void", "soft", counters)
        if oversized(rollout, self._rules.replica.domain.recipe):
            return Decision("rejected", "hard", "malformed")
        return None

    def _count(self, submission: Life, entry: Entry) -> None:
        if submission.state not in OPEN or entry.author not in submission.due or entry.author in submission.votes:
            return
        if not self._rules.drawn(entry, submission.rollout):
            return
        submission.votes[entry.author] = entry
        submission.on(Event.VERDICT)
        self._open[entry.author].pop(submission.entry.id, None)
        if submission.state is State.DECIDED:
            self._audit(submission, entry)
        else:
            status = decision(submission.verdicts, len(submission.due))
            if status is not None:
                self._decide(submission, status, Event.MAJORITY)
        if len(submission.votes) == len(submission.due):
            self._go_on(submission, Event.LAST_VERDICT)

    def _go_on(self, submission: Life, event: Event) -> None:
        submission.on(event)
        if submission.state in OVER:
            self._over[submission.entry.id] = None

    def _decide(self, submission: Life, status: Decision, event: Event) -> None:
        self._go_on(submission, event)
        submission.status = self._decided[submission.entry.id] = status
        del self.undecided[submission.entry.id]
        self.decisions.append((submission.entry, status))
        if len(self.decisions) > KEPT_DECISIONS:
            self.decisions.popleft()
            self.dropped += 1
        if status.outcome != "accepted":
            self.rejected += submission.rollout.responses
        tally = self._tally(submission.entry.author)
        tally.decide(status, submission.rollout)
        version = self.lineage.versions.get(submission.rollout.weights)
        if version is not None:
            thresholds = self._rules.replica.thresholds_at(version.anchor_height)
            tally.learn(status, submission.rollout, submission.verdicts, thresholds)
        for vote in submission.votes.values():
            self._audit(submission, vote)

    def _audit(self, submission: Life, vote: Entry, sign: int = 1) -> None:
        """Count a verdict on a decided submission; ``sign`` -1 takes back what its author earned."""
        assert isinstance(vote.payload, Verdict)
        self._tally(vote.author).audit(submission.status, submission.rollout, submission.share, vote.payload, sign)
        if sign > 0:
            self._tally(submission.entry.author).doubt(submission.status, submission.share, vote.payload)

    def _tally(self, author: bytes) -> Tally:
        self.touched.add(author)
        return self.tallies.setdefault(author, Tally())

    # Closing and forgetting

    def close(self, height: int) -> Closed:
        """Close what the cut of ``height`` closes, after its entries were taken: for the final fold."""
        closed: dict[bytes, frozenset[bytes]] = {}
        attended: list[Attended] = []
        unread: list[bytes] = []
        early: list[tuple[bytes, bytes]] = []
        for rollout, verdict in self.closing.pop(height - VERDICT_CUTS, ()):
            if verdict is not None:
                early.append((rollout, verdict))
            elif (submission := self.submissions.get(rollout)) is not None:
                if submission.state is State.ANNOUNCED:
                    unread.append(rollout)
                    self._take_out(submission)
                if submission.state in UNDECIDED:
                    self._decide(submission, lapsed(submission.verdicts), Event.LAPSED)
                else:
                    self._go_on(submission, Event.CLOSED)
                self._end(submission)
                version = self.lineage.versions.get(submission.rollout.weights)
                if version is not None and submission.due:
                    attended.append(Attended(submission.due, frozenset(submission.votes), version.anchor_height))
                closed[rollout] = frozenset(vote.id for vote in submission.votes.values())
        decided, self._decided = self._decided, {}
        found = Closed(decided, unread, closed, early, attended)
        self._drop_early(found)
        self._forget()
        return found

    def adopt(self, closed: Closed) -> None:
        """Take over what the final fold decided and closed: for the live fold."""
        for rollout in dict.fromkeys((*closed.unread, *closed.decided)):
            submission = self.submissions.get(rollout)
            if submission is not None and submission.state is State.ANNOUNCED:
                self._take_out(submission)
        for rollout, status in closed.decided.items():
            submission = self.submissions.get(rollout)
            if submission is not None and submission.status != status:
                if submission.state not in UNDECIDED:
                    self._undo(submission)
                self._decide(submission, status, Event.OVERRULED)
            self._decided.pop(rollout, None)
        for rollout, counted in closed.submissions.items():
            submission = self.submissions.get(rollout)
            if submission is not None:
                self._drop_late(submission, counted)
                self._go_on(submission, Event.CLOSED)
                self._end(submission)
        self._drop_early(closed)
        self._forget()

    def _take_out(self, submission: Life) -> None:
        """End the waiting of a submission that was never taken up."""
        submission.early = {}
        author, wanted = submission.entry.author, submission.rollout.weights
        self._queues[author].remove(submission)
        waiting = self._waiting.get(wanted, set())
        waiting.discard(author)
        if not waiting:
            self._waiting.pop(wanted, None)
        self._advance(author)

    def _end(self, submission: Life) -> None:
        self.version += 1
        for validator in submission.due:
            self._open.get(validator, {}).pop(submission.entry.id, None)

    def _drop_late(self, submission: Life, counted: Collection[bytes]) -> None:
        """Take back what verdicts earned that no cut covered in time."""
        for validator, vote in list(submission.votes.items()):
            if vote.id not in counted:
                self._audit(submission, vote, -1)
                del submission.votes[validator]

    def _undo(self, submission: Life) -> None:
        """Take a decision back, that of the live fold; it stays listed."""
        self._tally(submission.entry.author).decide(submission.status, submission.rollout, -1)
        for vote in submission.votes.values():
            self._audit(submission, vote, -1)
        if submission.status.outcome != "accepted":
            self.rejected -= submission.rollout.responses
        self.undecided[submission.entry.id] = submission.entry

    def _drop_early(self, closed: Closed) -> None:
        for rollout, verdict in closed.verdicts:
            waiting = self.early.get(rollout, {})
            waiting.pop(verdict, None)
            if not waiting:
                self.early.pop(rollout, None)

    def _forget(self) -> None:
        """Drop what is over: where nobody uses the version any more, and the oldest where there is much."""
        length = len(self.lineage.line)
        if self._forgotten_at != length:
            self._forgotten_at = length
            for rollout in list(self._over):
                submission = self.submissions[rollout]
                version = self.lineage.versions.get(submission.rollout.weights)
                if self._live and rollout in self._decided:
                    continue
                if version is None or version.number < length - KEPT_VERSIONS:
                    del self._over[rollout], self.submissions[rollout]
        for rollout in list(islice(self._over, max(len(self._over) - KEPT_DECISIONS, 0))):
            del self._over[rollout], self.submissions[rollout]

    # Reading

    def open_for(self, validator: bytes) -> Iterable[Entry]:
        """The rollout entries that this validator is due to judge and has not judged."""
        return self._open.get(validator, {}).values()

    def next_counter(self, author: bytes, weights: bytes) -> int:
        """The counter with which the author's next submission of this version begins, if it is not an older one than
        that of its newest submission."""
        counting = self.counting.get(author)
        return counting.expected if counting is not None and counting.weights == weights else 0

    def account(self, authors: Iterable[bytes]) -> Account:
        """The account of somebody whose work stands under these authors."""
        total, trained = Tally(), 0
        for author in authors:
            tally = self.tallies.get(author)
            if tally is not None:
                total.merge(tally)
            trained += self.lineage.trained[author]
        return total.account(trained)

    def standing(self, authors: Iterable[bytes]) -> Standing:
        """What is to be made of somebody whose work stands under these authors."""
        tallies = [self.tallies[author] for author in authors if author in self.tallies]
        if not tallies:
            return NEWCOMER
        # Begun with one of them: the evidence is not a newcomer's 0, where all of them stand better.
        total = replace(tallies[0], reasons=Counter(tallies[0].reasons))
        for tally in tallies[1:]:
            total.merge(tally)
        return total.standing()

    def restore(self, submissions: Iterable[Life], decided: Iterable[tuple[Entry, Decision]]) -> None:
        """Take over submissions of a snapshot, in the order in which they came; tallies count them already."""
        for submission in submissions:
            entry = submission.entry
            self.submissions[entry.id] = submission
            if submission.state in UNDECIDED:
                self.undecided[entry.id] = entry
            if submission.state is State.ANNOUNCED:
                self._queues.setdefault(entry.author, deque()).append(submission)
            elif submission.state in OPEN:
                for validator in submission.due:
                    if validator not in submission.votes:
                        self._open.setdefault(validator, {})[entry.id] = entry
            elif submission.state in OVER:
                self._over[entry.id] = None
        self.decisions.extend(decided)
        self._forgotten_at = len(self.lineage.line)
        for author, queue in self._queues.items():
            self._waiting.setdefault(queue[0].rollout.weights, set()).add(author)
