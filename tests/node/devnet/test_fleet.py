"""Daemons as children: restarted when they die, ended when they must."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from node.devnet import fleet
from node.devnet.fleet import Member, Pace, Total
from node.errors import UserError
from node.store.data_directory import DataDirectory

Program = Callable[[str], Member]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes a member whose daemon is a line of Python."""

    def make(code: str) -> Member:
        directory = DataDirectory(tmp_path / "node-1")
        directory.create()
        command = [sys.executable, "-S", "-c", code]
        return Member("node-1", directory, "/ip4/127.0.0.1/tcp/1/p2p/x", command, Pace(restart_pause=0, max_restarts=2))

    return make


def test_totals_go_on_where_a_counter_starts_again() -> None:
    total = Total()
    for counter in (10, 25, 3, 4):
        total.see(counter)
    assert total.value == 29


async def test_a_daemon_that_dies_is_started_again_and_told_of(program: Program) -> None:
    member = program("import os, signal; print('hello', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    said: list[str] = []
    with trio.fail_after(20):
        await member.keep_running(said.append)
    assert [line.startswith("node-1 died (signal SIGKILL)") for line in said] == [True, True, False]
    assert "not started again" in said[2]
    assert member.state == "failed"
    assert member.log.read_text() == "hello\n" * 3


async def test_a_users_mistake_is_not_retried(program: Program) -> None:
    member = program("import sys; print('noise\\nfarflung: the port is busy; choose another'); sys.exit(2)")
    with trio.fail_after(20), pytest.raises(UserError, match=r"^node-1: the port is busy; choose another$"):
        await member.keep_running(lambda text: None)


async def test_a_daemon_that_ended_on_purpose_stays_ended(program: Program) -> None:
    member = program("pass")
    with trio.fail_after(20):
        await member.keep_running(lambda text: None)
    assert member.state == "stopped"
    assert member.restarts == 0
    assert not member.fresh()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


async def test_stopping_kills_who_does_not_listen_and_what_it_leaves_behind(program: Program) -> None:
    others = fleet.adopt_orphans()
    member = program(STUBBORN)
    process = member.start()
    with trio.fail_after(20):
        while not (text := member.log.read_text()).endswith("\n"):  # noqa: ASYNC110  # another process writes it
            await trio.sleep(0.01)
        assert await fleet.stop([member], grace=0.1, others=others) == ["node-1"]
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(int(text), 0)


async def test_stopping_is_quick_where_daemons_listen(program: Program) -> None:
    others = fleet.adopt_orphans()
    member = program("import time; time.sleep(60)")
    process = member.start()
    with trio.fail_after(20):
        assert await fleet.stop([member, Member("node-2", member.directory, "", [])], grace=10, others=others) == []
    assert process.returncode == -signal.SIGTERM


def test_a_silent_daemon_has_no_last_line(program: Program) -> None:
    member = program("")
    member.log.touch()
    assert member.last_line() == "it said nothing"


def test_ports_are_free_different_and_not_the_kernels() -> None:
    ports = fleet.free_ports(20)
    assert len(set(ports)) == 20
    low = int(re.split(r"\s+", Path("/proc/sys/net/ipv4/ip_local_port_range").read_text())[0])
    for port in ports:
        assert port < max(low, 20_480)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_chosen() -> None:
    first = fleet.free_ports(1, list.sort)[0]
    with socket.socket() as taken, suppress(OSError):
        taken.bind(("127.0.0.1", first))
        assert fleet.free_ports(1, list.sort)[0] != first


async def test_orphans_that_end_are_reaped(program: Program) -> None:
    fleet.adopt_orphans()
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', '']).pid)"
    process = program(code).start()
    orphan = Path("/proc", (await _output(process, program(code))).strip())
    with trio.fail_after(20):
        while orphan.exists():  # noqa: ASYNC240  # the process table tells nobody of its changes
            fleet.reap([process.pid])
            await trio.sleep(0.01)
    assert process.returncode == 0


async def _output(process: subprocess.Popen[bytes], member: Member) -> str:
    with trio.fail_after(20):
        while process.poll() is None:  # noqa: ASYNC110
            await trio.sleep(0.01)
    return member.log.read_text()
