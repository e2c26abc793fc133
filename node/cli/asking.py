"""How commands read a node: from its running daemon over the control socket, else from its folder's own log."""

from __future__ import annotations

from typing import Any, Final

import trio

from node.api.client import Unavailable, request
from node.cli.options import note
from node.store.directory import DataDirectory
from protocol.ledger import Ledger

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


def offline(directory: DataDirectory) -> tuple[Ledger, tuple[str, ...]]:
    """The ledger of the directory's own log, checked byte by byte, and what is wrong. Raises ``UserError``."""
    # Imported here: a command that reaches the daemon needs none of it.
    from node.store.verify import verify

    report = verify(directory)
    note(f"no daemon runs on {directory.path}: this is what its log says")
    for problem in report.problems:
        note(problem)
    return Ledger(report.replica), report.problems
