"""``farflung identity recovery``, ``close`` and ``rebind``: the key that outlives a stolen or lost machine.

The words never leave the command that they are typed into: what it signs with them goes to the daemon.
"""

from __future__ import annotations

import argparse
from typing import Final

from node.cli import options
from node.cli.node_reading import ask, ask_running, wait_for
from node.cli.options import Values
from node.errors import UserError
from node.keys import recovery_words
from node.store.data_directory import DataDirectory
from protocol.identity import Identity
from protocol.log import recovery
from protocol.log.recovery import commitment

FINAL_PATIENCE: Final = 30.0
"""Seconds that a cut may take to cover the entry before the command ends all the same."""


def add_to(actions: options.Parsers) -> None:
    """Add the actions to ``farflung identity``."""
    steps = options.add_group(
        actions,
        "recovery",
        help="show or forget the recovery key",
        description="The key that outlives this machine.",
    )
    options.add_command(steps, "show", _show, help="show the recovery key as words", json=True)
    forget = options.add_command(steps, "forget", _forget, help="remove the recovery key from this machine")
    forget.add_argument("--yes", action="store_true", help="do not ask")
    close = options.add_command(
        actions, "close", close_lost, help="end a node whose key was stolen, with its recovery words"
    )
    close.add_argument(
        "node", nargs="?", metavar="NODE", help="the first digits of its id (default: the one of these words)"
    )
    rebind = options.add_command(
        actions, "rebind", rebind_lost, help="go on for a node that was lost, with its recovery words"
    )
    rebind.add_argument("node", metavar="NODE", help="the first digits of the old node's id")
    for parser in (close, rebind):
        options.add_file(parser, "--words-file", help="a file with the words (default: ask)")


def _show(arguments: argparse.Namespace) -> int:
    """Show the recovery key as 24 words. Anybody who has them can end this node."""
    directory = options.existing_directory(arguments)
    key = directory.recovery()
    committed = _committed(directory, key.node)
    found = {"words": recovery_words.words(key).split(), "public": key.node.hex(), "committed": committed}

    def for_people() -> None:
        if committed is False:
            raise UserError(
                f"{directory.recovery_file}: this is not the recovery key that the node named when it joined",
                "it is of no use; the right one is among its backups, or on paper",
            )
        print("\n".join(recovery_words.lines(key)))
        options.note(recovery_words.PURPOSE)

    options.show(arguments, {**found, "file": str(directory.recovery_file)}, for_people)
    return 0


def _committed(directory: DataDirectory, public: bytes) -> bool | None:
    """Whether the node's join names this key; None as long as no join is held."""
    from node.log.offline_proof import own_join  # it takes a second to load, which no other action should pay

    join = own_join(directory)
    return None if join is None else join.recovery == commitment(public)


def _forget(arguments: argparse.Namespace) -> int:
    """Remove the recovery key from the data directory, once its words are on paper: from then on nobody can read it
    here, neither thieves nor you."""
    directory = options.existing_directory(arguments)
    directory.recovery()
    if not arguments.yes:
        if not arguments.terminal.listens():
            raise UserError("forget asks first, and there is no terminal to ask at", "add --yes")
        if not arguments.terminal.agreed("Are the 24 words on paper? Nothing brings them back."):
            options.note("the recovery key is still here")
            return 1
    directory.forget_recovery()
    print(f"{directory.recovery_file} is gone; the words alone are the recovery key now")
    return 0


def close_lost(arguments: argparse.Namespace, patience: float = FINAL_PATIENCE) -> int:
    """Have this running node end the feed of another one, whose recovery words you have: nothing that is signed with
    its key counts any more. What is final stays, and identity rebind can still move it. This cannot be undone.

    End the node that the words are the key of; a cut that covers the entry may take ``patience`` seconds.
    """
    directory, status, key, target = _prepare(arguments)
    if target["ended"] is not None:
        print(f"{_name(target)} ended already, with the cut of height {target['ended']}")
        return 0
    domain, author = bytes.fromhex(status["domain"]), bytes.fromhex(status["node"])
    record = recovery.close(key, domain, bytes.fromhex(target["node"]), author)
    return _append(directory, "close", target, record.signature, key, f"{_name(target)} is closed", patience)


def rebind_lost(arguments: argparse.Namespace, patience: float = FINAL_PATIENCE) -> int:
    """Have this running node take over the credit and the reputation of another one, whose recovery words you have, and
    end that one's feed. This cannot be undone.

    Have this node go on for the one that the words are the key of; a cut may take ``patience`` seconds.
    """
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
    return _append(directory, "rebind", target, record.signature, key, done, patience)


def _prepare(arguments: argparse.Namespace) -> tuple[DataDirectory, Values, Identity, Values]:
    """The folder, its daemon's status, the recovery key, and the node that it is the key of."""
    directory = options.existing_directory(arguments)
    status = ask_running(directory, "can tell others", "start it with farflung run")
    key = recovery_words.key(_typed(arguments))
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


def _typed(arguments: argparse.Namespace) -> str:
    if arguments.words_file is not None:
        return recovery_words.read(arguments.words_file)
    question = "The 24 recovery words, with spaces between them (not shown): "
    words: str = arguments.terminal.secret("the words", question, "use --words-file FILE")
    return words


def _append(
    directory: DataDirectory,
    op: str,
    target: Values,
    signature: bytes,
    key: Identity,
    done: str,
    patience: float,
) -> int:
    """Have the daemon append the entry, and wait until a cut covers it."""
    made = ask(directory, op, target=target["node"], recovery=key.node.hex(), signature=signature.hex())

    def read() -> Values:
        rows = ask(directory, "recovery", commitment=commitment(key.node).hex())["nodes"]
        return next(row for row in rows if row["node"] == target["node"])

    def final(row: Values) -> bool:
        return row["ended"] is not None and (op == "close" or row["successor"] is not None)

    row = wait_for(read, final, patience)
    if final(row):
        print(f"{done} (final since the cut of height {row['ended']})")
    else:
        options.note(f"entry {made['entry']} stands in this node's feed; it takes effect with the next cut")
    return 0


def _name(row: Values) -> str:
    return f"{row['name']} ({row['node'][:8]})"
