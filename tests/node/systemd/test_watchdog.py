"""What counts as progress, on a whole node over trio's mock clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.roles import role_manager
from node.roles.role_manager import RoleManager
from node.systemd import watchdog
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster


async def start(running: Running) -> RoleManager:
    roles = RoleManager(running.node)
    running.nursery.start_soon(roles.run)
    await trio.sleep(1)
    return roles


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
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def stuck(node: object) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)

    monkeypatch.setitem(role_manager._LIVES, "inference", stuck)
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", r="relay", a="inference")
        running = cluster.running["a"]
        roles = await start(running)
        # The role is to end, for another, and does not.
        cluster.crash("r")
        await trio.sleep(7)
        assert await watchdog.progress(running.node.log, roles, 2) is None
        monkeypatch.setattr(watchdog, "ROLES_LIMIT", 2.0)
        still = await watchdog.progress(running.node.log, roles, 10)
        assert still is not None
        assert still.startswith("the role manager did nothing for ")


async def test_the_status_line_tells_role_version_peers_and_warnings(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", r="relay", a="inference")
        node = cluster.running["a"].node
        node.role = "inference"
        assert watchdog.status_line(node).endswith(", 4 peers")
        assert watchdog.status_line(node).startswith("inference, ")
        node.health.warn("disk", "the disk is full")
        assert watchdog.status_line(node).endswith("; the disk is full")
