"""How commands read a node: from its running daemon over the control socket, else from its folder's own log.

A daemon that declines ends a command with its line and exit code 1, as one that does not answer where one is needed
(``main``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from node.api.control_client import Declined, Unavailable, request
from node.cli.options import Values, note
from node.errors import UserError
from node.store.data_directory import DataDirectory
from protocol.credit.ledger import Ledger

PATIENCE: Final = 10.0
"""Seconds that a daemon has to answer: a busy one may train while it is asked."""
POLL: Final = 0.5
"""Seconds between two questions to a daemon that is waited for."""


def ask(directory: DataDirectory, op: str, **arguments: Any) -> Values:
    """One operation on the directory's daemon. Raises ``Unavailable``."""
    return trio.run(partial(request, directory, op, timeout=PATIENCE, **arguments))


def ask_or_none(directory: DataDirectory, op: str) -> Values | None:
    """The same, None where no daemon answers. Raises ``Declined``."""
    try:
        return ask(directory, op)
    except Declined:
        raise
    except Unavailable:
        return None


def ask_running(directory: DataDirectory, why: str, remedy: str) -> Values:
    """The status of a node that must run. Raises ``UserError`` where none does: ``why`` only a running one will do."""
    try:
        return ask(directory, "status")
    except Unavailable as error:
        if isinstance(error, Declined) or lock_holder(directory) is not None:
            raise
    raise UserError(f"{directory.path}: no daemon runs, and only a running one {why}", remedy)


def wait_for(
    read: Callable[[], Values], condition: Callable[[Values], bool], patience: float, poll: float = POLL
) -> Values:
    """The first answer of ``read`` that meets ``condition``, or the one after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = read()
        if condition(found) or time.monotonic() > deadline:
            return found
        time.sleep(poll)


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


def daemon_or_log(directory: DataDirectory, op: str, of_ledger: Callable[[Ledger], Values]) -> tuple[Values, int]:
    """What the daemon answers to ``op``, else what ``of_ledger`` makes of the folder's own log; and the exit code.

    ``source`` in it is "daemon" or "log".
    """
    answer = ask_or_none(directory, op)
    if answer is not None:
        return {"source": "daemon", **answer}, 0
    ledger, problems = offline(directory)
    return {"source": "log", **of_ledger(ledger)}, 1 if problems else 0
