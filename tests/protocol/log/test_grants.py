"""``protocol.log.grants``: what the grants of electors are worth who left office."""

from __future__ import annotations

from random import Random

import pytest

from protocol.credit.ledger import Ledger
from protocol.credit.snapshot import Snapshot
from protocol.log.amendment import Amendment
from protocol.log.branches import Outcome
from protocol.log.entry import Entry
from protocol.log.heads import heads_root
from protocol.log.quorum import CertifiedCut, CertifiedGrant, Cut, certify, commit
from protocol.log.replica import Replica
from protocol.records import Role, Weights
from tests.protocol.builders import MODEL, THRESHOLDS, Writer, cut_for, digest, feed_all, grant_for, key, small_domain

OLD, NEW = ("e1", "e2", "e3"), ("n1", "n2", "n3")
DOMAIN = small_domain((*OLD, "e4"))
FIRST = Weights(1, 0, None, MODEL.manifest.hash, MODEL.manifest.size, MODEL.whole, 4096, None)


class Story:
    """Term 1 is granted to "trainer", whose version 0 is final; where ``amend`` is called, others are electors."""

    def __init__(self) -> None:
        self.replica = Replica(DOMAIN)
        self.ledger = Ledger(self.replica)
        self.objects: list[Entry | CertifiedCut | CertifiedGrant] = []
        self.writers = {name: Writer(name, DOMAIN.id) for name in ("w", "trainer", "other")}
        self.electors = OLD
        for writer in self.writers.values():
            self.take(writer.entries[0])
        self.first = self.cut()
        assert self.grant(1, "trainer") is Outcome.ADDED
        self.newest = self.say("trainer", FIRST)
        self.cut()

    def take(self, thing: Entry | CertifiedCut) -> None:
        assert self.replica.add_entry(thing) if isinstance(thing, Entry) else self.replica.add_cut(thing)
        self.objects.append(thing)

    def say(self, name: str, payload: Role | Weights) -> Entry:
        entry = self.writers[name].append(payload)
        self.take(entry)
        return entry

    def cut(self, *electors: str) -> CertifiedCut:
        if not self.replica.uncovered():
            self.say("w", Role("relay"))
        cut = cut_for(self.replica, *(electors or self.electors))
        self.take(cut)
        for writer in self.writers.values():
            writer.anchor = cut.cut.id
        return cut

    def grant(self, term: int, trainer: str, anchor: CertifiedCut | None = None, by: tuple[str, ...] = ()) -> Outcome:
        base = self.newest if hasattr(self, "newest") else None
        anchored = (anchor or self.replica.newest_cut).cut.id  # type: ignore[union-attr]
        made = grant_for(DOMAIN, term, key(trainer).node, base, electors=by or self.electors, anchor=anchored)
        outcome = self.replica.add_grant(made)
        if outcome is Outcome.ADDED:
            self.objects.append(made)
        return outcome

    def version(self, name: str, term: int) -> Entry:
        assert isinstance(self.newest.payload, Weights)
        number = self.newest.payload.number + 1
        payload = Weights(term, number, self.newest.id, digest(f"m{term}"), 2000, digest(f"w{term}"), 4096, None)
        return self.say(name, payload)

    def amend(self) -> None:
        made = Amendment.make(DOMAIN.id, 1, [key(name).node for name in (*NEW, "n4")], THRESHOLDS)
        entry = self.writers["w"].append(made.payload({key(name).node: made.sign(key(name)) for name in OLD}))
        self.take(entry)
        self.cut()
        self.electors = NEW


def final_line(story: Story) -> list[bytes]:
    return [entry.id for entry in story.ledger.lineage(final=True)]


def test_electors_who_left_office_give_no_term_away() -> None:
    story = Story()
    story.amend()
    for term in (2, 2**40):
        assert story.grant(term, "other", anchor=story.first, by=OLD) is Outcome.OUTDATED
    # A settled term goes on, and who is in office now gives the next one.
    assert story.ledger.grant() is not None
    story.newest = story.version("trainer", 1)
    story.cut()
    assert final_line(story)[-1] == story.newest.id
    assert story.grant(2, "other") is Outcome.ADDED
    story.newest = story.version("other", 2)
    story.cut()
    assert final_line(story)[-1] == story.newest.id


def test_a_grant_of_which_nothing_came_is_void_with_the_amendment() -> None:
    story = Story()
    assert story.grant(2, "other") is Outcome.ADDED
    lost = story.version("other", 2)  # anchors on the old rules, and no cut of theirs covers it
    made = Amendment.make(DOMAIN.id, 1, [key(name).node for name in (*NEW, "n4")], THRESHOLDS)
    story.take(story.writers["w"].append(made.payload({key(name).node: made.sign(key(name)) for name in OLD})))
    rows = [head for head in story.replica.uncovered() if head.author == story.writers["w"].node]
    replica = story.replica
    root = heads_root({**replica.certified, **{head.author: head for head in rows}}.values())
    cut = Cut.make(DOMAIN.id, len(replica.cuts) + 1, replica.newest_cut_id, root, rows)
    story.take(certify(cut, 50, dict(commit(key(name), cut, 50) for name in OLD), DOMAIN.electors))
    assert sorted(story.replica.grants) == [1]
    assert story.replica.terms.highest == 2
    assert story.ledger.grant().trainer == key("trainer").node  # type: ignore[union-attr]
    # Its version stands in nobody's way: a cut covers it, and it is none.
    story.electors = NEW
    story.cut()
    assert story.replica.certified_head(key("other").node) == lost.seq
    assert final_line(story) == [story.newest.id]
    # Not even when the same node is granted a term of that number again.
    assert story.grant(2, "other") is Outcome.ADDED
    story.ledger.update()
    assert final_line(story) == [story.newest.id]
    story.newest = story.version("other", 2)
    story.cut()
    assert final_line(story)[-1] == story.newest.id != lost.id


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_a_snapshot_tell_the_same(seed: int) -> None:
    story = Story()
    story.grant(2, "other")
    story.newest = story.version("other", 2)
    story.cut()
    story.grant(3, "trainer")
    story.amend()
    story.newest = story.version("other", 2)
    story.cut()
    story.grant(4, "trainer")
    story.newest = story.version("trainer", 4)
    story.cut()
    told = list(story.objects)
    Random(seed).shuffle(told)
    replica = Replica(DOMAIN)
    ledger = Ledger(replica)
    left = feed_all(replica, told)
    assert set(left) <= {Outcome.OUTDATED}
    assert sorted(replica.grants) == sorted(story.replica.grants) == [1, 2, 4]
    assert [entry.id for entry in ledger.lineage(final=True)] == final_line(story)
    taken = Snapshot.take(ledger)
    assert taken is not None
    every = [thing for thing in told if isinstance(thing, CertifiedGrant)]
    resumed = Snapshot.parse(taken.encode(), DOMAIN).resume(every)
    assert sorted(resumed.replica.grants) == [1, 2, 4]
    assert [entry.id for entry in resumed.lineage(final=True)] == final_line(story)
    assert resumed.replica.terms.highest == 4
