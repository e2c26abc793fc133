"""``farflung identity recovery``, ``close`` and ``rebind``: the key that outlives a stolen or lost machine.

The words never leave the command that they are typed into: what it signs with them goes to the daemon.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final, Literal

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
        actions, "recovery", help="show or forget the recovery key", description="The key that outlives this machine."
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
    lost = _find(arguments)
    if lost.row["ended"] is not None:
        print(f"{lost} ended already, with the cut of height {lost.row['ended']}")
        return 0
    return lost.append("close", f"{lost} is closed", patience)


def rebind_lost(arguments: argparse.Namespace, patience: float = FINAL_PATIENCE) -> int:
    """Have this running node take over the credit and the reputation of another one, whose recovery words you have, and
    end that one's feed. This cannot be undone.

    Have this node go on for the one that the words are the key of; a cut may take ``patience`` seconds.
    """
    lost = _find(arguments)
    if lost.row["node"] == lost.status["node"]:
        raise UserError("this node cannot take over from itself", "run the command on the new node")
    if (successor := lost.row["successor"]) is not None:
        raise UserError(f"{lost} went on as {successor[:8]} already", "only the first rebind of a node counts")
    return lost.append("rebind", f"{lost.status['name']} goes on for {lost}: farflung credits", patience)


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node whose recovery ``key`` was typed in: its ``row`` as the daemon of ``directory`` knows it, which has
    ``status``."""

    directory: DataDirectory
    status: Values
    key: Identity
    row: Values

    def __str__(self) -> str:
        return f"{self.row['name']} ({self.row['node'][:8]})"

    def append(self, op: Literal["close", "rebind"], done: str, patience: float) -> int:
        """Have the daemon append the entry, and wait until a cut covers it."""
        domain, node, author = map(bytes.fromhex, (self.status["domain"], self.row["node"], self.status["node"]))
        record = (recovery.close if op == "close" else recovery.rebind)(self.key, domain, node, author)
        signed = {"target": node.hex(), "recovery": self.key.node.hex(), "signature": record.signature.hex()}
        made = ask(self.directory, op, **signed)

        def read() -> Values:
            return next(row for row in _named_by(self.directory, self.key) if row["node"] == self.row["node"])

        def final(row: Values) -> bool:
            return row["ended"] is not None and (op == "close" or row["successor"] is not None)

        row = wait_for(read, final, patience)
        if final(row):
            print(f"{done} (final since the cut of height {row['ended']})")
        else:
            options.note(f"entry {made['entry']} stands in this node's feed; it takes effect with the next cut")
        return 0


def _named_by(directory: DataDirectory, key: Identity) -> list[Values]:
    """The nodes that named the recovery key, as the daemon knows them."""
    rows: list[Values] = ask(directory, "recovery", commitment=commitment(key.node).hex())["nodes"]
    return rows


def _find(arguments: argparse.Namespace) -> LostNode:
    """The node that the words are the key of. Raises ``UserError``."""
    directory = options.existing_directory(arguments)
    status = ask_running(directory, "can tell others", "start it with farflung run")
    key = recovery_words.key(_typed(arguments))
    wanted = (arguments.node or "").lower()
    chosen = [row for row in _named_by(directory, key) if row["node"].startswith(wanted)]
    if not chosen:
        raise UserError(
            f"no node{f' {wanted}' if wanted else ''} of this domain named the key of these words when it joined",
            "compare words and node; a log that is still being fetched may not have it yet (farflung status)",
        )
    if len(chosen) > 1:
        names = ", ".join(row["node"][:16] for row in chosen)
        raise UserError(f"{len(chosen)} nodes named this key: {names}", "name one of them")
    return LostNode(directory, status, key, chosen[0])


def _typed(arguments: argparse.Namespace) -> str:
    if arguments.words_file is not None:
        return recovery_words.read(arguments.words_file)
    question = "The 24 recovery words, with spaces between them (not shown): "
    words: str = arguments.terminal.secret("the words", question, "use --words-file FILE")
    return words
