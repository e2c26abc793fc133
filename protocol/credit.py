"""Credit and reputation: what a node's verified work adds up to, and how far it is trusted.

1. Credit is a function of the set of final entries and of the grants: no order, no clock, no running average.
2. The author of an accepted submission earns one for each of its responses.
3. A due validator whose verdict agrees with the decision (accepted or rejected) earns one for every four responses
   that it replayed, rounded down for each submission.
4. A trainer earns one for each response of its steps whose weights stand on the lineage.
5. Relays earn nothing yet: nothing that they sign proves that bytes were carried.
6. A void submission earns nobody anything and costs nobody reputation.
7. Where a node goes on for another one (``protocol.recovery``), everything that the other one did counts for it, with
   the cut that covers the rebind: credit, counts and hard rejections. The other one's account is empty from then on.
8. Reputation is ``10⁶·(a+1) // (a+2+20·h)`` for a accepted and h hard-rejected submissions: 500,000 for a newcomer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol.constants import MILLION
from protocol.records import Rollout, Verdict

if TYPE_CHECKING:
    from protocol.ledger import Ledger

AUDIT_SHARE: Final = 4
"""Replayed responses for one credit: a prefill costs about a quarter of generating."""


@dataclass(frozen=True, slots=True)
class Status:
    """What was decided about a submission. ``outcome`` is "accepted", "rejected", "void" or "pending"."""

    outcome: str
    severity: str
    reason: str


PENDING: Final = Status("pending", "none", "pending")


@dataclass(frozen=True, slots=True)
class Account:
    """One node's account. ``credit`` is the sum of ``generated``, ``audited`` and ``trained``; the counts are of
    submissions; ``reasons`` counts rejected and void submissions by reason; ``reputation`` is in micro."""

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
    reasons: Counter[str] = field(default_factory=Counter)

    def decide(self, status: Status, rollout: Rollout, sign: int = 1) -> None:
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

    def audit(self, status: Status, rollout: Rollout, verdict: Verdict, sign: int = 1) -> None:
        """Count this node's verdict on a submission whose due validators decided ``status``; ``sign`` as above."""
        if status.outcome == verdict.outcome and status.outcome != "void":
            replayed = min(verdict.audited, rollout.groups) * (rollout.responses // rollout.groups)
            self.audited += sign * (replayed // AUDIT_SHARE)

    def merge(self, other: Tally) -> None:
        """Count all of another author's as well: one node went on for the other."""
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.void += other.void
        self.pending += other.pending
        self.hard += other.hard
        self.generated += other.generated
        self.audited += other.audited
        self.reasons.update(other.reasons)

    def account(self, trained: int) -> Account:
        """The finished account; ``trained`` counts the responses of the node's steps on the lineage."""
        return Account(
            credit=self.generated + self.audited + trained,
            accepted=self.accepted,
            rejected=self.rejected,
            void=self.void,
            pending=self.pending,
            hard=self.hard,
            reputation=reputation(self.accepted, self.hard),
            reasons={reason: count for reason, count in sorted(self.reasons.items()) if count},
            generated=self.generated,
            audited=self.audited,
            trained=trained,
        )


def reputation(accepted: int, hard: int) -> int:
    """How far a node is trusted, in micro."""
    return MILLION * (accepted + 1) // (accepted + 2 + 20 * hard)


def credits(ledger: Ledger) -> dict[bytes, Account]:
    """The account of every author whose join is final, ascending by author, from final entries only."""
    return ledger.accounts(final=True)
