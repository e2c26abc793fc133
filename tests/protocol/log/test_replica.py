"""The replica: what it takes, in any order, and how it freezes who forks."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from protocol.errors import Evidence, PeerError
from protocol.log.branches import Outcome
from protocol.log.entry import NO_PREV, Entry, make
from protocol.log.fork_proof import ForkProof
from protocol.log.frozen_entries import MAX_ASIDE
from protocol.log.heads import FROZEN, LIVE, Head, RangeRequest, heads_root, plan
from protocol.log.quorum import CertifiedCut, CertifiedGrant, Cut, certify, commit
from protocol.log.replica import Replica
from protocol.records import Join, Leave, Role, Weights
from tests.protocol.builders import Story, Writer, cut_for, digest, feed_all, grant_for, key, missing_for, small_domain
from tests.protocol.reference_log import bucket_digests

DOMAIN = small_domain()


def feed(name: str, length: int, *, branch: str = "relay", shared: int = 1) -> list[Entry]:
    """A feed of ``length`` entries; from place ``shared`` on they differ from those of other branches."""
    writer = Writer(name, DOMAIN.id)
    while len(writer.entries) < length:
        writer.append(Role("none" if len(writer.entries) < shared else branch))
    return writer.entries


def filled(*entries: Entry) -> Replica:
    """A replica that took these entries."""
    replica = Replica(DOMAIN)
    for entry in entries:
        assert replica.add_entry(entry)
    return replica


def certified(cut: Cut) -> CertifiedCut:
    """The cut with the only elector's commit."""
    return certify(cut, 1, dict([commit(key("elector"), cut, 1)]), DOMAIN.electors)


def test_entries_are_taken_in_order_of_their_feed() -> None:
    entries = feed("a", 3)
    replica = Replica(DOMAIN)
    assert replica.add_entry(entries[1]) is Outcome.MISSING_PREV
    assert replica.add_entry(entries[0]) is Outcome.ADDED
    assert replica.add_entry(entries[0]) is Outcome.KNOWN
    assert replica.add_entry(entries[2]) is Outcome.MISSING_PREV
    assert replica.add_entry(entries[1]) is Outcome.ADDED
    assert replica.next_for(key("a").node) == 2
    assert replica.entries(key("a").node) == replica.arrivals == entries[:2]
    assert replica.entries(key("a").node, 1, 5) == entries[1:2]
    assert replica.entries(key("a").node, -3, -1) == []
    assert replica.entry(entries[1].id) is entries[1]
    assert replica.entry(entries[2].id) is None
    assert replica.head_at(key("a").node, 2) is None
    assert replica.id_at(key("a").node, 0) == entries[0].id
    assert replica.heads_root() == heads_root(replica.heads.values())
    assert replica.bucket_digests() == bucket_digests(replica.heads.values())


def test_an_outcome_is_true_where_something_was_added() -> None:
    assert [outcome for outcome in Outcome if outcome] == [Outcome.ADDED]


def test_nothing_of_another_domain_is_taken() -> None:
    other = small_domain(("another",))
    writer = Writer("a", other.id)
    elsewhere = Replica(other)
    elsewhere.add_entry(writer.entries[0])
    replica = Replica(DOMAIN)
    fork = ForkProof.of(writer.append(Leave()), Writer("a", other.id).append(Role("relay")))
    with pytest.raises(PeerError, match="another domain"):
        replica.add_entry(writer.entries[0])
    with pytest.raises(PeerError, match="another domain"):
        replica.add_cut(cut_for(elsewhere, "another"))
    with pytest.raises(PeerError, match="another domain"):
        replica.add_grant(grant_for(other, 1, writer.node, electors=("another",)))
    with pytest.raises(PeerError, match="another domain"):
        replica.add_fork(fork)


def test_an_entry_waits_for_its_anchor_and_never_goes_back_to_an_older_one() -> None:
    writer = Writer("a", DOMAIN.id)
    replica = filled(*writer.entries)
    cut = cut_for(replica, "elector")
    writer.anchor = cut.cut.id
    entry = writer.append(Leave())
    assert replica.add_entry(entry) is Outcome.MISSING_ANCHOR
    assert replica.add_cut(cut)
    assert replica.add_entry(entry)
    writer.anchor = DOMAIN.id
    with pytest.raises(PeerError, match="goes back"):
        replica.add_entry(writer.append(Leave()))


def test_a_cut_makes_final_what_it_covers() -> None:
    a, b = feed("a", 3), feed("b", 1)
    replica = filled(*a[:2])
    first = cut_for(replica, "elector")
    assert Replica(DOMAIN).newest_cut is None
    assert replica.certified_head(key("a").node) == -1
    assert replica.add_cut(first) is Outcome.ADDED
    assert replica.add_cut(first) is Outcome.KNOWN
    assert not replica.uncovered()
    for entry in (a[2], b[0]):
        assert replica.add_entry(entry)
    assert {head.seq for head in replica.uncovered()} == {2, 0}
    second = cut_for(replica, "elector")
    assert replica.add_cut(second)
    assert replica.newest_cut is second
    assert replica.newest_cut_id == second.cut.id
    assert second.cut.heads_root == replica.heads_root()
    assert [replica.height(cut) for cut in (DOMAIN.id, second.cut.id, digest("?"))] == [0, 2, None]


def test_a_cut_waits_for_the_cut_before_and_for_its_entries() -> None:
    a = feed("a", 300)
    source = filled(*a[:2])
    first = cut_for(source, "elector")
    source.add_cut(first)
    assert not feed_all(source, a[2:200])
    second = cut_for(source, "elector")
    replica = filled(a[0])
    assert replica.add_cut(second) is Outcome.MISSING_CUT
    assert replica.add_cut(first) is Outcome.MISSING_ENTRIES
    assert missing_for(replica, first.cut) == [RangeRequest(key("a").node, 1, 1)]
    assert replica.add_entry(a[1])
    assert missing_for(replica, first.cut) == []
    assert replica.add_cut(first)
    assert replica.add_cut(second) is Outcome.MISSING_ENTRIES
    assert missing_for(replica, second.cut) == [RangeRequest(key("a").node, 2, 199)]
    assert not feed_all(replica, [*a[2:200], second])
    assert replica.heads_root() == source.heads_root()


def test_cuts_that_contradict_what_is_certified_are_refused() -> None:
    a = feed("a", 3)
    replica = filled(*a)
    low = replica.head_at(key("a").node, 0)
    high = replica.head_at(key("a").node, 2)
    assert low is not None
    assert high is not None
    bad_root = Head(high.author, high.seq, high.entry_id, digest("feed root"))
    for rows, root, why in (
        ([high], heads_root([low]), "heads root"),
        ([bad_root], heads_root([bad_root]), "feed root"),
    ):
        with pytest.raises(PeerError, match=why):
            replica.add_cut(certified(Cut.make(DOMAIN.id, 1, DOMAIN.id, root, rows)))
    assert not replica.cuts
    first = certified(Cut.make(DOMAIN.id, 1, DOMAIN.id, heads_root([high]), [high]))
    assert replica.add_cut(first)
    for height, prev, row, why in (
        (1, DOMAIN.id, low, "taken"),
        (2, digest("prev"), high, "newest"),
        (2, first.cut.id, high, "forward"),
        (2, first.cut.id, low, "forward"),
    ):
        with pytest.raises(PeerError, match=why):
            replica.add_cut(certified(Cut.make(DOMAIN.id, height, prev, heads_root([row]), [row])))
    assert list(replica.cuts) == [first]


def test_a_term_is_granted_once() -> None:
    replica = Replica(DOMAIN)
    grant = grant_for(DOMAIN, 1, key("a").node)
    before = replica.side_digest()
    assert replica.add_grant(grant) is Outcome.ADDED
    assert replica.add_grant(grant) is Outcome.KNOWN
    assert replica.side_digest() != before
    with pytest.raises(PeerError, match="granted already"):
        replica.add_grant(grant_for(DOMAIN, 1, key("b").node))


def test_cuts_and_grants_need_a_quorum_of_electors() -> None:
    domain = small_domain(("e1", "e2", "e3", "e4"))
    replica = Replica(domain)
    replica.add_entry(Writer("a", domain.id).entries[0])
    cut = cut_for(replica, "e1", "e2", "e3")
    grant = grant_for(domain, 1, key("a").node, electors=("e1", "e2", "e4"))
    assert replica.electors_at(1) == domain.electors
    extra = sorted([*cut.votes, commit(key("stranger"), cut.cut, cut.epoch)])
    for votes, why in ((cut.votes[1:], "quorum"), (tuple(extra), "no elector")):
        with pytest.raises(PeerError, match=why):
            replica.add_cut(dataclasses.replace(cut, votes=votes))
    with pytest.raises(PeerError, match="quorum"):
        replica.add_grant(dataclasses.replace(grant, votes=grant.votes[:2]))
    assert replica.add_cut(cut)
    assert replica.add_grant(grant)
    # Another certificate of the same cut changes nothing.
    again = {key(name).node: commit(key(name), cut.cut, 9)[1] for name in ("e2", "e3", "e4")}
    assert replica.add_cut(certify(cut.cut, 9, again, domain.electors)) is Outcome.KNOWN
    assert replica.newest_cut is cut


def test_a_grant_waits_for_its_anchor() -> None:
    replica = filled(*feed("a", 1))
    cut = cut_for(replica, "elector")
    grant = grant_for(DOMAIN, 1, key("a").node, anchor=cut.cut.id)
    assert replica.add_grant(grant) is Outcome.MISSING_CUT
    assert replica.add_cut(cut)
    assert replica.add_grant(grant)


def test_versions_of_granted_terms_only_are_taken_and_covered() -> None:
    writer = Writer("a", DOMAIN.id)
    writer.append(Role("trainer"))
    for number in range(2):
        writer.append(Weights(7, number, None if number == 0 else digest("w"), digest("m"), 9, digest("n"), 9, None))
    replica = filled(*writer.entries[:2])
    assert replica.add_entry(writer.entries[2]) is Outcome.MISSING_GRANT
    assert [head.seq for head in replica.uncovered()] == [1]
    assert replica.add_grant(grant_for(DOMAIN, 7, writer.node))
    for entry in writer.entries[2:]:
        assert replica.add_entry(entry)
    assert replica.reportable() == replica.uncovered()
    blind = filled(*writer.entries[:2])
    cut = cut_for(replica, "elector")
    assert blind.judge_cut(cut.cut) is Outcome.MISSING_ENTRIES
    assert replica.add_cut(cut)
    assert replica.versions_in(cut.cut) == writer.entries[2:]
    assert replica.reportable() == []


# Forks

A = feed("a", 6, branch="relay", shared=3)
B = feed("a", 5, branch="validator", shared=3)
NODE = key("a").node


def test_a_second_entry_for_a_place_is_evidence_and_freezes_its_author() -> None:
    replica = filled(*A)
    before = replica.side_digest()
    with pytest.raises(Evidence) as caught:
        replica.add_entry(B[3])
    proof = ForkProof.parse(caught.value.proof)
    assert (proof.author, proof.seq) == (NODE, 3)
    assert replica.forks == {NODE: proof}
    assert replica.side_digest() != before
    assert replica.frozen(NODE)
    assert (replica.heads[NODE].seq, replica.heads[NODE].status) == (2, FROZEN)
    assert replica.rewrites == 1
    assert replica.arrivals == A[:3]
    assert replica.entry(A[3].id) is None
    for entry in (A[3], B[3], B[4], A[5]):
        assert replica.add_entry(entry) is Outcome.FROZEN
    assert replica.add_fork(proof) is Outcome.KNOWN


def test_signing_one_body_twice_is_no_fork() -> None:
    replica = filled(*A)
    again = dataclasses.replace(A[2], signature=bytes(64))
    assert replica.add_entry(again) is Outcome.KNOWN


def test_a_proof_of_a_lower_place_takes_more_away() -> None:
    replica = filled(*A)
    with pytest.raises(Evidence):
        replica.add_entry(B[4])
    assert replica.heads[NODE].seq == 3
    with pytest.raises(Evidence):
        replica.add_entry(B[3])
    assert replica.heads[NODE].seq == 2
    other = make(key("a"), DOMAIN.id, 0, bytes(32), DOMAIN.id, Writer("a", DOMAIN.id).entries[0].payload)
    assert replica.add_entry(other) is Outcome.KNOWN
    rejoined = Writer("b", DOMAIN.id).entries[0].payload
    with pytest.raises(Evidence):
        replica.add_entry(make(key("a"), DOMAIN.id, 0, bytes(32), DOMAIN.id, rejoined))
    assert NODE not in replica.heads
    assert replica.arrivals == []


def test_what_is_certified_stays() -> None:
    replica = filled(*A)
    cut = cut_for(replica, "elector")
    replica.add_cut(cut)
    more = Writer("a", DOMAIN.id)
    more.entries = list(A)
    assert replica.add_entry(more.append(Leave()))
    with pytest.raises(Evidence):
        replica.add_entry(B[3])
    assert replica.heads[NODE] == Head(NODE, 5, A[5].id, cut.cut.changes[0].feed_root, FROZEN)
    assert replica.uncovered() == [replica.heads[NODE]]
    freeze = cut_for(replica, "elector")
    assert replica.add_cut(freeze)
    assert freeze.cut.changes[0].status == FROZEN
    assert not replica.uncovered()
    assert freeze.cut.heads_root == replica.heads_root()


def test_a_cut_of_the_other_branch_brings_it_back() -> None:
    source = filled(*B)
    cut = cut_for(source, "elector")
    replica = filled(*A)
    assert replica.add_cut(cut) is Outcome.MISSING_ENTRIES
    assert missing_for(replica, cut.cut) == [RangeRequest(NODE, 0, 4)]
    with pytest.raises(Evidence):
        replica.add_entry(B[4])
    assert replica.add_cut(cut) is Outcome.MISSING_ENTRIES
    assert missing_for(replica, cut.cut) == [RangeRequest(NODE, 0, 3)]
    assert not feed_all(replica, [*B, cut])
    assert replica.add_fork(replica.forks[NODE]) is Outcome.KNOWN
    source.add_fork(replica.forks[NODE])
    assert source.heads[NODE].seq == 2
    assert source.judge_cut(cut.cut) is Outcome.ADDED
    assert source.heads[NODE].seq == 2
    assert source.add_cut(cut)
    assert replica.heads_root() == source.heads_root()
    assert replica.entries(NODE) == source.entries(NODE) == B
    assert sorted(entry.id for entry in replica.arrivals) == sorted(entry.id for entry in B)


def test_a_cut_can_bring_back_a_whole_feed() -> None:
    renamed = make(key("a"), DOMAIN.id, 0, NO_PREV, DOMAIN.id, Join(digest("recovery a"), "farflung/test", "a'"))
    source = filled(renamed)
    cut = cut_for(source, "elector")
    replica = filled(*A[:2])
    with pytest.raises(Evidence):
        replica.add_entry(renamed)
    assert NODE not in replica.heads
    assert missing_for(replica, cut.cut) == []
    assert replica.add_cut(cut)
    assert replica.entries(NODE) == [renamed]
    assert replica.head_at(NODE, 0) == Head(NODE, 0, renamed.id, cut.cut.changes[0].feed_root, FROZEN)


def test_a_cut_cannot_cover_what_anchors_elsewhere() -> None:
    odd = Writer("a", DOMAIN.id)
    odd.anchor = digest("a cut that nobody made")
    odd.append(Leave())
    replica = filled(*A[:1])
    replica.add_fork(ForkProof.of(A[1], odd.entries[1]))
    assert replica.add_entry(odd.entries[1]) is Outcome.FROZEN
    row = Head(NODE, 1, odd.entries[1].id, digest("feed root"))
    with pytest.raises(PeerError, match="anchor"):
        replica.add_cut(certified(Cut.make(DOMAIN.id, 1, DOMAIN.id, heads_root([row]), [row])))
    assert replica.entries(NODE) == A[:1]


def test_no_cut_leaves_a_certified_branch() -> None:
    replica = filled(*A[:4])
    replica.add_cut(cut_for(replica, "elector"))
    source = filled(*B)
    row = source.heads[NODE]
    cut = certified(Cut.make(DOMAIN.id, 2, replica.newest_cut_id, heads_root([row]), [row]))
    feed_all(replica, B)
    with pytest.raises(PeerError, match="leaves the branch"):
        replica.add_cut(cut)


def test_a_freezing_cut_ends_a_feed_without_the_proof() -> None:
    source = filled(*A[:4])
    source.add_fork(ForkProof.of(A[3], B[3]))
    assert source.heads[NODE].seq == 2
    cut = cut_for(source, "elector")
    for replica in (filled(*A), filled(*A[:3])):
        assert replica.add_cut(cut)
        assert replica.heads_root() == source.heads_root()
        assert replica.frozen(NODE)
        assert replica.add_entry(A[3]) is Outcome.FROZEN
        assert replica.add_fork(ForkProof.of(A[4], B[4]))
        assert replica.heads[NODE].seq == 2


def test_a_frozen_author_cannot_fill_memory() -> None:
    replica = filled(A[0])
    replica.add_fork(ForkProof.of(A[3], B[3]))
    for seq in range(3, MAX_ASIDE + 20):
        entry = make(key("a"), DOMAIN.id, seq, digest(str(seq)), DOMAIN.id, Leave())
        assert replica.add_entry(entry) is Outcome.FROZEN
    assert len(list(replica._aside)) == MAX_ASIDE
    assert not feed_all(replica, A[1:3])
    assert replica.heads[NODE].seq == 2


def test_a_certified_branch_is_taken_however_long_it_is() -> None:
    writer, bystander = Writer("a", DOMAIN.id), Writer("b", DOMAIN.id)
    knows, victim = filled(writer.entries[0]), filled(writer.entries[0])
    # Entries that nobody was shown yet: more than have room aside.
    for _ in range(4):
        entry = bystander.entries[0] if not knows.cuts else bystander.append(Role("relay"))
        assert knows.add_entry(entry)
        assert victim.add_entry(entry)
        cut = cut_for(knows, "elector")
        assert knows.add_cut(cut)
        assert victim.add_cut(cut)
        writer.anchor = bystander.anchor = cut.cut.id
        for _ in range(256):
            writer.append(Role("relay"))
    rival = make(key("a"), DOMAIN.id, 1, writer.entries[0].id, DOMAIN.id, Leave())
    assert victim.add_entry(rival)
    for entry in writer.entries[1:]:
        assert knows.add_entry(entry)
    cut = cut_for(knows, "elector")
    assert knows.add_cut(cut)
    with pytest.raises(Evidence):
        victim.add_entry(writer.entries[1])
    for _ in range(20):
        if victim.add_cut(cut) is not Outcome.MISSING_ENTRIES:
            break
        for wanted in missing_for(victim, cut.cut):
            for entry in knows.entries(wanted.author, wanted.first_seq, wanted.last_seq):
                victim.add_entry(entry)
    assert victim.newest_cut_id == cut.cut.id
    assert victim.certified == knows.certified


def test_the_digest_of_grants_and_forks_is_made_once_and_follows_both() -> None:
    replica = filled(*A[:2])
    digests = [replica.side_digest()]
    assert replica.side_digest() is digests[0]
    assert replica.add_grant(grant_for(DOMAIN, 1, NODE))
    digests.append(replica.side_digest())
    with pytest.raises(Evidence):
        replica.add_entry(feed("a", 2)[1])
    digests.append(replica.side_digest())
    assert len(set(digests)) == 3
    assert replica.side_digest() is digests[2]


def everything() -> list[Entry | CertifiedCut | CertifiedGrant]:
    """A lively log: two authors fork, one of them after a cut that covered one of its branches."""
    story = Story(validators=("v1", "v2"), inference=("i1", "i2", "i3"))
    early = Writer("i3", story.domain.id, joined=False)
    early.entries = list(story.writers["i3"].entries)
    early.anchor = story.writers["i3"].anchor
    for counter in (0, 2):
        for name in ("i1", "i2"):
            rollout = story.rollout(name, counter)
            for validator in ("v1", "v2"):
                story.judge(validator, rollout)
    story.rollout("i3")
    story.cut()
    story.rollout("i3", 2)
    story.train()
    late = Writer("i2", story.domain.id, joined=False)
    late.entries = list(story.writers["i2"].entries)
    late.anchor = story.writers["i2"].anchor
    story.say("i2", Role("relay"))
    story.grant(2, "i1", story.newest)
    story.cut()
    story.join("newcomer")
    branches = [early.append(Leave()), early.append(Leave()), late.append(Leave())]
    return [*story.objects, *branches]


EVERYTHING = everything()


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_deliveries_ends_in_one_heads_root(seed: int) -> None:
    straight, shuffled = Replica(DOMAIN), Replica(DOMAIN)
    assert not feed_all(straight, EVERYTHING)
    deliveries = EVERYTHING * 2
    Random(seed).shuffle(deliveries)
    assert not feed_all(shuffled, deliveries)
    assert shuffled.heads_root() == straight.heads_root()
    assert shuffled.bucket_digests() == straight.bucket_digests()
    assert shuffled.side_digest() == straight.side_digest()
    assert shuffled.certified == straight.certified
    assert {entry.id for entry in shuffled.arrivals} == {entry.id for entry in straight.arrivals}
    assert {author.hex() for author in shuffled.forks} == {key("i2").node.hex(), key("i3").node.hex()}


def test_replicas_that_ask_each_other_converge() -> None:
    rng = Random(7)
    replicas = [Replica(DOMAIN) for _ in range(4)]
    for replica in replicas:
        seen = [thing for thing in EVERYTHING if rng.random() < 0.7]
        rng.shuffle(seen)
        feed_all(replica, seen)
    assert len({replica.heads_root() for replica in replicas}) > 1
    for _ in range(12):
        for ours in replicas:
            for theirs in replicas:
                feed_all(ours, [*theirs.grants.values(), *theirs.forks.values(), *theirs.cuts])
                wanted = plan(ours.heads, theirs.heads.values(), ours.id_at)
                for cut in theirs.cuts[len(ours.cuts) :]:
                    wanted += missing_for(ours, cut.cut)
                for ask in wanted:
                    feed_all(ours, theirs.entries(ask.author, ask.first_seq, ask.last_seq))
    assert len({replica.heads_root() for replica in replicas}) == 1
    assert all(head.status == LIVE for head in replicas[0].heads.values() if head.author not in replicas[0].forks)
