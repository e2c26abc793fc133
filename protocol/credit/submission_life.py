"""The life of a submission, from its announcement until nothing can change it any more: states, events, one table.

::

    announced ──taken up──► due ──verdict──► judged ──majority──► decided ──last verdict──► complete
        │                    │                 │                     │                         │
        ├──refused──► void ──┼─────────────────┼────────closed───────┴─────────closed──────────┤
        └────────lapsed──────┴─────lapsed──────┴──────────────────────────────────────────► closed

1. It is *announced* until its version is legitimate and its author's submissions before it were taken up. Then it is
   *due*: its due validators are to judge it; or, where something is wrong with it that no validator need say, *void*.
2. It is *judged* where verdicts count that do not decide; *decided* where they do; *complete* where all of the due have
   spoken as well. A version without validators leaves it due.
3. The cut that closes it (``protocol.credit.fold``, rule 5) ends its life; where it is undecided, it lapses.
4. The live fold may be *overruled*: what the final one decided stands, whatever was decided here, or not yet.
5. What is in no row of ``SUCCESSORS`` cannot happen: ``after`` raises ``LocalError``.

Whether a step trained on it does not belong to its life: that stands in blobs, which not everybody holds, and changes
nothing that the log says (``node.roles.rollout_pool``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from protocol.constants import MILLION
from protocol.errors import LocalError
from protocol.log.entry import Entry
from protocol.records import Rollout, Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a submission. ``outcome`` is "accepted", "rejected", "void" or "pending"."""

    outcome: str
    severity: str
    reason: str


PENDING: Final = Decision("pending", "none", "pending")


class State(Enum):
    """Where a submission stands."""

    ANNOUNCED = "announced"
    DUE = "due"
    JUDGED = "judged"
    DECIDED = "decided"
    COMPLETE = "complete"
    VOID = "void"
    CLOSED = "closed"


class Event(Enum):
    """What happens to a submission."""

    TAKEN_UP = "taken up"
    REFUSED = "refused"
    VERDICT = "verdict"
    MAJORITY = "majority"
    LAST_VERDICT = "last verdict"
    OVERRULED = "overruled"
    LAPSED = "lapsed"
    CLOSED = "closed"


SUCCESSORS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        State.ANNOUNCED: {
            Event.TAKEN_UP: State.DUE,
            Event.REFUSED: State.VOID,
            Event.OVERRULED: State.VOID,
            Event.LAPSED: State.CLOSED,
        },
        State.DUE: {Event.VERDICT: State.JUDGED, Event.OVERRULED: State.DECIDED, Event.LAPSED: State.CLOSED},
        State.JUDGED: {
            Event.VERDICT: State.JUDGED,
            Event.MAJORITY: State.DECIDED,
            Event.OVERRULED: State.DECIDED,
            Event.LAPSED: State.CLOSED,
        },
        State.DECIDED: {
            Event.VERDICT: State.DECIDED,
            Event.LAST_VERDICT: State.COMPLETE,
            Event.OVERRULED: State.DECIDED,
            Event.CLOSED: State.CLOSED,
        },
        State.COMPLETE: {Event.OVERRULED: State.COMPLETE, Event.CLOSED: State.CLOSED},
        State.VOID: {Event.OVERRULED: State.VOID, Event.CLOSED: State.CLOSED},
        State.CLOSED: {},
    }
)
"""What follows in each state from each event that can happen there."""

UNDECIDED: Final = frozenset({State.ANNOUNCED, State.DUE, State.JUDGED})
OPEN: Final = frozenset({State.DUE, State.JUDGED, State.DECIDED})
"""Verdicts may still count."""
OVER: Final = frozenset({State.COMPLETE, State.VOID, State.CLOSED})
"""No verdict can change it any more."""


def after(state: State, event: Event) -> State:
    """The state after an event; ``LocalError`` for one that cannot happen then."""
    following = SUCCESSORS[state].get(event)
    if following is None:
        raise LocalError(f"a submission that is {state.value} cannot be {event.value}")
    return following


@dataclass(slots=True, eq=False)
class Life:
    """A submission and what is known about it. ``early`` are verdicts from before it was taken up, by id; ``votes``
    those that count, by validator; ``share`` (micro) of its groups each of the ``due`` replays."""

    entry: Entry
    early: dict[bytes, Entry]
    due: tuple[bytes, ...] = ()
    votes: dict[bytes, Entry] = field(default_factory=dict)
    status: Decision = PENDING
    share: int = MILLION
    state: State = State.ANNOUNCED
    rollout: Rollout = field(init=False)
    """The entry's payload."""

    def __post_init__(self) -> None:
        assert isinstance(self.entry.payload, Rollout)
        self.rollout = self.entry.payload

    def on(self, event: Event) -> None:
        """Go on to the state that follows from ``event``; raises ``LocalError`` where that cannot happen."""
        self.state = after(self.state, event)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts that count."""
        return [vote.payload for vote in self.votes.values() if isinstance(vote.payload, Verdict)]


def state_of(due: tuple[bytes, ...] | None, votes: int, status: Decision, *, closed: bool) -> State:
    """The state of a submission of which a snapshot says so much; ``due`` is None where it was not taken up."""
    if closed:
        return State.CLOSED
    if due is None:
        return State.ANNOUNCED
    if status == PENDING:
        return State.JUDGED if votes else State.DUE
    if votes < len(due):
        return State.DECIDED
    return State.COMPLETE if due else State.VOID
