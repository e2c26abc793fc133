"""A trainer that is heard and makes nothing loses its office; one that cannot have what it needs does not."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from node.roles.holder_progress import HolderProgress
from protocol.records import Rollout
from tests.node.fake_children import Faults
from tests.node.fakes import Cluster, Running, open_cluster
from tests.node.roles.test_role_manager import trained
from tests.node.roles.test_rollout_pool import announce, judge, stage
from tests.protocol.builders import RECIPE, digest


def watch(running: Running) -> HolderProgress:
    return HolderProgress(running.node, running.own, running.pool, running.parts.blobs)


async def promised(cluster: Cluster) -> None:
    """A full batch is accepted and final, and nobody has its files."""
    version = cluster.running["t"].node.log.ledger.newest_weights()
    assert version is not None
    for first in range(0, 2 * RECIPE.groups_per_step, 2):
        await judge(cluster, await announce(cluster, "j", version, first))
    await cluster.cut()


async def test_nobody_is_idle_whose_batch_nobody_can_fetch(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    """What colluding validators accepted and withhold costs the trainer nothing."""
    async with open_cluster(tmp_path, faults) as cluster:
        await stage(cluster)
        progress = watch(cluster.running["elector"])
        await promised(cluster)
        patience = cluster.domain.timings.patience_ms / 1000
        for _ in range(3):
            await progress.look()
            await trio.sleep(patience)
        assert not progress.idle()


async def test_a_trainer_that_is_there_and_makes_nothing_is_replaced(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.start("elector", willing=("inference",))
        for name in ("a", "b", "c", "d"):
            await cluster.start(name)
        await trained(cluster, 3)
        lazy = cluster.running[cluster.role("trainer")]
        faults.seconds |= {"train": 10_000.0}
        ledger = cluster.running["elector"].node.log.ledger

        def replaced() -> bool:
            grant = ledger.grant()
            return grant is not None and grant.term == 2

        await cluster.until(replaced, 300)
        grant = ledger.grant()
        assert grant is not None
        assert grant.trainer != lazy.id
        assert lazy.id in cluster.running["elector"].presences.members()
        faults.seconds |= {"train": 0.1}
        await trained(cluster, 6, 120)


async def test_a_version_begins_the_clock_anew(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["elector"]
        progress = watch(running)
        entries = []
        for first in range(0, 2 * RECIPE.groups_per_step, 2):
            name = f"j {first}"
            stored = cluster.running["j"].blobs.put(name.encode())
            node = cluster.running["j"].node
            responses = 2 * RECIPE.group_size
            (entry,) = await node.log.append(Rollout(version.id, first, 2, responses, responses, stored, len(name), 2))
            await cluster.agree()
            await judge(cluster, entry)
            entries.append(entry)
        await cluster.cut()
        patience = cluster.domain.timings.patience_ms / 1000
        await progress.look()
        await trio.sleep(patience / 2)
        assert not progress.idle()
        await trio.sleep(patience)
        assert progress.idle()
        again = await cluster.announce("t", b"\7" * 64, version, digest("step"))
        assert again.id != version.id
        await progress.look()
        assert not progress.idle()
