"""A node's configuration: command-line flags, environment variables and ``farflung.toml``, in this order of precedence.

1. A key is declared once: a field of ``Config``, or of the section of the file whose class it stands in, with its type,
   its default, what it may be and what it means. Flags, variables, the template of a new file and the table of
   docs/OPERATING.md follow from that (a test compares the table).
2. A key's variable is ``FARFLUNG_``, its section and its name in capitals; lists stand there with commas.
3. A mistake ends the start with one line that names its file and line, its variable or its flag.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from node.errors import UserError, os_errors
from node.net.address_text import MAX_ADDRESSES, address_problem
from node.store.durable_files import read_text, write_atomic
from node.weights.bulk import bulk_address
from protocol.errors import PeerError

WILLING: Final = ("trainer", "relay", "validator", "inference")
ENGINES: Final = ("auto", "torch", "vllm")
CHEATS: Final = ("", "wrong-weights", "forged-reward")
MAX_QUESTIONS: Final = 1 << 16
MAX_SAMPLES: Final = 256
"""Answers to one question of an evaluation: a recipe's largest group."""
PREFIX: Final = "FARFLUNG_"
OTHER_VARIABLES: Final = ("FARFLUNG_CONFIG", "FARFLUNG_DATA_DIR", "FARFLUNG_PYTHON")
"""Variables that are no keys: where the file and the node's folder are, and what the installer runs."""

Check = Callable[[object], str | None]
"""What is wrong with a TOML value, or None."""

T = TypeVar("T")


# What values may be


def _integer(low: int, high: int) -> Check:
    # bool is an int in Python; "threads = true" is still a mistake.
    return lambda value: (
        None if type(value) is int and low <= value <= high else f"expected an integer from {low} to {high}"
    )


def _choice(*choices: str) -> Check:
    return lambda value: None if value in choices else f"expected one of {', '.join(map(json.dumps, choices))}"


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "expected true or false"


def _list(low: int, high: int, problem: Check) -> Check:
    amount = f"at most {high}" if low == 0 else f"{low} to {high}"

    def check(value: object) -> str | None:
        if not isinstance(value, list) or not low <= len(value) <= high:
            return f"expected a list of {amount} addresses"
        return next((found for item in value if (found := problem(item))), None)

    return check


def _own_address(item: object) -> str | None:
    return address_problem(item, peer=False)


def _peer_address(item: object) -> str | None:
    return address_problem(item, peer=True)


def _bulk_address(item: object) -> str | None:
    try:
        bulk_address.parse(item if isinstance(item, str) else "")
    except PeerError as error:
        return str(error)
    return None


def _roles(value: object) -> str | None:
    if not isinstance(value, list) or any(item not in WILLING for item in value) or len(set(value)) != len(value):
        return f"expected a list of different roles out of {', '.join(WILLING)}"
    return None


def _text(value: object, most: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= most and value.isascii() and value.isprintable()


def _name(value: object) -> str | None:
    return None if _text(value, 32) else "a name is 1 to 32 printable ASCII characters"


def _switch_or_folder(value: object) -> str | None:
    fits = isinstance(value, bool) or _text(value, 1024)
    return None if fits else "expected true, false or the path of a folder in printable ASCII"


def _project(value: object) -> str | None:
    # What Weights & Biases allows in a project's name.
    fits = value == "" or (_text(value, 128) and not re.search(r"[/\\#?%:]", str(value)))
    return None if fits else "a project is at most 128 printable ASCII characters, none of /\\#?%:"


# The keys


def _key(default: T, check: Check, meaning: str) -> T:
    return field(default=default, metadata={"check": check, "meaning": meaning})


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How this node trains when it is the trainer."""

    processes: int = _key(1, _integer(1, 64), "processes that share the model when this node is the trainer")
    recompute: str = _key("auto", _choice("auto", "on", "off"), "compute activations again for the backward pass")
    eval_every: int = _key(0, _integer(0, 2**31), "as the trainer, evaluate each version whose number this divides")
    eval_questions: int = _key(64, _integer(1, MAX_QUESTIONS), "held-out questions of each task")
    eval_samples: int = _key(1, _integer(1, MAX_SAMPLES), "answers to each of them")
    eval_greedy: bool = _key(False, _boolean, "true: the likeliest tokens instead of sampled ones")


@dataclass(frozen=True, slots=True)
class BulkConfig:
    """How the node gives weights, beside the rest of the network."""

    listen: tuple[str, ...] = _key(
        (), _list(0, MAX_ADDRESSES, _own_address), "where weights are served; left out: as listen, at its port + 10000"
    )
    announce: tuple[str, ...] = _key(
        (), _list(0, 4, _bulk_address), "where others are told to fetch weights, instead of bulk.listen"
    )
    proxied: bool = _key(False, _boolean, "true where a reverse proxy stands in front of bulk.listen")
    rate: int = _key(0, _integer(0, 10**6), "megabits a second of weights that the node sends at most; 0: no limit")
    peer_rate: int = _key(0, _integer(0, 10**6), "of these megabits to one peer; 0: no limit")
    connections: int = _key(512, _integer(8, 4096), "connections for weights that are open at once")
    peer_connections: int = _key(32, _integer(1, 4096), "of these connections of one peer")


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Room for weights on the disk."""

    quota: int = _key(0, _integer(0, 2**40), "MiB that versions and deltas may take on the disk; 0: no limit")
    reserve: int = _key(512, _integer(0, 2**40), "MiB of the disk that they leave free")


@dataclass(frozen=True, slots=True)
class BlobsConfig:
    """Room for everything else that peers give."""

    quota: int = _key(4096, _integer(0, 2**40), "MiB that files of submissions and steps may take; 0: no limit")


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """Where metrics go beside ``metrics.jsonl``, which is always written."""

    tensorboard: bool | str = _key(False, _switch_or_folder, "write metrics for TensorBoard as well: true, or a folder")
    wandb: str = _key("", _project, "a Weights & Biases project that gets the metrics too")


@dataclass(frozen=True, slots=True)
class DevnetConfig:
    """What only a development network may ask of a node."""

    cheat: str = _key("", _choice(*CHEATS), "how to cheat, for tests of a development network")
    pause_at_step: int = _key(0, _integer(0, 2**31), "the node works on no step after this one; 0: no end")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of ``farflung.toml``; addresses are multiaddr texts."""

    name: str = _key("node", _name, "shown to people beside the node's id")
    listen: tuple[str, ...] = _key(
        ("/ip4/0.0.0.0/tcp/4001",),
        _list(1, MAX_ADDRESSES, _own_address),
        "where others can dial this node; port 0 takes a free one",
    )
    bootstrap: tuple[str, ...] = _key((), _list(0, 64, _peer_address), "peers to ask first, each with its /p2p/…")
    willing: tuple[str, ...] = _key(WILLING, _roles, "the roles that this node may take")
    log_level: str = _key("info", _choice("debug", "info", "warning", "error"), "the least that is logged")
    history: str = _key("all", _choice("all", "recent"), "all: keep every log entry; recent: drop old, final ones")
    threads: int = _key(1, _integer(1, 1024), "threads of each child process that computes")
    engine: str = _key("auto", _choice(*ENGINES), "what generates: torch, vllm, or auto for the better")
    tensor_parallel: int = _key(1, _integer(1, 64), "GPUs that vLLM shards the model over; on a CPU its processes")
    trainer: TrainerConfig = TrainerConfig()
    bulk: BulkConfig = BulkConfig()
    weights: WeightsConfig = WeightsConfig()
    blobs: BlobsConfig = BlobsConfig()
    tracking: TrackingConfig = TrackingConfig()
    devnet: DevnetConfig = DevnetConfig()


@dataclass(frozen=True, slots=True)
class Key:
    """One key as it was declared. ``name`` is ``key`` or ``section.key``, ``default`` a TOML value."""

    name: str
    default: object
    check: Check
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
        """The value that ``text`` stands for outside of TOML; a text that is none is left to ``check``."""
        if isinstance(self.default, list):
            return [item.strip() for item in text.split(",") if item.strip()]
        if isinstance(self.default, bool):
            return {"true": True, "false": False}.get(text, text)
        if isinstance(self.default, int) and re.fullmatch(r"-?[0-9]{1,18}", text):
            return int(text)
        return text


def _keys(kind: type[Any], section: str = "") -> Iterator[Key]:
    for each in fields(kind):
        if each.metadata:
            default = list(each.default) if isinstance(each.default, tuple) else each.default
            yield Key(section + each.name, default, each.metadata["check"], each.metadata["meaning"])
    for each in fields(kind):
        if not each.metadata:
            yield from _keys(type(each.default), f"{each.name}.")


KEYS: Final = {key.name: key for key in _keys(Config)}
"""Every key of ``farflung.toml``, by name."""
_SECTIONS: Final[Mapping[str, type[Any]]] = {
    each.name: type(each.default) for each in fields(Config) if not each.metadata
}


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
    flags = {} if flags is None else flags
    for name, value in flags.items():
        if (problem := KEYS[name].check(value)) is not None:
            raise UserError(f"{KEYS[name].flag}: {problem}", "correct the command line")
    return _config({**_read_file(path, required=required), **_read_environment(environment), **flags})


def _config(values: Mapping[str, object]) -> Config:
    tables: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        tables[section][key] = tuple(value) if isinstance(value, list) else value
    return Config(**tables[""], **{section: kind(**tables[section]) for section, kind in _SECTIONS.items()})


def _read_file(path: Path, *, required: bool) -> dict[str, object]:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise UserError(f"{path}: there is no such file", "name a farflung.toml with --config") from None
        return {}
    except OSError:
        pass  # reading it says what is wrong
    return _read_toml(read_text(path, "make it readable for this user"), path)


def _read_toml(text: str, path: Path) -> dict[str, object]:
    values: dict[str, object] = {}

    def mistake(name: str, problem: str, remedy: str) -> UserError:
        return UserError(f"{path}: line {toml_line(text, name.split('.'))}: {problem}", remedy)

    for key, value in toml_table(text, path).items():
        if key not in _SECTIONS:
            values[key] = value
        elif isinstance(value, dict):
            values |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            raise mistake(key, f"{key}: expected a section: [{key}]", "correct the line or delete it")
    for name, value in values.items():
        if name not in KEYS:
            section = name.partition(".")[0] if name.partition(".")[0] in _SECTIONS else ""
            known = ", ".join(key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == section)
            raise mistake(name, f"unknown key {name!r}", f"known keys are {known}")
        if (problem := KEYS[name].check(value)) is not None:
            raise mistake(name, f"{name}: {problem}", "correct the value or delete the line")
    return values


def toml_table(text: str, path: Path, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The table that ``text`` describes. Raises ``UserError`` with the line of ``path`` where it is not TOML."""
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except RecursionError:
        raise UserError(f"{path}: brackets stand too deep in each other", "no key of it needs more than one") from None
    except ValueError as error:  # of tomllib, and of Python for an integer of thousands of digits
        found = re.fullmatch(r"(.*) \(at line ([0-9]+), column ([0-9]+)\)", str(error))
        line, what = (found[2], f"{found[1]}, column {found[3]}") if found else (text.count("\n") + 1, str(error))
        raise UserError(f"{path}: line {line}: not TOML: {what}", "correct that line") from None


def toml_line(text: str, where: Sequence[str | int]) -> int | None:
    """The line (from 1) on which the statement begins that makes ``where`` (keys, and indices of sections that repeat)
    in a valid TOML text; None without one.

    TOML has too many ways to write a key to look for one: one line more is read at a time, until the key is there.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    began = 0
    for count in range(1, len(lines) + 1):
        try:
            value: Any = tomllib.loads("\n".join(lines[:count]))
        except ValueError:
            continue  # inside a statement of several lines
        try:
            for part in where:
                value = value[part]
        except (LookupError, TypeError):
            began = count
            continue
        while not lines[began].strip() or lines[began].lstrip().startswith("#"):
            began += 1
        return began + 1
    return None


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    known = {key.variable: key for key in KEYS.values()}
    values: dict[str, object] = {}
    for variable in sorted(environment):
        key = known.get(variable)
        if key is not None:
            value = key.decode(environment[variable])
            if (problem := key.check(value)) is not None:
                raise UserError(f"{variable}: {problem}", "correct the variable or unset it")
            values[key.name] = value
        elif variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and (meant := _meant(variable, known)):
            raise UserError(f"{variable}: there is no such variable", f"{meant} is meant, or unset it")
    return values


def _meant(variable: str, known: Collection[str]) -> str | None:
    """The variable of which this one is a slip of the pen. Others may use our prefix for what is theirs."""
    return next(iter(difflib.get_close_matches(variable, known, n=1, cutoff=0.9)), None)


def without_overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what would override or replace a node's own file."""
    ours = {key.variable for key in KEYS.values()} | {"FARFLUNG_CONFIG", "FARFLUNG_DATA_DIR"}
    return {name: value for name, value in environment.items() if name not in ours}


# Writing


def write(config: Config, path: Path) -> None:
    """Write ``config`` so that ``load`` gives it back. Raises ``UserError`` where the file cannot be written."""
    values = asdict(config)
    for section in _SECTIONS:
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
    with os_errors(path, "cannot be written", "check the folder's rights and room"):
        write_atomic(path, text.encode())
