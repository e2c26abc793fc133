"""``farflung tasks``: what a domain's tasks can be made of on this machine, and which questions are of use."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from node.cli import options, tables, tasks_profile
from node.cli.options import Values
from node.tasks import task_kinds


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(commands, "tasks", help=phrase, description="Commands on tasks and their rewards.")
    tasks_profile.add_to(actions)
    options.add_command(actions, "ls", ls, help="list the kinds of tasks", data_dir=False, json=True)


def ls(arguments: argparse.Namespace, kinds: Callable[[], list[Values]] | None = None) -> int:
    """List the kinds of tasks that a domain can have, the versions that a new one pins, and what is missing here. Exit
    code 1 where something is.

    List what ``kinds`` there are.
    """
    rows = (kinds or task_kinds.kinds)()
    shown = ((row["kind"], row["about"], row["version"], row["missing"] or "ready") for row in rows)
    options.show(arguments, {"kinds": rows}, lambda: tables.table(("kind", "what", "pinned", "here"), shown))
    return 1 if any(row["missing"] for row in rows) else 0
