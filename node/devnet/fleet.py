"""Daemons as child processes of a devnet: started, watched, restarted and ended.

1. A daemon is ``python -P -m node.cli.main run``, in a session of its own (a Ctrl-C in the terminal reaches only the
   devnet), with its output in ``daemon.log``. It is started from the main thread and asks the kernel to end with it.
2. One that dies is started again after a pause, as a service manager would, so many times (``Pace``).
   Exit code 2 is a mistake of its user, which no restart mends; exit code 0 is somebody's wish.
3. Ending is bounded: SIGTERM, a grace, SIGKILL; then whatever daemons left behind is killed as well, which this process
   can see because it made itself the reaper of its descendants' orphans.
4. Counters of a status restart with the daemon; the totals here do not.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from node.api.control_client import Unavailable, request
from node.config import without_overrides
from node.errors import UserError
from node.store.data_directory import DataDirectory

STATUS_TIMEOUT: Final = 5.0
FRESH: Final = 5.0
"""Seconds for which a status tells how a node is now."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Pace:
    """How often daemons are asked, in seconds, and how they are started again."""

    poll: float = 0.5
    restart_pause: float = 2.0
    max_restarts: int = 10


PACE: Final = Pace()


@dataclass(slots=True)
class Total:
    """A counter's sum over the restarts of what counts."""

    value: int = 0
    _last: int = 0

    def see(self, counter: int) -> None:
        """Take in the counter's present value; a smaller one than before is a new counter."""
        self.value += counter - self._last if counter >= self._last else counter
        self._last = counter


def daemon_command(directory: DataDirectory) -> list[str]:
    """The command line of a daemon: the one that an operator uses, but tied to this process's life."""
    program = [sys.executable, "-P", "-m", "node.cli.main"]
    return [*program, "run", "--die-with-parent", "--data-dir", str(directory.path)]


@dataclass(slots=True)
class Member:
    """One daemon of the fleet and what it last said about itself."""

    name: str
    directory: DataDirectory
    address: str
    command: Sequence[str]
    pace: Pace = PACE
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    state: str = "waiting"
    status: dict[str, Any] = field(default_factory=dict)
    status_at: float = -1e9
    sent: Total = field(default_factory=Total)
    received: Total = field(default_factory=Total)
    tokens: Total = field(default_factory=Total)

    @property
    def log(self) -> Path:
        """Where the daemon's output goes."""
        return self.directory.path / "daemon.log"

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.process is not None and self.process.poll() is None

    def fresh(self) -> bool:
        """Whether the status is recent enough to rely on."""
        return self.running and trio.current_time() - self.status_at < FRESH

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon; its earlier output is kept. Call from the main thread."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=without_overrides(os.environ),
            )
        self.state = "starting"
        return self.process

    def last_line(self) -> str:
        """The end of the daemon's output: where it ended, its reason."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("farflung: ") if lines else "it said nothing"

    async def ask(self, op: str = "status", **arguments: Any) -> dict[str, Any]:
        """One operation on the daemon's control socket. Raises ``Unavailable``."""
        return await request(self.directory, op, timeout=STATUS_TIMEOUT, **arguments)

    async def poll(self) -> None:
        """Refresh the status where the daemon answers."""
        with suppress(Unavailable):
            self.status = await self.ask()
            self.status_at = trio.current_time()
            self.state = "running"
            self.sent.see(self.status["bytes_sent"])
            self.received.see(self.status["bytes_received"])
            self.tokens.see(self.status["tokens"])

    async def keep_polling(self) -> None:
        """Refresh the status for ever."""
        while True:
            if self.running:
                await self.poll()
            await trio.sleep(self.pace.poll)

    async def keep_running(self, say: Callable[[str], None]) -> None:
        """Start the daemon and keep it running; returns where it ended on purpose.

        Raises ``UserError`` with its last line where its first start ended for a mistake of its user. Later it is no
        mistake but the machine's state, such as a full disk, and is tried again.
        """
        while True:
            code = await _ended(self.start())
            if code == 2 and not self.status:
                self.state = "failed"
                raise UserError(f"{self.name}: {self.last_line()}")
            if code == 0 or self.restarts == self.pace.max_restarts:
                self.state = "stopped" if code == 0 else "failed"
                say(f"{self.name} ended ({_exit(code)}) and is not started again; its output: {self.log}")
                return
            self.restarts += 1
            self.state = "restarting"
            say(f"{self.name} died ({_exit(code)}); it is started again in {self.pace.restart_pause:.0f} s")
            await trio.sleep(self.pace.restart_pause)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process's end and return its exit code."""
    while (code := process.poll()) is None:  # not reaped, so the number is still this process's
        pidfd = os.pidfd_open(process.pid)
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
    return code


def _exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def adopt_orphans() -> set[int]:
    """Make this process the parent of what its descendants leave behind (Linux prctl(2)).

    Returns the children it has already, which ``stop`` leaves alone.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return _children()


async def stop(members: Iterable[Member], *, grace: float, others: set[int]) -> list[str]:
    """End all daemons within about ``grace`` seconds, and what they left behind. Returns the names of the killed."""
    processes = {member.name: member.process for member in members if member.process is not None}
    _signal(processes.values(), signal.SIGTERM)
    with trio.move_on_after(grace):
        for process in processes.values():
            await _ended(process)
    killed = [name for name, process in processes.items() if process.poll() is None]
    _signal((processes[name] for name in killed), signal.SIGKILL)
    for process in processes.values():
        await _ended(process)
    # A daemon's own children end by themselves when their sockets close; this is for those that do not.
    for _ in range(20):
        orphans = _children() - others
        if not orphans:
            break
        _kill(orphans)
        await trio.sleep(0.05)
    return killed


async def keep_reaping(members: Iterable[Member]) -> None:
    """Reap orphans that end, for ever: whoever adopts them must, or they stay in the process table."""
    members = list(members)
    while True:
        reap({member.process.pid for member in members if member.process is not None})
        await trio.sleep(1)


def reap(others: Collection[int]) -> None:
    """Reap the children that have ended, up to one of ``others``, whose own tasks do it."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in others:
                break
            os.waitpid(ended.si_pid, os.WNOHANG)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def _signal(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _children() -> set[int]:
    """Process ids of this process's children, from proc(5)."""
    found = set()
    ours = os.getpid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                # pid (command) state ppid …: the command may hold spaces and brackets, so split behind the last one.
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == ours:
                    found.add(int(entry.name))
    return found


_shuffle: Final = random.SystemRandom().shuffle


def free_ports(count: int, shuffle: Callable[[list[int]], None] = _shuffle) -> list[int]:
    """``count`` TCP ports on 127.0.0.1 that nothing uses now, the first of those that ``shuffle`` brings into order.

    They lie below the range that the kernel takes for outgoing connections, so that none is lost to such a connection
    while its node is restarted. Raises ``UserError``.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    candidates = list(range(10_240, max(int(text.split()[0]), 20_480)))
    shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            return ports
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    raise UserError("there are not enough free ports on 127.0.0.1", "stop some programs that listen there")
