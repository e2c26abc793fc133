"""The ledger and its folds: versions, audiences, decisions, accounts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import pytest

from protocol.credit.ledger import Ledger
from protocol.credit.snapshot import Snapshot
from protocol.credit.submission_life import PENDING, Decision
from protocol.errors import Evidence
from protocol.log.branches import Outcome
from protocol.log.entry import Entry, make
from protocol.log.quorum import CertifiedGrant, Grant, certify_grant, grant_vote
from protocol.log.replica import Replica
from protocol.records import Leave, Role, Rollout, Step, Weights
from protocol.work.rollout import max_bytes
from tests.protocol.builders import POLICY, RECIPE, Story, digest, feed_all, key, status_of, take

TRUSTED = dataclasses.replace(POLICY, validator_reputation=600_000)


def statuses(story: Story, *rollouts: Entry) -> list[str]:
    """The outcomes of these rollout entries."""
    return [status_of(story.ledger, rollout.id).outcome for rollout in rollouts]


# Nodes


def test_names_and_roles() -> None:
    story = Story()
    ledger, node = story.ledger, story.node("i1")
    before = story.replica.newest_cut_id
    assert ledger.joined(node)
    assert not ledger.joined(story.node("stranger"))
    assert (ledger.name(node), ledger.name(story.node("stranger"))) == ("i1", "")
    assert ledger.standing_role(node) == "inference"
    story.say("i1", Role("relay"))
    assert ledger.standing_role(node) == "relay"
    assert ledger.standing_role(node, before) == "inference"
    assert ledger.standing_role(node, story.domain.id) == "none"
    story.say("i1", Leave())
    assert ledger.standing_role(node) == "none"
    assert ledger.standing_role(story.node("stranger")) == "none"
    assert ledger.authors() == sorted(story.node(name) for name in ("trainer", "v1", "i1", "i2"))


# Versions


def test_the_lineage_grows_with_the_trainers_weights() -> None:
    story = Story()
    ledger, zero = story.ledger, story.newest
    assert list(ledger.lineage()) == [zero]
    one = story.train()
    two = story.say("trainer", story.version(1, 2, one.id))  # unchanged weights, announced again
    assert list(ledger.lineage()) == [zero, one, two]
    assert ledger.newest_weights() is two
    assert [ledger.version_number(entry.id) for entry in (zero, one, two)] == [0, 1, 2]
    assert ledger.version_number(digest("?")) is None
    assert ledger.weights(one.id) is one
    assert isinstance(one.payload, Weights)
    assert [step.id for step in ledger.steps()] == [one.payload.step]
    assert ledger.newest_weights(final=True) is None
    story.cut()
    assert ledger.newest_weights(final=True) is two
    grant = ledger.grant()
    assert grant is not None
    assert (grant.term, grant.trainer) == (1, story.node("trainer"))


def test_weights_wait_for_their_grant_and_their_predecessor() -> None:
    story = Story()
    story.train()
    story.train()
    replica = Replica(story.domain)
    ledger = Ledger(replica)
    missing = feed_all(replica, [thing for thing in story.objects if not isinstance(thing, CertifiedGrant)])
    assert set(missing) == {Outcome.MISSING_GRANT, Outcome.MISSING_PREV}
    assert ledger.newest_weights() is None
    assert ledger.grant() is None
    assert not feed_all(replica, story.objects)
    assert len(ledger.lineage()) == 3
    assert [entry.id for entry in ledger.lineage()] == [entry.id for entry in story.ledger.lineage()]


@pytest.mark.parametrize(
    "payload",
    [
        lambda story: story.version(1, 2, story.newest.id),  # a number left out
        lambda story: story.version(1, 1, digest("?")),  # another predecessor
        lambda story: story.version(1, 0, None),  # version 0 again
    ],
)
def test_weights_out_of_place_do_not_count(payload: Callable[[Story], Weights]) -> None:
    story = Story()
    story.say("trainer", payload(story))
    assert list(story.ledger.lineage()) == [story.newest]


@pytest.mark.parametrize(("author", "term"), [("i1", 1), ("i1", 2), ("trainer", 2)])
def test_weights_outside_their_authors_term_are_not_taken(author: str, term: int) -> None:
    story = Story()
    made = story.writers[author].append(story.version(term, 1, story.newest.id))
    assert story.replica.add_entry(made) is Outcome.MISSING_GRANT
    assert story.replica.entry(made.id) is None
    behind = story.writers[author].append(Role("none"))
    assert story.replica.add_entry(behind) is Outcome.MISSING_PREV


def test_version_0_is_the_genesis() -> None:
    story = Story()
    for other in ({"whole": digest("?")}, {"manifest": digest("?")}, {"manifest_size": 1}):
        wrong = dataclasses.replace(story.version(1, 0, None), **other)
        replica = Replica(story.domain)
        ledger = Ledger(replica)
        assert not feed_all(replica, story.objects[:-1])
        entry = make(key("trainer"), story.domain.id, 2, story.newest.prev, story.newest.anchor, wrong)
        assert replica.add_entry(entry)
        assert ledger.newest_weights() is None


def test_of_two_successors_the_one_of_lowest_seq_counts() -> None:
    story = Story()
    zero = story.newest
    one = story.say("trainer", story.version(1, 1, zero.id))
    story.say("trainer", dataclasses.replace(story.version(1, 1, zero.id), whole=digest("another")))
    assert list(story.ledger.lineage()) == [zero, one]


def test_a_new_term_replaces_what_follows_its_base() -> None:
    story = Story()
    zero = story.newest
    one, two = story.train(), story.train()
    rollout = story.rollout("i2", weights=two)
    story.grant(2, "i1", one)  # the ledger was asked nothing so far: it learns of the grant before the weights
    assert list(story.ledger.lineage()) == [zero, one]
    assert story.ledger.version_number(two.id) is None
    story.train()  # the old trainer goes on, and nobody follows
    other = story.train("i1", 2, one)
    assert list(story.ledger.lineage()) == [zero, one, other]
    # What was made with a version that once stood is still judged, but no longer asked for.
    assert story.ledger.weights(two.id) is two
    assert story.ledger.pending_for(story.node("v1")) == []
    story.judge("v1", rollout)
    assert statuses(story, rollout) == ["accepted"]


def test_a_grant_counts_only_where_its_base_stands() -> None:
    story = Story()
    zero = story.newest
    one = story.train()
    story.grant(2, "i1", story.say("trainer", story.version(1, 5, one.id)))
    assert list(story.ledger.lineage()) == [zero, one]
    wrong = Grant.make(
        story.domain.id, 3, story.node("i1"), zero.id, 1, 7, story.domain.id
    )  # zero is version 0 of term 1
    story.replica.add_grant(certify_grant(wrong, dict([grant_vote(key("elector"), wrong)]), story.domain.electors))
    assert list(story.ledger.lineage()) == [zero, one]
    story.grant(4, "i1", zero)
    assert list(story.ledger.lineage()) == [zero]


def test_a_grant_before_version_0_starts_again() -> None:
    story = Story()
    story.train()
    story.grant(2, "i1")
    assert list(story.ledger.lineage()) == []
    zero = story.say("i1", story.version(2, 0, None))
    assert list(story.ledger.lineage()) == [zero]


def test_a_grant_whose_base_comes_late_is_overruled_by_a_later_one() -> None:
    story = Story()
    zero, one = story.newest, story.train()
    two = story.train()
    late = [thing for thing in story.objects if thing is two]
    story.grant(2, "i1", two)
    story.grant(3, "i2", one)
    mine = story.train("i2", 3, one)
    rollout = story.rollout("i1", weights=mine)
    story.judge("v1", rollout)
    assert list(story.ledger.lineage()) == [zero, one, mine]
    replica = Replica(story.domain)
    ledger = Ledger(replica)
    for thing in story.objects:
        if thing not in late:
            take(replica, thing)
            ledger.update()
    assert status_of(ledger, rollout.id).outcome == "accepted"
    assert not feed_all(replica, story.objects)
    assert [entry.id for entry in ledger.lineage()] == [zero.id, one.id, mine.id]
    assert ledger.accounts() == story.ledger.accounts()


def test_a_grant_that_comes_late_takes_nothing_back() -> None:
    story = Story()
    one = story.train()
    two = story.train()
    story.grant(3, "i1", two)
    three = story.train("i1", 3, two)
    rollout = story.rollout("i2", weights=three)
    story.judge("v1", rollout)
    assert statuses(story, rollout) == ["accepted"]
    story.grant(2, "i2", one)
    aside = story.train("i2", 2, one)
    assert statuses(story, rollout) == ["accepted"]
    assert story.ledger.newest_weights() is three
    assert (story.ledger.version_number(aside.id), story.ledger.weights(aside.id)) == (None, aside)
    assert story.ledger.generation == 0
    assert story.ledger.accounts() == Ledger(story.replica).accounts()


def test_there_may_be_more_terms_than_versions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.credit.lineage.KEPT", 4)
    story = Story()
    for term in range(2, 9):
        story.grant(term, "trainer", story.newest)
        story.train(term=term)
        story.ledger.update()
    assert len(story.ledger.lineage()) == 4
    assert story.ledger.newest_weights() is story.newest
    assert story.ledger.version_number(story.newest.id) == 7
    story.cut()
    snapshot = Snapshot.take(story.ledger)
    assert snapshot is not None
    again = Snapshot.parse(snapshot.encode(), story.domain).resume(story.replica.grants.values())
    assert again.newest_weights(final=True) == story.newest
    assert again.lineage(final=True) == story.ledger.lineage(final=True)


@pytest.mark.parametrize("change", [{"term": 2}, {"number": 2}, {"base": digest("?")}])
def test_a_step_that_does_not_fit_its_weights_is_none(change: dict[str, object]) -> None:
    story = Story()
    zero = story.newest
    good = Step(1, 1, zero.id, digest("blob"), 9, 0, 0, 0, 2, 8, 0, 8, 40, 1, 1, 1, 0)
    made = story.say("trainer", dataclasses.replace(good, **change))  # type: ignore[arg-type]
    story.say("trainer", story.version(1, 1, zero.id, made.id))
    assert len(story.ledger.lineage()) == 2
    assert story.ledger.steps() == []


# Audiences


def test_validators_stand_in_the_cut_that_the_version_anchors_on() -> None:
    story = Story(validators=("v1", "v2"))
    zero = story.newest
    both = {story.node("v1"), story.node("v2")}
    assert story.ledger.validators_of(zero.id) == both
    story.say("v2", Role("none"))
    story.join("v3")
    story.say("v3", Role("validator"))
    one = story.train()
    assert story.ledger.validators_of(one.id) == both  # it anchors on the same cut
    story.cut()
    two = story.train()
    assert story.ledger.validators_of(two.id) == {story.node("v1"), story.node("v3")}
    assert story.ledger.validators_of(zero.id) == both
    assert story.ledger.validators_of(digest("?")) == frozenset()
    assert not story.ledger.may_infer(story.node("v3"), one.id)
    assert story.ledger.may_infer(story.node("v3"), two.id)
    assert not story.ledger.may_infer(story.node("v3"), digest("?"))


def test_nobody_stands_before_the_first_cut() -> None:
    story = Story()
    assert story.ledger.audience(0) == frozenset()
    story.ledger.update()
    assert not story.ledger.eligible(story.node("i1"), 0)
    assert story.ledger.eligible(story.node("i1"), 1)


def test_validators_are_named_or_trusted() -> None:
    story = Story(validators=("v1", "v2"), inference=("i1",), policy=TRUSTED, named=("v1", "v9"))
    assert story.ledger.validators_of(story.newest.id) == {story.node("v1")}
    assert [story.ledger.may_validate(story.node(name)) for name in ("v1", "v2", "v9")] == [True, False, True]
    for counter in (0, 2):
        story.judge("v1", story.rollout("v2", counter))
    story.train()
    assert story.ledger.validators_of(story.newest.id) == {story.node("v1")}  # not final in its cut
    story.cut()
    story.train()
    assert story.ledger.accounts(final=True)[story.node("v2")].reputation == 750_000
    assert story.ledger.may_validate(story.node("v2"))
    assert story.ledger.validators_of(story.newest.id) == {story.node("v1"), story.node("v2")}
    # Told in another order, grants last, the past is the same.
    replica = Replica(story.domain)
    ledger = Ledger(replica)
    for thing in story.objects:
        if not isinstance(thing, CertifiedGrant):
            take(replica, thing)
            ledger.update()
    feed_all(replica, story.objects)
    assert ledger.validators_of(story.newest.id) == {story.node("v1"), story.node("v2")}
    assert ledger.accounts(final=True) == story.ledger.accounts(final=True)


def test_three_validators_of_many_are_due() -> None:
    names = tuple(f"v{number}" for number in range(1, 8))
    story = Story(validators=names)
    rollouts = [story.rollout("i1", counter) for counter in range(0, 20, 2)]
    chosen = [story.ledger.due(rollout) for rollout in rollouts]
    assert {len(due) for due in chosen} == {3}
    assert len(set(chosen)) > 1
    assert set().union(*chosen) <= {story.node(name) for name in names}
    for name in names:
        due_here = [r.id for r, due in zip(rollouts, chosen, strict=True) if story.node(name) in due]
        assert [entry.id for entry in story.ledger.pending_for(story.node(name))] == due_here


# Decisions


def test_a_single_validator_decides() -> None:
    story = Story()
    first, second, third, fourth = (story.rollout("i1", counter) for counter in (0, 2, 4, 6))
    assert status_of(story.ledger, first.id) is PENDING
    assert status_of(story.ledger, digest("?")) is PENDING
    assert [entry.id for entry in story.ledger.outstanding()] == [first.id, second.id, third.id, fourth.id]
    story.judge("v1", first)
    story.judge("v1", second, "hard", "reward")
    story.judge("v1", third, "soft")
    story.judge("v1", fourth, "void")
    expected = [
        Decision("accepted", "none", "ok"),
        Decision("rejected", "hard", "reward"),
        Decision("rejected", "soft", "late"),
        Decision("void", "soft", "undecidable"),
    ]
    entries = [first, second, third, fourth]
    assert [status_of(story.ledger, entry.id) for entry in entries] == expected
    assert story.ledger.decisions() == list(zip(entries, expected, strict=True))
    assert story.ledger.decisions(3) == [(fourth, expected[3])]
    assert story.ledger.pending_for(story.node("v1")) == []
    assert story.ledger.outstanding() == []
    assert {status_of(story.ledger, entry.id, final=True) for entry in entries} == {PENDING}
    story.cut()
    assert [status_of(story.ledger, entry.id, final=True) for entry in entries] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("accepted",), PENDING),
        (("accepted", "accepted"), Decision("accepted", "none", "ok")),
        (("hard", "accepted", "accepted"), Decision("accepted", "none", "ok")),
        (("hard", "accepted", "hard"), Decision("rejected", "hard", "sampling")),
        (("hard", "soft"), Decision("rejected", "soft", "late")),
        (("soft", "hard", "accepted"), Decision("rejected", "soft", "late")),
        (("void", "void", "hard"), Decision("void", "soft", "undecidable")),
        (("accepted", "hard", "void"), Decision("void", "soft", "undecidable")),
        (("accepted", "hard"), PENDING),
    ],
)
def test_a_majority_of_three_decides(given: tuple[str, ...], expected: Decision) -> None:
    story = Story(validators=("v1", "v2", "v3"))
    rollout = story.rollout("i1")
    for number, outcome in enumerate(given, 1):
        story.judge(f"v{number}", rollout, outcome)
    assert status_of(story.ledger, rollout.id) == expected
    assert set(story.ledger.verdicts(rollout.id)) == {story.node(f"v{n + 1}") for n in range(len(given))}


def test_two_due_must_agree() -> None:
    story = Story(validators=("v1", "v2"))
    agreed, split = story.rollout("i1"), story.rollout("i1", 2)
    for rollout, second in ((agreed, "accepted"), (split, "hard")):
        story.judge("v1", rollout)
        assert statuses(story, rollout) == ["pending"]
        story.judge("v2", rollout, second)
    assert statuses(story, agreed, split) == ["accepted", "void"]


def test_the_first_verdict_counts_and_others_have_no_say() -> None:
    story = Story()
    rollout = story.rollout("i1")
    story.judge("i2", rollout, "hard")
    assert statuses(story, rollout) == ["pending"]
    story.judge("v1", rollout)
    story.judge("v1", rollout, "hard")
    assert statuses(story, rollout) == ["accepted"]
    assert story.ledger.accounts()[story.node("v1")].audited == 2


def test_a_draw_that_is_no_signature_over_the_submission_does_not_count() -> None:
    story = Story()
    rollout, other = story.rollout("i1"), story.rollout("i1", 2)
    payload = story.verdict("v1", rollout, "hard")
    elsewhere = story.verdict("v1", other, "hard")
    story.say("v1", dataclasses.replace(payload, draw=bytes(64)))
    story.say("v1", dataclasses.replace(payload, draw=elsewhere.draw))
    # Nor one over the same file as another entry announces it: who announces another's file first learns no draw.
    assert isinstance(rollout.payload, Rollout)
    copied = story.say("i2", rollout.payload)
    early = story.verdict("v1", copied, "hard")
    assert early.draw != payload.draw
    story.say("v1", dataclasses.replace(payload, draw=early.draw))
    assert statuses(story, rollout) == ["pending"]
    assert [entry.id for entry in story.ledger.pending_for(story.node("v1"))] == [rollout.id, other.id, copied.id]
    story.judge("v1", rollout)
    assert statuses(story, rollout) == ["accepted"]


def test_a_late_verdict_earns_where_it_agrees() -> None:
    story = Story(validators=("v1", "v2", "v3"))
    rollout, other = story.rollout("i1"), story.rollout("i1", 2)
    for name in ("v1", "v2"):
        story.judge(name, rollout)
        story.judge(name, other)
    story.judge("v3", rollout)
    story.judge("v3", other, "hard")
    accounts = story.ledger.accounts()
    assert [accounts[story.node(name)].audited for name in ("v1", "v2", "v3")] == [4, 4, 2]


def test_a_gap_voids_what_follows() -> None:
    story = Story(inference=("i1", "i2"))
    rollouts = [story.rollout("i1", counter) for counter in (0, 4, 2, 6)]
    other = story.rollout("i2")
    assert statuses(story, *rollouts, other) == ["pending", "void", "void", "void", "pending"]
    assert status_of(story.ledger, rollouts[1].id) == Decision("void", "soft", "gap")
    assert story.ledger.next_counter(story.node("i1"), story.newest.id) == 2
    story.train()
    assert statuses(story, story.rollout("i1")) == ["pending"]  # every version counts anew
    assert story.ledger.next_counter(story.node("i1"), story.newest.id) == 2
    assert story.ledger.next_counter(story.node("i2"), story.newest.id) == 0


def test_counters_count_once() -> None:
    story = Story()
    first, again, overlapping, next_one = (story.rollout("i1", counter) for counter in (0, 0, 1, 2))
    assert statuses(story, first, again, overlapping, next_one) == ["pending", "void", "void", "pending"]
    assert status_of(story.ledger, again.id).reason == "duplicate"


def test_nobody_goes_back_to_an_older_version() -> None:
    story = Story()
    zero = story.newest
    before = story.rollout("i1")
    story.train()
    new, old = story.rollout("i1"), story.rollout("i1", 2, weights=zero)
    assert statuses(story, before, new, old) == ["pending", "pending", "void"]
    assert status_of(story.ledger, old.id).reason == "ineligible"


def test_a_newcomer_waits_for_a_version_after_its_join() -> None:
    story = Story()
    story.join("newcomer")
    early = story.rollout("newcomer")
    assert status_of(story.ledger, early.id) == Decision("void", "soft", "ineligible")
    assert story.ledger.due(early) == ()
    story.cut()
    story.train()
    assert statuses(story, story.rollout("newcomer")) == ["pending"]


@pytest.mark.parametrize(
    ("groups", "responses", "tokens", "size"),
    [
        (3, 12, 40, 100),
        (2, 9, 40, 100),
        (2, 8, 8 * RECIPE.max_response_tokens + 1, 100),
        (2, 8, 40, max_bytes(RECIPE) + 1),
    ],
)
def test_who_announces_more_than_the_recipe_allows_is_rejected(
    groups: int, responses: int, tokens: int, size: int
) -> None:
    story = Story()
    entry = story.say("i1", Rollout(story.newest.id, 0, groups, responses, tokens, digest("file"), size, 2))
    assert status_of(story.ledger, entry.id) == Decision("rejected", "hard", "malformed")
    assert story.ledger.accounts()[story.node("i1")].hard == 1


def test_verdicts_before_their_rollout_and_rollouts_before_their_weights() -> None:
    story = Story()
    story.train()
    rollout = story.rollout("i1")
    verdict = story.judge("v1", rollout)
    trainer = story.node("trainer")
    replica = Replica(story.domain)
    ledger = Ledger(replica)
    later = [thing for thing in story.objects if isinstance(thing, Entry) and thing.author == trainer and thing.seq > 1]
    for thing in story.objects:
        if thing not in later and thing is not rollout:
            assert take(replica, thing)
    assert replica.entry(verdict.id) is not None
    assert status_of(ledger, rollout.id) is PENDING
    replica.add_entry(rollout)
    assert status_of(ledger, rollout.id) is PENDING
    assert ledger.outstanding() == []
    for thing in later:
        assert take(replica, thing)
    assert status_of(ledger, rollout.id).outcome == "accepted"


def test_without_validators_nothing_is_decided() -> None:
    story = Story(validators=())
    rollout = story.rollout("i1")
    story.judge("i2", rollout)
    assert statuses(story, rollout) == ["pending"]
    assert story.ledger.outstanding() == []


# The whole


def test_a_fork_takes_back_what_was_not_final() -> None:
    story = Story()
    writer = story.writers["i1"]
    rollout = story.rollout("i1")
    story.judge("v1", rollout)
    assert statuses(story, rollout) == ["accepted"]
    generation = story.ledger.generation
    fork = make(writer.identity, story.domain.id, rollout.seq, rollout.prev, rollout.anchor, Leave())
    with pytest.raises(Evidence):
        story.replica.add_entry(fork)
    assert statuses(story, rollout) == ["pending"]
    assert story.ledger.generation == generation + 1
    assert story.ledger.accounts()[story.node("i1")].credit == 0
    assert story.ledger.accounts()[story.node("v1")].credit == 0


def lively() -> Story:
    """A story with everything in it that an order could upset."""
    story = Story(validators=("v1", "v2", "v3"), inference=("i1", "i2", "i3"))
    for version in range(3):
        for counter in (0, 2):
            for number, name in enumerate(("i1", "i2", "i3")):
                rollout = story.rollout(name, counter if (version, name) != (1, "i3") else 2 * counter)
                story.judge("v1", rollout)
                if number:
                    story.judge("v2", rollout, "accepted" if number == 1 else "hard")
                if counter:
                    story.judge("v3", rollout, ("accepted", "soft", "hard")[version])
        if version == 1:
            story.join("newcomer")
            story.rollout("newcomer")
        story.train()
        if version != 1:
            story.cut()
    story.grant(2, "i2", story.ledger.lineage()[2])
    story.train("i2", 2, story.ledger.lineage()[2])
    story.judge("v1", story.rollout("i1"))
    story.say("v3", Role("none"))
    story.cut()
    story.train("i2", 2)
    story.rollout("i3")
    story.grant(3, "i1", story.ledger.lineage()[3])
    return story


LIVELY = lively()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_tells_the_same_story(seed: int) -> None:
    rng = Random(seed)
    deliveries = list(LIVELY.objects)
    rng.shuffle(deliveries)
    replica = Replica(LIVELY.domain)
    ledger = Ledger(replica)
    while deliveries:
        some, deliveries = deliveries[:9], deliveries[9:]
        for thing in some:
            if not take(replica, thing):
                deliveries.append(thing)
        if rng.random() < 0.3:
            ledger.accounts(final=True)
    assert [entry.id for entry in ledger.lineage()] == [entry.id for entry in LIVELY.ledger.lineage()]
    assert ledger.accounts() == LIVELY.ledger.accounts()
    assert ledger.accounts(final=True) == LIVELY.ledger.accounts(final=True)
    assert [step.id for step in ledger.steps(final=True)] == [step.id for step in LIVELY.ledger.steps(final=True)]
    for entry in LIVELY.replica.arrivals:
        if isinstance(entry.payload, Rollout):
            assert status_of(ledger, entry.id) == status_of(LIVELY.ledger, entry.id)
            assert ledger.due(entry) == LIVELY.ledger.due(entry)


def test_a_ledger_over_a_full_replica_says_what_one_that_followed_it_says() -> None:
    cold = Ledger(LIVELY.replica)
    assert cold.accounts() == LIVELY.ledger.accounts()
    assert cold.accounts(final=True) == LIVELY.ledger.accounts(final=True)
    assert {status.outcome for _, status in cold.decisions()} == {"accepted", "rejected", "void"}
    assert len({account.credit for account in cold.accounts(final=True).values()}) > 3


def test_final_answers_depend_on_final_entries_only() -> None:
    """A replica that holds nothing beyond the newest cut gives the same final accounts."""
    replica = Replica(LIVELY.domain)
    final = [
        thing
        for thing in LIVELY.objects
        if not isinstance(thing, Entry) or thing.seq <= LIVELY.replica.certified_head(thing.author)
    ]
    assert len(final) < len(LIVELY.objects)
    assert not feed_all(replica, final)
    assert Ledger(replica).accounts(final=True) == LIVELY.ledger.accounts(final=True)
