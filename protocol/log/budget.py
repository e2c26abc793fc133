"""What a key may add to everybody's log: a budget that grows with its work, so that fresh keys are no burden.

1. Of an author's entries all count, except ``weights`` and ``step`` of its own settled term (``protocol.log.grants``)
   and ``verdict`` while it stands as a validator. With the cut that covers them they are spent.
2. With a cut an author may have spent the ``budget`` of the genesis, ``BUDGET_PER_SUBMISSION`` for each of its accepted
   submissions and each of up to ``MAX_UNJUDGED`` that nobody judged yet, and one for every ``BUDGET_CUTS`` cuts since
   it was admitted (for an elector in force every ``ELECTOR_BUDGET_CUTS``): all as of the cut before, which all replicas
   hold alike. A cut that covers more is no cut.
3. What work was accepted says ``Work``, which the credit's ledger is; nothing here knows how it is judged.

Why the cut before, and not the entry's anchor: replicas that were told of an entry at different times would need the
budget of every height for ever (docs/decisions/016-budgets.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from protocol.constants import BUDGET_CUTS, BUDGET_PER_SUBMISSION, ELECTOR_BUDGET_CUTS
from protocol.log.entry import Entry
from protocol.log.grants import Terms
from protocol.records import Step, Verdict, Weights


class Work(Protocol):
    """What an author did by the newest cut that the replica holds."""

    def worked(self, author: bytes) -> int:
        """Its accepted submissions, and up to ``MAX_UNJUDGED`` that nobody judged yet."""

    def judges(self, author: bytes) -> bool:
        """Whether it stands as a validator."""


class Unbounded:
    """The ``Work`` for logs whose budgets are not at issue."""

    def worked(self, author: bytes) -> int:
        return 2**60

    def judges(self, author: bytes) -> bool:
        return True


UNBOUNDED: Final = Unbounded()


class Budgets:
    """What each author has spent by the newest cut; ``spent`` is for reading only. ``base`` is the genesis' budget."""

    def __init__(self, base: int, spent: Mapping[bytes, int] | None = None) -> None:
        self._base = base
        self.spent: Counter[bytes] = Counter(spent or {})

    def left(self, author: bytes, cuts: int, work: Work, *, elector: bool = False) -> int:
        """How much the author may still spend, ``cuts`` cuts after it was admitted."""
        slowly = cuts // (ELECTOR_BUDGET_CUTS if elector else BUDGET_CUTS)
        allowed = self._base + BUDGET_PER_SUBMISSION * work.worked(author) + slowly
        return allowed - self.spent[author]

    def cover(self, author: bytes, costs: int) -> None:
        """A cut covers entries of the author that cost so much."""
        if costs:
            self.spent[author] += costs


def costs(entry: Entry, terms: Terms, work: Work) -> int:
    """What an entry counts: 0 where rule 1 makes an exception."""
    match entry.payload:
        case Weights(term=term) | Step(term=term):
            # A settled term follows from cuts alone; a grant may come before or after one.
            return int(term not in terms.settled or terms.grants[term].grant.trainer != entry.author)
        case Verdict():
            return int(not work.judges(entry.author))
    return 1


def affordable(entries: Iterable[Entry], left: int, terms: Terms, work: Work) -> int:
    """How many of these entries, in their order, ``left`` pays for."""
    count = 0
    for entry in entries:
        left -= costs(entry, terms, work)
        if left < 0:
            break
        count += 1
    return count
