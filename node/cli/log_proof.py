"""``farflung log prove``, ``check-proof`` and ``checkpoint``: what is final, for people who hold no log."""

from __future__ import annotations

import argparse
from base64 import b64encode
from dataclasses import fields
from pathlib import Path
from typing import Any

from node.cli import options, tables
from node.cli.options import Values
from node.errors import UserError
from node.log.offline_proof import NotFinal, consistency, prove, published
from node.store.durable_files import read_named, write_new
from protocol.errors import PeerError
from protocol.identity import peer_id
from protocol.log.checkpoint import origin, verifier_key
from protocol.log.entry_proof import MAX_PROOF_BYTES, LogProof
from protocol.log.quorum import quorum


def add_to(actions: options.Parsers) -> None:
    """Add the actions to ``farflung log``."""
    prove = options.add_command(actions, "prove", _prove, help="prove that an entry is final")
    prove.add_argument("entry", metavar="ENTRY", help="the entry's id, or its first 8 or more digits")
    options.add_file(prove, "-o", "--out", help="the file to make (default: <first digits of the id>.proof)")
    check = options.add_command(
        actions, "check-proof", _check, help="check such a proof, without network and log", data_dir=False, json=True
    )
    options.add_file(check, "file", help="the proof")
    check.add_argument("--domain", required=True, metavar="ID", help="the domain's id, 64 hexadecimal digits")
    checkpoint = options.add_command(
        actions, "checkpoint", _checkpoint, help="the newest checkpoint that the electors cosigned", json=True
    )
    options.add_number(
        checkpoint,
        "--since",
        metavar="SIZE",
        help="prove above it that it continues the checkpoint of SIZE cuts, in the form that a C2SP tlog-witness takes",
    )


def _prove(arguments: argparse.Namespace) -> int:
    """Write a file that proves that an entry is final to whoever knows the domain's id, with no network and no log.
    Works beside a running daemon."""
    try:
        proof = prove(options.existing_directory(arguments), arguments.entry)
    except NotFinal as error:
        options.note(str(error))
        return 1
    entry_id = proof.covering.entry.id.hex()
    path = arguments.out or Path(f"{entry_id[:16]}.proof")
    write_new(path, proof.encode(), mode=0o644)
    print(f"{path} proves that entry {entry_id} is final")
    print(f"check it anywhere with: farflung log check-proof {path} --domain {proof.domain.id.hex()}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Check a file made by farflung log prove, and say what it proves. Exit code 1 where it proves nothing."""
    try:
        domain = bytes.fromhex(arguments.domain)
    except ValueError:
        domain = b""
    if len(domain) != 32:
        raise UserError(f"--domain {arguments.domain}: a domain's id has 64 hexadecimal digits", "give all of them")
    data = read_named(arguments.file, MAX_PROOF_BYTES, "name a proof")
    try:
        proof = LogProof.parse(data)
        electors = proof.check(domain)
    except PeerError as error:
        reason = str(error)
        refuted = {"holds": False, "reason": reason}
        options.show(arguments, refuted, lambda: options.note(f"{arguments.file} proves nothing: {reason}"))
        return 1
    found = _values(proof, electors)
    options.show(arguments, found, lambda: tables.facts(_words(found), title=f"{arguments.file} holds:"))
    return 0


def _checkpoint(arguments: argparse.Namespace) -> int:
    """Print the newest checkpoint of the domain's cuts: a C2SP tlog-checkpoint with the electors' cosignatures, which
    other tools can verify."""
    directory = options.existing_directory(arguments)
    found = published(directory)
    if found is None:
        options.note(f"{directory.path}: no checkpoint has been cosigned yet")
        return 1
    checkpoint, cosigners = found.cosigned.checkpoint, [elector for elector, _, _ in found.cosigned.cosignatures]
    proof: list[str] | None = None
    if arguments.since is not None:
        path = consistency(directory, arguments.since, checkpoint.size)
        proof = [b64encode(node).decode() for node in path]
    values = {
        "origin": origin(checkpoint.domain),
        "size": checkpoint.size,
        "root": checkpoint.root.hex(),
        "time": found.cosigned.time,
        "cosigners": [elector.hex() for elector in cosigners],
        "verifier_keys": [verifier_key(elector).encode() for elector in cosigners],
        "note": found.note.decode(),
        "consistency": proof,
    }
    # With a proof it is the body of an add-checkpoint request: https://c2sp.org/tlog-witness
    above = [] if proof is None else [f"old {arguments.since}", *proof, ""]
    options.show(arguments, values, lambda: print(*above, values["note"], sep="\n", end=""))
    return 0


def _values(proof: LogProof, electors: tuple[bytes, ...]) -> Values:
    covering = proof.covering
    entry, cut = covering.entry, covering.cut
    return {
        "holds": True,
        "domain": proof.domain.id.hex(),
        "domain_name": proof.domain.name,
        "entry": entry.id.hex(),
        "author": entry.author.hex(),
        "seq": entry.seq,
        "final_entries": covering.row.seq + 1,
        "frozen": bool(covering.row.status),
        "kind": entry.kind,
        "payload": plain(entry.payload),
        "height": cut.cut.height,
        "cut": cut.cut.id.hex(),
        "signers": [elector.hex() for elector, _ in cut.votes],
        "electors": len(electors),
        "quorum": quorum(len(electors)),
    }


def _words(found: Values) -> list[tuple[str, str]]:
    rows = [
        ("domain", f"{found['domain_name']}, {found['domain']}"),
        ("entry", found["entry"]),
        ("written by", f"{found['author']} ({peer_id(bytes.fromhex(found['author']))})"),
        ("place", f"{found['seq']} in its author's feed, of which the first {found['final_entries']} are final"),
        ("says", found["kind"]),
    ]
    rows += [("", f"{name} = {value}") for name, value in found["payload"].items()]
    rows.append(("final", f"at height {found['height']} or before, by cut {found['cut']}"))
    of = f"{len(found['signers'])} of {found['electors']} electors signed it, {found['quorum']} are needed"
    rows.append(("certified", of))
    if found["frozen"]:
        rows.append(("mind", "the author's feed has ended: it was forked, closed or moved to another node"))
    return rows


def plain(payload: Any) -> Values:
    """A payload's fields by name, ready for JSON: bytes as hexadecimal digits."""
    values = {item.name: getattr(payload, item.name) for item in fields(payload)}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}
