"""The relay: no child, and the first to be asked."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from node.weights import offers
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import open_cluster


async def test_a_relay_lives_without_a_child_until_it_is_cancelled(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        with trio.move_on_after(1000) as scope:
            await offers.push(running.node, running.weights)
        assert scope.cancelled_caught
        assert faults.calls == []


async def test_what_a_relay_holds_is_asked_of_it_and_not_of_the_trainer(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        await cluster.running["r"].weights.hold(version, timeout=10)
        await trio.sleep(1)  # its presence says so
        assert next(iter(cluster.running["i"].weights.holders_of.version(version))) == cluster.running["r"].id
        # From now on the trainer can be reached by nobody, and nobody misses it.
        others = [r.id for name, r in cluster.running.items() if name != "t"]
        cluster.network.partition([cluster.running["t"].id], others)
        await cluster.running["i"].weights.hold(version, timeout=10)
        assert cluster.running["i"].weights.held.paths(version.id)[1].read_bytes() == WHOLE_0
