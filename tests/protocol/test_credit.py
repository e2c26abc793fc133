"""Credit and reputation: the arithmetic, and that only final work counts."""

from __future__ import annotations

import pytest

from protocol.constants import MILLION
from protocol.credit import PENDING, Status, Tally, credits, reputation
from protocol.records import Rollout, Verdict
from tests.protocol.builders import Story, digest

ROLLOUT = Rollout(digest("weights"), 0, 3, 24, 100, digest("file"), 1000)
ACCEPTED = Status("accepted", "none", "ok")


def verdict(outcome: str, audited: int) -> Verdict:
    """A verdict of this outcome."""
    severity, reason = ("none", "ok") if outcome == "accepted" else ("soft", "late")
    return Verdict(digest("rollout"), outcome, severity, reason, 0, bytes(64), audited)


@pytest.mark.parametrize(
    ("accepted", "hard", "expected"),
    [(0, 0, 500_000), (1, 0, 666_666), (98, 0, 990_000), (0, 1, 45_454), (98, 1, 825_000), (10**9, 0, 999_999)],
)
def test_reputation(accepted: int, hard: int, expected: int) -> None:
    assert reputation(accepted, hard) == expected


def test_an_author_earns_one_for_each_accepted_response() -> None:
    tally = Tally(pending=4)
    tally.decide(ACCEPTED, ROLLOUT)
    tally.decide(Status("rejected", "hard", "sampling"), ROLLOUT)
    tally.decide(Status("rejected", "soft", "late"), ROLLOUT)
    tally.decide(Status("void", "soft", "late"), ROLLOUT)
    account = tally.account(trained=5)
    assert (account.accepted, account.rejected, account.void, account.hard, account.pending) == (1, 2, 1, 1, 0)
    assert (account.generated, account.audited, account.trained, account.credit) == (24, 0, 5, 29)
    assert account.reasons == {"late": 2, "sampling": 1}
    assert list(account.reasons) == ["late", "sampling"]
    assert account.reputation == reputation(1, 1)


@pytest.mark.parametrize(
    ("status", "given", "audited", "earned"),
    [
        (ACCEPTED, "accepted", 3, 6),
        (ACCEPTED, "accepted", 1, 2),
        (ACCEPTED, "accepted", 0, 0),
        (ACCEPTED, "accepted", 1000, 6),  # claims more groups than there are
        (ACCEPTED, "rejected", 3, 0),
        (Status("rejected", "hard", "reward"), "rejected", 3, 6),
        (Status("void", "soft", "undecidable"), "void", 3, 0),
        (PENDING, "accepted", 3, 0),
    ],
)
def test_an_auditor_earns_a_quarter_of_what_it_replayed(status: Status, given: str, audited: int, earned: int) -> None:
    tally = Tally()
    tally.audit(status, ROLLOUT, MILLION, verdict(given, audited))
    assert tally.account(0).credit == tally.audited == earned


def test_a_quarter_is_rounded_down_for_each_submission() -> None:
    tally = Tally()
    odd = Rollout(digest("weights"), 0, 1, 7, 7, digest("file"), 10)
    for _ in range(3):
        tally.audit(ACCEPTED, odd, MILLION, verdict("accepted", 1))
    assert tally.audited == 3


def test_only_final_work_counts() -> None:
    story = Story()
    rollout = story.rollout("i1")
    story.judge("v1", rollout)
    assert sum(account.credit for account in credits(story.ledger).values()) == 0
    assert story.ledger.accounts()[story.node("i1")].credit == 8
    story.cut()
    accounts = credits(story.ledger)
    assert list(accounts) == sorted(accounts)
    assert accounts[story.node("i1")].generated == accounts[story.node("i1")].credit == 8
    assert accounts[story.node("v1")].audited == accounts[story.node("v1")].credit == 2


def test_a_trainer_earns_for_steps_whose_weights_stand_on_the_lineage() -> None:
    story = Story()
    first = story.train(trained=5)
    story.train(trained=7)
    story.cut()
    assert credits(story.ledger)[story.node("trainer")].trained == 12
    story.grant(2, "i1", first)
    assert credits(story.ledger)[story.node("trainer")].trained == 5
