"""The keys of ``farflung.toml``: what each may be, and what it means.

1. A key's variable is ``FARFLUNG_`` and its name in capitals, a devnet key's ``FARFLUNG_DEVNET_``; lists stand there
   with commas.
2. ``KEYS`` is the one list of all keys; docs/OPERATING.md explains each, and a test compares the two.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from node.weights.bulk import bulk_address as bulk
from protocol.errors import PeerError
from protocol.identity import node_id

WILLING: Final = ("trainer", "relay", "validator", "inference")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
ENGINES: Final = ("auto", "torch", "vllm")
HISTORIES: Final = ("all", "recent")
CHEATS: Final = ("", "wrong-weights", "forged-reward")
RECOMPUTE: Final = ("auto", "on", "off")
DEFAULT_LISTEN: Final = ("/ip4/0.0.0.0/tcp/4001",)

# A presence carries at most eight addresses of 128 characters; more could not be announced.
MAX_ADDRESSES: Final = 8
MAX_ADDRESS_LENGTH: Final = 128
MAX_BOOTSTRAP: Final = 64
MAX_THREADS: Final = 1024
MAX_TENSOR_PARALLEL: Final = 64
MAX_STEP: Final = 2**31
MAX_PROCESSES: Final = 64
MAX_BULK: Final = 4
"""A presence carries no more addresses for weights."""
MAX_RATE: Final = 10**6
MAX_CONNECTIONS: Final = 4096
MAX_QUESTIONS: Final = 1 << 16
MAX_SAMPLES: Final = 256
"""Answers to one question of an evaluation: a recipe's largest group."""
MAX_PATH: Final = 1024
MAX_PROJECT: Final = 128
MAX_ROOM: Final = 2**40

PREFIX: Final = "FARFLUNG_"
OTHER_VARIABLES: Final = ("FARFLUNG_CONFIG", "FARFLUNG_DATA_DIR", "FARFLUNG_PYTHON")
"""Variables that are no keys: where the file and the node's folder are, and what the installer runs."""

_NO_PROJECT = re.compile(r"[/\\#?%:]")
"""What Weights & Biases allows in no project's name."""
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})(?:/p2p/([1-9A-HJ-NP-Za-km-z]+))?")


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


def _text(value: object, most: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= most and value.isascii() and value.isprintable()


def _switch_or_folder(value: object) -> str | None:
    fits = isinstance(value, bool) or _text(value, MAX_PATH)
    return None if fits else "expected true, false or the path of a folder in printable ASCII"


def _project(value: object) -> str | None:
    fits = value == "" or (_text(value, MAX_PROJECT) and not _NO_PROJECT.search(str(value)))
    return None if fits else f"a project is at most {MAX_PROJECT} printable ASCII characters, none of /\\#?%:"


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
        Key("engine", "auto", partial(_choice, ENGINES), "what generates: torch, vllm, or auto for the better"),
        Key(
            "tensor_parallel",
            1,
            partial(_integer, 1, MAX_TENSOR_PARALLEL),
            "GPUs that vLLM shards the model over; on a CPU its processes",
        ),
        Key(
            "trainer.processes",
            1,
            partial(_integer, 1, MAX_PROCESSES),
            "processes that share the model when this node is the trainer; on GPUs one each",
        ),
        Key(
            "trainer.recompute",
            "auto",
            partial(_choice, RECOMPUTE),
            "compute activations again for the backward pass: on, off, or auto: where memory is short",
        ),
        Key(
            "trainer.eval_every",
            0,
            partial(_integer, 0, MAX_STEP),
            "evaluate each version whose number this divides when this node is the trainer; 0: none",
        ),
        Key("trainer.eval_questions", 64, partial(_integer, 1, MAX_QUESTIONS), "held-out questions of each task"),
        Key("trainer.eval_samples", 1, partial(_integer, 1, MAX_SAMPLES), "answers to each of them"),
        Key("trainer.eval_greedy", False, _boolean, "take the likeliest tokens instead of sampling"),
        Key("bulk.listen", [], _bulk_listen, "where weights are served; left out: as listen, at its port + 10000"),
        Key("bulk.announce", [], _announce, "where others are told to fetch weights, instead of bulk.listen"),
        Key("bulk.proxied", False, _boolean, "whether a reverse proxy stands in front of bulk.listen"),
        Key("bulk.rate", 0, partial(_integer, 0, MAX_RATE), "megabits a second of weights sent at most; 0: no limit"),
        Key("bulk.peer_rate", 0, partial(_integer, 0, MAX_RATE), "megabits a second to one peer; 0: no limit"),
        Key("bulk.connections", 512, partial(_integer, 8, MAX_CONNECTIONS), "connections for weights at once"),
        Key("bulk.peer_connections", 32, partial(_integer, 1, MAX_CONNECTIONS), "connections of one peer at once"),
        Key("weights.quota", 0, partial(_integer, 0, MAX_ROOM), "MiB that weights may take on the disk; 0: no limit"),
        Key("weights.reserve", 512, partial(_integer, 0, MAX_ROOM), "MiB of the disk that weights leave free"),
        Key(
            "tracking.tensorboard",
            False,
            _switch_or_folder,
            "write metrics for TensorBoard: true, or a folder instead of tensorboard/ in the node's own",
        ),
        Key("tracking.wandb", "", _project, "a Weights & Biases project to send metrics to"),
        Key("devnet.cheat", "", partial(_choice, CHEATS), "how to cheat, for tests of a development network"),
        Key(
            "devnet.pause_at_step", 0, partial(_integer, 0, MAX_STEP), "nothing is generated after this step; 0: never"
        ),
    )
}
"""Every key of ``farflung.toml``, by name."""
