"""``farflung peers``: who a node is connected to and whom it hears."""

from __future__ import annotations

import argparse

from node.cli import options, tables
from node.cli.node_reading import ask_or_none


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    options.add_command(commands, "peers", _peers, help=phrase, json=True)


def _peers(arguments: argparse.Namespace) -> int:
    """List the nodes that this one is connected to or hears. Where no daemon runs, the peers that the node remembers
    for its next start."""
    directory = options.existing_directory(arguments)
    answer = ask_or_none(directory, "peers")
    if answer is None:
        options.note(f"no daemon runs on {directory.path}: these are the peers that it remembers")
        known = directory.known_peers()
        rows = [{"peer_id": peer, "addresses": list(addresses)} for peer, addresses in known.items()]
        texts = ((address,) for addresses in known.values() for address in addresses)
        options.show(arguments, {"source": "file", "peers": rows}, lambda: tables.table(("address",), texts))
        return 0
    columns = ("node", "name", "role", "version", "connection", "address", "seconds")
    shown = (
        (
            row["node"][:8],
            row["name"],
            row["role"],
            str(row["version"]) if row["version"] >= 0 else "–",
            ("it dialled" if row["inbound"] else "dialled") if row["connected"] else "only heard",
            row["address"] or next(iter(row["addresses"]), "–"),
            str(row["seconds"]) if row["connected"] else "–",
        )
        for row in answer["peers"]
    )
    options.show(arguments, {"source": "daemon", **answer}, lambda: tables.table(columns, shown))
    return 0
