"""``farflung identity recovery``, ``close`` and ``rebind``: the key that outlives a stolen or lost machine.

The words never leave the command that they are typed into: what it signs with them goes to the daemon.
"""

from __future__ import annotations

import argparse
import getpass
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import shtab

from node.cli import options
from node.errors import UserError
from node.store.data_directory import DataDirectory

if TYPE_CHECKING:
    from protocol.identity import Identity

FINAL_PATIENCE: Final = 30.0
"""Seconds that a cut may take to cover the entry before the command ends all the same."""
POLL: Final = 0.5


def add_to(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the actions to ``farflung identity``."""
    recovery = actions.add_parser(
        "recovery", help="show or forget the recovery key", description="The key that outlives this machine."
    )
    steps = recovery.add_subparsers(metavar="ACTION", required=True)
    show = steps.add_parser(
        "show",
        help="show the recovery key as words",
        description="Show the recovery key as 24 words. Anybody who has them can end this node.",
    )
    options.add_data_dir(show)
    options.add_json(show)
    show.set_defaults(command=_show)
    forget = steps.add_parser(
        "forget",
        help="remove the recovery key from this machine",
        description="Remove the recovery key from the data directory, once its words are on paper: from then on nobody "
        "can read it here, neither thieves nor you.",
    )
    forget.add_argument("--yes", action="store_true", help="do not ask")
    options.add_data_dir(forget)
    forget.set_defaults(command=_forget)
    close = actions.add_parser(
        "close",
        help="end a node whose key was stolen, with its recovery words",
        description="Have this running node end the feed of another one, whose recovery words you have: nothing that "
        "is signed with its key counts any more. What is final stays, and identity rebind can still move it. This "
        "cannot be undone.",
    )
    close.add_argument(
        "node", nargs="?", metavar="NODE", help="the first digits of its id (default: the one of these words)"
    )
    close.set_defaults(command=_close)
    rebind = actions.add_parser(
        "rebind",
        help="go on for a node that was lost, with its recovery words",
        description="Have this running node take over the credit and the reputation of another one, whose recovery "
        "words you have, and end that one's feed. This cannot be undone.",
    )
    rebind.add_argument("node", metavar="NODE", help="the first digits of the old node's id")
    rebind.set_defaults(command=_rebind)
    for parser in (close, rebind):
        options.complete(
            parser.add_argument("--words-file", type=Path, metavar="FILE", help="a file with the words (default: ask)"),
            shtab.FILE,
        )
        options.add_data_dir(parser)


def announce(directory: DataDirectory, made: bool, *, secret: bool) -> None:
    """Tell about a recovery key that was ``made`` just now: its words where ``secret`` text may go to the output."""
    if not made:
        return
    command = f"farflung identity recovery show --data-dir {directory.path}"
    if secret and sys.stdout.isatty():
        from node.keys import recovery_words

        print("\nthe recovery key of this node, shown this once:\n")
        print("\n".join(recovery_words.lines(directory.recovery())))
        print(f"\n{recovery_words.PURPOSE}")
        print(f"It also lies in {directory.recovery_file} until farflung identity recovery forget.\n")
    else:
        print(f"write its recovery key down, as words: {command}")


def _show(arguments: argparse.Namespace) -> int:
    from node.keys import recovery_words

    directory = options.existing_directory(arguments)
    key = directory.recovery()
    committed = _committed(directory, key.node)
    if arguments.json:
        found = {"words": recovery_words.words(key).split(), "public": key.node.hex(), "committed": committed}
        options.print_json({**found, "file": str(directory.recovery_file)})
        return 0
    if committed is False:
        raise UserError(
            f"{directory.recovery_file}: this is not the recovery key that the node named when it joined",
            "it is of no use; the right one is among its backups, or on paper",
        )
    print("\n".join(recovery_words.lines(key)))
    options.note(recovery_words.PURPOSE)
    return 0


def _committed(directory: DataDirectory, public: bytes) -> bool | None:
    """Whether the node's join names this key; None as long as no join is held."""
    from node.log.offline_proof import own_join
    from protocol.log.recovery import commitment

    join = own_join(directory)
    return None if join is None else join.recovery == commitment(public)


def _forget(arguments: argparse.Namespace) -> int:
    directory = options.existing_directory(arguments)
    directory.recovery()
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise UserError("forget asks first, and there is no terminal to ask at", "add --yes")
        try:
            answer = input("Are the 24 words on paper? Nothing brings them back. [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            options.note("the recovery key is still here")
            return 1
    directory.forget_recovery()
    print(f"{directory.recovery_file} is gone; the words alone are the recovery key now")
    return 0


def _close(arguments: argparse.Namespace) -> int:
    from protocol.log import recovery

    directory, status, key, target = _prepare(arguments)
    if target["ended"] is not None:
        print(f"{_name(target)} ended already, with the cut of height {target['ended']}")
        return 0
    domain, author = bytes.fromhex(status["domain"]), bytes.fromhex(status["node"])
    record = recovery.close(key, domain, bytes.fromhex(target["node"]), author)
    return _say(directory, "close", target, record.signature, key, f"{_name(target)} is closed")


def _rebind(arguments: argparse.Namespace) -> int:
    from protocol.log import recovery

    directory, status, key, target = _prepare(arguments)
    if target["node"] == status["node"]:
        raise UserError("this node cannot take over from itself", "run the command on the new node")
    if target["successor"] is not None:
        raise UserError(
            f"{_name(target)} went on as {target['successor'][:8]} already", "only the first rebind of a node counts"
        )
    domain, author = bytes.fromhex(status["domain"]), bytes.fromhex(status["node"])
    record = recovery.rebind(key, domain, bytes.fromhex(target["node"]), author)
    done = f"{status['name']} goes on for {_name(target)}: farflung credits"
    return _say(directory, "rebind", target, record.signature, key, done)


def _prepare(arguments: argparse.Namespace) -> tuple[DataDirectory, dict[str, Any], Identity, dict[str, Any]]:
    """The folder, its daemon's status, the recovery key, and the node that it is the key of."""
    from node.api.control_client import Unavailable
    from node.cli.node_reading import ask
    from node.keys import recovery_words
    from protocol.log.recovery import commitment

    directory = options.existing_directory(arguments)
    try:
        status = ask(directory, "status")
    except Unavailable:
        raise UserError(
            f"{directory.path}: no daemon runs, and only a running one can tell others", "start it with farflung run"
        ) from None
    key = recovery_words.key(_typed(arguments.words_file))
    nodes = ask(directory, "recovery", commitment=commitment(key.node).hex())["nodes"]
    wanted = (arguments.node or "").lower()
    chosen = [row for row in nodes if row["node"].startswith(wanted)]
    if not chosen:
        raise UserError(
            f"no node{f' {wanted}' if wanted else ''} of this domain named the key of these words when it joined",
            "compare words and node; a log that is still being fetched may not have it yet (farflung status)",
        )
    if len(chosen) > 1:
        names = ", ".join(row["node"][:16] for row in chosen)
        raise UserError(f"{len(chosen)} nodes named this key: {names}", "name one of them")
    return directory, status, key, chosen[0]


def _typed(file: Path | None) -> str:
    from node.keys import recovery_words

    if file is not None:
        return recovery_words.read(file)
    if not sys.stdin.isatty():
        raise UserError("there is no terminal to ask for the words on", "use --words-file FILE")
    return getpass.getpass("The 24 recovery words, with spaces between them (not shown): ")


def _say(directory: DataDirectory, op: str, target: dict[str, Any], signature: bytes, key: Identity, done: str) -> int:
    """Have the daemon append the entry, and wait until a cut covers it."""
    from node.api.control_client import Unavailable
    from node.cli.node_reading import ask
    from protocol.log.recovery import commitment

    public = key.node.hex()
    try:
        made = ask(directory, op, target=target["node"], recovery=public, signature=signature.hex())
        deadline = time.monotonic() + FINAL_PATIENCE
        while time.monotonic() < deadline:
            rows = ask(directory, "recovery", commitment=commitment(key.node).hex())["nodes"]
            row = next(row for row in rows if row["node"] == target["node"])
            if row["ended"] is not None and (op == "close" or row["successor"] is not None):
                print(f"{done} (final since the cut of height {row['ended']})")
                return 0
            time.sleep(POLL)
    except Unavailable as error:
        options.note(str(error))
        return 1
    options.note(f"entry {made['entry']} stands in this node's feed; it takes effect with the next cut")
    return 0


def _name(row: dict[str, Any]) -> str:
    return f"{row['name']} ({row['node'][:8]})"
