"""An author's standing in each cut: tiers, evidence, and validators who disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol import codec
from protocol.constants import MILLION
from protocol.credit import fold_state, history
from protocol.credit.ledger import Ledger
from protocol.credit.reputation import reputation
from protocol.credit.sequential_test import CONVICTS, NEWCOMER, gain
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.log.replica import Replica
from protocol.records import Role, Verdict, parse_payload
from tests.protocol.builders import POLICY, RECIPE, THRESHOLDS, Story, digest, feed_all, status_of

SHARED = replace(POLICY, audit_share=0)
JUDGES = ("v1", "v2", "v3")


def round_of(story: Story, first: int, count: int, *, author: str = "i1", score: int = 0) -> list[Entry]:
    """Submissions of the newest version, all accepted, by all validators."""
    made = []
    for counter in range(first, first + 2 * count, 2):
        rollout = story.rollout(author, counter)
        for judge in JUDGES:
            verdict = story.verdict(judge, rollout, "accepted")
            story.say(judge, replace(verdict, score=score))
        made.append(rollout)
    return made


def test_the_audited_share_is_of_the_cut_that_the_version_anchors_on() -> None:
    story = Story(validators=JUDGES, policy=SHARED)
    made = round_of(story, 0, 18)
    assert {story.ledger.audited_share(rollout) for rollout in made} == {MILLION}
    story.cut()
    (same,) = round_of(story, 36, 1)
    assert story.ledger.audited_share(same) == MILLION  # the version is the old one
    story.train()
    half = story.rollout("i1")
    assert story.ledger.audited_share(half) == MILLION // 2
    assert story.ledger.audited_share(story.rollout("i2")) == MILLION
    node = story.node("i1")
    assert story.ledger.standing(node, story.newest.id).tier == 1
    assert story.ledger.standing(story.node("i2"), story.newest.id) == NEWCOMER
    # All who hear of it in another order say the same.
    other = Ledger(replica := Replica(story.domain))
    assert feed_all(replica, story.objects[::-1]) == []
    assert other.audited_share(half) == MILLION // 2


def test_a_lone_hard_verdict_on_a_share_brings_full_audits_and_no_disagreement() -> None:
    story = Story(validators=JUDGES, policy=SHARED)
    round_of(story, 0, 18)
    story.cut()
    story.train()
    rollout = story.rollout("i1")
    for judge, outcome in zip(JUDGES, ("accepted", "accepted", "hard"), strict=True):
        story.judge(judge, rollout, outcome, audited=1)
    story.cut()
    assert status_of(story.ledger, rollout.id).outcome == "accepted"
    account = story.ledger.accounts(final=True)[story.node("v3")]
    assert (account.disagreed, account.agreed) == (0, 18)
    story.train()
    assert story.ledger.audited_share(story.rollout("i1")) == MILLION
    assert story.ledger.accounts(final=True)[story.node("i1")].reputation == reputation(19, 0)


def test_a_validator_that_keeps_accusing_loses_its_place() -> None:
    story = Story(validators=JUDGES, policy=replace(POLICY, validator_reputation=400_000))
    for number in range(4):
        rollout = story.rollout("i1", 2 * number)
        for judge, outcome in zip(JUDGES, ("accepted", "accepted", "hard"), strict=True):
            story.judge(judge, rollout, outcome)
        story.cut()
    story.train()
    accounts = story.ledger.accounts(final=True)
    assert [accounts[story.node(judge)].disagreed for judge in JUDGES] == [0, 0, 4]
    assert accounts[story.node("v3")].reputation == reputation(0, 2)
    assert accounts[story.node("v3")].audited == 0
    assert story.node("v3") not in story.ledger.validators_of(story.newest.id)
    assert story.node("v1") in story.ledger.validators_of(story.newest.id)


def test_evidence_of_final_verdicts_convicts_from_the_next_version_on() -> None:
    story = Story(validators=JUDGES)
    score = 2 * THRESHOLDS.deficit_mean
    tokens = 2 * RECIPE.group_size * 5
    step = gain(score * tokens, tokens, THRESHOLDS.deficit_honest, THRESHOLDS.deficit_mean)
    needed = -(-CONVICTS // step)
    assert 1 < needed < 20
    round_of(story, 0, needed - 1, score=score)
    story.cut()
    story.train()
    node = story.node("i1")
    assert story.ledger.standing(node, story.newest.id).deficits == (needed - 1) * step
    round_of(story, 0, 1, score=score)
    story.cut()
    assert not story.ledger.standing(node, story.newest.id).convicts
    story.train()
    assert story.ledger.standing(node, story.newest.id).convicts
    # A hard rejection ends the test, and a new one begins.
    rollout = story.rollout("i1")
    for judge in JUDGES:
        verdict = story.verdict(judge, rollout, "hard", "drift")
        assert isinstance(verdict, Verdict)
        story.say(judge, verdict)
    story.cut()
    story.train()
    assert story.ledger.standing(node, story.newest.id) == NEWCOMER


def test_evidence_has_an_end_whatever_validators_make_up() -> None:
    """A snapshot holds it, so that a score of one hundred per cent of very many tokens must not overflow it."""
    standing = NEWCOMER.after(gain(MILLION * 2**50, 2**50, THRESHOLDS.deficit_honest, THRESHOLDS.deficit_mean), False)
    assert standing.deficits == CONVICTS
    assert standing.convicts
    with pytest.raises(PeerError):
        parse_payload("verdict", [digest("r"), "void", "soft", "undecidable", MILLION + 1, bytes(64), 0])


def test_standings_survive_a_snapshot() -> None:
    story = Story(validators=JUDGES, policy=SHARED)
    for number in range(3):
        round_of(story, 12 * number, 6, score=100 * number)
        story.cut()
    pending = story.rollout("i1", 36)
    story.cut()
    past, _, fold = story.ledger.to_value()
    for value, schema in ((past, history.SCHEMA), (fold, fold_state.SCHEMA)):
        assert codec.fits(codec.decode(codec.encode(value), max_bytes=1 << 24), schema)
    again = history.History.from_value(past)
    node = story.node("i1")
    for height in range(6):
        assert again.standing(node, height) == story.ledger.standing_at(node, height)
    assert story.ledger.standing_at(node, 4).tier == 1
    assert story.ledger.standing_at(node, 4).deficits < 0
    restored = fold_state.fold_from_value(fold, story.ledger)
    assert restored.submissions[pending.id].share == story.ledger.audited_share(pending)
    assert {author: tally.standing() for author, tally in restored.tallies.items()} == {
        author: tally.standing() for author, tally in story.ledger.fold(final=True).tallies.items()
    }


def test_only_the_newest_changes_are_kept() -> None:
    kept = history.History()
    for height in range(1, 101):
        kept.judge(b"a", height, replace(NEWCOMER, deficits=height))
    assert kept.standing(b"a", 100).deficits == 100
    assert kept.standing(b"a", 50).deficits == 50
    assert kept.standing(b"a", 3).deficits == 101 - history.KEPT_STANDINGS  # the oldest that is kept
    assert kept.standing(b"b", 3) == NEWCOMER
    kept.judge(b"c", 7, replace(NEWCOMER, tier=1))
    assert (kept.standing(b"c", 6), kept.standing(b"c", 7).tier) == (NEWCOMER, 1)


def test_two_roles_in_one_cut_are_the_same_after_a_snapshot() -> None:
    """A role laid down and taken again within a cut changed nothing, for who ran on and for who was restarted."""
    story = Story()
    story.cut()
    before = story.ledger.to_value()[0]
    story.say("v1", Role("none"))
    story.say("v1", Role("validator"))
    story.cut()
    past = story.ledger.to_value()[0]
    again = history.History.from_value(past)
    assert again.to_value() == past == before
    since = again.stands_since(story.node("v1"))
    assert since == history.History.from_value(before).stands_since(story.node("v1"))
