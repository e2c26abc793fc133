"""What decides about one submission: its counters and its size, and then the verdicts of the due validators.

1. Counters run from 0 per (author, version): the first gap voids it and all that follows ("gap"); counters that
   were used already are void ("duplicate").
2. A submission that announces more than the recipe allows is hard-rejected ("malformed").
3. The outcome that a majority of the due gave is the decision, with severity hard where a majority said so, and the
   reason that most of those gave (the first in the alphabet among equals). Where all have spoken without a majority
   the submission is void ("undecidable").
4. Of one that lapses the majority of the due who have spoken decides; a tie, silence and weights that never became
   legitimate make it void ("unjudged").

Which verdicts count, and when a submission lapses, is the business of ``protocol.credit.fold``; what states it goes
through, of ``protocol.credit.submission_life``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.credit.submission_life import Decision
from protocol.domain import Recipe
from protocol.records import Rollout, Verdict
from protocol.work.rollout import max_bytes


@dataclass(slots=True)
class Counting:
    """The version that an author's newest submission names, and the counter that comes next unless there was a gap."""

    weights: bytes
    made_with: tuple[int, int]
    expected: int = 0
    broken: bool = False

    def take(self, rollout: Rollout) -> str | None:
        """Count the author's next submission of this version; the reason why it is void, if it is."""
        if self.broken or rollout.first_counter > self.expected:
            self.broken = True
            return "gap"
        if rollout.first_counter < self.expected:
            return "duplicate"
        self.expected += rollout.groups
        return None


def oversized(rollout: Rollout, recipe: Recipe) -> bool:
    """Whether a submission announces more than the recipe allows."""
    return (
        rollout.groups > recipe.groups_per_submission
        or rollout.responses != rollout.groups * recipe.group_size
        or rollout.tokens > rollout.responses * recipe.max_response_tokens
        or rollout.size > max_bytes(recipe)
    )


def decision(votes: Sequence[Verdict], due: int) -> Decision | None:
    """What these counting verdicts of ``due`` validators decide, or None while they do not."""
    majority = due // 2 + 1
    if len(votes) < majority:
        return None
    first = votes[0]
    agreed = (first.outcome, first.severity, first.reason)
    if all((verdict.outcome, verdict.severity, verdict.reason) == agreed for verdict in votes):
        return Decision(*agreed)
    for outcome, count in Counter(verdict.outcome for verdict in votes).items():
        if count >= majority:
            agreeing = [verdict for verdict in votes if verdict.outcome == outcome]
            severity = "none" if outcome == "accepted" else "soft"
            if sum(verdict.severity == "hard" for verdict in agreeing) >= majority:
                severity = "hard"
            reasons = Counter(verdict.reason for verdict in agreeing)
            return Decision(outcome, severity, min(reasons, key=lambda reason: (-reasons[reason], reason)))
    return Decision("void", "soft", "undecidable") if len(votes) >= due else None


def lapsed(votes: Sequence[Verdict]) -> Decision:
    """What the verdicts that came in time decide, where too few came for a majority of the due."""
    found = decision(votes, len(votes)) if votes else None
    return Decision("void", "soft", "unjudged") if found is None or found.reason == "undecidable" else found
