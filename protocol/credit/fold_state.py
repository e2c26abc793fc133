"""A fold as a value: for snapshots, and to make a live fold from the final one.

Signatures are not verified, and the rules not checked again: a value comes from this node's own fold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Final

from protocol import codec
from protocol.codec import Array, Int, Many, Optional, Text
from protocol.constants import MILLION
from protocol.credit import lineage
from protocol.credit.decision import Counting
from protocol.credit.fold import Fold, Rules
from protocol.credit.lineage import ENTRY, Lineage, pack, unpack
from protocol.credit.reputation import COUNTS, Tally
from protocol.credit.sequential_test import FLOOR
from protocol.credit.submission_life import Decision, Life, State, state_of
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.records import Rollout, Verdict

_COUNT: Final = Int()
_ENTRIES: Final = Many(ENTRY, most=codec.MAX_INT)
_STATUS: Final = Array((("outcome", Text(16)), ("severity", Text(16)), ("reason", Text(32))))
_SUBMISSION: Final = Array(
    (
        ("entry", ENTRY),
        ("early", _ENTRIES),
        ("due", Optional(Many(codec.KEY, most=codec.MAX_INT))),
        ("votes", _ENTRIES),
        ("status", _STATUS),
        ("closed", Int(0, 1)),
        ("share", Int(0, MILLION)),
    )
)
_TALLY: Final = Array(
    (
        ("author", codec.KEY),
        *((name, _COUNT) for name in COUNTS),
        # Evidence may be negative: it is written as the distance from the floor.
        ("deficits", _COUNT),
        ("borders", _COUNT),
        ("reasons", Many(Array((("reason", Text(32)), ("count", _COUNT))), most=codec.MAX_INT)),
    )
)
_COUNTING: Final = Array(
    (
        ("author", codec.KEY),
        ("weights", codec.HASH),
        ("term", _COUNT),
        ("number", _COUNT),
        ("expected", _COUNT),
        ("broken", Int(0, 1)),
    )
)
_CLOSING: Final = Array(
    (
        ("height", _COUNT),
        (
            "things",
            Many(Array((("rollout", codec.HASH), ("verdict", Optional(codec.HASH)))), most=codec.MAX_INT),
        ),
    )
)
SCHEMA: Final = Array(
    (
        ("lineage", lineage.SCHEMA),
        ("submissions", Many(_SUBMISSION, most=codec.MAX_INT)),
        ("decided", Many(Int(), most=codec.MAX_INT)),
        ("early", _ENTRIES),
        ("tallies", Many(_TALLY, most=codec.MAX_INT)),
        ("counting", Many(_COUNTING, most=codec.MAX_INT)),
        ("closing", Many(_CLOSING, most=codec.MAX_INT)),
        ("rejected", _COUNT),
    )
)


def fold_to_value(fold: Fold) -> list[Any]:
    """All of the fold, ready for ``codec.encode``. Of the decisions those are listed whose submissions are kept."""
    places = {rollout: place for place, rollout in enumerate(fold.submissions)}
    return [
        fold.lineage.to_value(),
        [_submission(submission) for submission in fold.submissions.values()],
        [places[entry.id] for entry, _ in fold.decisions if entry.id in places],
        [pack(entry) for waiting in fold.early.values() for entry in waiting.values()],
        [_tally(author, tally) for author, tally in fold.tallies.items()],
        [[author, row.weights, *row.made_with, row.expected, int(row.broken)] for author, row in fold.counting.items()],
        [
            [height, kept]
            for height, things in fold.closing.items()
            if (kept := [list(thing) for thing in things if _matters(fold, *thing)])
        ],
        fold.rejected,
    ]


def fold_from_value(value: Any, rules: Rules, *, live: bool = False) -> Fold:
    """The inverse, for a value that fits ``SCHEMA``, with at least the grants of then. Raises ``PeerError`` for a value
    that cannot be."""
    lines, submissions, decided, early, tallies, counting, closing, rejected = value
    fold = Fold(rules, Lineage.from_value(lines, rules.replica), live=live)
    restored = [_restored(row) for row in submissions]
    if any(place >= len(restored) for place in decided):
        raise PeerError("snapshot: a decision about nothing")
    fold.restore(restored, [(restored[place].entry, restored[place].status) for place in decided])
    for entry in map(unpack, early):
        if not isinstance(entry.payload, Verdict):
            raise PeerError("snapshot: a verdict is none")
        fold.early.setdefault(entry.payload.rollout, {})[entry.id] = entry
    for author, *counts, deficits, borders, reasons in tallies:
        tally = fold.tallies[author] = Tally(**dict(zip(COUNTS, counts, strict=True)))
        tally.deficits, tally.borders = deficits + FLOOR, borders + FLOOR
        tally.reasons = Counter(dict(reasons))
    for author, weights, term, number, expected, broken in counting:
        fold.counting[author] = Counting(weights, (term, number), expected, bool(broken))
    for height, things in closing:
        fold.closing[height] = [(rollout, verdict) for rollout, verdict in things]
    fold.rejected = rejected
    return fold


def copy_fold(fold: Fold, rules: Rules) -> Fold:
    """A live fold of its own in the same state: what ``fold_from_value`` would make of ``fold_to_value``, faster."""
    new = Fold(rules, fold.lineage.copy(), live=True)
    kept = [replace(one, early=dict(one.early), votes=dict(one.votes)) for one in fold.submissions.values()]
    new.restore(kept, [(entry, status) for entry, status in fold.decisions if entry.id in fold.submissions])
    new.early = {rollout: dict(waiting) for rollout, waiting in fold.early.items()}
    new.tallies = {author: replace(tally, reasons=Counter(tally.reasons)) for author, tally in fold.tallies.items()}
    new.counting = {author: replace(row) for author, row in fold.counting.items()}
    new.closing = {height: list(things) for height, things in fold.closing.items()}
    new.rejected = fold.rejected
    return new


def _matters(fold: Fold, rollout: bytes, verdict: bytes | None) -> bool:
    if verdict is None:
        return rollout in fold.submissions
    return verdict in fold.early.get(rollout, ())


def _submission(submission: Life) -> list[Any]:
    status = submission.status
    return [
        pack(submission.entry),
        [pack(entry) for entry in submission.early.values()],
        None if submission.state is State.ANNOUNCED else list(submission.due),
        [pack(vote) for vote in submission.votes.values()],
        [status.outcome, status.severity, status.reason],
        int(submission.state is State.CLOSED),
        submission.share,
    ]


def _restored(value: list[Any]) -> Life:
    packed, early, due, votes, status, closed, share = value
    entry = unpack(packed)
    if not isinstance(entry.payload, Rollout):
        raise PeerError("snapshot: a submission is none")
    given: dict[bytes, Entry] = {vote.author: vote for vote in map(unpack, votes)}
    waiting = {verdict.id: verdict for verdict in map(unpack, early)}
    judged = Decision(*status)
    state = state_of(due, len(given), judged, closed=bool(closed))
    return Life(entry, waiting, tuple(due or ()), given, judged, share, state)


def _tally(author: bytes, tally: Tally) -> list[Any]:
    counts = [getattr(tally, name) for name in COUNTS]
    return [
        author,
        *counts,
        tally.deficits - FLOOR,
        tally.borders - FLOOR,
        [[reason, count] for reason, count in sorted(tally.reasons.items()) if count],
    ]
