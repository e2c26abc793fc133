"""Proposals: what follows from reports and locks, and what a voter thinks of a content."""

from __future__ import annotations

import pytest

from protocol.errors import Evidence
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import FROZEN, Head, heads_root
from protocol.log.proposal import choose, problem, propose, proposer
from protocol.log.quorum import MAX_CHANGES, Cut, Report, prepare, vote
from protocol.log.replica import Replica
from protocol.records import Role, Weights
from tests.protocol.builders import Writer, cut_for, digest, grant_for, key, small_domain
from tests.protocol.log.test_quorum import DOMAIN, ELECTORS, NAMES, head, make_cut


def held(author: bytes, seq: int) -> Head | None:
    """A replica that holds places 0 … 9 of authors x and y, on the unnamed branch."""
    for name in ("x", "y"):
        if author == digest(name) and 0 <= seq < 10:
            return head(name, seq)
    return None


def report(name: str, *rows: Head, epoch: int = 1) -> Report:
    """An elector's report, through its wire form."""
    rows = tuple(sorted(rows, key=lambda row: row.author))
    made = Report(DOMAIN, key(name).node, epoch, DOMAIN, rows, 0, 0)
    return Report.parse(made.sign(key(name)), ELECTORS)


def proposal(*reports: Report, certified: dict[bytes, Head] | None = None, most: int = MAX_CHANGES) -> Cut | None:
    """What a proposer makes of these reports."""
    return propose(DOMAIN, 1, DOMAIN, certified or {}, reports, ELECTORS, held, most)


def test_proposers_take_turns() -> None:
    assert [proposer(epoch, ELECTORS) for epoch in range(5)] == [*ELECTORS, ELECTORS[0]]


def test_the_highest_head_that_a_quorum_covers_is_proposed() -> None:
    cut = proposal(report("a", head("x", 9)), report("b", head("x", 5)), report("c", head("x", 7)))
    assert cut is not None
    assert cut.changes == (head("x", 5),)
    assert cut.heads_root == heads_root([head("x", 5)])
    cut = proposal(*(report(name, head("x", seq)) for name, seq in zip(NAMES, (9, 5, 7, 8), strict=True)))
    assert cut is not None
    assert cut.changes == (head("x", 7),)


def test_what_no_quorum_covers_is_not_proposed() -> None:
    assert proposal() is None
    assert proposal(report("a", head("x", 9)), report("b", head("x", 9))) is None
    # The last report of an elector counts, and only once.
    assert proposal(*[report("a", head("x", 9))] * 3) is None
    # Another branch, and what the proposer does not hold.
    assert proposal(report("a", head("x", 9)), report("b", head("x", 9)), report("c", head("x", 9, "'"))) is None
    assert proposal(*(report(name, head("x", 10)) for name in NAMES)) is None


def test_nothing_is_proposed_where_nothing_moved() -> None:
    reports = [report(name, head("x", 5)) for name in NAMES]
    assert proposal(*reports, certified={digest("x"): head("x", 5)}) is None
    assert proposal(*reports, certified={digest("x"): head("x", 8)}) is None
    assert proposal(*reports, certified={digest("x"): head("x", 4)}) is not None


def test_a_proposal_keeps_certified_rows_in_its_root() -> None:
    cut = proposal(*(report(name, head("x", 5)) for name in NAMES), certified={digest("y"): head("y", 2)})
    assert cut is not None
    assert cut.heads_root == heads_root([head("x", 5), head("y", 2)])


def test_what_does_not_fit_into_a_cut_waits_for_the_next() -> None:
    low, high = sorted(("x", "y"), key=digest)
    both = [report(name, head("x", 5), head("y", 6)) for name in NAMES]
    first = proposal(*both, most=1)
    assert first is not None
    assert [row.author for row in first.changes] == [digest(low)]
    then = proposal(*both, certified={digest(low): first.changes[0]}, most=1)
    assert then is not None
    assert [row.author for row in then.changes] == [digest(high)]


def test_a_quorum_that_reports_a_fork_freezes_the_author() -> None:
    frozen = head("x", 5, status=FROZEN)
    cut = proposal(*(report(name, frozen) for name in NAMES[:3]), certified={digest("x"): head("x", 5)})
    assert cut is not None
    assert cut.changes == (frozen,)
    assert proposal(*(report(name, frozen) for name in NAMES[:2]), certified={digest("x"): head("x", 5)}) is None


def test_the_newest_lock_is_proposed_again() -> None:
    cuts = [make_cut(head("x", seq)) for seq in (1, 2)]
    locks = [
        prepare(cut, epoch, dict(vote(key(name), cut, epoch) for name in NAMES[:3]), ELECTORS)
        for cut, epoch in zip(cuts, (7, 5), strict=True)
    ]
    fresh = make_cut(head("x", 9))
    assert choose([None, locks[1], locks[0]], lambda: fresh) == (cuts[0], locks[0])
    assert choose([None, None], lambda: fresh) == (fresh, None)
    assert choose([None], lambda: None) is None


# What a voter thinks

LOG = small_domain()


def cut_of(replica: Replica, *rows: Head | None, root: bytes | None = None) -> Cut:
    """The next cut, with these rows."""
    chosen = [row for row in rows if row is not None]
    vector = {**replica.certified, **{row.author: row for row in chosen}}
    height = len(replica.cuts) + 1
    return Cut.make(LOG.id, height, replica.newest_cut_id, root or heads_root(vector.values()), chosen)


def forked() -> tuple[Writer, Writer, Replica]:
    """Two branches of one feed that part at place 2, and a replica that holds the first."""
    one, two = Writer("a", LOG.id), Writer("a", LOG.id)
    for writer, role in ((one, "relay"), (two, "trainer")):
        writer.append(Role("none"))
        writer.append(Role(role))
    replica = Replica(LOG)
    for entry in one.entries:
        assert replica.add_entry(entry)
    return one, two, replica


def test_a_voter_accepts_what_its_replica_would_take() -> None:
    one, _, replica = forked()
    whole = cut_of(replica, replica.head_at(one.node, 2))
    assert problem(replica, whole, prepared=False) is None
    bare = Replica(LOG)
    assert problem(bare, whole, prepared=True) == "entries that it covers are missing"
    wrong = cut_of(replica, replica.head_at(one.node, 2), root=digest("root"))
    assert problem(replica, wrong, prepared=True) == "cut: the heads root is wrong"
    assert replica.add_cut(cut_for(replica, "elector"))
    assert problem(replica, whole, prepared=False) == "it is known already"


def test_a_voter_accepts_a_hidden_branch_and_a_frozen_row_only_where_a_quorum_did() -> None:
    one, two, replica = forked()
    high = cut_of(replica, replica.head_at(one.node, 2))
    prefix = replica.head_at(one.node, 1)
    assert prefix is not None
    ended = cut_of(replica, Head(prefix.author, prefix.seq, prefix.entry_id, prefix.feed_root, FROZEN))
    assert problem(replica, ended, prepared=False) == "nothing is known that froze the author"
    assert problem(replica, ended, prepared=True) is None
    with pytest.raises(Evidence):
        replica.add_entry(two.entries[2])
    assert problem(replica, ended, prepared=False) is None
    assert problem(replica, high, prepared=False) == "another branch is held"
    assert problem(replica, high, prepared=True) is None
    assert replica.forks[one.node] == ForkProof.of(one.entries[2], two.entries[2])


def test_a_voter_accepts_no_version_without_its_grant() -> None:
    writer = Writer("a", LOG.id)
    writer.append(Weights(3, 0, None, digest("m"), 9, digest("n"), 9, None))
    granted, replica = Replica(LOG), Replica(LOG)
    assert granted.add_grant(grant_for(LOG, 3, writer.node))
    for entry in writer.entries:
        granted.add_entry(entry)
        replica.add_entry(entry)
    cut = cut_of(granted, granted.head_at(writer.node, 1))
    assert problem(replica, cut, prepared=True) == "entries that it covers are missing"
    assert problem(granted, cut, prepared=False) is None
