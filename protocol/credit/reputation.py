"""Credit and reputation: what a node's verified work adds up to, and how far it is trusted.

1. Credit is a function of the set of final entries and of the grants: no order, no clock, no running average.
2. The author of an accepted submission earns one for each of its responses.
3. A due validator whose verdict agrees with the decision (accepted or rejected) earns one for every four responses
   that it was to replay and did, rounded down for each submission.
4. A trainer earns one for each response of its steps whose weights stand on the lineage.
5. Relays earn nothing yet: nothing that they sign proves that bytes were carried.
6. A void submission earns nobody anything and costs nobody reputation.
7. Where a node goes on for another one (``protocol.log.recovery``), everything that the other one did counts for it,
   with the cut that covers the rebind: credit, counts and hard rejections. The other one's account is empty from then
   on.
8. Reputation is ``10⁶·(a+1) // (a+2+20·(h+s))`` for a accepted and h hard-rejected submissions and s strays: 500,000
   for a newcomer.
9. A validator *disagrees* where it accepted what was rejected as hard, or rejected as hard what was accepted, although
   all of the due replayed everything. Two disagreements, and one more for every 16 agreements, are forgiven; what goes
   beyond are strays.
10. Where only a share was replayed, a hard verdict that stands alone may be right: the others need not have drawn the
   group that it is about. It convicts nobody, but its author's accepted submissions in a row begin anew, so that
   the next ones are audited fully.
11. *Trust* is reputation, or what the reputation would be of the accepted ones in a row alone, if that is less. It sets
   the audited share (``protocol.work.schedule``).
12. The evidence of the sequential tests (``protocol.credit.sequential_test``) takes from each decided submission the
    lower median of
   the scores of those who had replayed any of it when the decision fell. It is kept by the final fold only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from protocol.constants import MILLION
from protocol.credit import sequential_test
from protocol.credit.sequential_test import Standing
from protocol.credit.submission_life import Decision
from protocol.domain import Thresholds
from protocol.records import Rollout, Verdict
from protocol.work import schedule

AUDIT_SHARE: Final = 4
"""Replayed responses for one credit: a prefill costs about a quarter of generating."""
FORGIVEN: Final = 2
"""Disagreements with the majority that cost a validator nothing."""
AGREEMENTS: Final = 16
"""Agreements that forgive one more."""
BORDERLINE: Final = "borderline"
"""The reason of a soft rejection that is evidence in the second sequential test."""


@dataclass(frozen=True, slots=True)
class Account:
    """One node's account. ``credit`` is the sum of ``generated``, ``audited`` and ``trained``; the counts are of
    submissions; ``reasons`` counts rejected and void submissions by reason; ``reputation`` is in micro. ``agreed`` and
    ``disagreed`` count this node's verdicts."""

    credit: int
    accepted: int
    rejected: int
    void: int
    pending: int
    hard: int
    reputation: int
    reasons: Mapping[str, int]
    generated: int
    audited: int
    trained: int
    agreed: int = 0
    disagreed: int = 0


@dataclass(slots=True)
class Tally:
    """A node's account while it is being added up."""

    accepted: int = 0
    rejected: int = 0
    void: int = 0
    pending: int = 0
    hard: int = 0
    generated: int = 0
    audited: int = 0
    agreed: int = 0
    disagreed: int = 0
    clean: int = 0
    """Submissions accepted in a row (rule 10); like the evidence, of use in the final fold only."""
    deficits: int = 0
    borders: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def decide(self, status: Decision, rollout: Rollout, sign: int = 1) -> None:
        """Count the decision about a submission of this node that was pending; ``sign`` -1 takes it back."""
        self.pending -= sign
        if status.outcome == "accepted":
            self.accepted += sign
            self.generated += sign * rollout.responses
            return
        self.reasons[status.reason] += sign
        if status.outcome == "void":
            self.void += sign
        else:
            self.rejected += sign
            self.hard += sign * (status.severity == "hard")

    def audit(self, status: Decision, rollout: Rollout, share: int, verdict: Verdict, sign: int = 1) -> None:
        """Count this node's verdict on a submission whose due validators, each to replay ``share`` (micro) of it,
        decided ``status``; ``sign`` as above."""
        if status.outcome == verdict.outcome and status.outcome != "void":
            replayed = min(verdict.audited, schedule.audited_count(rollout.groups, share))
            self.audited += sign * (replayed * (rollout.responses // rollout.groups) // AUDIT_SHARE)
            self.agreed += sign
        elif share == MILLION and {(status.outcome, status.severity), (verdict.outcome, verdict.severity)} == _OPPOSED:
            self.disagreed += sign

    def learn(self, status: Decision, rollout: Rollout, verdicts: Sequence[Verdict], thresholds: Thresholds) -> None:
        """Take what a decided submission of this node says of it (rules 10 and 12); nothing takes it back."""
        if status.severity == "hard":
            self.clean = self.deficits = self.borders = 0
            return
        if status.outcome == "accepted":
            self.clean += 1
        scores = sorted((verdict.score, verdict.audited) for verdict in verdicts if verdict.audited)
        if scores:
            score, audited = scores[(len(scores) - 1) // 2]
            tokens = rollout.tokens * min(audited, rollout.groups) // rollout.groups
            gain = sequential_test.gain(score * tokens, tokens, thresholds.deficit_honest, thresholds.deficit_mean)
            after = Standing(0, self.deficits, self.borders).after(gain, status.reason == BORDERLINE)
            self.deficits, self.borders = after.deficits, after.borders

    def doubt(self, status: Decision, share: int, verdict: Verdict) -> None:
        """Take a validator's verdict on a submission of this node that was decided as ``status`` (rule 10)."""
        if share < MILLION and status.outcome == "accepted" and verdict.severity == "hard":
            self.clean = 0

    def merge(self, other: Tally) -> None:
        """Count all of another author's as well: one node went on for the other."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.deficits = max(self.deficits, other.deficits)
        self.borders = max(self.borders, other.borders)
        self.reasons.update(other.reasons)

    @property
    def strays(self) -> int:
        """Disagreements that are not forgiven (rule 9)."""
        return max(0, self.disagreed - FORGIVEN - self.agreed // AGREEMENTS)

    def standing(self) -> Standing:
        """What the log says of this node (rule 11)."""
        trust = min(reputation(self.accepted, self.hard + self.strays), reputation(self.clean, 0))
        return Standing(schedule.audit_tier(trust), self.deficits, self.borders)

    def account(self, trained: int) -> Account:
        """The finished account; ``trained`` counts the responses of the node's steps on the lineage."""
        return Account(
            credit=self.generated + self.audited + trained,
            reputation=reputation(self.accepted, self.hard + self.strays),
            reasons={reason: count for reason, count in sorted(self.reasons.items()) if count},
            trained=trained,
            **{name: getattr(self, name) for name in COUNTS if name != "clean"},
        )


COUNTS: Final = Tally.__slots__[:-3]
"""What a tally counts, in the order of a snapshot."""
_OPPOSED: Final = {("accepted", "none"), ("rejected", "hard")}


def reputation(accepted: int, hard: int) -> int:
    """How far a node is trusted, in micro; ``hard`` counts hard rejections and strays."""
    return MILLION * (accepted + 1) // (accepted + 2 + 20 * hard)
