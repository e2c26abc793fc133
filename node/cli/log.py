"""``farflung log``: commands on a data directory's log. They read it from the disk, whether a daemon runs or not."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shtab

from node.cli import options, tables
from node.errors import UserError
from node.store.directory import DataDirectory
from protocol.records import KINDS, Record, Rollout, Step, Verdict, Weights

if TYPE_CHECKING:
    from node.store.verify import LogReport
    from protocol.entry import Entry


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("log", help="check, show or export a node's log", description="Commands on a log.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify",
        help="check the whole log offline",
        description="Check every signature, chain, payload rule and cut of the log in a data directory. The heads root "
        "and each node's credit go to standard output, the same for any two nodes that hold the same log; "
        "everything else goes to standard error. Exit code 1 where the log is not valid.",
    )
    options.complete(
        verify.add_argument("folder", type=Path, nargs="?", metavar="DATA-DIR", help="the same as --data-dir"),
        shtab.DIRECTORY,
    )
    options.add_data_dir(verify)
    verify.set_defaults(command=_verify)
    show = actions.add_parser(
        "show",
        help="list entries",
        description="List the entries of the log in the order of the cuts that they stand on.",
    )
    show.add_argument("--author", metavar="NODE", help="only this node's: the first digits of its id, or its name")
    show.add_argument("--kind", choices=sorted(KINDS), help="only entries of this kind")
    show.add_argument("--last", type=int, default=20, metavar="N", help="only the last N (default: 20; 0: all)")
    options.add_data_dir(show)
    options.add_json(show)
    show.set_defaults(command=_show)
    export = actions.add_parser(
        "export",
        help="write the log as lines of JSON",
        description="Write the whole log, one JSON object a line: the genesis, then entries, cuts, grants and proofs "
        "of forks, each with its signed bytes in hex.",
    )
    options.complete(
        export.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a new file (default: standard output)"),
        shtab.FILE,
    )
    options.add_data_dir(export)
    export.set_defaults(command=_export)


def _read(directory: DataDirectory) -> LogReport:
    """The checked log; what is wrong with it is told on standard error."""
    # Imported here, so that other commands start without loading what they do not use.
    from node.store.verify import verify

    found = verify(directory)
    for problem in found.problems:
        options.note(f"{directory.path}: {problem}")
    return found


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.folder is not None and arguments.data_dir is not None:
        raise UserError("the folder is given twice", "give it once")
    arguments.data_dir = arguments.folder or arguments.data_dir
    directory = options.data_directory(arguments)
    began = time.monotonic()
    found = _read(directory)
    sys.stdout.write(found.text())
    result = options.counted(len(found.problems), "problem") if found.problems else "the log is valid"
    options.note(f"{directory.path}: {result} ({time.monotonic() - began:.1f} s)")
    return found.exit_code


def _show(arguments: argparse.Namespace) -> int:
    if arguments.last < 0:
        raise UserError(f"--last {arguments.last}: a number of entries is not negative", "0 shows all")
    found = _read(options.existing_directory(arguments))
    authors = _authors(found, arguments.author)
    chosen = [
        entry
        for entry in _ordered(found)
        if entry.author in authors and (arguments.kind is None or entry.kind == arguments.kind)
    ][-arguments.last :]
    if arguments.json:
        options.print_json({"domain": found.domain.id.hex(), "entries": [_values(found, entry) for entry in chosen]})
        return found.exit_code
    numbers = {entry.id: entry.payload.number for entry in found.replica.arrivals if isinstance(entry.payload, Weights)}
    tables.table(
        ("cut", "node", "name", "seq", "kind", "what"),
        [
            (
                str(found.replica.height(entry.anchor)),
                entry.author.hex()[:8],
                found.names[entry.author],
                str(entry.seq),
                entry.kind,
                _words(entry.payload, numbers),
            )
            for entry in chosen
        ],
    )
    return found.exit_code


def _export(arguments: argparse.Namespace) -> int:
    directory = options.existing_directory(arguments)
    found = _read(directory)
    lines = _lines(directory, found)
    if arguments.file is None:
        for line in lines:
            print(json.dumps(line))
        return found.exit_code
    try:
        with arguments.file.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except FileExistsError:
        raise UserError(f"{arguments.file}: there is a file already", "name a new one") from None
    except OSError as error:
        raise UserError(f"{arguments.file}: cannot be written ({error.strerror})", "name another file") from None
    return found.exit_code


def _authors(found: LogReport, wanted: str | None) -> set[bytes]:
    authors = set(found.replica.heads)
    if wanted is None:
        return authors
    chosen = {author for author in authors if author.hex().startswith(wanted.lower()) or found.names[author] == wanted}
    if not chosen:
        raise UserError(f"--author {wanted}: no node of this log", "farflung roles lists its nodes")
    return chosen


def _ordered(found: LogReport) -> list[Entry]:
    """All entries, behind what they stand on: by the height of their cut, then author by author."""
    height = found.replica.height
    return sorted(found.replica.arrivals, key=lambda entry: (height(entry.anchor) or 0, entry.author, entry.seq))


def _lines(directory: DataDirectory, found: LogReport) -> Iterator[dict[str, Any]]:
    replica = found.replica
    yield {"type": "genesis", "domain": found.domain.id.hex(), "data": (directory.genesis() or b"").hex()}
    for entry in _ordered(found):
        yield {"type": "entry", **_values(found, entry), "data": entry.encode().hex()}
    for cut in replica.cuts:
        yield {"type": "cut", "height": cut.cut.height, "id": cut.cut.id.hex(), "data": cut.encode().hex()}
    for term, grant in sorted(replica.grants.items()):
        yield {"type": "grant", "term": term, "trainer": grant.grant.trainer.hex(), "data": grant.encode().hex()}
    for author, proof in sorted(replica.forks.items()):
        yield {"type": "fork", "author": author.hex(), "seq": proof.seq, "data": proof.encode().hex()}


def _values(found: LogReport, entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id.hex(),
        "author": entry.author.hex(),
        "name": found.names[entry.author],
        "seq": entry.seq,
        "cut": found.replica.height(entry.anchor),
        "final": entry.seq <= found.replica.certified_head(entry.author),
        "kind": entry.kind,
        "payload": {item.name: _plain(getattr(entry.payload, item.name)) for item in fields(entry.payload)},
    }


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _words(payload: Record, numbers: dict[bytes, int]) -> str:
    """What an entry says, in a phrase; ``numbers`` are the version numbers of weights entries."""
    from node.api.words import words

    match payload:
        case Weights():
            return f"version {payload.number} of term {payload.term}, {payload.size / 1e6:.1f} MB"
        case Rollout():
            version = numbers.get(payload.weights, "?")
            return f"{payload.responses} responses in {payload.groups} groups, {payload.tokens} tokens, v{version}"
        case Verdict():
            return f"{payload.rollout.hex()[:8]} {payload.outcome}: {words(payload.reason)}"
        case Step():
            return f"makes version {payload.number}: reward {payload.reward / 1e6:.3f}, {payload.accepted} accepted"
        case _:
            return ", ".join(str(_plain(getattr(payload, item.name)))[:32] for item in fields(payload))
