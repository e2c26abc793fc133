"""The rules by which an elector votes, commits and grants, one by one. What follows from them: ``test_model``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import PeerError
from protocol.log import elector_state as rules
from protocol.log.amendment import Amendment
from protocol.log.elector_state import (
    MAX_BARS,
    ElectorState,
    abstain,
    barred,
    commit,
    contested,
    follow,
    know_grant,
    reached,
    sign_amendment,
    unknown,
)
from protocol.log.heads import heads_root
from protocol.log.quorum import CertifiedCut, Cut, Grant, PreparedCut
from protocol.log.quorum import vote as signed_vote
from tests.protocol.builders import THRESHOLDS, digest, key
from tests.protocol.log.test_quorum import DOMAIN, ELECTORS, NAMES, head, make_cut

A, B = make_cut(head("x", 1)), make_cut(head("x", 2))
ME = ELECTORS[0]
SIGNED = tuple((elector, bytes(64)) for elector in ELECTORS)


def vote(
    state: ElectorState, cut: Cut, epoch: int, proof: PreparedCut | None, electors: tuple[bytes, ...], *versions: Any
) -> ElectorState | str:
    return rules.vote(state, cut, epoch, proof, electors, *versions, limit=100)


def sign_grant(state: ElectorState, one: Grant, known: int) -> ElectorState | str:
    return rules.sign_grant(state, one, known, limit=100)


def prepared(cut: Cut, epoch: int, signers: int = 3) -> PreparedCut:
    """The transitions leave signatures to parsers."""
    return PreparedCut(cut, epoch, SIGNED[:signers])


def certified(cut: Cut, epoch: int, *, by_me: bool = True) -> CertifiedCut:
    return CertifiedCut(cut, epoch, SIGNED[:3] if by_me else SIGNED[1:])


def after(cut: Cut) -> Cut:
    """The cut of the next height."""
    rows = [head("y", 1)]
    return Cut.make(DOMAIN, cut.height + 1, cut.id, heads_root([*cut.changes, *rows]), rows)


def done(outcome: ElectorState | str) -> ElectorState:
    assert isinstance(outcome, ElectorState), outcome
    return outcome


def refused(outcome: ElectorState | str, why: str) -> None:
    assert isinstance(outcome, str)
    assert why in outcome


def test_one_vote_an_epoch_and_epochs_only_grow() -> None:
    state = done(vote(ElectorState(), A, 3, None, ELECTORS))
    assert (state.voted_epoch, state.voted, state.epoch) == (3, A.id, 3)
    assert vote(state, A, 3, None, ELECTORS) is state
    refused(vote(state, B, 3, None, ELECTORS), "epoch 3")
    refused(vote(state, A, 2, None, ELECTORS), "epoch 3")
    refused(vote(ElectorState(), A, 0, None, ELECTORS), "epoch 0")
    assert done(vote(state, B, 4, None, ELECTORS)).voted == B.id  # a vote alone locks nobody
    assert done(vote(state, A, 100, None, ELECTORS)).voted_epoch == 100
    refused(vote(state, A, 101, None, ELECTORS), "too far")
    refused(vote(state, after(A), 4, None, ELECTORS), "height 1")


def test_a_locked_elector_votes_for_another_cut_only_with_a_newer_prepared_one() -> None:
    state = done(commit(done(vote(ElectorState(), A, 3, None, ELECTORS)), prepared(A, 3), ELECTORS))
    assert state.lock == prepared(A, 3)
    refused(vote(state, B, 4, None, ELECTORS), "locked")
    assert done(vote(state, A, 4, None, ELECTORS)).voted == A.id
    refused(vote(state, B, 6, prepared(B, 3), ELECTORS), "locked")
    refused(vote(state, B, 6, prepared(B, 2), ELECTORS), "locked")
    refused(vote(state, B, 6, prepared(B, 6), ELECTORS), "justification")
    refused(vote(state, B, 6, prepared(A, 5), ELECTORS), "justification")
    refused(vote(state, B, 6, prepared(B, 5, signers=2), ELECTORS), "quorum")
    unlocked = done(vote(state, B, 6, prepared(B, 5), ELECTORS))
    assert unlocked.voted == B.id
    assert unlocked.lock == prepared(A, 3)  # until it commits to the other
    refused(vote(unlocked, A, 6, None, ELECTORS), "epoch 6")
    assert done(vote(unlocked, A, 7, None, ELECTORS)).voted == A.id


def test_a_commit_needs_a_prepared_cut_of_an_epoch_that_no_later_vote_passed() -> None:
    voted = done(vote(ElectorState(), A, 3, None, ELECTORS))
    state = done(commit(voted, prepared(A, 3), ELECTORS))
    assert commit(state, prepared(A, 3), ELECTORS) is state
    refused(commit(voted, prepared(A, 3, signers=2), ELECTORS), "quorum")
    refused(commit(voted, prepared(A, 2), ELECTORS), "epoch 3")
    refused(commit(state, prepared(A, 2), ELECTORS), "epoch 3")
    refused(commit(state, prepared(B, 3), ELECTORS), "epoch 3")
    refused(commit(voted, prepared(after(A), 3), ELECTORS), "height 1")
    # A quorum voted in it, so no epoch is too high.
    assert done(commit(voted, prepared(A, 10**6), ELECTORS)).committed_epoch == 10**6
    # It need not have voted for it: a quorum did.
    later = done(commit(state, prepared(B, 5), ELECTORS))
    assert (later.lock, later.committed_epoch) == (prepared(B, 5), 5)
    refused(vote(later, B, 5, None, ELECTORS), "epoch 5")
    assert done(commit(done(vote(ElectorState(), A, 3, None, ELECTORS)), prepared(B, 3), ELECTORS)).lock == prepared(
        B, 3
    )


def test_a_certified_cut_opens_the_next_height() -> None:
    state = done(commit(done(vote(ElectorState(), A, 3, None, ELECTORS)), prepared(A, 3), ELECTORS))
    next_state = follow(state, certified(A, 3), ME, ELECTORS)
    assert (next_state.height, next_state.lock, next_state.voted, next_state.abstains) == (2, None, None, None)
    refused(vote(next_state, after(A), 3, None, ELECTORS), "epoch 3")
    assert done(vote(next_state, after(A), 4, None, ELECTORS)).voted == after(A).id
    refused(vote(next_state, B, 4, None, ELECTORS), "height 2")
    # Whoever missed the whole attempt goes on above its epoch as well.
    missed = follow(ElectorState(), certified(A, 3, by_me=False), ME, ELECTORS)
    assert (missed.height, missed.epoch) == (2, 3)
    # An old cut that is read again changes nothing.
    assert follow(next_state, certified(A, 3), ME, ELECTORS) == next_state


def grant(term: int, base: tuple[int, int] = (0, 0), trainer: str = "t") -> Grant:
    entry = DOMAIN if base == (0, 0) else digest(f"version {base}")
    return Grant.make(DOMAIN, term, key(trainer).node, entry, *base, DOMAIN)


def test_one_grant_a_term() -> None:
    state = done(sign_grant(ElectorState(), grant(3), 0))
    assert sign_grant(state, grant(3), 0) is state
    refused(sign_grant(state, grant(3, trainer="u"), 0), "term 3")
    refused(sign_grant(state, grant(2), 0), "term 3")
    refused(sign_grant(state, grant(4), 4), "term 4")
    refused(sign_grant(state, grant(101), 0), "too far")
    assert done(sign_grant(state, grant(4, trainer="u"), 0)).granted == grant(4, trainer="u").id
    assert contested(state, 2)
    assert not contested(state, 3)


def test_what_was_voted_for_or_is_final_is_never_given_up() -> None:
    voted = done(vote(ElectorState(), A, 1, None, ELECTORS, [(1, 4), (1, 5)]))
    refused(sign_grant(voted, grant(2, (1, 4)), 1), "older")
    assert done(sign_grant(voted, grant(2, (1, 5)), 1)).term == 2
    final = follow(ElectorState(), certified(A, 1, by_me=False), ME, ELECTORS, [(1, 5)])
    refused(sign_grant(final, grant(2, (1, 4)), 1), "older")


def test_a_signed_grant_bars_older_versions_beyond_its_base_until_it_is_certified() -> None:
    signed = done(sign_grant(ElectorState(), grant(2, (1, 4)), 1))
    assert [barred(signed, version) for version in ((1, 4), (1, 5), (2, 5), (1, 3))] == [False, True, False, False]
    refused(vote(signed, A, 1, None, ELECTORS, [(1, 5)]), "grant of term 2")
    refused(sign_grant(signed, grant(3, (1, 5)), 1), "older base")
    assert done(sign_grant(signed, grant(3, (1, 4)), 1)).bars == ((3, 1, 4),)
    assert done(vote(signed, A, 1, None, ELECTORS, [(1, 4)])).bars == ((2, 1, 4),)
    for known in (grant(2, (1, 4)), grant(3, (1, 4))):
        assert not barred(know_grant(signed, known), (1, 5))
    assert barred(know_grant(signed, grant(1)), (1, 5))


def test_a_prepared_or_certified_cut_shows_that_the_grant_is_lost() -> None:
    signed = done(sign_grant(ElectorState(), grant(2, (1, 4)), 1))
    voted = done(vote(signed, A, 5, prepared(A, 4), ELECTORS, [(1, 5)]))
    assert (voted.bars, voted.highest) == ((), (1, 5))
    locked = done(commit(signed, prepared(A, 4), ELECTORS))
    assert done(vote(locked, A, 5, None, ELECTORS, [(1, 5)])).bars == ()
    assert follow(signed, certified(A, 4), ME, ELECTORS, [(1, 5)]).bars == ()


def test_a_certified_grant_decides_what_the_highest_version_is() -> None:
    voted = done(vote(ElectorState(), A, 1, None, ELECTORS, [(1, 5)]))
    assert know_grant(voted, grant(2, (1, 4))).highest == (1, 4)
    assert know_grant(voted, grant(2, (1, 6))).highest == (1, 5)


def test_the_memory_of_grants_is_bounded() -> None:
    state = ElectorState()
    for term in range(2, MAX_BARS + 10):
        state = done(sign_grant(state, grant(term, (term - 1, term)), 1))
    assert len(state.bars) == MAX_BARS
    assert state.bars[-1] == (MAX_BARS + 9, MAX_BARS + 8, MAX_BARS + 9)


def test_one_amendment_a_number() -> None:
    one, other = (Amendment.make(DOMAIN, 1, ELECTORS[:count], THRESHOLDS) for count in (3, 4))
    state = done(sign_amendment(ElectorState(), one, 0))
    assert sign_amendment(state, one, 0) is state
    refused(sign_amendment(state, other, 0), "another amendment of number 1")
    refused(sign_amendment(ElectorState(), one, 1), "number 2")
    second = Amendment.make(DOMAIN, 2, ELECTORS, THRESHOLDS)
    refused(sign_amendment(state, second, 0), "number 1")
    assert done(sign_amendment(state, second, 1)).amended == 2
    refused(sign_amendment(abstain(state, 3, ELECTORS), second, 1), "abstains")


def test_an_elector_that_lost_its_past_abstains_until_the_others_passed_it() -> None:
    lost = follow(ElectorState(), certified(A, 7), ME, ELECTORS)
    assert lost.abstains == 7
    for outcome in (
        vote(lost, after(A), 8, None, ELECTORS),
        commit(lost, prepared(after(A), 8), ELECTORS),
        sign_grant(lost, grant(1), 0),
    ):
        refused(outcome, "abstains")
    lost = abstain(lost, 9, ELECTORS)
    second = after(A)
    assert follow(lost, certified(second, 9, by_me=False), ME, ELECTORS).abstains == 9
    assert follow(lost, certified(second, 10), ME, ELECTORS).abstains == 10
    assert follow(lost, certified(second, 10, by_me=False), ME, ELECTORS, asked=False).abstains == 9
    back = follow(lost, certified(second, 10, by_me=False), ME, ELECTORS)
    assert back.abstains is None
    assert done(vote(back, after(second), 11, None, ELECTORS)).voted_epoch == 11


def test_where_the_others_are_no_quorum_nobody_abstains() -> None:
    for electors in (ELECTORS[:1], ELECTORS[:2]):
        state = abstain(ElectorState(), 7, electors)
        assert (state.abstains, state.epoch) == (None, 7)


def test_an_own_signature_that_is_not_remembered() -> None:
    state = done(commit(done(vote(ElectorState(), A, 3, None, ELECTORS)), prepared(A, 3), ELECTORS))
    state = done(vote(state, A, 5, None, ELECTORS))
    assert [unknown(state, epoch, A.id, committed=False) for epoch in (4, 5, 6)] == [False, False, True]
    assert unknown(state, 5, B.id, committed=False)
    assert [unknown(state, epoch, A.id, committed=True) for epoch in (3, 4)] == [False, True]


@pytest.mark.parametrize(
    ("claims", "electors", "epoch"),
    [
        ([], 1, 0),
        ([5], 4, None),
        ([5, 9], 4, 9),
        ([5, 9, 2**40], 4, 9),  # one liar cannot keep it away for ever
        ([5, 9, 0], 4, 5),
        ([9], 3, 9),
        ([1, 2, 3, 4], 7, 4),
        ([1, 2, 3, 4, 5, 2**40], 7, 4),
    ],
)
def test_what_the_others_reached(claims: list[int], electors: int, epoch: int | None) -> None:
    assert reached(claims, electors) == epoch


def test_a_state_reads_as_written() -> None:
    ballots = dict(signed_vote(key(name), A, 3) for name in NAMES[:3])
    lock = PreparedCut(A, 3, tuple(sorted(ballots.items())))
    full = ElectorState(2, 5, B.id, 3, lock, 9, 7, digest("grant"), (3, 4), 5, digest("amendment"), ((7, 3, 4),))
    for state in (ElectorState(), full, replace(full, lock=None, voted=None)):
        assert ElectorState.decode(state.encode()) == state
    raw = full.encode()
    for wrong in (b"", raw[:-1], raw + b"\0", replace(full, lock=prepared(A, 3)).encode()):
        with pytest.raises(PeerError):
            ElectorState.decode(wrong)
