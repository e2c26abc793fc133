"""Credit and reputation: the arithmetic, and that only final work counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.constants import MILLION
from protocol.credit.reputation import Tally, reputation
from protocol.credit.sequential_test import NEWCOMER, gain
from protocol.credit.submission_life import PENDING, Decision
from protocol.records import Rollout, Verdict
from tests.protocol import builders
from tests.protocol.builders import Story, digest

ROLLOUT = Rollout(digest("weights"), 0, 3, 24, 100, digest("file"), 1000, 3)
ACCEPTED = Decision("accepted", "none", "ok")


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
    tally.decide(Decision("rejected", "hard", "sampling"), ROLLOUT)
    tally.decide(Decision("rejected", "soft", "late"), ROLLOUT)
    tally.decide(Decision("void", "soft", "late"), ROLLOUT)
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
        (Decision("rejected", "hard", "reward"), "rejected", 3, 6),
        (Decision("void", "soft", "undecidable"), "void", 3, 0),
        (PENDING, "accepted", 3, 0),
    ],
)
def test_an_auditor_earns_a_quarter_of_what_it_replayed(
    status: Decision, given: str, audited: int, earned: int
) -> None:
    tally = Tally()
    tally.audit(status, ROLLOUT, MILLION, verdict(given, audited))
    assert tally.account(0).credit == tally.audited == earned


def test_a_quarter_is_rounded_down_for_each_submission() -> None:
    tally = Tally()
    odd = Rollout(digest("weights"), 0, 1, 7, 7, digest("file"), 10, 1)
    for _ in range(3):
        tally.audit(ACCEPTED, odd, MILLION, verdict("accepted", 1))
    assert tally.audited == 3


THRESHOLDS = replace(builders.THRESHOLDS, deficit_honest=1_000, deficit_mean=20_000)


def judged(outcome: str, severity: str, reason: str = "ok", score: int = 0, audited: int = 3) -> Verdict:
    return Verdict(digest("rollout"), outcome, severity, reason, score, bytes(64), audited)


GOOD, BAD, UNSURE, AWAY = (
    judged("accepted", "none"),
    judged("rejected", "hard", "sampling"),
    judged("void", "soft", "undecidable"),
    judged("rejected", "soft", "missing"),
)
REFUSED = Decision("rejected", "hard", "sampling")


def test_only_opposite_verdicts_over_everything_are_disagreements() -> None:
    tally = Tally()
    for status, verdict in ((ACCEPTED, GOOD), (REFUSED, BAD)):
        tally.audit(status, ROLLOUT, MILLION, verdict)
    assert (tally.agreed, tally.disagreed) == (2, 0)
    for status, verdict in ((ACCEPTED, UNSURE), (ACCEPTED, AWAY), (REFUSED, UNSURE)):
        tally.audit(status, ROLLOUT, MILLION, verdict)
    for status, verdict in ((ACCEPTED, BAD), (REFUSED, GOOD)):
        tally.audit(status, ROLLOUT, MILLION // 2, verdict)  # the others need not have seen what it saw
    assert (tally.agreed, tally.disagreed) == (2, 0)
    for status, verdict in ((ACCEPTED, BAD), (REFUSED, GOOD)):
        tally.audit(status, ROLLOUT, MILLION, verdict)
    assert (tally.agreed, tally.disagreed) == (2, 2)
    tally.audit(ACCEPTED, ROLLOUT, MILLION, BAD, -1)
    assert tally.disagreed == 1


def test_who_keeps_disagreeing_loses_reputation() -> None:
    tally = Tally(accepted=20)
    for disagreed, agreed, strays in ((2, 0, 0), (3, 0, 1), (3, 15, 1), (3, 16, 0), (8, 32, 4)):
        tally.disagreed, tally.agreed = disagreed, agreed
        assert tally.strays == strays
        assert tally.account(0).reputation == reputation(20, strays)
    assert (tally.account(0).agreed, tally.account(0).disagreed) == (32, 8)


def test_a_newcomer_is_audited_fully_and_trust_is_earned_in_a_row() -> None:
    tally = Tally()
    tiers = []
    for _ in range(200):
        tiers.append(tally.standing().tier)
        tally.decide(ACCEPTED, ROLLOUT)
        tally.learn(ACCEPTED, ROLLOUT, [GOOD], THRESHOLDS)
    assert [tiers.index(tier) for tier in range(5)] == [0, 18, 38, 78, 158]
    # A hard verdict that stands alone, where only a share was replayed, begins the row anew ...
    tally.doubt(ACCEPTED, MILLION, BAD)
    tally.doubt(REFUSED, MILLION // 2, BAD)
    tally.doubt(ACCEPTED, MILLION // 2, GOOD)
    assert tally.standing().tier == 4
    tally.doubt(ACCEPTED, MILLION // 2, BAD)
    assert tally.standing().tier == 0
    assert tally.account(0).reputation == reputation(200, 0)
    # ... and one that stands lowers reputation for long.
    for _ in range(100):
        tally.learn(ACCEPTED, ROLLOUT, [GOOD], THRESHOLDS)
    assert tally.standing().tier == 3
    tally.decide(REFUSED, ROLLOUT)
    tally.learn(REFUSED, ROLLOUT, [BAD], THRESHOLDS)
    assert (tally.standing(), tally.clean) == (NEWCOMER, 0)


def test_evidence_takes_the_lower_median_of_the_scores() -> None:
    def after(*verdicts: Verdict, status: Decision = ACCEPTED) -> tuple[int, int]:
        tally = Tally()
        tally.learn(status, ROLLOUT, verdicts, THRESHOLDS)
        return tally.deficits, tally.borders

    def of(score: int, audited: int = 3) -> Verdict:
        return judged("accepted", "none", score=score, audited=audited)

    tokens = ROLLOUT.tokens
    expected = gain(40_000 * tokens, tokens, 1_000, 20_000)
    assert expected > 0
    for scores in ((40_000,), (40_000, 900_000), (0, 40_000, 900_000), (40_000, 40_000, 40_000)):
        assert after(*map(of, scores))[0] == expected
    # A third of it replayed is a third of the evidence; who replayed nothing says nothing.
    assert after(of(40_000, 1))[0] == gain(40_000 * (tokens // 3), tokens // 3, 1_000, 20_000)
    assert after(of(40_000), of(0, 0))[0] == expected
    assert after(of(40_000, 0)) == (0, 0)
    assert after(of(0), status=Decision("rejected", "soft", "borderline"))[1] > 0 > after(of(0))[1]


def test_who_goes_on_for_another_takes_the_worse_evidence_along() -> None:
    old, new = Tally(deficits=5, borders=-3, clean=2, agreed=1, disagreed=4), Tally(deficits=-1, borders=7, clean=3)
    new.merge(old)
    assert (new.deficits, new.borders, new.clean, new.agreed, new.disagreed) == (5, 7, 5, 1, 4)


def test_only_final_work_counts() -> None:
    story = Story()
    rollout = story.rollout("i1")
    story.judge("v1", rollout)
    assert sum(account.credit for account in story.ledger.accounts(final=True).values()) == 0
    assert story.ledger.accounts()[story.node("i1")].credit == 8
    story.cut()
    accounts = story.ledger.accounts(final=True)
    assert list(accounts) == sorted(accounts)
    assert accounts[story.node("i1")].generated == accounts[story.node("i1")].credit == 8
    assert accounts[story.node("v1")].audited == accounts[story.node("v1")].credit == 2


def test_a_trainer_earns_for_steps_whose_weights_stand_on_the_lineage() -> None:
    story = Story()
    first = story.train(trained=5)
    story.train(trained=7)
    story.cut()
    assert story.ledger.accounts(final=True)[story.node("trainer")].trained == 12
    story.grant(2, "i1", first)
    assert story.ledger.accounts(final=True)[story.node("trainer")].trained == 5
