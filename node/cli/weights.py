"""``farflung weights``: which versions are on the disk, cleaning up, fetching one, exporting one for other programs.

``ls``, ``gc`` and ``export`` work whether a daemon runs or not; ``pull`` needs one.
"""

from __future__ import annotations

import argparse
import sys

from node.cli import export, held_versions, options, tables
from node.cli.node_reading import ask, lock_holder
from node.cli.options import Values
from node.weights.retention import clean


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(commands, "weights", help=phrase, description="Commands on weights.")
    options.add_command(actions, "ls", _ls, help="list what is on the disk", json=True)
    gc = options.add_command(actions, "gc", _gc, help="delete what is not needed", json=True)
    gc.add_argument("--dry-run", action="store_true", help="only tell what would go")
    pull = options.add_command(actions, "pull", _pull, help="fetch a version now")
    options.add_number(pull, "version", nargs="?", default=-1, metavar="VERSION", help="default: the newest")
    export = options.add_command(actions, "export", _export, help="write a version as a model directory")
    options.add_folder(export, "folder", help="a new or empty folder")
    options.add_number(export, "--version", default=-1, help="default: the newest that is here whole")


def _ls(arguments: argparse.Namespace) -> int:
    """List the versions and deltas on the disk, how much of each is here, and why it is kept."""
    found = held_versions.on_disk(options.existing_directory(arguments))
    options.show(arguments, found, lambda: _show(found))
    return 0


def _show(found: Values) -> None:
    rows = (
        (
            row["kind"],
            ", ".join(map(str, row["numbers"])) or "not of the lineage",
            tables.size(row["size"]),
            "whole" if row["here"] == row["size"] else f"{100 * row['here'] / row['size']:.0f} %",
            row["digest"][:8],
            row["kept"] or "not kept: farflung weights gc",
        )
        for row in found["objects"]
    )
    tables.table(("what", "number", "size", "here", "digest", "kept"), rows)
    options.note(_room(found))


def _gc(arguments: argparse.Namespace) -> int:
    """Delete what no rule keeps and, where the quota is exceeded or the reserve is not left, also what the node can do
    without. A running node does the same by itself."""
    directory = options.existing_directory(arguments)
    if lock_holder(directory) is not None:
        found = ask(directory, "weights-gc", dry_run=arguments.dry_run)
    else:
        _, store, lineage = held_versions.read_offline(directory)
        with directory.open_locked():
            found = clean(store, lineage, dry_run=arguments.dry_run)
    options.show(arguments, found, lambda: _tell_gone(found, "would be deleted" if arguments.dry_run else "deleted"))
    return 1 if found["shortage"] is not None and not arguments.json else 0


def _tell_gone(found: Values, word: str) -> None:
    for row in found["gone"]:
        print(f"{row['digest'][:8]}  {tables.size(row['size'])}  {word}")
    freed = sum(row["size"] for row in found["gone"])
    options.note(f"{options.counted(len(found['gone']), 'object')}, {tables.size(freed)} {word}; {_room(found)}")
    if found["shortage"] is not None:
        options.note(f"still: {found['shortage']}")


def _pull(arguments: argparse.Namespace) -> int:
    """Have the running node fetch a version, and show how far it is. Exit code 1 where it does not arrive."""
    found = held_versions.pull(options.existing_directory(arguments), arguments.version)
    options.note(f"version {found['version']} is here, whole and verified ({tables.size(found['size'])})")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    """Write a version with its configuration and tokenizer as a directory that transformers loads as it is. Every byte
    is verified on the way."""
    directory = options.existing_directory(arguments)
    chosen = export.choose(directory, arguments.version)
    with tables.counting("writing", "bar", "bytes", "rate", "left") as progress:
        export.write(chosen, arguments.folder, progress=progress)
    print(arguments.folder)
    options.note(f"version {chosen.number}, {tables.size(chosen.manifest.size)}: load it with transformers or vLLM")
    sys.stdout.flush()
    return 0


def _room(found: Values) -> str:
    quota = f" of at most {tables.size(found['quota'])}" if found["quota"] else ""
    free, reserve = tables.size(found["free"]), tables.size(found["reserve"])
    return f"weights take {tables.size(found['used'])}{quota}; the disk has {free} free, and they leave {reserve}"
