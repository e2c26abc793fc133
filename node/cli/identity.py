"""``farflung identity``: who this node is, its key in a file under a passphrase, and its recovery key."""

from __future__ import annotations

import argparse
import sys
import time

from node.cli import options, recovery
from node.errors import UserError
from node.keys import key_file
from node.store.durable_files import read_text, write_new
from protocol.identity import peer_id

ONE_PLACE = (
    "Two nodes must never run with one key: peers hear two heads of one feed, and what either did may be lost. "
    "Stop the old node for good before this one is started."
)


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(
        commands, "identity", help=phrase, description="The key is the node: keep a copy of it."
    )
    options.add_command(actions, "show", _show, help="who this node is", json=True)
    export = options.add_command(actions, "export", _export, help="write the key into a file under a passphrase")
    options.add_file(export, "file", help="the file to make")
    load = options.add_command(actions, "import", _import, help="give a new data directory the key from such a file")
    load.description = f"{load.description} {ONE_PLACE}"
    options.add_file(load, "file", help="a file made by identity export")
    for parser in (export, load):
        options.add_file(parser, "--passphrase-file", help="the passphrase is this file's first line (default: ask)")
    recovery.add_to(actions)


def fingerprint(node: bytes) -> str:
    """The node id for comparing by eye or over the phone: sixteen groups of four hexadecimal digits."""
    text = node.hex()
    return " ".join(text[start : start + 4] for start in range(0, len(text), 4))


def _show(arguments: argparse.Namespace) -> int:
    """Show the node's ids and where its key is."""
    directory = options.existing_directory(arguments)
    node = directory.read_identity().node
    found = {
        "node": node.hex(),
        "peer": peer_id(node),
        "fingerprint": fingerprint(node),
        "key_file": str(directory.key_file),
        "recovery_file": str(directory.recovery_file) if directory.recovery_file.exists() else None,
        "recovery_forgotten": directory.recovery_forgotten,
        "data_dir": str(directory.path),
    }
    recovery_key = found["recovery_file"] or ("its words alone" if directory.recovery_forgotten else "none yet")
    pairs = (
        *(("node id", found["node"]), ("peer id", found["peer"]), ("fingerprint", found["fingerprint"])),
        *(("key", found["key_file"]), ("recovery key", recovery_key), ("data directory", found["data_dir"])),
    )
    options.show(arguments, found, lambda: print("\n".join(f"{label:<15} {value}" for label, value in pairs)))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    """Write identity and recovery key into a new file, encrypted with a passphrase (argon2id, XSalsa20-Poly1305). A
    file that is there is never overwritten."""
    directory = options.data_directory(arguments)
    identity = directory.read_identity()
    kept = directory.recovery().seed if directory.recovery_file.exists() else None
    if arguments.file.exists():  # told before anyone is asked for a passphrase; write_new makes sure
        raise UserError(f"{arguments.file}: it is there already and is not overwritten", "name another file")
    passphrase = _passphrase(arguments, twice=True)
    write_new(arguments.file, key_file.seal(key_file.Keys(identity.seed, kept), passphrase).encode())
    print(f"{arguments.file} holds the key of node {identity.node.hex()}")
    print("Keep the file and the passphrase apart, and both away from this machine.", file=sys.stderr)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    """Put the keys of an exported file into a data directory without a node."""
    text = key_file.read(arguments.file)
    key_file.node_of(text, str(arguments.file))
    directory = options.data_directory(arguments)
    with directory.open_locked():
        directory.require_no_node()
        passphrase = _passphrase(arguments, twice=False)
        keys = key_file.unseal(text, passphrase, str(arguments.file))
        # No node was ever started as often as there were seconds; a later move has a higher number.
        directory.import_keys(keys.identity, keys.recovery, int(time.time()))
    print(f"{directory.key_file} is the key of node {keys.node.hex()}")
    print(ONE_PLACE, file=sys.stderr)
    return 0


def _passphrase(arguments: argparse.Namespace, *, twice: bool) -> str:
    """The passphrase from a file, or asked for without echo. Raises ``UserError``."""
    file, terminal = arguments.passphrase_file, arguments.terminal
    if file is not None:
        text = read_text(file, "name a file whose first line it is", most=4096)
        passphrase = text.partition("\n")[0].rstrip("\r")
    else:
        passphrase = terminal.secret("the passphrase", "Passphrase: ", "use --passphrase-file FILE")
        if twice and terminal.ask_hidden("The same again: ") != passphrase:
            raise UserError("the two passphrases differ", "run the command again")
    if twice and len(passphrase) < key_file.MIN_PASSPHRASE:
        raise UserError(
            f"the passphrase has {len(passphrase)} characters, at least {key_file.MIN_PASSPHRASE} are needed",
            "take a longer one",
        )
    return passphrase
