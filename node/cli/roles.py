"""``farflung roles``: who plays which role in the domain."""

from __future__ import annotations

import argparse

from node.cli import options, tables


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "roles",
        help="who plays which role",
        description="List the domain's nodes with the roles that they stand for in the log, and whether they are "
        "there now. Where no daemon runs, what the folder's own log says.",
    )
    options.add_data_dir(parser)
    options.add_json(parser)
    parser.set_defaults(command=_roles)


def _roles(arguments: argparse.Namespace) -> int:
    from node.cli.node_reading import ask_or_none, offline

    directory = options.existing_directory(arguments)
    answer = ask_or_none(directory, "roles")
    source = "daemon"
    problems: tuple[str, ...] = ()
    if answer is None:
        from node.api.node_rows import role_rows

        ledger, problems = offline(directory)
        source = "log"
        answer = {"domain": ledger.domain.id.hex(), "nodes": role_rows(ledger)}
    if arguments.json:
        options.print_json({"source": source, **answer})
    else:
        tables.table(
            ("node", "name", "role", "now"),
            [(row["node"][:8], row["name"], row["role"], _now(row)) for row in answer["nodes"]],
        )
    return 1 if problems else 0


def _now(row: dict[str, object]) -> str:
    present = row.get("present")
    if present is None:
        return "unknown"
    if not present:
        return "away"
    plays = str(row.get("plays"))
    return "there" if plays == row["role"] else f"there, says {plays}"
