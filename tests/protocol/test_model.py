"""No two certified cuts conflict and no term has two trainers, in every reachable world of four electors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protocol.log import elector_state as rules
from protocol.log.elector_state import ElectorState
from protocol.log.quorum import Cut, Grant, PreparedCut
from tests.protocol.builders import digest, key
from tests.protocol.model import DOMAIN, Model, Rules, World, all_of, cut_on, given_up, two_trainers

A, B = cut_on(None, "a"), cut_on(None, "b")
TREE = [A, B, cut_on(A, "c"), cut_on(A, "d"), cut_on(B, "c")]


def test_one_height_has_one_cut_and_honest_electors_never_get_stuck() -> None:
    model = Model([A, B], epochs=3, twins=True)
    count, wrong = model.explore(all_of(model.conflict, model.stuck))
    assert wrong is None
    assert count > 40_000


def test_cuts_of_two_heights_nest() -> None:
    model = Model(TREE, epochs=2)
    count, wrong = model.explore(all_of(model.conflict, model.stuck))
    assert wrong is None
    assert count > 10_000


def test_changing_places_leaves_nothing_out() -> None:
    whole, half = Model([A, B], epochs=2), Model([A, B], epochs=2, twins=True)
    counts = [model.explore(all_of(model.conflict, model.stuck)) for model in (whole, half)]
    assert counts[0][0] // 2 <= counts[1][0] < counts[0][0]


# Mistakes that the exploration finds


def no_lock() -> Rules:
    """Commits lock nobody: one round of votes in effect."""
    real = rules.commit

    def commit(state: ElectorState, prepared: PreparedCut, electors: tuple[bytes, ...]) -> ElectorState | str:
        new = real(state, prepared, electors)
        return new if isinstance(new, str) else replace(new, lock=None)

    return Rules(commit=commit)


def two_votes_an_epoch() -> Rules:
    """A vote is forgotten at once."""
    real = rules.vote

    def vote(state: ElectorState, cut: Cut, epoch: int, *rest: Any, limit: int) -> ElectorState | str:
        new = real(state, cut, epoch, *rest, limit=limit)
        return new if isinstance(new, str) else replace(new, voted_epoch=epoch - 1, voted=None)

    return Rules(vote=vote)


def late_commits() -> Rules:
    """It commits in an epoch although it voted in a later one."""
    real = rules.commit

    def commit(state: ElectorState, prepared: PreparedCut, electors: tuple[bytes, ...]) -> ElectorState | str:
        earlier = replace(state, voted_epoch=min(state.voted_epoch, prepared.epoch))
        new = real(earlier, prepared, electors)
        return new if isinstance(new, str) else replace(new, voted_epoch=state.voted_epoch)

    return Rules(commit=commit)


@pytest.mark.parametrize("mistake", [no_lock, two_votes_an_epoch, late_commits])
def test_a_mistake_in_the_rules_is_found(mistake: Callable[[], Rules]) -> None:
    model = Model([A, B], epochs=2, by=mistake())
    assert model.explore(model.conflict)[1] is not None


def test_sending_before_storing_is_found() -> None:
    model = Model([A, B], epochs=2, forgetful=True)
    assert model.explore(model.conflict)[1] is not None


def test_a_stuck_elector_is_found() -> None:
    """Without justifications a lock can never be left."""
    real = rules.vote

    def vote(state: ElectorState, cut: Cut, epoch: int, proof: object, *rest: Any, limit: int) -> ElectorState | str:
        return real(state, cut, epoch, None, *rest, limit=limit)

    model = Model([A, B], epochs=2, by=Rules(vote=vote))
    assert model.explore(model.stuck)[1] == "honest electors alone are stuck"


# Terms

BASES = {(0, 0): DOMAIN, (1, 0): digest("version 0"), (1, 1): digest("version 1"), (2, 2): digest("version 2")}


def grant(term: int, trainer: str, base: tuple[int, int]) -> Grant:
    return Grant.make(DOMAIN, term, key(trainer).node, BASES[base], *base, DOMAIN)


GRANTS = [
    grant(2, "x", (1, 0)),
    grant(2, "y", (1, 0)),
    grant(2, "x", (1, 1)),
    grant(3, "x", (1, 0)),
    grant(3, "y", (1, 1)),
]
VERSIONS = [[(1, 0)], [(1, 0), (1, 1)]]


@pytest.mark.parametrize("learn", [False, True])
def test_no_term_has_two_trainers(learn: bool) -> None:
    model = Model([A], epochs=1, grants=GRANTS, versions=VERSIONS[:1], learn=learn)
    count, wrong = model.explore(all_of(two_trainers(model), model.stuck))
    assert wrong is None
    assert count > 500


def test_what_is_final_is_never_given_up() -> None:
    model = Model([A, B], epochs=2, grants=[GRANTS[0], GRANTS[3], GRANTS[4]], versions=VERSIONS)
    count, wrong = model.explore(all_of(two_trainers(model), given_up(model), model.conflict, model.stuck))
    assert wrong is None
    assert count > 10_000


def two_grants_a_term() -> Rules:
    """A signed grant is forgotten at once."""
    real = rules.sign_grant

    def sign(state: ElectorState, one: Grant, known: int, *, limit: int) -> ElectorState | str:
        new = real(state, one, known, limit=limit)
        return new if isinstance(new, str) else replace(new, term=one.term - 1, bars=())

    return Rules(sign_grant=sign)


def no_bars() -> Rules:
    """A signed grant keeps nothing back."""
    real = rules.sign_grant

    def sign(state: ElectorState, one: Grant, known: int, *, limit: int) -> ElectorState | str:
        new = real(state, one, known, limit=limit)
        return new if isinstance(new, str) else replace(new, bars=())

    return Rules(sign_grant=sign)


def low_bases() -> Rules:
    """What was voted for does not bind."""
    real = rules.sign_grant

    def sign(state: ElectorState, one: Grant, known: int, *, limit: int) -> ElectorState | str:
        return real(replace(state, highest=(0, 0)), one, known, limit=limit)

    return Rules(sign_grant=sign)


@pytest.mark.parametrize("mistake", [two_grants_a_term, no_bars, low_bases])
def test_a_mistake_with_terms_is_found(mistake: Callable[[], Rules]) -> None:
    model = Model([A, B], epochs=1, grants=GRANTS[:2], versions=VERSIONS, by=mistake())

    def wrong(world: World) -> str | None:
        return two_trainers(model)(world) or given_up(model)(world)

    assert model.explore(wrong)[1] is not None
