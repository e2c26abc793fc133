"""What counts as progress, on a whole node over trio's mock clock."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.daemon import ROLES
from node.roles.role_manager import RoleManager
from node.systemd import watchdog
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster


async def start(running: Running) -> RoleManager:
    running.keep(ROLES)
    await trio.sleep(1)
    return running.parts.roles


async def hold(lock: trio.Lock, *, task_status: Any) -> None:
    async with lock:
        task_status.started()
        await trio.sleep_forever()


async def test_a_node_that_waits_makes_progress(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", r="relay", a="inference")
        running = cluster.running["a"]
        roles = await start(running)
        await trio.sleep(3)
        assert await watchdog.progress(running.node.log, roles, 10) is None


async def test_a_log_that_is_held_for_ever_stands_still(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", r="relay", a="inference")
        running = cluster.running["a"]
        roles = await start(running)
        await cluster.nursery.start(hold, running.node.log._lock)
        began = trio.current_time()
        assert await watchdog.progress(running.node.log, roles, 2) == "the log took no entry for 2 s"
        assert trio.current_time() - began == pytest.approx(2)


async def test_a_role_manager_that_never_turns_again_stands_still(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async def stuck() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)

    async with open_cluster(tmp_path, faults, lives={"inference": stuck}) as cluster:
        await cluster.stage(t="trainer", v="validator", r="relay", a="inference")
        running = cluster.running["a"]
        roles = await start(running)
        # The role is to end, for another, and does not.
        cluster.crash("r")
        await trio.sleep(7)
        assert await watchdog.progress(running.node.log, roles, 2) is None
        await trio.sleep(watchdog.ROLES_LIMIT)
        still = await watchdog.progress(running.node.log, roles, 10)
        assert still is not None
        assert still.startswith("the role manager did nothing for ")


async def test_the_status_line_tells_role_version_peers_and_warnings(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", r="relay", a="inference")
        running = cluster.running["a"]
        line = partial(watchdog.status_line, running.node, running.own, running.weights)
        assert line().endswith(", 4 peers")
        assert line().startswith("inference, ")
        running.node.health.warn("disk", "the disk is full")
        assert line().endswith("; the disk is full")
