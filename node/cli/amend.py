"""``farflung domain amend``: change a domain's electors and thresholds, with the signatures of a quorum.

One elector makes the file, each signs it in turn on its own machine, and anybody's node carries it into the log. What
counts is the signed body in the file; the lines beside it are written for people.

An elector signs one text of each number, so that a proof which shows a quorum's signatures of one need not show that
there is no other. What has no quorum left to sign it has no way out: the text is agreed on before anybody signs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from node.api.control_client import Declined, Unavailable
from node.cli import options
from node.cli.node_reading import ask
from node.cli.options import Values
from node.errors import UserError
from node.store.durable_files import read_named, write_atomic, write_new
from protocol.constants import MILLION
from protocol.domain import Thresholds
from protocol.errors import LocalError, PeerError
from protocol.identity import node_id
from protocol.log.amendment import Amendment

MAX_BYTES: Final = 1 << 20
"""A longer file is no amendment."""
NAMES: Final = tuple(field.name for field in fields(Thresholds))
"""The thresholds, in the order of an amendment."""


def add_to(actions: options.Parsers) -> None:
    """Add the action's parser to ``farflung domain``."""
    steps = options.add_group(
        actions,
        "amend",
        metavar="STEP",
        help="change a domain's electors and thresholds",
        description="Make an amendment, have a quorum of the electors sign it, and carry it into the log. It is in "
        "force from the second cut on that is made then. An elector signs one text of each number, and numbers leave "
        "no gap: agree on the text before anybody signs, or the domain can never be amended again.",
    )
    make = options.add_command(steps, "make", _make, help="write an amendment into a new file")
    options.add_file(make, "file", help="the new file")
    make.add_argument("--elector", action="append", metavar="NODE", help="an elector; once each, all of them")
    make.add_argument("--validator", action="append", metavar="NODE", help="a named validator; once each, all of them")
    make.add_argument("--trainer", action="append", metavar="NODE", help="a named trainer, in their order, all of them")
    make.add_argument("--threshold", action="append", metavar="NAME=VALUE", default=[], help="a threshold that changes")
    sign = options.add_command(steps, "sign", _sign, help="have this node's elector sign the file; each number once")
    submit = options.add_command(steps, "submit", _submit, help="carry the signed file into the log")
    for step in (sign, submit):
        options.add_file(step, "file", help="the amendment")


def _make(arguments: argparse.Namespace) -> int:
    now = _ask(arguments, "amend")
    electors, validators, trainers = (
        [_node(text) for text in named] if named else None
        for named in (arguments.elector, arguments.validator, arguments.trainer)
    )
    values = dict(zip(NAMES, now["thresholds"], strict=True))
    for change in arguments.threshold:
        name, _, value = change.partition("=")
        if name not in values:
            raise UserError(f"--threshold {change}: unknown name", f"known are {', '.join(values)}")
        values[name] = micro(change, value)
    try:
        thresholds = Thresholds(**values) if arguments.threshold else None
        domain, number = bytes.fromhex(now["domain"]), now["number"] + 1
        made = Amendment.make(domain, number, electors, thresholds, validators=validators, trainers=trainers)
    except LocalError as error:
        raise UserError(f"such an amendment is not possible: {error}") from None
    write_new(arguments.file, _text(made, {}), mode=0o644)
    print(
        f"amendment {made.number} stands in {arguments.file}; once the electors agree on it, have them sign this file"
    )
    print(
        "each of them signs one text of a number, for ever: a number whose electors are split is lost, and all after it"
    )
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    made, votes = _read(arguments.file)
    print("\n".join(_lines(made)))
    answer = _ask(arguments, "amend_sign", body=made.body.hex())
    votes[bytes.fromhex(answer["elector"])] = bytes.fromhex(answer["signature"])
    write_atomic(arguments.file, _text(made, votes))
    print(f"signed by {answer['elector']}; {len(votes)} signatures stand in {arguments.file}")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    made, votes = _read(arguments.file)
    hexed = {elector.hex(): vote.hex() for elector, vote in votes.items()}
    answer = _ask(arguments, "amend_submit", body=made.body.hex(), votes=hexed)
    print(f"amendment {made.number} is entry {answer['seq']} of this node's feed")
    return 0


def _ask(arguments: argparse.Namespace, op: str, **more: Any) -> Values:
    try:
        return ask(options.existing_directory(arguments), op, **more)
    except Unavailable as error:
        how = "docs/OPERATING.md says how a domain is amended"
        remedy = how if isinstance(error, Declined) else "the node's daemon must run: farflung run"
        raise UserError(str(error), remedy) from None


def micro(change: str, value: str) -> int:
    try:
        scaled = Decimal(value) * MILLION
        if scaled != scaled.to_integral_value():
            raise ValueError
        return int(scaled)
    except (ArithmeticError, ValueError):
        raise UserError(f"--threshold {change}: not a number of at most six decimals") from None


def _node(text: str) -> bytes:
    try:
        return bytes.fromhex(text) if len(text) == 64 else node_id(text)
    except (ValueError, PeerError):
        raise UserError(
            f"--elector {text}: neither a peer id nor a node id", "farflung identity show tells both"
        ) from None


def _lines(made: Amendment) -> list[str]:
    values = [] if made.thresholds is None else made.thresholds.to_value()
    named = (("elector", made.electors), ("validator", made.validators), ("trainer", made.trainers))
    return [
        f"amendment {made.number} of domain {made.domain.hex()}",
        *(f"{office:<11} {node.hex()}" for office, nodes in named for node in nodes or ()),
        *(f"{name} = {value / MILLION:g}" for name, value in zip(NAMES, values, strict=False)),
    ]


def _text(made: Amendment, votes: dict[bytes, bytes]) -> bytes:
    value = {
        "says": _lines(made),
        "body": made.body.hex(),
        "signatures": {elector.hex(): vote.hex() for elector, vote in sorted(votes.items())},
    }
    return json.dumps(value, indent=1).encode() + b"\n"


def _read(path: Path) -> tuple[Amendment, dict[bytes, bytes]]:
    try:
        value = json.loads(read_named(path, MAX_BYTES, "name an amendment's file"))
        made = Amendment.parse(bytes.fromhex(value["body"]))
        votes = {bytes.fromhex(elector): bytes.fromhex(vote) for elector, vote in value["signatures"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PeerError) as error:
        raise UserError(f"{path}: not an amendment ({error})", "make a new one: farflung domain amend make") from None
    return made, votes
