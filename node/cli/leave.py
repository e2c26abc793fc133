"""``farflung leave``: end a node's part in its domain, in order.

The node gives up its role, says so in its feed, waits until that and its last submissions are settled, and stops. Its
key, its log and its credit stay; its next start brings it back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, Final

from node.cli import options
from node.errors import UserError
from node.store.data_directory import DataDirectory

ENTRY_PATIENCE: Final = 60.0
"""Seconds until the leave entry must stand; the node's role ends first, with its children."""
SETTLE_PATIENCE: Final = 30.0
"""Seconds that the entry may take to become final, and the last submissions to be judged, before the node stops."""
POLL: Final = 0.5


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "leave",
        help="leave the domain and stop the node",
        description="Have the running node give up its role, append a leave entry to its feed, and stop once that is "
        "final. Its key, log and credit stay; farflung run brings it back.",
    )
    options.add_data_dir(parser)
    parser.set_defaults(command=_leave)


def _leave(arguments: argparse.Namespace) -> int:
    from node.api.control_client import Unavailable
    from node.cli.node_reading import ask

    directory = options.existing_directory(arguments)
    try:
        status = ask(directory, "status")
    except Unavailable:
        raise UserError(
            f"{directory.path}: no daemon runs, and only a running one can tell others that it leaves",
            "start it with farflung run and leave then; a node that is away has no role anyway",
        ) from None
    try:
        if status["own_entries"] > 0:
            ask(directory, "leave")
            status = _wait(directory, lambda now: bool(now["left"]), ENTRY_PATIENCE)
            if not status["left"]:
                options.note(f"the leave entry does not stand yet: it waits for {'; '.join(status['waits_for'])}")
                options.note("the node gives its role up as soon as it can; to stop it at once: Ctrl-C, or SIGTERM")
                return 1
            status = _wait(directory, _settled, SETTLE_PATIENCE)
        ask(directory, "stop")
    except Unavailable as error:
        options.note(f"the daemon went away meanwhile: {error}")
        return 1
    account = status["account"] or {"credit": 0}
    settled = "" if _settled(status) else "; its last entries are not all settled yet, others go on with that"
    print(f"{status['name']} has left {status['domain_name']} with credit {account['credit']}{settled}")
    print(f"farflung run --data-dir {directory.path} brings it back")
    return 0


def _settled(status: dict[str, Any]) -> bool:
    return bool(status["own_final"]) and not (status["account"] or {}).get("pending", 0)


def _wait(directory: DataDirectory, condition: Callable[[dict[str, Any]], bool], patience: float) -> dict[str, Any]:
    """The first status that meets ``condition``, or the one after ``patience`` seconds."""
    from node.cli.node_reading import ask

    deadline = time.monotonic() + patience
    while True:
        status = ask(directory, "status")
        if condition(status) or time.monotonic() > deadline:
            return status
        time.sleep(POLL)
