"""``farflung log``: commands on a data directory's log that need no running daemon."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("log", help="check a node's log", description="Commands on a node's log.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify",
        help="check the whole log offline",
        description="Check every signature, chain, payload rule and cut of the log in a data directory. The heads root "
        "and each node's credit go to standard output, the same for any two nodes that hold the same log; "
        "everything else goes to standard error. Exit code 1 where the log is not valid.",
    )
    verify.add_argument("data_dir", type=Path, metavar="DATA-DIR", help="the node's folder")
    verify.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    # Imported here, so that other commands start without loading what they do not use.
    from node.store.directory import DataDirectory
    from node.store.verify import verify

    began = time.monotonic()
    found = verify(DataDirectory(arguments.data_dir))
    sys.stdout.write(found.text())
    for problem in found.problems:
        print(f"farflung: {arguments.data_dir}: {problem}", file=sys.stderr)
    result = f"{len(found.problems)} problems" if found.problems else "the log is valid"
    print(f"farflung: {arguments.data_dir}: {result} ({time.monotonic() - began:.1f} s)", file=sys.stderr)
    return found.exit_code
