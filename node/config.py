"""A node's configuration: ``farflung.toml`` in its data directory.

Keys (all optional)::

    name = "node-1"                                      # shown to people; at most 32 printable ASCII characters
    listen = ["/ip4/0.0.0.0/tcp/4001"]                   # where others can dial this node; port 0 takes a free one
    bootstrap = ["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…"]
    willing = ["trainer", "relay", "validator", "inference"]
    log_level = "info"                                   # debug, info, warning or error
    threads = 1                                          # threads of each child process that computes

    [devnet]                                             # only read in a development network
    cheat = ""                                           # "wrong-weights" or "forged-reward"
    pause_at_step = 0                                    # the trainer stops for good before the step after this one
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.store.files import write_atomic
from protocol.errors import PeerError
from protocol.identity import node_id

WILLING: Final = ("trainer", "relay", "validator", "inference")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
CHEATS: Final = ("", "wrong-weights", "forged-reward")
DEFAULT_LISTEN: Final = ("/ip4/0.0.0.0/tcp/4001",)

# A presence carries at most eight addresses of 128 characters; more could not be announced.
MAX_ADDRESSES: Final = 8
MAX_ADDRESS_LENGTH: Final = 128
MAX_BOOTSTRAP: Final = 64
MAX_THREADS: Final = 1024
MAX_STEP: Final = 2**31

_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})(?:/p2p/([1-9A-HJ-NP-Za-km-z]+))?")


@dataclass(frozen=True, slots=True)
class DevnetConfig:
    """What only a development network may ask of a node."""

    cheat: str = ""
    pause_at_step: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of ``farflung.toml``; addresses are multiaddr texts."""

    name: str = "node"
    listen: tuple[str, ...] = DEFAULT_LISTEN
    bootstrap: tuple[str, ...] = ()
    willing: tuple[str, ...] = WILLING
    log_level: str = "info"
    threads: int = 1
    devnet: DevnetConfig = DevnetConfig()


def address_problem(address: object, *, peer: bool) -> str | None:
    """What is wrong with a multiaddr text, or None. ``peer`` asks for a trailing ``/p2p/<peer id>``."""
    if not isinstance(address, str) or len(address) > MAX_ADDRESS_LENGTH:
        return f"an address is a text of at most {MAX_ADDRESS_LENGTH} characters"
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return f"{address!r} is not an address"
    kind, host, port, name = found.groups()
    if int(port) > 65535:
        return f"{address!r} has no valid port"
    if kind in ("ip4", "ip6"):
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            return f"{address!r} has no valid IP address"
        if version != int(kind[2:]):
            return f"{address!r} has an IP address of the other version"
    if peer:
        if name is None:
            return f"{address!r} lacks the peer's id (/p2p/12D3KooW…)"
        try:
            node_id(name)
        except PeerError:
            return f"{address!r} names no Ed25519 peer id"
        if int(port) == 0:
            return f"{address!r} has no valid port"
    elif name is not None:
        return f"{address!r} must not carry a peer id"
    return None


def _name(value: object) -> str | None:
    fits = isinstance(value, str) and 1 <= len(value) <= 32 and value.isascii() and value.isprintable()
    return None if fits else "a name is 1 to 32 printable ASCII characters"


def _listen(value: object) -> str | None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ADDRESSES:
        return f"expected a list of 1 to {MAX_ADDRESSES} addresses"
    return next((problem for item in value if (problem := address_problem(item, peer=False))), None)


def _bootstrap(value: object) -> str | None:
    if not isinstance(value, list) or len(value) > MAX_BOOTSTRAP:
        return f"expected a list of at most {MAX_BOOTSTRAP} addresses"
    return next((problem for item in value if (problem := address_problem(item, peer=True))), None)


def _willing(value: object) -> str | None:
    if not isinstance(value, list) or any(item not in WILLING for item in value) or len(set(value)) != len(value):
        return f"expected a list of different roles out of {', '.join(WILLING)}"
    return None


def _choice(choices: tuple[str, ...], value: object) -> str | None:
    return None if value in choices else "expected one of " + ", ".join(json.dumps(choice) for choice in choices)


def _integer(low: int, high: int, value: object) -> str | None:
    # bool is an int in Python; "threads = true" is still a mistake.
    return None if type(value) is int and low <= value <= high else f"expected an integer from {low} to {high}"


def _devnet(value: object) -> str | None:
    return None if isinstance(value, dict) else "expected a section: [devnet]"


def _check(table: dict[str, Any], section: str, path: Path) -> None:
    checks = {
        "": {
            "name": _name,
            "listen": _listen,
            "bootstrap": _bootstrap,
            "willing": _willing,
            "log_level": lambda value: _choice(LOG_LEVELS, value),
            "threads": lambda value: _integer(1, MAX_THREADS, value),
            "devnet": _devnet,
        },
        "devnet": {
            "cheat": lambda value: _choice(CHEATS, value),
            "pause_at_step": lambda value: _integer(0, MAX_STEP, value),
        },
    }[section]
    for key, value in table.items():
        full = f"{section}.{key}" if section else key
        if key not in checks:
            raise UserError(f"{path}: unknown key {full!r}", f"known keys are {', '.join(checks)}")
        problem = checks[key](value)
        if problem is not None:
            raise UserError(f"{path}: {full}: {problem}", "correct the value or delete the line")


def parse(text: str, path: Path) -> Config:
    """The configuration in ``text``; ``path`` names the file in the ``UserError`` of a mistake."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib's message ends in "(at line 3, column 5)".
        raise UserError(f"{path}: not TOML: {error}", "correct that line") from None
    _check(table, "", path)
    section = table.pop("devnet", {})
    _check(section, "devnet", path)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Config(**values, devnet=DevnetConfig(**section))


def load(path: Path) -> Config:
    """Read ``path``; a missing file is the default configuration. Raises ``UserError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text", "save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "make it readable for this user") from None
    return parse(text, path)


def write(config: Config, path: Path) -> None:
    """Write ``config`` so that ``load`` gives it back. Raises ``UserError`` where the file cannot be written."""
    values = {
        "name": config.name,
        "listen": list(config.listen),
        "bootstrap": list(config.bootstrap),
        "willing": list(config.willing),
        "log_level": config.log_level,
        "threads": config.threads,
    }
    devnet = {"cheat": config.devnet.cheat, "pause_at_step": config.devnet.pause_at_step}
    # JSON's integers, lists and printable-ASCII strings are TOML's as well.
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    lines += ["", "[devnet]", *(f"{key} = {json.dumps(value)}" for key, value in devnet.items()), ""]
    text = "\n".join(lines)
    parse(text, path)
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})", "check the folder's rights and room") from None
