"""``farflung log``: commands on a data directory's log. They read it from the disk, whether a daemon runs or not."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from typing import TextIO

from node.api.reason_words import words
from node.cli import log_proof, options, tables
from node.cli.options import Values
from node.errors import UserError, os_errors
from node.log.offline_verification import Each, LogReport, verify
from node.store.data_directory import DataDirectory
from protocol.credit.ledger import Ledger
from protocol.log.entry import Entry
from protocol.log.quorum import CertifiedCut
from protocol.records import KINDS, Absent, Amend, Close, Invite, Rebind, Record, Rollout, Step, Verdict, Weights


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(commands, "log", help=phrase, description="Commands on a log.")
    verify = options.add_command(actions, "verify", _verify, help="check the whole log offline")
    options.add_folder(verify, "folder", nargs="?", metavar="DATA-DIR", help="the same as --data-dir")
    show = options.add_command(actions, "show", _show, help="list entries", json=True)
    show.add_argument("--author", metavar="NODE", help="only this node's: the first digits of its id, or its name")
    show.add_argument("--kind", choices=sorted(KINDS), help="only entries of this kind")
    options.add_number(show, "--last", default=20, help="only the last N (default: 20; 0: all)")
    export = options.add_command(actions, "export", _export, help="write the log as lines of JSON")
    options.add_file(export, "file", nargs="?", help="a new file (default: standard output)")
    log_proof.add_to(actions)


def _read(directory: DataDirectory, each: Each | None = None) -> LogReport:
    """The checked log, without what is final, which ``each`` is shown; what is wrong with it is told on standard error,
    on a terminal also how far the check is."""
    with tables.counting("checking", "bar", "count", "left") as progress:
        found = verify(directory, keep=False, progress=progress, each=each)
    for line in (*found.notes, *found.problems):
        options.note(f"{directory.path}: {line}")
    return found


def _verify(arguments: argparse.Namespace) -> int:
    """Check every signature, chain, payload rule and cut of the log in a data directory. The heads root and each node's
    credit go to standard output, the same for any two nodes that hold the same log; everything else goes to standard
    error. Exit code 1 where the log is not valid."""
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
    """List the entries of the log in the order of the cuts that cover them, those without one last."""
    if arguments.last < 0:
        raise UserError(f"--last {arguments.last}: a number of entries is not negative", "0 shows all")
    chosen: deque[Entry] = deque(maxlen=arguments.last or None)
    numbers: dict[bytes, int] = {}

    def each(item: Entry | CertifiedCut, ledger: Ledger) -> None:
        if isinstance(item, CertifiedCut):
            return
        if isinstance(item.payload, Weights):
            numbers[item.id] = item.payload.number
        if arguments.kind in (None, item.kind) and _is(item.author, ledger.name(item.author), arguments.author):
            chosen.append(item)

    found = _read(options.existing_directory(arguments), each)
    if arguments.author is not None and not any(
        _is(author, found.ledger.name(author), arguments.author) for author in found.replica.heads
    ):
        raise UserError(f"--author {arguments.author}: no node of this log", "farflung roles lists its nodes")
    rows = (
        (
            *(found.replica.height(entry.anchor), entry.id.hex()[:8], entry.author.hex()[:8]),
            *(found.ledger.name(entry.author), entry.seq, entry.kind, _words(entry.payload, numbers)),
        )
        for entry in chosen
    )
    columns = ("cut", "entry", "node", "name", "seq", "kind", "what")
    # Of a whole log these are many: they are made only where they are asked for.
    entries = [_values(found.ledger, entry) for entry in chosen] if arguments.json else []
    values = {"domain": found.replica.domain.id.hex(), "entries": entries}
    options.show(arguments, values, lambda: tables.table(columns, rows))
    return found.exit_code


def _export(arguments: argparse.Namespace) -> int:
    """Write the whole log, one JSON object a line: the genesis, then cut by cut the entries that it covers and the cut,
    then entries without one, grants and proofs of forks, each with its signed bytes in hex."""
    directory = options.existing_directory(arguments)
    if arguments.file is None:
        return _write(directory, sys.stdout)
    with os_errors(arguments.file, "cannot be written", "name another file"):
        try:
            file = arguments.file.open("x", encoding="utf-8")
        except FileExistsError:
            raise UserError(f"{arguments.file}: there is a file already", "name a new one") from None
        try:
            with file:
                return _write(directory, file)
        except BaseException:
            arguments.file.unlink(missing_ok=True)
            raise


def _write(directory: DataDirectory, file: TextIO) -> int:
    """Write the log line by line while it is checked; the exit code."""
    genesis = directory.genesis()

    def write(type_: str, data: bytes, **values: object) -> None:
        file.write(json.dumps({"type": type_, **values, "data": data.hex()}) + "\n")

    def begin(ledger: Ledger) -> None:
        nonlocal genesis
        if genesis is not None:
            write("genesis", genesis, domain=ledger.domain.id.hex())
            genesis = None

    def each(item: Entry | CertifiedCut, ledger: Ledger) -> None:
        begin(ledger)
        if isinstance(item, CertifiedCut):
            write("cut", item.encode(), height=item.cut.height, id=item.cut.id.hex())
        else:
            write("entry", item.encode(), **_values(ledger, item))

    found = _read(directory, each)
    begin(found.ledger)
    for term, grant in sorted(found.replica.grants.items()):
        write("grant", grant.encode(), term=term, trainer=grant.grant.trainer.hex())
    for author, proof in sorted(found.replica.forks.items()):
        write("fork", proof.encode(), author=author.hex(), seq=proof.seq)
    return found.exit_code


def _is(author: bytes, name: str, wanted: str | None) -> bool:
    """Whether somebody who asks for ``wanted`` means this author."""
    return wanted is None or author.hex().startswith(wanted.lower()) or name == wanted


def _values(ledger: Ledger, entry: Entry) -> Values:
    return {
        "id": entry.id.hex(),
        "author": entry.author.hex(),
        "name": ledger.name(entry.author),
        "seq": entry.seq,
        "cut": ledger.replica.height(entry.anchor),
        "final": entry.seq <= ledger.replica.certified_head(entry.author),
        "kind": entry.kind,
        "payload": log_proof.plain(entry.payload),
    }


def _words(payload: Record, numbers: dict[bytes, int]) -> str:
    """What an entry says, in a phrase; ``numbers`` are the version numbers of weights entries."""
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
        case Absent():
            return f"{len(payload.votes)} electors hear nothing of {payload.node.hex()[:8]}"
        case Amend():
            return f"amendment {payload.number}, signed by {len(payload.votes)}"
        case Invite():
            return f"lets in {payload.uses} by {payload.key.hex()[:8]}, up to cut {payload.expires}"
        case Close():
            return f"closes {payload.target.hex()[:8]}"
        case Rebind():
            return f"goes on for {payload.target.hex()[:8]}"
        case _:
            return ", ".join(str(value)[:32] for value in log_proof.plain(payload).values())
