"""A daemon that is told to stop ends, whatever goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from node.health.ending import stop_on_signal

ROOT = Path(__file__).resolve().parents[3]
HELD_BY_A_THREAD = """
import time, trio
from node.health import ending
async def main():
    ending.ending()()
    with trio.move_on_after(0.01):
        await trio.to_thread.run_sync(time.sleep, 600)
trio.run(main)
"""
HELD_BY_THE_LOOP = """
import os, signal, time, trio, trio.testing
from node.health import ending
async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ending.stop_on_signal, nursery.cancel_scope.cancel, ending.ending())
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 600
        while time.monotonic() < end:
            pass
trio.run(main)
"""


@pytest.mark.parametrize("hold", [HELD_BY_A_THREAD, HELD_BY_THE_LOOP])
def test_nothing_that_goes_on_holds_a_daemon_that_is_told_to_stop(hold: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", hold], env=environment, timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_and_begins_the_time_to_end(number: signal.Signals) -> None:
    before, told = signal.getsignal(number), list[str]()
    async with trio.open_nursery() as nursery:

        def stop() -> None:
            told.append("stop")
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop_on_signal, stop, lambda: told.append("time runs"))
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), number)
        with trio.fail_after(10):
            await trio.sleep(60)
    assert told == ["time runs", "stop"]
    assert signal.getsignal(number) is before
