"""A node's configuration: command-line flags, environment variables and ``farflung.toml``, in this order of precedence.

1. ``node.config_keys`` has the keys, their variables and flags. What no source names has its default.
2. A mistake ends the start with one line that names its file and line, its variable or its flag.

::

    name = "node-1"                                      # shown to people; at most 32 printable ASCII characters
    listen = ["/ip4/0.0.0.0/tcp/4001"]                   # where others can dial this node; port 0 takes a free one
    bootstrap = ["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…"]
    willing = ["trainer", "relay", "validator", "inference"]
    log_level = "info"                                   # debug, info, warning or error
    history = "all"                                      # "recent": a node that keeps no old log entries
    threads = 1                                          # threads of each child process that computes
    engine = "auto"                                      # what generates: "auto", "torch" or "vllm"
    tensor_parallel = 1                                  # GPUs that vLLM shards a model over

    [trainer]
    processes = 1                                        # processes (on GPUs: one each) that share the model
    recompute = "auto"                                   # activations: "on" saves memory, "off" saves time
    eval_every = 0                                       # versions from one evaluation to the next; 0: none
    eval_questions = 64                                  # held-out questions of each task
    eval_samples = 1                                     # answers to each
    eval_greedy = false                                  # the likeliest tokens instead of sampled ones

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

    [tracking]                                           # beside metrics.jsonl, which is always written
    tensorboard = false                                  # true, or a folder
    wandb = ""                                           # a Weights & Biases project

    [devnet]                                             # only read in a development network
    cheat = ""                                           # "wrong-weights" or "forged-reward"
    pause_at_step = 0                                    # the trainer stops for good before the step after this one
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from node.config_keys import DEFAULT_LISTEN, KEYS, OTHER_VARIABLES, PREFIX, WILLING
from node.errors import UserError
from node.store.durable_files import write_atomic


@dataclass(frozen=True, slots=True)
class DevnetConfig:
    """What only a development network may ask of a node."""

    cheat: str = ""
    pause_at_step: int = 0


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How this node trains when it is the trainer."""

    processes: int = 1
    recompute: str = "auto"
    eval_every: int = 0
    eval_questions: int = 64
    eval_samples: int = 1
    eval_greedy: bool = False


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
class TrackingConfig:
    """Where metrics go beside ``metrics.jsonl``. ``tensorboard`` may name a folder."""

    tensorboard: bool | str = False
    wandb: str = ""


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
    engine: str = "auto"
    tensor_parallel: int = 1
    trainer: TrainerConfig = TrainerConfig()
    bulk: BulkConfig = BulkConfig()
    weights: WeightsConfig = WeightsConfig()
    tracking: TrackingConfig = TrackingConfig()
    devnet: DevnetConfig = DevnetConfig()


SECTIONS: Final = {
    "trainer": TrainerConfig,
    "bulk": BulkConfig,
    "weights": WeightsConfig,
    "tracking": TrackingConfig,
    "devnet": DevnetConfig,
}
"""What a section of the file stands for."""


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
