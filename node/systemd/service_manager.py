"""What the daemon tells systemd and the journal. Without systemd every call here does nothing.

1. sd_notify(3): datagrams of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET`` names ("@…" is an abstract one).
   The variables are taken out of the environment, so that no child speaks for the daemon.
2. A message that the manager does not take within a second is dropped: telling must never stop the work.
3. The watchdog is fed by ``feed`` only, which asks for progress each time. It is no timer: where the loop stands still
   nothing calls it, and where progress is missing it stays silent, until the manager ends the process.
4. Lines for the journal carry a priority (``<3>``, sd-daemon(3)) on each line, and no time: the journal has its own.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final, TextIO

import trio

logger = logging.getLogger(__name__)

SEND_PATIENCE: Final = 1.0
"""Seconds that a message may wait for room in the manager's socket."""
SLOWEST_FEED: Final = 10.0
"""Seconds between two looks at the progress at most, so that the status line is fresh as well."""


@dataclass(frozen=True, slots=True)
class Manager:
    """The service manager that started this process. ``address`` None: there is none.

    ``watchdog_seconds`` is the longest time that it goes without a sign of life, 0 where it wants none; ``patience``
    seconds a message may wait for room in its socket.
    """

    address: str | None = None
    watchdog_seconds: float = 0.0
    patience: float = SEND_PATIENCE

    @classmethod
    def take(cls, environment: MutableMapping[str, str] = os.environ) -> Manager:
        """The manager that the environment names, and no longer names afterwards."""
        # A path, or a name of Linux's abstract namespace.
        named = re.fullmatch("/.*|@.+", environment.pop("NOTIFY_SOCKET", ""), re.DOTALL)
        address = None if named is None else re.sub("^@", "\0", named[0])
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        wanted = microseconds.isascii() and microseconds.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if wanted and address is not None else 0.0)

    def send(self, **values: str | int) -> bool:
        """Send ``KEY=value`` lines; whether the manager took them. Blocks for ``patience`` seconds at most.

        ``READY=1``: what depends on the daemon may start; ``STATUS`` is the line that ``systemctl status`` shows.
        """
        if self.address is None:
            return False
        lines = [f"{key}={' '.join(str(value).split())}" for key, value in values.items()]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(self.patience)
                channel.sendto("\n".join(lines).encode(), self.address)
        except OSError as error:
            logger.debug("the service manager did not take %s: %s", ", ".join(values), error)
            return False
        return True

    async def feed(self, progress: Callable[[float], Awaitable[str | None]], status: Callable[[], str]) -> None:
        """Feed the watchdog for ever, each time only where ``progress`` says that there was some.

        ``progress`` is given the seconds that it may take and returns None, or in words what stands still. Without a
        watchdog only the status line is kept fresh.
        """
        if self.address is None:
            return
        # Three looks in the time that the manager waits: one may be late without ending a daemon that is well.
        pause = min(self.watchdog_seconds / 3, SLOWEST_FEED) if self.watchdog_seconds else SLOWEST_FEED
        while True:
            still = await progress(pause)
            if still is not None:
                logger.error("nothing is told to the watchdog: %s", still)
                self.send(STATUS=f"stands still: {still}")
            else:
                self.send(**({"WATCHDOG": 1} if self.watchdog_seconds else {}), STATUS=status())
            await trio.sleep(pause)


def is_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``stream`` leads straight to the journal: ``JOURNAL_STREAM`` is its device and inode, systemd.exec(5)."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def priority(level: int) -> int:
    """syslog(3)'s priority of a level of ``logging``."""
    numbers = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (level, 7))
    return next(number for least, number in numbers if level >= least)


def for_journal(text: str, level: int) -> str:
    """``text`` with its priority on every line: the journal takes each line for a message of its own."""
    return "\n".join(f"<{priority(level)}>{line}" for line in text.split("\n"))


class JournalFormatter(logging.Formatter):
    """Records as the journal wants them: priority, name and message, no time."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text, and its traceback, with the priority on each line."""
        return for_journal(super().format(record), record.levelno)


def log_handler(stream: TextIO | None = None) -> logging.Handler:
    """A handler for the daemon's log on ``stream`` (standard error), fit for the journal or for people."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    people = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JournalFormatter("%(name)s: %(message)s") if is_journal(stream) else people)
    return handler
