"""Turns: in order, with patience, and deaf to whoever is not due."""

from __future__ import annotations

from protocol.log.turns import JUMP, MAX_BACKOFF, Turns


def test_the_one_after_the_last_proposer_comes_first_and_others_after_its_silence() -> None:
    views = [Turns(4, me, 1.0, 10.0, epoch=6) for me in range(4)]
    assert [view.holder for view in views] == [3] * 4
    assert [view.due(0.0) for view in views] == [12.0, 13.0, 14.0, 11.0]
    assert [view.due(15.0) for view in views] == [16.0, 17.0, 18.0, 15.0]
    assert [views[0].accepts(elector, 10.5) for elector in range(4)] == [False, False, False, True]
    assert [views[0].accepts(elector, 12.0) for elector in range(4)] == [True, True, False, True]


def test_who_proposes_has_the_turn_and_the_next_one_waits_for_it() -> None:
    view = Turns(4, 0, 1.0, 10.0, epoch=6)
    assert view.take(3, 11.0)
    assert view.due(0.0) == 12.25
    assert view.take(3, 11.5)
    assert view.due(0.0) == 12.25
    assert not view.accepts(0, 11.9)
    assert view.take(0, 12.0)
    assert view.patience == 2.0
    assert view.holder == 0


def test_a_greedy_one_waits_until_all_others_had_their_turn() -> None:
    view = Turns(4, 0, 1.0, 0.0, epoch=3)
    assert view.take(0, 1.0)
    for moment in (1.0, 1.5, 3.9):
        assert not view.take(3, moment)
    assert view.take(1, 2.0)
    assert not view.take(0, 7.0)  # three turns of two seconds
    assert view.take(0, 8.0)


def test_patience_grows_with_fruitless_turns_and_a_cut_restores_it() -> None:
    view = Turns(4, 0, 1.0, 0.0)
    now = 1.0
    for turn in range(1, 12):
        now += MAX_BACKOFF
        assert view.take(turn % 4, now)
    assert view.patience == MAX_BACKOFF
    view.cut(11, now)
    assert view.patience == 1.0
    assert view.holder == 0


def test_one_elector_has_every_turn() -> None:
    view = Turns(1, 0, 1.0, 0.0)
    assert view.accepts(0, 0.0)
    assert view.due(0.0) == 1.0
    assert view.due(5.0) == 5.0


def test_epochs_reach_further_as_time_passes() -> None:
    view = Turns(4, 0, 2.0, 10.0, epoch=5)
    assert [view.limit(now) for now in (10.0, 11.9, 12.0, 20.0)] == [5 + JUMP * steps for steps in (1, 1, 2, 6)]
    view.cut(900, 20.0)
    assert view.limit(20.0) == 900 + JUMP
