"""``farflung weights``: which versions are on the disk, cleaning up, fetching one, exporting one for other programs.

``ls``, ``gc`` and ``export`` work whether a daemon runs or not; ``pull`` needs one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shtab

from node.cli import options, tables
from node.errors import UserError
from node.store.data_directory import DataDirectory

if TYPE_CHECKING:
    from node.store.version_store import VersionStore
    from node.weights.retention import Lineage
    from protocol.log.entry import Entry


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "weights", help="list, clean up, fetch or export versions of the weights", description="Commands on weights."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    ls = actions.add_parser(
        "ls",
        help="list what is on the disk",
        description="List the versions and deltas on the disk, how much of each is here, and why it is kept.",
    )
    options.add_data_dir(ls)
    options.add_json(ls)
    ls.set_defaults(command=_ls)
    gc = actions.add_parser(
        "gc",
        help="delete what is not needed",
        description="Delete what no rule keeps and, where the quota is exceeded or the reserve is not left, also what "
        "the node can do without. A running node does the same by itself.",
    )
    gc.add_argument("--dry-run", action="store_true", help="only tell what would go")
    options.add_data_dir(gc)
    options.add_json(gc)
    gc.set_defaults(command=_gc)
    pull = actions.add_parser(
        "pull",
        help="fetch a version now",
        description="Have the running node fetch a version, and show how far it is. Exit code 1 where it does not "
        "arrive.",
    )
    pull.add_argument("version", type=int, nargs="?", default=-1, metavar="VERSION", help="default: the newest")
    options.add_data_dir(pull)
    pull.set_defaults(command=_pull)
    export = actions.add_parser(
        "export",
        help="write a version as a model directory",
        description="Write a version with its configuration and tokenizer as a directory that transformers "
        "loads as it is. Every byte is verified on the way.",
    )
    options.complete(
        export.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder"), shtab.DIRECTORY
    )
    export.add_argument("--version", type=int, default=-1, metavar="N", help="default: the newest that is here whole")
    options.add_data_dir(export)
    export.set_defaults(command=_export)


def _offline(directory: DataDirectory) -> tuple[Sequence[Entry], VersionStore, Lineage]:
    """What the commands need of a node that does not run: its lineage's entries, none where it never ran."""
    from node.cli.node_reading import offline
    from node.domain import joining
    from node.store.version_store import VersionStore
    from node.weights.retention import lineage_of

    domain = joining.held(directory)
    if domain is None:
        raise UserError(f"{directory.path}: this node joined no domain yet", "farflung join ADDRESS")
    entries = offline(directory)[0].lineage() if directory.log_database.exists() else ()
    config = directory.config().weights
    directory.versions.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = VersionStore(directory.versions, quota=config.quota << 20, reserve=config.reserve << 20, owner=False)
    return entries, store, lineage_of(entries, domain)


def found_on_disk(directory: DataDirectory) -> dict[str, Any]:
    """What is on the disk: from the daemon, else from the folder's own log."""
    from node.api.weight_requests import objects
    from node.cli.node_reading import ask_or_none
    from node.domain import joining
    from node.weights.retention import room

    found = ask_or_none(directory, "weights")
    if found is not None:
        return found
    entries, store, lineage = _offline(directory)
    domain = joining.held(directory)
    assert domain is not None
    return {**room(store), "domain": domain.id.hex(), "objects": objects(entries, store, lineage)}


def _ls(arguments: argparse.Namespace) -> int:
    found = found_on_disk(options.existing_directory(arguments))
    if arguments.json:
        options.print_json(found)
        return 0
    tables.table(
        ("what", "number", "size", "here", "digest", "kept"),
        [
            (
                row["kind"],
                ", ".join(map(str, row["numbers"])) or "not of the lineage",
                tables.size(row["size"]),
                "whole" if row["here"] == row["size"] else f"{100 * row['here'] / row['size']:.0f} %",
                row["digest"][:8],
                row["kept"] or "not kept: farflung weights gc",
            )
            for row in found["objects"]
        ],
    )
    options.note(_room(found))
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    from node.cli.node_reading import ask, lock_holder

    directory = options.existing_directory(arguments)
    if lock_holder(directory) is not None:
        from node.api.control_client import Unavailable

        try:
            found = ask(directory, "weights-gc", dry_run=arguments.dry_run)
        except Unavailable as error:
            raise UserError(str(error), "wait until the daemon answers, or stop it") from None
    else:
        from node.weights.retention import clean

        _, store, lineage = _offline(directory)
        with directory.open_locked():
            found = clean(store, lineage, dry_run=arguments.dry_run)
    if arguments.json:
        options.print_json(found)
        return 0
    word = "would be deleted" if arguments.dry_run else "deleted"
    for row in found["gone"]:
        print(f"{row['digest'][:8]}  {tables.size(row['size'])}  {word}")
    freed = sum(row["size"] for row in found["gone"])
    options.note(f"{options.counted(len(found['gone']), 'object')}, {tables.size(freed)} {word}; {_room(found)}")
    if found["shortage"] is not None:
        options.note(f"still: {found['shortage']}")
        return 1
    return 0


def _pull(arguments: argparse.Namespace) -> int:
    from node.api.control_client import Declined
    from node.cli.pull_progress import pull

    try:
        found = pull(options.existing_directory(arguments), arguments.version)
    except Declined as error:
        options.note(str(error))
        return 1
    options.note(f"version {found['version']} is here, whole and verified ({tables.size(found['size'])})")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from node.cli import export

    directory = options.existing_directory(arguments)
    chosen = export.choose(directory, found_on_disk(directory)["objects"], arguments.version)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        export.write(
            chosen, arguments.folder, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    print(arguments.folder)
    options.note(f"version {chosen.number}, {tables.size(chosen.manifest.size)}: load it with transformers or vLLM")
    sys.stdout.flush()
    return 0


def _room(found: dict[str, Any]) -> str:
    quota = f" of at most {tables.size(found['quota'])}" if found["quota"] else ""
    free, reserve = tables.size(found["free"]), tables.size(found["reserve"])
    return f"weights take {tables.size(found['used'])}{quota}; the disk has {free} free, and they leave {reserve}"
