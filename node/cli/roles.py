"""``farflung roles``: who plays which role in the domain."""

from __future__ import annotations

import argparse

from node.api.node_rows import role_rows
from node.cli import options, tables
from node.cli.node_reading import daemon_or_log


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    options.add_command(commands, "roles", _roles, help=phrase, json=True)


def _roles(arguments: argparse.Namespace) -> int:
    """List the domain's nodes with the roles that they stand for in the log, and whether they are there now. Where no
    daemon runs, what the folder's own log says."""
    answer, code = daemon_or_log(
        options.existing_directory(arguments),
        "roles",
        lambda ledger: {"domain": ledger.domain.id.hex(), "nodes": role_rows(ledger)},
    )
    rows = ((row["node"][:8], row["name"], row["role"], _now(row)) for row in answer["nodes"])
    options.show(arguments, answer, lambda: tables.table(("node", "name", "role", "now"), rows))
    return code


def _now(row: dict[str, object]) -> str:
    present = row.get("present")
    if present is None:
        return "unknown"
    if not present:
        return "away"
    plays = str(row.get("plays"))
    return "there" if plays == row["role"] else f"there, says {plays}"
