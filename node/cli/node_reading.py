"""How commands read a node: from its running daemon over the control socket, else from its folder's own log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import trio

from node.api.control_client import Unavailable, request
from node.cli.options import note
from node.store.data_directory import DataDirectory
from protocol.credit.ledger import Ledger

PATIENCE: Final = 10.0
"""Seconds that a daemon has to answer: a busy one may train while it is asked."""


def ask(directory: DataDirectory, op: str, **arguments: Any) -> dict[str, Any]:
    """One operation on the directory's daemon. Raises ``Unavailable``."""

    async def call() -> dict[str, Any]:
        return await request(directory, op, timeout=PATIENCE, **arguments)

    return trio.run(call)


def ask_or_none(directory: DataDirectory, op: str) -> dict[str, Any] | None:
    """The same, None where no daemon answers."""
    try:
        return ask(directory, op)
    except Unavailable:
        return None


def lock_holder(directory: DataDirectory) -> int | None:
    """The process id of the daemon that holds the directory, None where none does. See proc_locks(5).

    It is not tried by locking: a daemon that starts at that moment would be refused.
    """
    try:
        inode = directory.lock_file.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    for line in locks.splitlines():
        # 7: FLOCK  ADVISORY  WRITE 4711 fe:00:2189694 0 EOF; the devices' numbers differ on some file systems.
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4])
    return None


def offline(directory: DataDirectory) -> tuple[Ledger, tuple[str, ...]]:
    """The ledger of the directory's own log, checked byte by byte, and what is wrong. Raises ``UserError``."""
    # Imported here: a command that reaches the daemon needs none of it.
    from node.log.offline_verification import verify

    report = verify(directory, keep=False)
    note(f"no daemon runs on {directory.path}: this is what its log says")
    for problem in report.problems:
        note(problem)
    return report.ledger, report.problems
