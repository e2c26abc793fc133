"""What a node is and does now, and who hears of it."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from node.config import WILLING
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster


async def test_a_pause_counts_steps(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("i")
        assert not running.own.paused()
        running.own.pause_at_step = 1
        assert not running.own.paused()
        cluster.crash("i")
    async with open_cluster(tmp_path / "trained", faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            await cluster.start(name, pause_at_step=1)
        await cluster.until(lambda: all(running.own.paused() for running in cluster.running.values()))
        assert {running.steps for running in cluster.running.values()} == {1}


async def test_what_it_is_willing_to_do(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        own = (await cluster.node("a")).own
        assert own.willing() == WILLING
        own.unfit["relay"] = trio.current_time() + 10
        assert own.willing() == tuple(role for role in WILLING if role != "relay")
        own.leaving = True
        assert own.willing() == ()


async def test_a_change_is_published_at_once(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        a, b = await cluster.node("a"), await cluster.node("b")
        a.nursery.start_soon(a.presences.run)
        await trio.sleep(2)
        interval = cluster.domain.timings.presence_ms / 1000
        for role in ("relay", "validator"):
            a.own.role = role
            a.own.announce()
            await trio.sleep(interval / 2)
            assert b.presences.live()[a.id].role == role
