"""The table of a submission's life: what follows from what, what cannot be, and that a snapshot loses nothing of it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.credit.fold_state import copy_fold, fold_from_value, fold_to_value
from protocol.credit.submission_life import (
    OPEN,
    OVER,
    PENDING,
    SUCCESSORS,
    UNDECIDED,
    Decision,
    Event,
    Life,
    State,
    after,
    state_of,
)
from protocol.errors import LocalError
from tests.protocol.builders import Story

EVENTS = st.lists(st.sampled_from(Event), max_size=12)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_has_a_successor_or_is_refused(state: State, event: Event) -> None:
    if event in SUCCESSORS[state]:
        assert after(state, event) is SUCCESSORS[state][event]
    else:
        with pytest.raises(LocalError, match=f"{state.value} cannot be {event.value}"):
            after(state, event)


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    reached, leading = {State.ANNOUNCED}, {State.CLOSED}
    for _ in State:
        reached |= {new for state in reached for new in SUCCESSORS[state].values()}
        leading |= {state for state in State if leading & set(SUCCESSORS[state].values())}
    assert reached == leading == set(State)
    assert not SUCCESSORS[State.CLOSED]


def test_the_kinds_of_states_fit_the_table() -> None:
    assert not UNDECIDED & OVER
    for state in State:
        # What is open takes verdicts or is due to, what is over takes none; undecided is what may lapse.
        assert (Event.VERDICT in SUCCESSORS[state]) == (state in OPEN)
        assert (Event.LAPSED in SUCCESSORS[state]) == (state in UNDECIDED)
        assert (Event.CLOSED in SUCCESSORS[state]) == (state not in UNDECIDED | {State.CLOSED})


@given(EVENTS)
def test_a_decision_is_never_lost(events: list[Event]) -> None:
    state, decided, over = State.ANNOUNCED, False, False
    for event in events:
        if event not in SUCCESSORS[state]:
            continue
        state = after(state, event)
        decided = decided or state not in UNDECIDED
        over = over or state in OVER
        assert decided == (state not in UNDECIDED)
        assert over == (state in OVER)


def test_a_life_goes_on_by_the_table() -> None:
    story = Story()
    life = Life(story.rollout("i1"), {})
    for event in (Event.TAKEN_UP, Event.VERDICT, Event.MAJORITY, Event.LAST_VERDICT, Event.CLOSED):
        life.on(event)
    assert life.state is State.CLOSED
    with pytest.raises(LocalError):
        life.on(Event.VERDICT)
    assert life.state is State.CLOSED


@pytest.mark.parametrize(
    ("due", "votes", "reason", "closed", "state"),
    [
        (None, 0, "pending", False, State.ANNOUNCED),
        (3, 0, "pending", False, State.DUE),
        (0, 0, "pending", False, State.DUE),
        (3, 1, "pending", False, State.JUDGED),
        (3, 2, "ok", False, State.DECIDED),
        (3, 3, "ok", False, State.COMPLETE),
        (0, 0, "gap", False, State.VOID),
        (3, 2, "ok", True, State.CLOSED),
        (0, 0, "unjudged", True, State.CLOSED),
    ],
)
def test_a_snapshot_tells_the_state(due: int | None, votes: int, reason: str, closed: bool, state: State) -> None:
    status = PENDING if reason == "pending" else Decision("void", "soft", reason)
    names = None if due is None else tuple(bytes([place]) * 32 for place in range(due))
    assert state_of(names, votes, status, closed=closed) is state


def test_each_state_of_a_fold_survives_a_snapshot() -> None:
    story = Story(validators=("v1", "v2", "v3"), inference=("i1", "i2", "i3", "i4", "i5"))
    due, judged, decided, complete = (story.rollout(name) for name in ("i1", "i2", "i3", "i4"))
    void = story.rollout("i5", first_counter=4)
    waiting = story.rollout("i5", weights=due)  # names no version at all
    for names, rollout in ((("v1",), judged), (("v1", "v2"), decided), (("v1", "v2", "v3"), complete)):
        for name in names:
            story.judge(name, rollout)
    story.cut()
    story.ledger.update()
    fold = story.ledger.fold(final=True)
    wanted = {
        due.id: State.DUE,
        judged.id: State.JUDGED,
        decided.id: State.DECIDED,
        complete.id: State.COMPLETE,
        void.id: State.VOID,
        waiting.id: State.ANNOUNCED,
    }
    for one in (fold, fold_from_value(fold_to_value(fold), story.ledger), copy_fold(fold, story.ledger)):
        assert {rollout: life.state for rollout, life in one.submissions.items()} == wanted
