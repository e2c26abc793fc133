"""``farflung credits``: what everybody earned."""

from __future__ import annotations

import argparse

from node.cli import options, tables


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "credits",
        help="what everybody earned",
        description="List every node's credit, from final entries only, and what became of its submissions. Where no "
        "daemon runs, what the folder's own log says.",
    )
    options.add_data_dir(parser)
    options.add_json(parser)
    parser.set_defaults(command=_credits)


def _credits(arguments: argparse.Namespace) -> int:
    from node.cli.asking import ask_or_none, offline

    directory = options.existing_directory(arguments)
    answer = ask_or_none(directory, "credits")
    source = "daemon"
    problems: tuple[str, ...] = ()
    if answer is None:
        from node.api.rows import credits

        ledger, problems = offline(directory)
        source, answer = "log", credits(ledger)
    if arguments.json:
        options.print_json({"source": source, **answer})
    else:
        tables.table(
            ("node", "name", "role", "credit", "accepted", "rejected", "void", "pending", "reputation", "reasons"),
            [
                (
                    row["node"][:8],
                    row["name"],
                    row["role"],
                    *(str(row[key]) for key in ("credit", "accepted", "rejected", "void", "pending")),
                    f"{row['reputation'] / 1e6:.3f}",
                    ", ".join(f"{count} {reason}" for reason, count in row["reasons"].items()),
                )
                for row in answer["nodes"]
            ],
        )
    return 1 if problems else 0
