"""The folds over time: verdicts that lapse, what is forgotten, and a fold that begins again from its own value."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import KEPT_VERSIONS, VERDICT_CUTS
from protocol.credit import fold
from protocol.credit import ledger as ledger_module
from protocol.credit.fold_state import SCHEMA, copy_fold, fold_from_value, fold_to_value
from protocol.credit.ledger import Ledger
from protocol.credit.submission_life import PENDING, Decision
from protocol.log.branches import Outcome
from protocol.log.entry import Entry
from protocol.log.quorum import CertifiedCut
from protocol.log.replica import Replica
from protocol.records import Role, Rollout
from tests.protocol.builders import Story, status_of, take


def cut_often(story: Story, times: int) -> None:
    """Make so many cuts."""
    for number in range(times):
        story.say("i2", Role("inference" if number % 2 else "none"))
        story.cut()


@pytest.mark.parametrize(
    ("given_verdicts", "expected"),
    [
        ((), Decision("void", "soft", "unjudged")),
        (("accepted",), Decision("accepted", "none", "ok")),
        (("hard",), Decision("rejected", "hard", "sampling")),
        (("accepted", "hard"), Decision("void", "soft", "unjudged")),
    ],
)
def test_missing_verdicts_lapse(given_verdicts: tuple[str, ...], expected: Decision) -> None:
    story = Story(validators=("v1", "v2", "v3"))
    rollout = story.rollout("i1")
    for number, outcome in enumerate(given_verdicts, 1):
        story.judge(f"v{number}", rollout, outcome)
    story.cut()
    cut_often(story, VERDICT_CUTS - 1)
    assert status_of(story.ledger, rollout.id) == status_of(story.ledger, rollout.id, final=True) == PENDING
    assert story.ledger.outstanding() == [rollout]
    cut_often(story, 1)
    assert status_of(story.ledger, rollout.id, final=True) == expected
    assert status_of(story.ledger, rollout.id) == expected
    assert story.ledger.outstanding() == story.ledger.pending_for(story.node("v3")) == []
    account = story.ledger.accounts()[story.node("i1")]
    assert (account.pending, account.accepted, account.reasons.get("unjudged", 0)) == (
        0,
        expected.outcome == "accepted",
        expected.reason == "unjudged",
    )
    # What comes later counts for nothing, neither for the submission nor for who judged it.
    audited = story.ledger.accounts()[story.node("v3")].audited
    story.judge("v3", rollout)
    story.cut()
    assert status_of(story.ledger, rollout.id) == expected
    assert story.ledger.accounts()[story.node("v3")].audited == audited == 0
    assert story.ledger.accounts(final=True) == story.ledger.accounts()


def test_a_submission_whose_weights_never_come_lapses_and_lets_the_next_one_by() -> None:
    story = Story()
    unknown = story.say("i1", Rollout(bytes(32), 0, 2, 8, 40, bytes(32), 100, 2))
    behind = story.rollout("i1")
    story.cut()
    cut_often(story, VERDICT_CUTS - 1)
    story.judge("v1", behind)
    assert status_of(story.ledger, behind.id) == PENDING
    cut_often(story, 1)
    assert status_of(story.ledger, unknown.id, final=True) == Decision("void", "soft", "unjudged")
    # The one behind was final as long: it lapsed as well, though with the verdict that waited for it.
    assert status_of(story.ledger, behind.id).outcome == "accepted"
    after = story.rollout("i1", 2)
    story.judge("v1", after)
    assert status_of(story.ledger, after.id) == Decision("accepted", "none", "ok")
    for final in (False, True):  # nothing is kept of weights that anybody may name
        assert story.ledger.fold(final)._waiting == {}


def test_a_verdict_whose_submission_comes_too_late_counts_for_nothing() -> None:
    story = Story()
    entry = story.writers["i1"].append(Rollout(story.newest.id, 0, 2, 8, 40, bytes(32), 100, 2))
    story.judge("v1", entry)
    story.cut()
    cut_often(story, VERDICT_CUTS)
    story.ledger.update()
    assert story.replica.add_entry(entry)
    story.cut()
    assert status_of(story.ledger, entry.id, final=True) == status_of(story.ledger, entry.id) == PENDING


def test_the_live_fold_adopts_what_the_final_one_decided_in_another_order() -> None:
    story = Story(validators=("v1", "v2", "v3"))
    rollout = story.rollout("i1")
    names = sorted(("v1", "v2", "v3"), key=story.node)
    # Live, two soft rejections come first; in the cut the hard ones of lower keys do.
    for name, outcome in ((names[2], "soft"), (names[1], "hard"), (names[0], "hard")):
        story.judge(name, rollout, outcome)
    assert status_of(story.ledger, rollout.id).severity == "soft"
    story.cut()
    assert status_of(story.ledger, rollout.id, final=True).severity == "hard"
    assert status_of(story.ledger, rollout.id).severity == "hard"
    assert story.ledger.accounts() == story.ledger.accounts(final=True)
    assert len(story.ledger.decisions()) == story.ledger.decided() == 2


def test_what_nothing_can_change_is_forgotten() -> None:
    story = Story()
    decided = story.rollout("i1")
    waiting = story.rollout("i2")
    story.judge("v1", decided)
    for _ in range(KEPT_VERSIONS + 1):
        story.train()
    # As long as no cut covers it, the final fold might decide otherwise.
    assert status_of(story.ledger, decided.id).outcome == "accepted"
    story.cut()
    assert status_of(story.ledger, decided.id).outcome == "accepted"
    story.train()
    assert status_of(story.ledger, decided.id) == PENDING  # not kept
    assert story.ledger.outstanding() == [waiting]
    assert story.ledger.accounts()[story.node("i1")].accepted == 1
    assert [entry.id for entry, _ in story.ledger.decisions()] == [decided.id]


def test_decisions_are_listed_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "KEPT_DECISIONS", 3)
    story = Story()
    rollouts = [story.rollout("i1", counter) for counter in range(0, 10, 2)]
    for rollout in rollouts:
        story.judge("v1", rollout)
    assert [entry for entry, _ in story.ledger.decisions()] == rollouts[2:]
    assert [entry for entry, _ in story.ledger.decisions(4)] == rollouts[4:]
    assert story.ledger.decided() == 5
    assert status_of(story.ledger, rollouts[0].id) == PENDING
    assert status_of(story.ledger, rollouts[4].id).outcome == "accepted"


def long_story(seed: int) -> Story:
    """A story over more cuts than verdicts have, with lost validators, steps, a change of term and nonsense."""
    rng = Random(seed)
    story = Story(validators=("v1", "v2", "v3", "v4"), inference=("i1", "i2", "i3"))
    counters: dict[tuple[str, bytes], int] = {}
    term, trainer = 1, "trainer"
    for number in range(VERDICT_CUTS + 12):
        for _ in range(rng.randrange(3)):
            name = rng.choice(("i1", "i2", "i3"))
            counter = counters.get((name, story.newest.id), 0)
            rollout = story.rollout(name, counter)
            counters[name, story.newest.id] = counter + 2
            for validator in ("v1", "v2", "v3", "v4"):
                if rng.random() < 0.5:
                    story.judge(validator, rollout, rng.choice(("accepted", "accepted", "soft", "hard", "void")))
        if rng.random() < 0.2:
            story.say(rng.choice(("i1", "v4")), Rollout(rng.randbytes(32), 0, 2, 8, 40, bytes(32), 100, 2))
        if rng.random() < 0.2:
            story.train(trainer, term)
        if number == 40:
            term, trainer = 2, "i3"
            story.grant(2, trainer, story.newest)
        story.say("v4", Role("validator" if number % 2 else "none"))
        story.cut()
    story.judge("v1", story.rollout("i2", counters.get(("i2", story.newest.id), 0)))
    return story


LONG = long_story(1)


def same(one: Ledger, other: Ledger) -> None:
    """Fail unless both say the same of everything that is final."""
    assert one.accounts(final=True) == other.accounts(final=True)
    assert fold_to_value(one.fold(final=True))[3:] == fold_to_value(other.fold(final=True))[3:]
    assert one._history.to_value() == other._history.to_value()
    assert [entry.id for entry in one.lineage(final=True)] == [entry.id for entry in other.lineage(final=True)]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.3))
def test_any_permutation_repetition_and_loss_gives_one_result(seed: int, lost: float) -> None:
    rng = Random(seed)
    replica = Replica(LONG.domain)
    ledger = Ledger(replica)
    left = list(LONG.objects)
    # Shuffled in windows: the end of the log before its beginning would only be refused until all came again.
    while left:
        window = rng.randrange(1, 400)
        some, left = left[:window], left[window:]
        rng.shuffle(some)
        for thing in some + some[: rng.randrange(3)]:
            if rng.random() < lost or take(replica, thing) in (
                Outcome.MISSING_PREV,
                Outcome.MISSING_ANCHOR,
                Outcome.MISSING_CUT,
                Outcome.MISSING_ENTRIES,
                Outcome.MISSING_GRANT,
            ):
                left.append(thing)
        if rng.random() < 0.5:
            ledger.update()
    same(ledger, LONG.ledger)
    assert ledger.accounts() == LONG.ledger.accounts()
    assert ledger.generation == 0


def test_a_fold_begins_again_from_its_value() -> None:
    """After any cut: what follows is as if nothing had happened."""
    replica = Replica(LONG.domain)
    ledger = Ledger(replica)
    for number, thing in enumerate(LONG.objects):
        assert take(replica, thing)
        if number % 97 == 0:
            ledger.update()
            value = codec.decode(codec.encode(fold_to_value(ledger.fold(final=True))), max_bytes=2**30)
            codec.check(value, SCHEMA, "fold")
            assert fold_to_value(fold_from_value(value, ledger)) == value
            copy = copy_fold(ledger.fold(final=True), ledger)
            ledger._final = fold_from_value(value, ledger)
            assert fold_to_value(copy) == fold_to_value(ledger.fold(final=True))
            ledger._begin_anew()
    same(ledger, LONG.ledger)
    assert ledger.accounts() == LONG.ledger.accounts()
    for entry in (thing for thing in LONG.objects if isinstance(thing, Entry)):
        assert status_of(ledger, entry.id, final=True) == status_of(LONG.ledger, entry.id, final=True)


@pytest.mark.parametrize("asked", [None, 13, 1])
def test_a_fold_that_nobody_asked_for_long_begins_anew(asked: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever left memory meanwhile, and whenever somebody asks: the answers are the same."""
    monkeypatch.setattr(ledger_module, "BEHIND", 40)
    ledger = Ledger(Replica(LONG.domain))
    forgotten = 0
    for thing in LONG.objects:
        assert take(ledger.replica, thing)
        if isinstance(thing, CertifiedCut):
            ledger.note_final()
            if ledger.final_entries - forgotten >= 60:
                forgotten = ledger.final_entries
                ledger.forget()
            if asked is not None and thing.cut.height % asked == 0:
                ledger.update()
    same(ledger, LONG.ledger)
    assert ledger.accounts() == LONG.ledger.accounts()
    assert (ledger.generation > 0) == (asked != 1)


def test_accounts_add_up() -> None:
    outcomes: dict[str, int] = {}
    for account in LONG.ledger.accounts(final=True).values():
        for name in ("accepted", "rejected", "void", "pending"):
            outcomes[name] = outcomes.get(name, 0) + getattr(account, name)
    final = LONG.replica.certified_head
    rollouts = [
        thing
        for thing in LONG.objects
        if isinstance(thing, Entry) and isinstance(thing.payload, Rollout) and thing.seq <= final(thing.author)
    ]
    assert sum(outcomes.values()) == len(rollouts)
    assert all(outcomes.values())
    assert any("unjudged" in account.reasons for account in LONG.ledger.accounts().values())
