"""A log that goes on from a snapshot says what one says that was read whole."""

from __future__ import annotations

from random import Random

import pytest

from protocol.credit.ledger import Ledger
from protocol.credit.snapshot import Snapshot
from protocol.errors import Evidence, LocalError, PeerError
from protocol.log.branches import Outcome
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.quorum import CertifiedGrant
from protocol.log.replica import Replica
from protocol.records import Leave, Role
from tests.protocol.builders import Story, Writer, feed_all, small_domain, status_of, take
from tests.protocol.credit.test_fold import LONG, same
from tests.protocol.log.test_entry_proof import Amended


def restart(ledger: Ledger) -> Ledger:
    """What a node holds that stops here and starts again."""
    replica = ledger.replica
    snapshot = Snapshot.take(ledger)
    assert snapshot is not None
    tail = [replica.entry(entry_id) for entry_id in snapshot.tail]
    sides: list[CertifiedGrant | ForkProof] = [*replica.grants.values(), *replica.forks.values()]
    resumed = Snapshot.parse(snapshot.encode(), replica.domain).resume(sides)
    for entry in tail:
        if entry is not None:
            assert resumed.replica.add_entry(entry)
    return resumed


def ids(entries: list[Entry]) -> set[bytes]:
    """Their ids: the order is of no consequence."""
    return {entry.id for entry in entries}


@pytest.mark.parametrize("seed", range(4))
def test_it_goes_on_as_if_nothing_had_happened(seed: int) -> None:
    rng = Random(seed)
    ledger = Ledger(Replica(LONG.domain))
    for thing in LONG.objects:
        assert take(ledger.replica, thing)
        if rng.random() < 0.03 and ledger.replica.newest_cut is not None:
            if rng.random() < 0.5:
                ledger = restart(ledger)
            else:
                ledger.forget()
    same(ledger, LONG.ledger)
    replica = ledger.replica
    assert ledger.accounts() == LONG.ledger.accounts()
    assert ledger.final_entries == sum(head.seq + 1 for head in LONG.replica.certified.values())
    assert replica.heads_root() == LONG.replica.heads_root()
    assert replica.bucket_digests() == LONG.replica.bucket_digests()
    assert replica.certified == LONG.replica.certified
    assert replica.side_digest() == LONG.replica.side_digest()
    assert len(replica.cuts) == len(LONG.replica.cuts)
    assert [replica.height(cut.cut.id) for cut in LONG.replica.cuts] == list(range(1, len(replica.cuts) + 1))
    assert ledger.authors() == LONG.ledger.authors()
    assert [ledger.name(author) for author in ledger.authors()] == [LONG.ledger.name(a) for a in ledger.authors()]
    for cut in LONG.replica.cuts:
        for author in ledger.authors():
            assert ledger.standing_role(author, cut.cut.id) == LONG.ledger.standing_role(author, cut.cut.id)
    assert [entry.id for entry in ledger.steps()] == [entry.id for entry in LONG.ledger.steps()]
    assert ids(ledger.outstanding()) == ids(LONG.ledger.outstanding())
    for author in ledger.authors():
        assert ids(ledger.pending_for(author)) == ids(LONG.ledger.pending_for(author))
        assert ledger.next_counter(author, LONG.newest.id) == LONG.ledger.next_counter(author, LONG.newest.id)
    compared = 0
    for thing in LONG.objects:
        # When something settled is forgotten is each fold's own affair.
        if isinstance(thing, Entry) and thing.id in ledger.fold().submissions.keys() & LONG.ledger.fold().submissions:
            compared += 1
            assert status_of(ledger, thing.id) == status_of(LONG.ledger, thing.id)
            assert ledger.verdicts(thing.id) == LONG.ledger.verdicts(thing.id)
    assert compared > 5
    assert (ledger.fold().rejected, ledger.fold().lineage.rejected, ledger.step_count()) == (
        LONG.ledger.fold().rejected,
        LONG.ledger.fold().lineage.rejected,
        LONG.ledger.step_count(),
    )


def test_what_is_final_leaves_memory() -> None:
    story = Story()
    rollout = story.rollout("i1")
    author = story.node("i1")
    story.cut()
    after = story.say("i1", Role("none"))
    story.ledger.forget()
    replica = story.replica
    assert replica.arrivals == [after]
    assert replica.entry(rollout.id) is None
    assert (replica.base_for(author), replica.next_for(author)) == (3, 4)
    assert replica.entries(author) == [after]
    assert (replica.id_at(author, 2), replica.id_at(author, 1)) == (rollout.id, None)
    assert replica.head_at(author, 1) is None
    assert replica.head_at(author, 2) == replica.certified[author]
    assert replica.add_entry(rollout) is Outcome.BELOW
    assert replica.cuts.lowest == 2
    assert [cut.cut.height for cut in replica.cuts] == [2]
    with pytest.raises(IndexError):
        replica.cuts[0]
    assert replica.cuts[:5] == [replica.cuts[-1]]
    with pytest.raises(LocalError):
        Ledger(replica)
    story.cut()
    assert replica.certified_head(author) == 3


def test_a_fork_below_and_above_what_is_in_memory() -> None:
    story = Story()
    writer = story.writers["i1"]
    rival = Writer("i1", story.domain.id, joined=False)
    rival.entries = writer.entries[:2]
    rival.anchor = writer.anchor
    low = rival.append(Leave())
    story.say("i1", Role("relay"))
    story.cut()
    lost = story.say("i1", Role("none"))
    story.ledger.forget()
    ledger = restart(story.ledger)
    replica = ledger.replica
    assert replica.add_entry(low) is Outcome.BELOW
    # Who has the entry below on disk shows the proof.
    assert replica.add_fork(ForkProof.of(writer.entries[2], low))
    assert replica.frozen(writer.node)
    assert replica.next_for(writer.node) == 3
    assert ledger.standing_role(writer.node) == "relay"
    rival.entries = writer.entries[:3]
    rival.anchor = story.replica.newest_cut_id
    assert replica.add_entry(rival.append(Leave())) is Outcome.FROZEN
    # A frozen feed stays so over a restart, and a cut may still take a branch of it.
    ledger = restart(ledger)
    assert ledger.replica.frozen(writer.node)
    with pytest.raises(Evidence):
        story.replica.add_entry(rival.entries[-1])
    assert story.replica.heads_root() == ledger.replica.heads_root()
    assert lost.seq == 3


def test_late_branches_are_judged_above_what_is_final() -> None:
    story = Story()
    writer = story.writers["i1"]
    story.cut()
    rival = Writer("i1", story.domain.id, joined=False)
    rival.entries = list(writer.entries)
    rival.anchor = writer.anchor
    one, other = story.say("i1", Role("relay")), rival.append(Leave())
    elsewhere = Replica(story.domain)
    feed_all(elsewhere, [*[thing for thing in story.objects if thing is not one], other])
    from tests.protocol.builders import cut_for

    cut = cut_for(elsewhere, "elector")
    story.ledger.forget()
    with pytest.raises(Evidence):
        story.replica.add_entry(other)
    assert story.replica.add_cut(cut)
    assert story.replica.id_at(writer.node, other.seq) == other.id
    assert story.ledger.standing_role(writer.node) == "none"
    ledger = restart(story.ledger)
    assert ledger.replica.heads_root() == story.replica.heads_root()


def test_before_the_first_cut_there_is_none() -> None:
    assert Snapshot.take(Ledger(Replica(small_domain()))) is None


def test_what_does_not_fit_is_refused() -> None:
    snapshot = Snapshot.take(LONG.ledger)
    assert snapshot is not None
    data = snapshot.encode()
    grants = list(LONG.replica.grants.values())
    with pytest.raises(PeerError, match="another domain"):
        Snapshot.parse(data, small_domain(("another",)))
    rng = Random(3)
    for _ in range(150):
        place = rng.randrange(len(data))
        bad = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        # Most flips are found here; a node compares a hash first.
        try:
            Snapshot.parse(bad, LONG.domain).resume(grants)
        except PeerError:
            continue
    few: list[CertifiedGrant] = grants[:1]
    with pytest.raises(PeerError, match="missing"):
        Snapshot.parse(data, LONG.domain).resume(few)
    value = list(snapshot.value)
    for place, wrong in ((3, value[3][:-32]), (3, value[3] + bytes(1)), (4, value[4][1:])):
        with pytest.raises(PeerError):
            Snapshot(LONG.domain, [*value[:place], wrong, *value[place + 1 :]], ()).resume(grants)


def test_the_tree_over_the_cuts_and_the_electors_are_kept() -> None:
    world = Amended()
    replica = restart(Ledger(world.replica)).replica
    assert replica.cut_range == world.replica.cut_range
    assert replica.electors_at(len(replica.cuts) + 1) == world.electors
