"""Who is gone for good is declared absent by a quorum, replaced, and takes part again once it is back."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from protocol.records import Absent
from tests.node.fake_children import Faults, genesis
from tests.node.fakes import Cluster, Running, open_cluster
from tests.node.roles.test_role_manager import trained

ELECTORS = ("elector", "a", "b", "c")


def words(running: Running) -> list[Absent]:
    """The ``absent`` entries that a node holds."""
    entries = running.node.log.replica.arrivals
    return [entry.payload for entry in entries if isinstance(entry.payload, Absent)]


async def started(cluster: Cluster) -> None:
    for name in (*ELECTORS, "d"):
        await cluster.start(name)
    await trained(cluster, 2, 120)


async def test_four_electors_declare_the_only_validator_absent_and_steps_go_on(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, data=genesis(electors=ELECTORS)) as cluster:
        await started(cluster)
        name = cluster.role("validator")
        gone = cluster.crash(name)
        some = next(iter(cluster.running.values()))
        await cluster.until(lambda: any(word.node == gone.id for word in words(some)), 60)
        (word,) = (word for word in words(some) if word.node == gone.id)
        assert len(word.votes) >= 3
        before = min(r.steps for r in cluster.running.values())
        await trained(cluster, before + 4, 120)
        assert cluster.role("validator") != name
        assert all(r.port.blamed == [] for r in cluster.running.values())
        # It is back: its log catches up before it takes a role, and its own word restores its standing.
        await cluster.start(name, disk=gone.disk, known=[some.id])
        back = cluster.running[name]
        await cluster.until(
            lambda: back.own.role != "none" and gone.id not in some.node.log.replica.absences.since, 120
        )
        before = min(r.steps for r in cluster.running.values())
        await trained(cluster, before + 2, 120)


async def test_nobody_who_is_heard_is_declared_absent(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, data=genesis(electors=ELECTORS)) as cluster:
        await started(cluster)
        await trio.sleep(30)
        assert words(cluster.running["elector"]) == []
        elector, other = cluster.running["elector"], cluster.running["d"]
        assert elector.elector.voter.sign_absence(other.id, elector.node.log.replica.newest_cut_id) == (
            "that node was heard lately"
        )
        assert not await elector.elector.declare_absent(other.id)
