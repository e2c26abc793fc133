"""When a term is granted, to whom, and when not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.config import WILLING
from node.log.elector import NotGranted
from protocol.log import elector_state as rules
from protocol.log.quorum import Grant
from tests.node.fake_children import Faults, genesis
from tests.node.fakes import Cluster, Running, open_cluster
from tests.protocol.builders import POLICY


async def watched(
    cluster: Cluster, *names: str, willing: tuple[str, ...] = WILLING, elector_willing: tuple[str, ...] = ()
) -> Running:
    """Nodes that only publish presences, and the elector with its watch."""
    elector = await cluster.node("elector", willing=elector_willing)
    for name in names:
        await cluster.node(name, willing=willing)
    for running in cluster.running.values():
        running.nursery.start_soon(running.presences.run)
    watch(elector)
    return elector


def watch(elector: Running) -> None:
    elector.nursery.start_soon(elector.parts.elector.watch.run, elector.elector)


def grant(running: Running) -> Grant | None:
    return running.node.log.ledger.grant()


async def test_the_first_term_comes_with_enough_nodes(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, data=genesis(policy=replace(POLICY, min_nodes=3))) as cluster:
        elector = await watched(cluster, "a", "b")
        await trio.sleep(1.2)  # sooner than the founding wait alone would allow
        assert grant(elector) is not None
        await cluster.agree()
        held = grant(cluster.running["a"])
        assert held is not None
        assert held.trainer in (cluster.running["a"].id, cluster.running["b"].id)
        assert (held.term, held.base) == (1, cluster.domain.id)


async def test_or_with_fewer_after_the_founding_wait_but_never_for_one_alone(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, data=genesis(policy=replace(POLICY, min_nodes=9))) as cluster:
        elector = await watched(cluster, elector_willing=WILLING)
        await trio.sleep(30)
        assert grant(elector) is None
        other = await cluster.node("a")
        other.nursery.start_soon(other.presences.run)
        wait = cluster.domain.timings.founding_wait_ms / 1000
        await trio.sleep(wait - 0.2)
        assert grant(elector) is None
        await trio.sleep(1.5)
        assert grant(elector) is not None


async def test_nobody_willing_is_told(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        elector = await watched(cluster, "a", "b", willing=("inference",))
        await trio.sleep(3)
        assert elector.node.health.warnings["term"] == "no member that is present is willing to train and may"
        newcomer = await cluster.node("c")
        newcomer.nursery.start_soon(newcomer.presences.run)
        await trio.sleep(2)
        held = grant(elector)
        assert held is not None
        assert held.trainer == newcomer.id
        assert elector.node.health.warnings == {}


async def test_a_silent_holder_loses_its_office_and_a_short_absence_does_not_cost_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        elector = await watched(cluster, "a", "b")
        await trio.sleep(2)
        held = grant(elector)
        assert held is not None
        name = next(name for name, running in cluster.running.items() if running.id == held.trainer)
        silence = cluster.domain.timings.term_silence_ms / 1000
        gone = cluster.crash(name)
        await trio.sleep(silence - 1)
        again = await cluster.node(name, disk=gone.disk)
        again.nursery.start_soon(again.presences.run)
        await trio.sleep(silence)
        assert grant(elector) == held
        cluster.crash(name)
        await trio.sleep(silence + 3)
        successor = grant(elector)
        assert successor is not None
        assert successor.term == 2
        assert successor.trainer != held.trainer


async def test_a_holder_that_is_there_but_does_not_want_it_any_more_counts_as_silent(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        elector = await watched(cluster, "a", "b")
        await trio.sleep(2)
        held = grant(elector)
        assert held is not None
        holder = next(running for running in cluster.running.values() if running.id == held.trainer)
        holder.own.unfit["trainer"] = math.inf
        await trio.sleep(10)
        assert grant(elector) != held


async def test_a_restarted_elector_gives_the_holder_time(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        elector = await watched(cluster, "a", "b")
        await trio.sleep(2)
        held = grant(elector)
        gone = cluster.crash("elector")
        await trio.sleep(60)
        again = await cluster.node("elector", disk=gone.disk, willing=(), known=[cluster.running["a"].id])
        again.nursery.start_soon(again.presences.run)
        watch(again)
        await trio.sleep(10)
        assert grant(again) == held


async def test_a_full_disk_delays_a_term_and_ends_nothing(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        elector = await watched(cluster, "a", "b")
        elector.disk.full = True
        await trio.sleep(5)
        assert grant(elector) is None
        assert "no space left" in elector.node.health.warnings["term"]
        elector.disk.full = False
        await trio.sleep(2)
        assert grant(elector) is not None
        assert "term" not in elector.node.health.warnings


# Several electors

FOUR = ("elector", "e2", "e3", "e4")


async def four(cluster: Cluster, *names: str) -> list[Running]:
    """Four electors with their watches, none of them willing to train, and nodes that are."""
    electors = [await cluster.node(name, willing=()) for name in FOUR]
    for name in names:
        await cluster.node(name)
    for running in cluster.running.values():
        running.nursery.start_soon(running.presences.run)
    for running in electors:
        running.nursery.start_soon(running.elector.run)
        watch(running)
    return electors


async def granted(cluster: Cluster, term: int, seconds: float = 60) -> Grant:
    """Wait until everybody holds the grant of a term, the same one."""
    running = list(cluster.running.values())
    await cluster.until(lambda: all(term in one.node.log.replica.grants for one in running), seconds)
    found = [one.node.log.replica.grants[term].grant for one in running]
    assert len({grant.id for grant in found}) == 1
    return found[0]


async def test_a_quorum_grants_each_term_once(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    data = genesis(policy=replace(POLICY, min_nodes=6), electors=FOUR)
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        await four(cluster, "a", "b")
        first = await granted(cluster, 1, seconds=10)
        await trio.sleep(20)
        for running in cluster.running.values():
            assert list(running.node.log.replica.grants) == [1]
            assert running.port.blamed == []
            assert "term" not in running.node.health.warnings
        holder = next(name for name, running in cluster.running.items() if running.id == first.trainer)
        cluster.crash(holder)
        cluster.crash("e3")  # three are enough
        second = await granted(cluster, 2)
        assert second.trainer != first.trainer


async def test_no_elector_alone_deposes_a_trainer_that_is_there(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    data = genesis(policy=replace(POLICY, min_nodes=6), electors=FOUR)
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        liar, *honest = await four(cluster, "a", "b")
        first = await granted(cluster, 1)
        other = next(cluster.running[name].id for name in ("a", "b") if cluster.running[name].id != first.trainer)
        for trainer in (other, liar.id):
            with pytest.raises(NotGranted, match="not vacant"):
                await liar.elector.grant_term(trainer)
        # Nor does it renew the holder's term again and again.
        with pytest.raises(NotGranted, match="not vacant"):
            await liar.elector.grant_term(first.trainer)
        assert all(running.elector.voter.state.term == 1 for running in honest)


async def test_split_votes_move_on_to_a_higher_term(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    data = genesis(policy=replace(POLICY, min_nodes=6), electors=FOUR)
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        electors = [await cluster.node(name, willing=()) for name in FOUR]
        others = [await cluster.node(name) for name in ("a", "b")]
        for running in cluster.running.values():
            running.nursery.start_soon(running.presences.run)
        await cluster.agree()
        await trio.sleep(1)
        # Two signed one grant of term 1, two the other.
        for number, running in enumerate(electors):
            voter = running.elector.voter
            await running.elector.ask_past()
            own = Grant.make(cluster.domain.id, 1, others[number % 2].id, cluster.domain.id, 0, 0, cluster.domain.id)
            assert isinstance(await voter.sign_grant(own), bytes)
            running.nursery.start_soon(running.elector.run)
            watch(running)
        await granted(cluster, 2)
        assert all(1 not in running.node.log.replica.grants for running in cluster.running.values())


async def test_a_grant_that_failed_does_not_keep_the_holder_back_for_ever(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    data = genesis(policy=replace(POLICY, min_nodes=6), electors=FOUR)
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        electors = await four(cluster, "a", "b")
        first = await granted(cluster, 1)
        other = next(cluster.running[name].id for name in ("a", "b") if cluster.running[name].id != first.trainer)
        lost = Grant.make(cluster.domain.id, 7, other, cluster.domain.id, 0, 0, cluster.domain.id)
        for running in electors[1:3]:
            assert isinstance(await running.elector.voter.sign_grant(lost), bytes)
            assert rules.contested(running.elector.voter.state, 1)
        holder = next(name for name, running in cluster.running.items() if running.id == first.trainer)
        renewed = await granted(cluster, 8)
        assert renewed.trainer == cluster.running[holder].id
        for running in electors:
            assert not rules.contested(running.elector.voter.state, 8)
