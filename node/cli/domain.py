"""``farflung domain``: found a domain, and show what one is."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from node.cli import amend, invite, options
from node.cli.options import Values
from node.errors import UserError
from node.store.durable_files import read_named, write_new
from protocol.constants import MAX_GENESIS_BYTES
from protocol.domain import Domain, parse_genesis
from protocol.errors import PeerError
from protocol.records import Blob


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    actions = options.add_group(
        commands, "domain", help=phrase, description="A domain is one model, its tasks and its rules."
    )
    create = options.add_command(actions, "create", _create, help="found a domain from a domain.toml", json=True)
    options.add_file(create, "file", metavar="domain.toml", help="the description of the domain")
    create.add_argument(
        "--private",
        action="store_true",
        help="weights travel encrypted and only between nodes that joined, as private = true in the file",
    )
    options.add_file(create, "--out", help="write the signed genesis into this new file too")
    show = options.add_command(actions, "show", _show, help="what a domain is", json=True)
    options.add_file(show, "file", nargs="?", help="a signed genesis")
    amend.add_to(actions)
    invite.add_to(actions)


def _create(arguments: argparse.Namespace) -> int:
    """Check a domain.toml (docs/OPERATING.md), convert its model, sign the genesis with this node's key and put all of
    it into the data directory, which becomes the founder's. Prints the line to give to others."""
    # Imported here, so that other commands start without loading what they do not use.
    import trio

    from node.config import resolve
    from node.domain import domain_toml, founding
    from node.net.address_text import own_addresses

    asked = domain_toml.load(arguments.file)
    for line in asked.notes:
        options.note(line)
    if arguments.private:
        asked = replace(asked, private=True)
    directory = options.data_directory(arguments)
    out: Path | None = arguments.out
    if out is not None and out.exists():
        raise UserError(f"{out}: it is there already and is not overwritten", "name another file")
    with directory.open_locked():
        if directory.genesis() is not None:
            raise UserError(f"{directory.path}: this data directory has a domain already", "name a new --data-dir")
        listen = resolve(directory.config_file, environment=os.environ).listen
        directory.identity()
        options.note(f"checking the tasks and converting {asked.model}")
        trio.run(founding.check, asked)
        domain = trio.run(founding.found, directory, asked)
        directory.clean_work()
    if out is not None:
        write_new(out, directory.genesis() or b"", mode=0o644)
    address = next(iter(own_addresses(listen, domain.creator)), None)
    join = None if address is None else f"farflung join '{address}?domain={domain.id.hex()}'"
    founded = {**describe(domain), "address": address, "join": join, "data_dir": str(directory.path)}
    options.show(arguments, founded, lambda: _tell_founded(founded))
    return 0


def _tell_founded(founded: Values) -> None:
    where, domain = founded["data_dir"], founded["id"]
    print(f"domain {domain} ({founded['name']}) stands in {where}")
    print(f"start it:      farflung run --data-dir {where}")
    # Without an address its port is chosen when it runs.
    later = f"an address out of farflung status, once it runs, with ?domain={domain}"
    print(f"give others:   {founded['join'] or later}")
    if founded["admission"]["mode"] == "invited":
        options.note("only the invited get in: once it runs, farflung domain invite prints an address that lets one in")
    if not founded["validators"]:
        options.note("nobody is named a validator, so anybody may validate; name some for a domain of strangers")


def _show(arguments: argparse.Namespace) -> int:
    """Verify a signed genesis and show what it says: that of a file, else that of the data directory."""
    if arguments.file is not None:
        where = str(arguments.file)
        data = read_named(arguments.file, MAX_GENESIS_BYTES, "name a signed genesis")
    else:
        directory = options.existing_directory(arguments)
        where, data = str(directory.genesis_file), directory.genesis() or b""
        if not data:
            raise UserError(
                f"{directory.path}: this node has no domain yet", "farflung join, or farflung domain create"
            )
    try:
        domain = parse_genesis(data)
    except PeerError as error:
        raise UserError(f"{where}: not a valid genesis ({error})", "get it again from a peer you trust") from None
    described = describe(domain)
    options.show(arguments, described, lambda: print(text(described), end=""))
    return 0


def describe(domain: Domain) -> Values:
    """A domain as JSON-ready values, its numbers in the units of ``domain.toml``."""
    from node.domain.domain_toml import SECTIONS

    values: Values = {
        "id": domain.id.hex(),
        "name": domain.name,
        "creator": domain.creator.hex(),
        "devnet": bool(domain.devnet),
        "private": bool(domain.private),
        "electors": [node.hex() for node in domain.electors],
        "validators": [node.hex() for node in domain.validators],
        "trainers": [node.hex() for node in domain.trainers],
        "model": {
            "architecture": domain.model.architecture,
            "compute_dtype": domain.model.compute_dtype,
            "whole": domain.model.whole.hex(),
            "config": domain.model.config.hash.hex(),
            "tokenizer": domain.model.tokenizer.hash.hex(),
        },
        "tasks": [
            {name: getattr(task, name) for name in ("kind", "name", "weight", "parameters", "version")}
            | {"data": _blob(task.data), "set": _blob(task.items)}
            for task in domain.tasks
        ],
    }
    for name, section in SECTIONS.items():
        part = getattr(domain, name)
        values[name] = {
            key: getattr(part, field) / unit.scale if unit.scale > 1 else getattr(part, field)
            for key, (field, unit) in section.keys.items()
        }
    return values


def _blob(blob: Blob | None) -> Values | None:
    return None if blob is None else {"hash": blob.hash.hex(), "bytes": blob.size}


def text(described: Values) -> str:
    """A described domain for people."""
    from node.cli.identity import fingerprint

    model = described["model"]
    lines = [
        f"domain      {described['id']}",
        f"name        {described['name']}" + (" (a devnet)" if described["devnet"] else ""),
        *(["weights     private: encrypted, between nodes that joined"] if described["private"] else []),
        f"signed by   {fingerprint(bytes.fromhex(described['creator']))}",
        *(f"elector     {node}" for node in described["electors"]),
        *(f"validator   {node}" for node in described["validators"]),
        *(f"trainer     {node}" for node in described["trainers"]),
        f"admission   {described['admission']['mode']}",
        f"model       {model['architecture']}, {model['compute_dtype']}, weights {model['whole'][:16]}…",
    ]
    for task in described["tasks"]:
        data = "" if task["data"] is None else f", {task['data']['bytes']} bytes of data"
        lines.append(f"task        {task['name']} ({task['kind']} {task['version']}) ×{task['weight']}{data}")
        if task["set"] is not None:
            lines.append(f"            only the items of the set {task['set']['hash'][:16]}…")
        if task["parameters"] != "{}":
            lines.append(f"            {task['parameters']}")
    for name in ("recipe", "timings", "policy", "thresholds"):
        lines += ["", f"[{name}]" + ("  # seconds" if name == "timings" else "")]
        lines += [f"{key} = {value}" for key, value in described[name].items()]
    return "\n".join([*lines, ""])
