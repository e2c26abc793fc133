"""Feeds that are closed or rebound, in a whole log: what ends, what stays, and where the credit goes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from protocol.constants import VERDICT_CUTS
from protocol.credit.ledger import Ledger
from protocol.credit.reputation import Account, reputation
from protocol.errors import PeerError
from protocol.log import merkle, recovery
from protocol.log.branches import Outcome
from protocol.log.entry import Entry
from protocol.log.heads import FROZEN, LIVE, Head, heads_root
from protocol.log.quorum import CertifiedCut, Cut, certify, commit
from protocol.log.recovery import commitment
from protocol.log.replica import Replica
from protocol.records import Join, Leave, Role
from tests.protocol.builders import POLICY, Story, Writer, key, take
from tests.protocol.credit.test_snapshot import restart


class Kept(Story):
    """A story in which joins name real recovery keys, those called "recovery <name>"."""

    def join(self, name: str) -> Entry:
        writer = self.writers[name] = Writer(name, self.domain.id, joined=False)
        writer.anchor = self.replica.newest_cut_id
        return self.say(name, Join(commitment(key(f"recovery {name}").node), "farflung/test", name))

    def close(self, author: str, target: str, by: str = "") -> Entry:
        """``author`` closes ``target`` with the recovery key of ``by``, by default the target's own."""
        secret = key(f"recovery {by or target}")
        return self.say(author, recovery.close(secret, self.domain.id, self.node(target), self.node(author)))

    def rebind(self, author: str, target: str, by: str = "") -> Entry:
        """``author`` takes over from ``target``."""
        secret = key(f"recovery {by or target}")
        return self.say(author, recovery.rebind(secret, self.domain.id, self.node(target), self.node(author)))

    def worked(self, name: str, counter: int = 0, outcome: str = "accepted") -> Entry:
        """A submission that the validator judged."""
        rollout = self.rollout(name, counter)
        self.judge("v1", rollout, outcome)
        return rollout

    def account(self, name: str, final: bool = True) -> Account:
        """A node's account."""
        return self.ledger.accounts(final)[self.node(name)]

    def body(self, *rows: Head) -> CertifiedCut:
        """The next cut, with these rows."""
        replica = self.replica
        root = heads_root({**replica.certified, **{row.author: row for row in rows}}.values())
        cut = Cut.make(self.domain.id, len(replica.cuts) + 1, replica.newest_cut_id, root, rows)
        epoch = replica.cuts[-1].epoch + 1
        return certify(cut, epoch, dict([commit(key("elector"), cut, epoch)]), self.domain.electors)

    def cut_without(self, name: str) -> CertifiedCut:
        """Certify everything but what ``name`` wrote; feeds anchor on it from here on."""
        made = self.body(*(head for head in self.replica.uncovered() if head.author != self.node(name)))
        assert self.replica.add_cut(made)
        self.objects.append(made)
        for writer in self.writers.values():
            writer.anchor = made.cut.id
        return made

    def note_final(self) -> None:
        """Cut until nothing is left."""
        while self.replica.uncovered():
            self.cut()


def test_a_close_ends_the_feed_at_its_certified_head() -> None:
    story = Kept()
    story.worked("i1")
    story.cut()
    before = story.account("i1")
    story.close("i2", "i1")
    covered = story.replica.certified_head(story.node("i1"))
    lost = story.rollout("i1", 2)
    # Nothing happens before a cut covers it.
    assert story.replica.heads[story.node("i1")].status == LIVE
    cut = story.cut_without("i1")
    head = story.replica.heads[story.node("i1")]
    assert (head.seq, head.status) == (covered, FROZEN)
    assert story.replica.certified[story.node("i1")].status == LIVE
    assert story.replica.entry(lost.id) is None
    assert story.replica.frozen(story.node("i1"))
    assert story.account("i1") == before
    assert story.account("i1", final=False) == before
    # Later entries are refused, and the next cut shows the end.
    writer = story.writers["i1"]
    writer.anchor = cut.cut.id
    assert story.replica.add_entry(writer.append(Leave())) is Outcome.FROZEN
    assert story.replica.add_entry(lost) is Outcome.FROZEN
    story.cut()
    assert story.replica.certified[story.node("i1")] == head
    assert story.replica.uncovered() == []


def test_a_verdict_that_is_covered_too_late_earns_nothing_in_the_live_fold_either() -> None:
    story = Kept(validators=("v1", "v2", "v3"))
    rollout = story.rollout("i1")
    for validator in ("v1", "v2"):
        story.judge(validator, rollout)
    story.cut()
    story.judge("v3", rollout)
    assert story.account("v3", final=False).audited > 0
    for number in range(VERDICT_CUTS):
        story.say("i2", Role("inference" if number % 2 else "none"))
        story.cut_without("v3")
    story.note_final()
    assert story.account("v3") == story.account("v3", final=False)
    assert story.account("v3").audited == 0
    assert story.account("v1", final=False).audited > 0


def test_no_cut_moves_a_row_beyond_the_end() -> None:
    story = Kept()
    story.cut()
    story.close("i2", "i1")
    beyond = story.rollout("i1")
    story.cut_without("i1")
    ids = [entry.id for entry in story.writers["i1"].entries]
    with pytest.raises(PeerError, match="beyond the end"):
        story.replica.add_cut(story.body(Head(beyond.author, beyond.seq, beyond.id, merkle.root(ids))))
    story.cut()


def test_a_rebind_moves_the_account() -> None:
    story = Kept()
    story.worked("i1")
    story.worked("i1", 2, "hard")
    story.worked("i2")
    story.rollout("i1", 4)
    story.cut()
    old, own = story.account("i1"), story.account("i2")
    story.rebind("i2", "i1")
    assert story.account("i2", final=False).accepted == 1
    story.cut()
    both = story.account("i2")
    assert (both.credit, both.accepted, both.rejected) == (16, 2, 1)
    assert (both.hard, both.pending) == (old.hard + own.hard, old.pending + own.pending) == (1, 1)
    assert both.reputation == reputation(2, 1)
    assert both.reasons == {"sampling": 1}
    assert story.account("i2", final=False) == both
    empty = story.account("i1")
    assert (empty.credit, empty.accepted, empty.hard, empty.pending) == (0, 0, 0, 0)
    assert story.replica.endings.lost(story.node("i2")) == [story.node("i1")]
    # What was open is decided for the new node.
    (open_one,) = [entry for entry in story.ledger.outstanding() if entry.author == story.node("i1")]
    story.judge("v1", open_one)
    story.cut()
    assert (story.account("i2").credit, story.account("i2").pending) == (24, 0)


def test_a_wrong_key_has_no_effect_and_the_right_one_still_has() -> None:
    story = Kept()
    story.worked("i1")
    story.cut()
    story.close("i2", "i1", by="i2")
    story.rebind("i2", "i1", by="v1")
    story.cut()
    assert story.replica.endings.ended == {}
    assert not story.replica.frozen(story.node("i1"))
    story.rebind("i2", "i1")
    story.cut()
    assert story.account("i2").credit == 8


def test_a_join_that_no_cut_covers_cannot_be_closed() -> None:
    story = Kept()
    story.cut()
    story.join("late")
    story.close("i2", "late")
    story.cut_without("late")
    assert story.replica.endings.ended == {}
    story.cut()
    assert not story.replica.frozen(story.node("late"))


def test_a_chain_goes_on_and_what_an_ended_feed_did_before_counts() -> None:
    story = Kept(inference=("i1", "i2", "i3", "i4"))
    story.worked("i1")
    story.worked("i2")
    story.cut()
    story.rebind("i2", "i1")
    story.cut()
    story.rebind("i3", "i2")
    story.rebind("i4", "i1")  # too late: i1 went on already
    story.note_final()
    assert [story.account(name).credit for name in ("i1", "i2", "i3", "i4")] == [0, 0, 16, 0]
    assert story.replica.endings.owner(story.node("i1")) == story.node("i3")
    assert story.replica.frozen(story.node("i2"))
    assert not story.replica.frozen(story.node("i4"))


def test_a_node_that_ended_validates_no_later_version() -> None:
    story = Kept(validators=("v1", "v2"))
    story.close("i1", "v1")
    story.cut()
    weights = story.train()
    assert story.ledger.validators_of(weights.id) == {story.node("v2")}
    assert story.ledger.standing_role(story.node("v1")) == "none"
    assert story.ledger.standing_role(story.node("v2")) == "validator"
    # Versions that anchor on earlier cuts keep theirs.
    assert story.ledger.validators_of(story.ledger.lineage()[0].id) == {story.node("v1"), story.node("v2")}


def test_reputation_follows_its_owner_from_that_cut_on() -> None:
    policy = replace(POLICY, validator_reputation=600_000)
    story = Kept(validators=("v1", "v2"), policy=policy, named=("v1",))
    story.worked("i1")
    story.cut()
    before = story.train()
    story.rebind("v2", "i1")
    story.cut()
    after = story.train()
    story.cut()
    # v2 has no submission of its own: half a million, and two thirds with that of i1.
    for ledger in (story.ledger, Ledger(story.replica)):
        assert ledger.validators_of(before.id) == {story.node("v1")}
        assert ledger.validators_of(after.id) == {story.node("v1"), story.node("v2")}


def eventful() -> Kept:
    """A story of closes and rebinds, valid and not, in one cut and over several, with work in between."""
    story = Kept(validators=("v1", "v2", "v3"), inference=("i1", "i2", "i3", "i4"))
    for version in range(3):
        for place, name in enumerate(("i1", "i2", "i3", "i4")):
            if not story.replica.frozen(story.node(name)):
                rollout = story.rollout(name)
                for validator in ("v1", "v2", "v3")[: place + 1]:
                    if not story.replica.frozen(story.node(validator)):
                        story.judge(validator, rollout, "hard" if (version, place) == (0, 1) else "accepted")
        story.train()
        if version == 0:
            story.close("i4", "i1", by="i2")
            story.rebind("i3", "i2")
            story.rebind("i4", "i2")
        elif version == 1:
            story.rebind("i4", "i3")
            story.close("v2", "v3")
            story.rebind("i1", "v3")
        story.cut()
        story.note_final()
    story.rollout("i4")
    return story


EVENTFUL = eventful()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_ends_alike(seed: int) -> None:
    rng = Random(seed)
    deliveries = list(EVENTFUL.objects)
    rng.shuffle(deliveries)
    replica = Replica(EVENTFUL.domain)
    ledger = Ledger(replica)
    stuck = 0
    while deliveries and stuck < len(deliveries):
        thing = deliveries.pop(0)
        if take(replica, thing) in (Outcome.ADDED, Outcome.KNOWN, Outcome.FROZEN):
            stuck = 0
        else:
            stuck += 1
            deliveries.append(thing)
        if rng.random() < 0.05:
            ledger.accounts(final=True)
    assert deliveries == []
    assert len(replica.endings.ended) == 3
    assert Ledger(EVENTFUL.replica).accounts(final=True) == ledger.accounts(final=True)
    same_ending(ledger)


@pytest.mark.parametrize("seed", range(4))
def test_a_restart_from_a_snapshot_forgets_no_ending(seed: int) -> None:
    rng = Random(seed)
    ledger = Ledger(Replica(EVENTFUL.domain))
    for thing in EVENTFUL.objects:
        assert take(ledger.replica, thing)
        if rng.random() < 0.1 and ledger.replica.newest_cut is not None:
            if rng.random() < 0.5:
                ledger = restart(ledger)
            else:
                ledger.forget()
    same_ending(ledger)


def same_ending(ledger: Ledger) -> None:
    """Whether a ledger says what the one that saw everything says."""
    whole = EVENTFUL.replica
    assert ledger.replica.heads_root() == whole.heads_root()
    assert ledger.replica.endings.to_value() == whole.endings.to_value()
    assert ledger.replica.commitments == whole.commitments
    assert ledger.accounts() == EVENTFUL.ledger.accounts()
    assert ledger.accounts(final=True) == EVENTFUL.ledger.accounts(final=True)
    assert {author: ledger.standing_role(author) for author in ledger.authors()} == {
        author: EVENTFUL.ledger.standing_role(author) for author in EVENTFUL.ledger.authors()
    }
