"""Absence: who is gone loses its standing by a quorum's word, and gets it back by its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocol.constants import MISSED_VERDICTS, TICKET_CUTS, VERDICT_CUTS
from protocol.credit.attendance import RETURN_CUTS, Attendance, Attended
from protocol.errors import PeerError
from protocol.log import absence
from protocol.records import Absent, Role
from tests.protocol.builders import Story, digest, key
from tests.protocol.credit.test_snapshot import restart


def word(told: Story, name: str, seen: bytes | None = None, signers: Sequence[str] = ("elector",)) -> Absent:
    """The electors' word that a node is gone."""
    seen = told.replica.newest_cut_id if seen is None else seen
    votes = dict(absence.sign(key(signer), told.domain.id, told.node(name), seen) for signer in signers)
    return absence.make(told.domain.id, told.node(name), seen, votes)


def elected() -> Story:
    told = Story(validators=("v1", "v2", "v3"))
    told.join("elector")
    told.cut()
    return told


def test_a_quorums_word_ends_the_standing_with_its_cut() -> None:
    told = elected()
    told.say("elector", word(told, "v1"))
    assert told.ledger.standing_role(told.node("v1")) == "validator"
    told.cut()
    assert told.ledger.standing_role(told.node("v1")) == "none"
    assert told.node("v1") not in told.ledger.audience(len(told.replica.cuts))
    assert told.node("v1") in told.ledger.audience(len(told.replica.cuts) - 1)
    assert told.ledger.member(told.node("v1"))
    assert not told.ledger.judges(told.node("v1"))


def test_a_role_entry_on_that_cut_or_a_later_one_restores_it() -> None:
    told = elected()
    early = told.say("v1", Role("validator"))  # it anchors below
    told.say("elector", word(told, "v1"))
    told.cut()
    assert told.ledger.standing_role(told.node("v1")) == "none"
    assert early.payload == Role("validator")
    told.say("v1", Role("validator"))
    assert told.ledger.standing_role(told.node("v1")) == "validator"
    told.cut()
    assert told.ledger.judges(told.node("v1"))


def test_an_old_word_brought_again_does_nothing() -> None:
    told = elected()
    old = word(told, "v1")
    told.say("elector", old)
    told.cut()
    told.say("v1", Role("validator"))
    told.cut()
    told.say("elector", old)
    told.cut()
    assert told.ledger.judges(told.node("v1"))


def test_a_word_that_is_too_old_does_nothing() -> None:
    told = elected()
    old = word(told, "v2")
    for number in range(TICKET_CUTS + 1):
        told.admit(f"outsider {number}")
    told.say("elector", old)
    told.cut()
    assert told.ledger.judges(told.node("v2"))


@pytest.mark.parametrize("signers", [("v1",), ("i1", "v2")])
def test_without_a_quorum_it_is_nothing(signers: tuple[str, ...]) -> None:
    told = elected()
    told.say("i1", word(told, "v1", signers=tuple(sorted(signers, key=lambda name: key(name).node))))
    told.cut()
    assert told.ledger.judges(told.node("v1"))


def test_a_forged_word_is_refused() -> None:
    told = elected()
    right = word(told, "v1")
    absence.check(told.domain.id, right, told.domain.electors)
    for wrong in (
        Absent(told.node("v2"), right.seen, right.votes),
        Absent(right.node, digest("?"), right.votes),
        Absent(right.node, right.seen, ((told.domain.electors[0], bytes(64)),)),
    ):
        with pytest.raises(PeerError):
            absence.check(told.domain.id, wrong, told.domain.electors)


def test_it_survives_a_snapshot() -> None:
    told = elected()
    told.say("elector", word(told, "v1"))
    told.cut()
    resumed = restart(told.ledger)
    assert resumed.standing_role(told.node("v1")) == "none"
    assert resumed.replica.absences.to_value() == told.replica.absences.to_value()
    late = told.writers["v1"].append(Role("validator"))
    assert resumed.replica.add_entry(late)
    assert resumed.standing_role(told.node("v1")) == "validator"


# Attendance


def missed(told: Story, count: int, by: str = "v1") -> None:
    """Submissions that all but one of the due judge, closed at last."""
    others = [name for name in ("v1", "v2", "v3") if name != by]
    for _ in range(count):
        rollout = told.rollout("i1", 2 * (told.ledger.next_counter(told.node("i1"), told.newest.id) // 2))
        for name in others:
            told.judge(name, rollout)
    told.cut()
    for number in range(VERDICT_CUTS):
        told.admit(f"outsider {len(told.replica.cuts)} {number}")


def test_verdicts_left_to_others_end_the_standing() -> None:
    told = elected()
    told.train()
    told.cut()
    missed(told, MISSED_VERDICTS - 1)
    assert told.ledger.judges(told.node("v1"))
    told.train()
    told.cut()
    missed(told, 1)
    assert not told.ledger.judges(told.node("v1"))
    assert told.ledger.judges(told.node("v2"))
    height = len(told.replica.cuts)
    assert told.ledger.returns_at(told.node("v1")) > height
    told.say("v1", Role("validator"))
    told.cut()
    assert not told.ledger.judges(told.node("v1"))
    while len(told.replica.cuts) < told.ledger.returns_at(told.node("v1")):
        told.admit(f"more {len(told.replica.cuts)}")
    told.say("v1", Role("validator"))
    told.cut()
    assert told.ledger.judges(told.node("v1"))


def test_each_repeat_doubles_the_wait_and_a_verdict_begins_anew() -> None:
    book, due = Attendance(), [digest("a"), digest("b"), digest("c")]
    gone, here = Attended(due, frozenset(due[1:]), 9), Attended(due, frozenset(due), 9)
    for repeat in range(3):
        results = [book.note(gone, due[0], 0) for _ in range(MISSED_VERDICTS)]
        assert results == [False] * (MISSED_VERDICTS - 1) + [True]
        assert book.returns(due[0]) == RETURN_CUTS << repeat
    for _ in range(MISSED_VERDICTS - 1):
        assert not book.note(gone, due[0], 0)
    assert not book.note(here, due[0], 0)
    assert not book.note(gone, due[0], 0)
    assert Attendance.from_value(book.to_value()).to_value() == book.to_value()


def test_what_counts_for_nothing() -> None:
    book, due = Attendance(), [digest("a"), digest("b")]
    for _ in range(2 * MISSED_VERDICTS):
        assert not book.note(Attended(due, frozenset(), 9), due[0], 0)  # the others gave none either
        assert not book.note(Attended(due[:1], frozenset(), 9), due[0], 0)  # there are no others
        assert not book.note(Attended(due, frozenset(due[1:]), 9), due[0], 10)  # it did not stand then
