"""What systemd and the journal are told, over real datagram sockets."""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.systemd import service_manager
from node.systemd.service_manager import Manager


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """The manager's end: a datagram socket with a path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(5)
        yield channel


def told(channel: socket.socket) -> list[str]:
    """Everything that was sent and not yet read."""
    messages = []
    channel.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            messages.append(channel.recv(4096).decode())
    return messages


def manager(channel: socket.socket, **more: str) -> Manager:
    return Manager.take({"NOTIFY_SOCKET": channel.getsockname(), **more})


def test_the_manager_hears_of_a_life(listener: socket.socket) -> None:
    one = manager(listener)
    one.send(STATUS="reads the log")
    one.send(READY=1, STATUS="relay, 3 peers")
    one.send(STOPPING=1, STATUS="stopping")
    assert told(listener) == ["STATUS=reads the log", "READY=1\nSTATUS=relay, 3 peers", "STOPPING=1\nSTATUS=stopping"]


def test_an_abstract_socket_is_found() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0farflung-test-{os.getpid()}")
        assert Manager.take({"NOTIFY_SOCKET": f"@farflung-test-{os.getpid()}"}).send(READY=1)
        assert told(channel) == ["READY=1"]


def test_a_value_cannot_smuggle_in_another_line(listener: socket.socket) -> None:
    manager(listener).send(STATUS="one\nWATCHDOG=1\r\nMAINPID=1")
    assert told(listener) == ["STATUS=one WATCHDOG=1 MAINPID=1"]


def test_the_variables_are_taken_from_the_environment() -> None:
    environment = {
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": "60000000",
        "WATCHDOG_PID": str(os.getpid()),
        "PATH": "/bin",
    }
    assert Manager.take(environment) == Manager("/run/x", 60.0)
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize("address", ["", "@", "relative", "vsock:2:1"])
def test_without_a_usable_socket_nothing_is_told(address: str) -> None:
    one = Manager.take({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    assert one == Manager()
    assert not one.send(READY=1)


@pytest.mark.parametrize(("microseconds", "pid"), [("x", ""), ("-5", ""), ("²", ""), ("60000000", "1"), ("", "")])
def test_a_watchdog_that_is_not_for_this_process_is_none(microseconds: str, pid: str) -> None:
    environment = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": microseconds, "WATCHDOG_PID": pid}
    assert Manager.take(environment) == Manager("/run/x", 0.0)


def test_a_manager_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    assert not Manager(str(tmp_path / "nobody")).send(READY=1)


def test_a_manager_that_reads_nothing_does_not_hold_the_daemon_up(
    listener: socket.socket,
) -> None:
    one = replace(manager(listener), patience=0.01)
    assert one.send(READY=1)
    assert not all(one.send(STATUS=f"{number}") for number in range(100_000))


async def test_the_watchdog_is_fed_while_there_is_progress(
    listener: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    still: list[str | None] = [None, None, "the log took no entry", None]
    patience: list[float] = []

    async def progress(seconds: float) -> str | None:
        patience.append(seconds)
        await trio.lowlevel.checkpoint()
        return still[len(patience) - 1] if len(patience) <= len(still) else None

    with trio.move_on_after(75):
        await manager(listener, WATCHDOG_USEC="60000000").feed(progress, lambda: "relay")
    first, second, third, fourth, *rest = told(listener)
    assert first == second == fourth == "WATCHDOG=1\nSTATUS=relay"
    assert third == "STATUS=stands still: the log took no entry"
    assert len(rest) == 4  # every ten seconds
    assert set(patience) == {10.0}


async def test_a_short_watchdog_is_fed_three_times_in_its_time(
    listener: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    async def progress(seconds: float) -> str | None:
        assert seconds == 1.0
        await trio.lowlevel.checkpoint()
        return None

    with trio.move_on_after(2.5):
        await manager(listener, WATCHDOG_USEC="3000000").feed(progress, lambda: "relay")
    assert len(told(listener)) == 3


async def test_without_a_watchdog_only_the_status_is_kept(
    listener: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    async def progress(seconds: float) -> str | None:
        await trio.lowlevel.checkpoint()
        return None

    with trio.move_on_after(15):
        await manager(listener).feed(progress, lambda: "relay")
    assert told(listener) == ["STATUS=relay", "STATUS=relay"]


def test_the_journal_is_recognised_by_its_inode(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert service_manager.is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not service_manager.is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not service_manager.is_journal(stream, {})
    assert not service_manager.is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


@pytest.mark.parametrize(
    ("level", "number"),
    [(logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7)],
)
def test_levels_are_priorities(level: int, number: int) -> None:
    assert service_manager.priority(level) == number


def test_every_line_for_the_journal_has_its_priority_and_none_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stream"
    with path.open("w") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        handler = service_manager.log_handler(stream)
        try:
            raise ValueError("odd")
        except ValueError:
            handler.emit(logging.LogRecord("farflung", logging.ERROR, "", 0, "it %s", ("broke",), sys.exc_info()))
    lines = path.read_text().splitlines()
    assert lines[0] == "<3>farflung: it broke"
    assert lines[-1] == "<3>ValueError: odd"
    assert all(line.startswith("<3>") for line in lines)


def test_elsewhere_a_line_has_its_time_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    stream = io.StringIO()
    service_manager.log_handler(stream).emit(logging.LogRecord("farflung", logging.WARNING, "", 0, "slow", None, None))
    text = stream.getvalue()
    assert text.endswith(" WARNING farflung: slow\n")
    assert text[:2] == "20"
