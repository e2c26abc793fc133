"""What graphics memory a presence claims."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from node.peers import hardware
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster


@pytest.mark.parametrize(
    ("printed", "found"), [(b"143771\n", 143771), (b"81920\n81920\n", 163840), (b"[N/A]\n", 0), (b"", 0)]
)
def test_the_devices_add_up(printed: bytes, found: int) -> None:
    assert hardware.memory(printed) == found


async def test_it_is_claimed_in_the_presence(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async def tool(command: Sequence[str]) -> bytes:
        await trio.lowlevel.checkpoint()
        assert command == hardware.ASK
        return b"143771\n"

    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        running.nursery.start_soon(running.presences.run)
        running.nursery.start_soon(hardware.keep_claimed, running.own, tool)
        await cluster.until(lambda: any(p.gpu_mb == 143771 for p in running.presences.live().values()))


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi")])
async def test_without_the_tool_nothing_is_claimed(
    error: Exception, tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async def tool(command: Sequence[str]) -> bytes:
        await trio.lowlevel.checkpoint()
        raise error

    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        running.own.gpu_mb = 5
        running.nursery.start_soon(hardware.keep_claimed, running.own, tool)
        await cluster.until(lambda: running.own.gpu_mb == 0)
