"""What a proposer makes of reports, and what a voter thinks of a cut's content.

1. The proposer of an epoch is elector ``epoch mod n``.
2. A proposer that is shown a prepared cut of the height proposes that of the highest epoch: it may be certified
   somewhere. Otherwise it takes for each author the highest head of its own replica that q reports cover, and the
   waiting tickets that it likes best. Of authors without work it takes those first who add least, and no more than
   ``NEWCOMERS`` entries in all.
3. A voter accepts what its replica would take with a certificate, on visible branches only, a row of status 1 only
   where it knows the fork, and tickets whose work is what is asked. For a cut that was prepared the first alone counts:
   a quorum judged the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from protocol.errors import PeerError
from protocol.log.admission import Ticket, work_of
from protocol.log.branches import Outcome
from protocol.log.budget import UNBOUNDED, Work
from protocol.log.heads import FROZEN, Head, heads_root
from protocol.log.quorum import MAX_CHANGES, Cut, PreparedCut, Report, moves, quorum
from protocol.log.replica import Replica

NEWCOMERS: Final = 2048
"""Entries of authors without work that one cut covers."""

Held = Callable[[bytes, int], Head | None]
"""``held(author, seq)``: the head that the own replica's feed of ``author`` had at ``seq``, or None."""


def proposer(epoch: int, electors: Sequence[bytes]) -> bytes:
    """The elector that proposes in this epoch."""
    return electors[epoch % len(electors)]


def choose(
    locks: Iterable[PreparedCut | None], fresh: Callable[[], Cut | None]
) -> tuple[Cut, PreparedCut | None] | None:
    """What to propose, with what justifies it: rule 2. ``locks`` are valid and of this height; ``fresh`` makes a new
    cut. None where nothing moved."""
    held = [lock for lock in locks if lock is not None]
    if held:
        best = max(held, key=lambda lock: lock.epoch)
        return best.cut, best
    cut = fresh()
    return None if cut is None else (cut, None)


def propose(
    domain: bytes,
    height: int,
    prev: bytes,
    certified: Mapping[bytes, Head],
    reports: Iterable[Report],
    electors: Sequence[bytes],
    held: Held,
    most: int = MAX_CHANGES,
    tickets: Sequence[Ticket] = (),
    work: Work = UNBOUNDED,
) -> Cut | None:
    """The cut of ``height`` that follows ``prev``, whose vector is ``certified``, or None where nothing moved.

    Of each elector the last report of the iterable counts. ``tickets`` are those that this cut may admit by.
    """
    newest = {report.elector: report for report in reports if report.elector in electors}
    rows: dict[bytes, list[Head]] = {}
    for report in newest.values():
        for head in report.heads:
            own = held(head.author, head.seq)
            if own is not None and own.entry_id == head.entry_id and own.feed_root == head.feed_root:
                rows.setdefault(head.author, []).append(head)
    need = quorum(len(electors))
    chosen: dict[bytes, Head] = {}
    for author, heads in rows.items():
        if len(heads) >= need:
            seq = sorted((head.seq for head in heads), reverse=True)[need - 1]
            frozen = sum(head.status == FROZEN for head in heads) >= need
            own = held(author, seq)
            if own is not None:
                chosen[author] = Head(author, own.seq, own.entry_id, own.feed_root, int(frozen))
    moved = sorted(author for author, head in chosen.items() if moves(certified.get(author), head))
    moved = within_reason(moved, chosen, certified, work)
    if not moved and not tickets:
        return None
    # What does not fit waits for the next cut.
    changes = {author: chosen[author] for author in moved[:most]}
    root = heads_root({**certified, **changes}.values())
    return Cut.make(domain, height, prev, root, changes.values(), tickets)


def within_reason(
    moved: Sequence[bytes], chosen: Mapping[bytes, Head], certified: Mapping[bytes, Head], work: Work
) -> list[bytes]:
    """Of these authors, ascending, all who did work, and others as far as rule 2 goes."""
    new = {
        author: chosen[author].seq - (certified[author].seq if author in certified else -1)
        for author in moved
        if not work.worked(author) and not work.judges(author)
    }
    room = NEWCOMERS
    waits = set()
    for author in sorted(new, key=lambda author: (new[author], author)):
        # The smallest goes however much it is, or a domain of large budgets would cover some of its feeds never.
        if new[author] > room < NEWCOMERS:
            waits.add(author)
        else:
            room = max(room - new[author], 0)
    return [author for author in moved if author not in waits]


def problem(replica: Replica, cut: Cut, *, prepared: bool, work: Work = UNBOUNDED) -> str | None:
    """Why ``cut``'s content may not be voted for, or None where it may; ``prepared`` says that a quorum did so."""
    try:
        outcome = replica.judge_cut(cut, work=work)
    except PeerError as error:
        return str(error)
    if outcome is not Outcome.ADDED:
        return str(outcome.value)
    for head in () if prepared else cut.changes:
        own = replica.head_at(head.author, head.seq)
        if own is None or own.entry_id != head.entry_id:
            return "another branch is held"
        if head.status == FROZEN and not replica.frozen(head.author):
            return "nothing is known that froze the author"
    asked = replica.admissions.work
    for ticket in () if prepared or asked <= 1 else cut.tickets:
        if ticket.invitation is None and work_of(cut.domain, ticket) < asked:
            return "a ticket's work is less than what is asked"
    return None
