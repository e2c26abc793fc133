"""A node's configuration: command-line flags, environment variables and ``farflung.toml``, in this order of precedence.

1. A key's variable is ``FARFLUNG_`` and its name in capitals, a devnet key's ``FARFLUNG_DEVNET_``; lists stand there
   with commas. What no source names has its default.
2. A mistake ends the start with one line that names its file and line, its variable or its flag.
3. ``KEYS`` is the one list of all keys; docs/OPERATING.md explains each, and a test compares the two.

::

    name = "node-1"                                      # shown to people; at most 32 printable ASCII characters
    listen = ["/ip4/0.0.0.0/tcp/4001"]                   # where others can dial this node; port 0 takes a free one
    bootstrap = ["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…"]
    willing = ["trainer", "relay", "validator", "inference"]
    log_level = "info"                                   # debug, info, warning or error
    history = "all"                                      # "recent": a node that keeps no old log entries
    threads = 1                                          # threads of each child process that computes

    [bulk]                                               # weights, beside the rest of the network
    listen = []                                          # left out: as ``listen``, at its port + 10000
    announce = ["/dns4/weights.example.org/tcp/80/http"] # what others are told instead of ``listen``
    proxied = false                                      # a reverse proxy stands in front
    rate = 0                                             # megabits a second that it sends at most; 0: no limit
    peer_rate = 0                                        # of these to one peer
    connections = 512                                    # open at once
    peer_connections = 32                                # of these of one peer

    [weights]                                            # on this node's disk
    quota = 0                                            # MiB that weights may take; 0: no limit
    reserve = 512                                        # MiB that they leave free

    [devnet]                                             # only read in a development network
    cheat = ""                                           # "wrong-weights" or "forged-reward"
    pause_at_step = 0                                    # the trainer stops for good before the step after this one
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from node.bulk import address as bulk
from node.errors import UserError
from node.store.files import write_atomic
from protocol.errors import PeerError
from protocol.identity import node_id

WILLING: Final = ("trainer", "relay", "validator", "inference")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
HISTORIES: Final = ("all", "recent")
CHEATS: Final = ("", "wrong-weights", "forged-reward")
DEFAULT_LISTEN: Final = ("/ip4/0.0.0.0/tcp/4001",)

# A presence carries at most eight addresses of 128 characters; more could not be announced.
MAX_ADDRESSES: Final = 8
MAX_ADDRESS_LENGTH: Final = 128
MAX_BOOTSTRAP: Final = 64
MAX_THREADS: Final = 1024
MAX_STEP: Final = 2**31
MAX_BULK: Final = 4
"""A presence carries no more addresses for weights."""
MAX_RATE: Final = 10**6
MAX_CONNECTIONS: Final = 4096
MAX_ROOM: Final = 2**40

PREFIX: Final = "FARFLUNG_"
OTHER_VARIABLES: Final = ("FARFLUNG_CONFIG", "FARFLUNG_DATA_DIR", "FARFLUNG_PYTHON")
"""Variables that are no keys: where the file and the node's folder are, and what the installer runs."""

_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})(?:/p2p/([1-9A-HJ-NP-Za-km-z]+))?")


@dataclass(frozen=True, slots=True)
class DevnetConfig:
    """What only a development network may ask of a node."""

    cheat: str = ""
    pause_at_step: int = 0


@dataclass(frozen=True, slots=True)
class BulkConfig:
    """How the node gives weights. ``rate`` and ``peer_rate`` are megabits a second, 0 for no limit."""

    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    proxied: bool = False
    rate: int = 0
    peer_rate: int = 0
    connections: int = 512
    peer_connections: int = 32


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Room for weights on the disk, in MiB; a ``quota`` of 0 is none."""

    quota: int = 0
    reserve: int = 512


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of ``farflung.toml``; addresses are multiaddr texts."""

    name: str = "node"
    listen: tuple[str, ...] = DEFAULT_LISTEN
    bootstrap: tuple[str, ...] = ()
    willing: tuple[str, ...] = WILLING
    log_level: str = "info"
    history: str = "all"
    threads: int = 1
    bulk: BulkConfig = BulkConfig()
    weights: WeightsConfig = WeightsConfig()
    devnet: DevnetConfig = DevnetConfig()


SECTIONS: Final = {"bulk": BulkConfig, "weights": WeightsConfig, "devnet": DevnetConfig}
"""What a section of the file stands for."""


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
    elif kind not in ("ip4", "ip6"):
        return f"{address!r} is a name, and a node listens on an IP address"
    return None


# The keys


def _name(value: object) -> str | None:
    fits = isinstance(value, str) and 1 <= len(value) <= 32 and value.isascii() and value.isprintable()
    return None if fits else "a name is 1 to 32 printable ASCII characters"


def _listen(value: object) -> str | None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ADDRESSES:
        return f"expected a list of 1 to {MAX_ADDRESSES} addresses"
    return next((problem for item in value if (problem := address_problem(item, peer=False))), None)


def _bulk_listen(value: object) -> str | None:
    return None if value == [] else _listen(value)


def _announce(value: object) -> str | None:
    if not isinstance(value, list) or len(value) > MAX_BULK:
        return f"expected a list of at most {MAX_BULK} addresses"
    for item in value:
        try:
            bulk.parse(item if isinstance(item, str) else "")
        except PeerError as error:
            return str(error)
    return None


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "expected true or false"


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


@dataclass(frozen=True, slots=True)
class Key:
    """One key. ``name`` is ``key`` or ``section.key``, ``default`` a TOML value (a list for several), ``problem`` says
    what is wrong with a value, ``meaning`` is a phrase for people."""

    name: str
    default: str | int | bool | list[str]
    problem: Callable[[object], str | None]
    meaning: str

    @property
    def variable(self) -> str:
        """The environment variable that sets this key."""
        return PREFIX + self.name.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The command line's flag of this key."""
        return "--" + self.name.rpartition(".")[2].replace("_", "-")

    def decode(self, text: str) -> object:
        """The value that ``text`` stands for outside of TOML; a text that is none is left to ``problem``."""
        if isinstance(self.default, list):
            return [item.strip() for item in text.split(",") if item.strip()]
        if isinstance(self.default, bool):
            return {"true": True, "false": False}.get(text, text)
        if isinstance(self.default, int) and re.fullmatch(r"-?[0-9]{1,18}", text):
            return int(text)
        return text


KEYS: Final = {
    key.name: key
    for key in (
        Key("name", "node", _name, "shown to people beside the node's id"),
        Key("listen", list(DEFAULT_LISTEN), _listen, "where others can dial this node; port 0 takes a free one"),
        Key("bootstrap", [], _bootstrap, "peers to ask first; not needed again once others are known"),
        Key("willing", list(WILLING), _willing, "the roles that this node may take"),
        Key("log_level", "info", partial(_choice, LOG_LEVELS), "debug, info, warning or error"),
        Key("history", "all", partial(_choice, HISTORIES), "all: keep every log entry; recent: drop old, final ones"),
        Key("threads", 1, partial(_integer, 1, MAX_THREADS), "threads of each child process that computes"),
        Key("bulk.listen", [], _bulk_listen, "where weights are served; left out: as listen, at its port + 10000"),
        Key("bulk.announce", [], _announce, "where others are told to fetch weights, instead of bulk.listen"),
        Key("bulk.proxied", False, _boolean, "whether a reverse proxy stands in front of bulk.listen"),
        Key("bulk.rate", 0, partial(_integer, 0, MAX_RATE), "megabits a second of weights sent at most; 0: no limit"),
        Key("bulk.peer_rate", 0, partial(_integer, 0, MAX_RATE), "megabits a second to one peer; 0: no limit"),
        Key("bulk.connections", 512, partial(_integer, 8, MAX_CONNECTIONS), "connections for weights at once"),
        Key("bulk.peer_connections", 32, partial(_integer, 1, MAX_CONNECTIONS), "connections of one peer at once"),
        Key("weights.quota", 0, partial(_integer, 0, MAX_ROOM), "MiB that weights may take on the disk; 0: no limit"),
        Key("weights.reserve", 512, partial(_integer, 0, MAX_ROOM), "MiB of the disk that weights leave free"),
        Key("devnet.cheat", "", partial(_choice, CHEATS), "how to cheat, for tests of a development network"),
        Key(
            "devnet.pause_at_step", 0, partial(_integer, 0, MAX_STEP), "nothing is generated after this step; 0: never"
        ),
    )
}
"""Every key of ``farflung.toml``, by name."""


# Reading


def parse(text: str, path: Path) -> Config:
    """The configuration in ``text``; ``path`` names the file in the ``UserError`` of a mistake."""
    return _config(_read_toml(text, path))


def load(path: Path) -> Config:
    """Read ``path`` alone; a missing file is the default configuration. Raises ``UserError``."""
    return _config(_read_file(path, required=False))


def resolve(
    path: Path,
    *,
    required: bool = False,
    environment: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
) -> Config:
    """The configuration of a node from all sources.

    ``flags`` are TOML values by key. Where ``required`` is set a missing file is a mistake too. Raises ``UserError``.
    """
    values = {
        **_read_file(path, required=required),
        **_read_environment(environment),
        **_read_flags({} if flags is None else flags),
    }
    return _config(values)


def _config(values: Mapping[str, object]) -> Config:
    tables: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        tables[section][key] = tuple(value) if isinstance(value, list) else value
    return Config(**tables[""], **{section: kind(**tables[section]) for section, kind in SECTIONS.items()})


def _read_file(path: Path, *, required: bool) -> dict[str, object]:
    try:
        # Some editors put a byte order mark in front, which TOML does not know.
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise UserError(f"{path}: there is no such file", "name a farflung.toml with --config") from None
        return {}
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line}: not UTF-8 text", "save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "make it readable for this user") from None
    return _read_toml(text, path)


def _read_toml(text: str, path: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at line ([0-9]+), column ([0-9]+)\)", str(error))
        line, what = (found[2], f"{found[1]}, column {found[3]}") if found else (text.count("\n") + 1, str(error))
        raise UserError(f"{path}: line {line}: not TOML: {what}", "correct that line") from None
    except RecursionError:
        raise UserError(f"{path}: brackets stand too deep in each other", "no key of it needs more than one") from None
    values: dict[str, object] = {}
    for key, value in table.items():
        if key not in SECTIONS:
            values[key] = value
        elif isinstance(value, dict):
            values |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            where = f"{path}: line {_line(text, key)}"
            raise UserError(f"{where}: {key}: expected a section: [{key}]", "correct the line or delete it")
    for name, value in values.items():
        where = f"{path}: line {_line(text, name)}"
        if name not in KEYS:
            section = name.partition(".")[0] if name.partition(".")[0] in SECTIONS else ""
            known = ", ".join(key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == section)
            raise UserError(f"{where}: unknown key {name!r}", f"known keys are {known}")
        if (problem := KEYS[name].problem(value)) is not None:
            raise UserError(f"{where}: {name}: {problem}", "correct the value or delete the line")
    return values


def _line(text: str, name: str) -> int:
    """The line (from 1) on which the statement begins that sets ``name`` in a valid TOML text.

    TOML has too many ways to write a key to look for one: one line more is read at a time, until the key is there.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    began = 0
    for count in range(1, len(lines) + 1):
        try:
            table: Any = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue  # inside a statement of several lines
        for part in name.split("."):
            table = table.get(part) if isinstance(table, dict) else None
        if table is not None:
            while not lines[began].strip() or lines[began].lstrip().startswith("#"):
                began += 1
            return began + 1
        began = count
    return len(lines)


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    known = {key.variable: key for key in KEYS.values()}
    values: dict[str, object] = {}
    for variable in sorted(environment):
        key = known.get(variable)
        if key is not None:
            value = key.decode(environment[variable])
            if (problem := key.problem(value)) is not None:
                raise UserError(f"{variable}: {problem}", "correct the variable or unset it")
            values[key.name] = value
        elif variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and (meant := _meant(variable, known)):
            raise UserError(f"{variable}: there is no such variable", f"{meant} is meant, or unset it")
    return values


def _meant(variable: str, known: Collection[str]) -> str | None:
    """The variable of which this one is a slip of the pen. Others may use our prefix for what is theirs."""
    return next(iter(difflib.get_close_matches(variable, known, n=1, cutoff=0.9)), None)


def _read_flags(flags: Mapping[str, object]) -> dict[str, object]:
    for name, value in flags.items():
        if (problem := KEYS[name].problem(value)) is not None:
            raise UserError(f"{KEYS[name].flag}: {problem}", "correct the command line")
    return dict(flags)


def without_overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what would override or replace a node's own file."""
    ours = {key.variable for key in KEYS.values()} | {"FARFLUNG_CONFIG", "FARFLUNG_DATA_DIR"}
    return {name: value for name, value in environment.items() if name not in ours}


# Writing


def write(config: Config, path: Path) -> None:
    """Write ``config`` so that ``load`` gives it back. Raises ``UserError`` where the file cannot be written."""
    values = asdict(config)
    for section in SECTIONS:
        values |= {f"{section}.{key}": value for key, value in values.pop(section).items()}
    _save(_lines(values, {}), path)


def write_template(path: Path, values: Mapping[str, object]) -> None:
    """Write a file that explains every key and sets those of ``values`` (TOML values by key). Raises ``UserError``."""
    head = [
        "# The configuration of a Farflung node; docs/OPERATING.md explains it. A key that is left out has the",
        "# default shown here. Flags of the command line and variables (FARFLUNG_THREADS=2) override this file.",
        "",
    ]
    meanings = {name: key.meaning for name, key in KEYS.items() if not name.startswith("devnet.")}
    _save(head + _lines(values, meanings), path)


def _lines(values: Mapping[str, object], meanings: Mapping[str, str]) -> list[str]:
    """Lines that set ``values``; keys that have a meaning are all shown, with it."""
    lines = []
    section = ""
    for name, key in KEYS.items():
        if name not in values and name not in meanings:
            continue
        inside, _, plain = name.rpartition(".")
        if inside != section:
            lines += ["", f"[{inside}]"]
            section = inside
        if name in meanings:
            lines.append(f"# {meanings[name]}")
        # JSON's integers, booleans, lists and printable-ASCII strings are TOML's as well.
        mark = "" if name in values else "# "
        lines.append(f"{mark}{plain} = {json.dumps(values.get(name, key.default))}")
    return [*lines, ""]


def _save(lines: list[str], path: Path) -> None:
    text = "\n".join(lines)
    parse(text, path)
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})", "check the folder's rights and room") from None
