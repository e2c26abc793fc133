"""``farflung credits``: what everybody earned."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from node.api.node_rows import credits
from node.cli import options, tables
from node.cli.node_reading import daemon_or_log
from node.cli.options import Values

COLUMNS: Final = ("node", "name", "role", *tables.ACCOUNT, "reputation", "notes")


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    options.add_command(commands, "credits", _credits, help=phrase, json=True)


def _credits(arguments: argparse.Namespace) -> int:
    """List every node's credit and reputation, from final entries only. Credit is the sum of generated (responses of
    accepted submissions), audited (a quarter of the responses it replayed, where its verdict was that of the majority)
    and trained (responses of its training steps). Accepted, rejected, void and pending count its submissions. Where no
    daemon runs, what the folder's own log says."""
    answer, code = daemon_or_log(options.existing_directory(arguments), "credits", credits)
    rows = (
        (
            *(row["node"][:8], row["name"], row["role"]),
            *(row[key] for key in tables.ACCOUNT),
            *(f"{row['reputation'] / 1e6:.3f}", "; ".join(_notes(row))),
        )
        for row in answer["nodes"]
    )
    options.show(arguments, answer, lambda: tables.table(COLUMNS, rows))
    return code


def _notes(row: Values) -> Iterator[str]:
    """Why submissions did not count, and what became of a node or its predecessors."""
    if row["reasons"]:
        yield ", ".join(f"{count} {reason}" for reason, count in row["reasons"].items())
    if row["goes_on_for"]:
        yield "goes on for " + ", ".join(node[:8] for node in row["goes_on_for"])
    if row["ended"] == "closed":
        yield "closed"
    if row["goes_on_as"] is not None:
        yield f"goes on as {row['goes_on_as'][:8]}"
