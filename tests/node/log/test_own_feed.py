"""A node's own feed: its join, its head in doubt, its end; and a past that nobody has any more."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from node.log import own_feed
from protocol.records import Join, Role
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster

FEED = "keeping the own feed"


async def test_a_newcomer_joins_once(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("a", join=False)
        assert running.node.log.own_seq == -1
        running.keep(FEED)
        await trio.sleep(60)
        (join,) = running.node.log.replica.entries(running.id)
        assert isinstance(join.payload, Join)
        assert join.payload.name == "a"
        assert running.warnings == {}


async def test_a_join_waits_for_room_on_the_disk(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("a", join=False)
        running.disk.full = True
        running.keep(FEED)
        await trio.sleep(12)
        assert "no space left" in running.warnings[FEED]
        assert running.node.log.own_seq == -1
        running.disk.full = False
        await trio.sleep(20)
        assert running.node.log.own_seq == 0
        await trio.sleep(60)
        assert running.warnings == {}
        assert running.node.log.own_seq == 0


async def test_a_head_in_doubt_is_told_until_it_is_clear(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first = await cluster.node("a")
        await cluster.node("b")
        await cluster.agree()
        gone = cluster.crash("a")
        away = cluster.crash("b")
        again = await cluster.node("a", disk=gone.disk, known=[away.id])
        again.keep(FEED)
        await trio.sleep(15)
        assert again.warnings["own head"].startswith("nothing is appended: 0 of 1 known peers")
        await cluster.node("b", disk=away.disk, known=[again.id])
        await trio.sleep(15)
        assert again.warnings == {}
        await again.node.log.append(Role("relay"))
        assert first.id == again.id


async def test_a_past_that_nobody_has_any_more_is_told_while_it_lasts(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("a")
        unserved: set[bytes] = set()
        running.nursery.start_soon(own_feed.watch_history, running.node, unserved)
        await trio.sleep(1)
        assert running.warnings == {}
        unserved.add(bytes(32))
        await trio.sleep(own_feed.PAUSE)
        assert "connect to one that keeps them" in running.warnings["history"]
        unserved.clear()
        await trio.sleep(own_feed.PAUSE)
        assert running.warnings == {}
