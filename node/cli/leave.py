"""``farflung leave``: end a node's part in its domain, in order.

The node gives up its role, says so in its feed, waits until that and its last submissions are settled, and stops. Its
key, its log and its credit stay; its next start brings it back.
"""

from __future__ import annotations

import argparse
from typing import Final

from node.cli import options
from node.cli.node_reading import POLL, ask, ask_running, wait_for
from node.cli.options import Values

ENTRY_PATIENCE: Final = 60.0
"""Seconds until the leave entry must stand; the node's role ends first, with its children."""
FINAL_PATIENCE: Final = 30.0
"""Seconds that the entry may take to become final, and the last submissions to be judged, before the node stops."""


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    options.add_command(commands, "leave", leave, help=phrase)


def leave(
    arguments: argparse.Namespace, patience: float = ENTRY_PATIENCE, final: float = FINAL_PATIENCE, poll: float = POLL
) -> int:
    """Have the running node give up its role, append a leave entry to its feed, and stop once that is final. Its key,
    log and credit stay; farflung run brings it back.

    Have the node leave; the entry may take ``patience`` seconds, and ``final`` seconds to become final.
    """
    directory = options.existing_directory(arguments)
    remedy = "start it with farflung run and leave then; a node that is away has no role anyway"
    status = ask_running(directory, "can tell others that it leaves", remedy)

    def read() -> Values:
        return ask(directory, "status")

    if status["own_entries"] > 0:
        ask(directory, "leave")
        status = wait_for(read, lambda now: bool(now["left"]), patience, poll)
        if not status["left"]:
            options.note(f"the leave entry does not stand yet: it waits for {'; '.join(status['waits_for'])}")
            options.note("the node gives its role up as soon as it can; to stop it at once: Ctrl-C, or SIGTERM")
            return 1
        status = wait_for(read, _all_final, final, poll)
    ask(directory, "stop")
    account = status["account"] or {"credit": 0}
    loose_ends = "" if _all_final(status) else "; its last entries are not all settled yet, others go on with that"
    print(f"{status['name']} has left {status['domain_name']} with credit {account['credit']}{loose_ends}")
    print(f"farflung run --data-dir {directory.path} brings it back")
    return 0


def _all_final(status: Values) -> bool:
    return bool(status["own_final"]) and not (status["account"] or {}).get("pending", 0)
