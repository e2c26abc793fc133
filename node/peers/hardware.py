"""What graphics memory this machine has, as its presence claims it; claims decide ties only.

The daemon loads no driver: NVIDIA's own tool is asked, once, in a process of its own. Without it nothing is claimed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from node.peers.own_state import OwnState

ASK: Final = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
PATIENCE: Final = 20.0

Run = Callable[[Sequence[str]], Awaitable[bytes]]
"""Runs a command and returns what it prints; raises ``OSError`` or ``subprocess.CalledProcessError``."""


async def run_tool(command: Sequence[str]) -> bytes:
    """The ``Run`` of a real machine."""
    done = await trio.run_process(list(command), capture_stdout=True, stderr=subprocess.DEVNULL)
    return bytes(done.stdout)


def memory(printed: bytes) -> int:
    """The sum of the MiB that the tool names, a line for each device; lines that are no number count nothing."""
    return sum(int(line) for line in printed.split(b"\n") if line.strip().isdigit())


async def keep_claimed(own: OwnState, run: Run = run_tool) -> None:
    """Find out once, and have it announced."""
    with trio.move_on_after(PATIENCE):
        try:
            own.gpu_mb = min(memory(await run(ASK)), 2**40)
        except (OSError, subprocess.CalledProcessError):
            own.gpu_mb = 0
        if own.gpu_mb:
            own.announce()
    await trio.sleep_forever()
