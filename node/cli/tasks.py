"""``farflung tasks``: what a domain's tasks can be made of on this machine, and which questions are of use."""

from __future__ import annotations

import argparse

from node.cli import options, tables, tasks_profile


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "tasks", help="what tasks this machine can serve", description="Commands on tasks and their rewards."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    tasks_profile.add_to(actions)
    ls = actions.add_parser(
        "ls",
        help="list the kinds of tasks",
        description="List the kinds of tasks that a domain can have, the versions that a new one pins, and what is "
        "missing here. Exit code 1 where something is.",
    )
    options.add_json(ls)
    ls.set_defaults(command=_ls)


def _ls(arguments: argparse.Namespace) -> int:
    # Imported here, so that other commands start without loading what they do not use.
    from node.tasks import task_kinds

    rows = task_kinds.kinds()
    if arguments.json:
        options.print_json({"kinds": rows})
    else:
        tables.table(
            ("kind", "what", "pinned", "here"),
            [(row["kind"], row["about"], row["version"], row["missing"] or "ready") for row in rows],
        )
    return 1 if any(row["missing"] for row in rows) else 0
