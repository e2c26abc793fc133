"""``farflung init``: a node's folder with its key and a configuration to fill in."""

from __future__ import annotations

import argparse

from node.cli import options
from node.config import write_template
from node.errors import UserError
from node.keys import recovery_words
from node.store.data_directory import DataDirectory
from protocol.identity import Identity, peer_id


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    parser = options.add_command(commands, "init", _init, help=phrase, json=True)
    options.add_config(parser)


def _init(arguments: argparse.Namespace) -> int:
    """Make a node's folder with its key and a farflung.toml that explains every key. What is there already stays as it
    is."""
    directory = options.data_directory(arguments)
    options.configuration(arguments, directory, may_lack=True)
    path, _ = options.config_file(arguments, directory)
    made, new_key = not directory.exists(), False
    if made or not path.exists():
        with directory.open_locked():
            identity, new_key = furnish(arguments, directory)
    else:
        identity = directory.identity()
    found = {
        "data_dir": str(directory.path),
        "config": str(path),
        "node": identity.node.hex(),
        "peer_id": peer_id(identity.node),
        "made": made,
    }

    def for_people() -> None:
        print(f"node {found['peer_id']} {'stands' if made else 'stood already'} in {directory.path}")
        print(f"configuration: {path}")
        print(f"its key is {directory.key_file}: back it up (farflung identity export), and never run it in two places")
        announce(directory, new_key, secret=arguments.terminal.shows())

    options.show(arguments, found, for_people)
    return 0


def announce(directory: DataDirectory, made: bool, *, secret: bool) -> None:
    """Tell about a recovery key that was ``made`` just now: its words where ``secret`` text may go to the output."""
    if not made:
        return
    command = f"farflung identity recovery show --data-dir {directory.path}"
    if secret:
        print("\nthe recovery key of this node, shown this once:\n")
        print("\n".join(recovery_words.lines(directory.recovery())))
        print(f"\n{recovery_words.PURPOSE}")
        print(f"It also lies in {directory.recovery_file} until farflung identity recovery forget.\n")
    else:
        print(f"write its recovery key down, as words: {command}")


def furnish(arguments: argparse.Namespace, directory: DataDirectory) -> tuple[Identity, bool]:
    """Make the keys and the configuration where they are missing; the folder is locked. Raises ``UserError``.

    Returns the identity, and whether the recovery key was made now: its words are then to be shown.
    """
    identity = directory.identity()
    made = directory.make_recovery()
    path, _ = options.config_file(arguments, directory)
    given = options.flags(arguments)
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}", "make it, or name another file with --config")
        write_template(path, given)
    elif given:
        options.note(f"{path} is there already: the options given now are not written into it")
    return identity, made
