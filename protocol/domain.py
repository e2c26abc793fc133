"""A compute domain's genesis: the task, the model, the recipe and the rules that all its nodes share.

1. The body is a canonical array; ``domain id = SHA-256("farflung/domain/v1\\0" ‖ body)``.
2. The genesis travels as ``[body, signature]``; the creator named in the body signs the body (``identity.GENESIS``).
3. Electors and named validators are strictly ascending, so that a set has one encoding. There is an elector.
4. Task parameters are the ASCII text of a JSON object; the text itself is pinned, not what it decodes to.
5. A task may be restricted to a set of its items, a blob (``protocol.taskset``). Its numbers are in ``protocol.rules``.

``parse_genesis`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any, ClassVar, Final, NoReturn

from protocol import codec, identity
from protocol.codec import Array, Bytes, Int, Many, Optional, Text
from protocol.constants import FORMAT, MAX_GENESIS_BYTES, MAX_MANIFEST_BYTES, MAX_SET_BYTES, MILLION
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.records import Blob
from protocol.rules import Part as Part
from protocol.rules import Policy as Policy
from protocol.rules import Recipe as Recipe
from protocol.rules import Thresholds as Thresholds
from protocol.rules import Timings as Timings
from protocol.rules import default_timings as default_timings

ID_CONTEXT: Final = b"farflung/domain/v1\0"
MAX_ARCHITECTURE: Final = 64
DTYPES: Final = ("float32", "bfloat16")
TASK_KINDS: Final = ("reasoning-gym", "jsonl", "code", "package")
TASK_KINDS_WITH_DATA: Final = ("jsonl", "code")
MAX_ELECTORS: Final = 64
MAX_NAMED_VALIDATORS: Final = 256
MAX_TASKS: Final = 64


@dataclass(frozen=True, slots=True)
class Model:
    """The model: its architecture (``model_type``), configuration and tokenizer blobs, version 0's manifest blob and
    hash of the whole (32 bytes), and the dtype in which every node generates."""

    SCHEMA: ClassVar[Array] = Array(
        (
            ("architecture", Text(MAX_ARCHITECTURE)),
            ("config", Blob.SCHEMA),
            ("tokenizer", Blob.SCHEMA),
            ("manifest", Array((("hash", Bytes(32)), ("size", Int(1, MAX_MANIFEST_BYTES))))),
            ("whole", codec.HASH),
            ("compute_dtype", Text(16, DTYPES)),
        )
    )

    architecture: str
    config: Blob
    tokenizer: Blob
    manifest: Blob
    whole: bytes
    compute_dtype: str

    def to_value(self) -> list[Any]:
        """The fields in declaration order, ready for ``codec.encode``."""
        blobs = [blob.to_value() for blob in (self.config, self.tokenizer, self.manifest)]
        return [self.architecture, *blobs, self.whole, self.compute_dtype]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the mix. ``weight`` is its integer share, ``parameters`` JSON text, ``version`` what questions and
    scores come from, ``data`` the file of a "jsonl" or "code" task and of no other. ``items`` is the blob of the set
    (``protocol.taskset``) that its questions come from; None: all its items."""

    SCHEMA: ClassVar[Array] = Array(
        (
            ("kind", Text(16, TASK_KINDS)),
            ("name", Text(64)),
            ("weight", Int(1, MILLION)),
            ("parameters", Text(2000)),
            ("version", Text(200)),
            ("data", Optional(Blob.SCHEMA)),
            ("items", Optional(Array((("hash", Bytes(32)), ("size", Int(1, MAX_SET_BYTES)))))),
        )
    )

    kind: str
    name: str
    weight: int
    parameters: str
    version: str
    data: Blob | None
    items: Blob | None = None

    def to_value(self) -> list[Any]:
        """The fields in declaration order, ready for ``codec.encode``."""
        data, items = (None if blob is None else blob.to_value() for blob in (self.data, self.items))
        return [self.kind, self.name, self.weight, self.parameters, self.version, data, items]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The blobs that this task names: a newcomer needs them."""
        return tuple(blob for blob in (self.data, self.items) if blob is not None)


@dataclass(frozen=True, slots=True)
class Domain:
    """A verified genesis. ``id`` and all keys have 32 bytes, ``devnet`` and ``private`` are 0 or 1. The nodes of a
    private domain give weights to one another only, and encrypted."""

    id: bytes
    body: bytes
    name: str
    creator: bytes
    devnet: int
    private: int
    electors: tuple[bytes, ...]
    validators: tuple[bytes, ...]
    model: Model
    tasks: tuple[Task, ...]
    recipe: Recipe
    timings: Timings
    policy: Policy
    thresholds: Thresholds


_BODY: Final = Array(
    (
        ("format", Int(FORMAT, FORMAT)),
        ("name", Text(64)),
        ("creator", codec.KEY),
        ("devnet", Int(0, 1)),
        ("private", Int(0, 1)),
        ("electors", Many(codec.KEY, most=MAX_ELECTORS, least=1)),
        ("validators", Many(codec.KEY, most=MAX_NAMED_VALIDATORS)),
        ("model", Model.SCHEMA),
        ("tasks", Many(Task.SCHEMA, most=MAX_TASKS, least=1)),
        ("recipe", Array(Recipe.SCHEMA)),
        ("timings", Array(Timings.SCHEMA)),
        ("policy", Array(Policy.SCHEMA)),
        ("thresholds", Array(Thresholds.SCHEMA)),
    )
)
_WIRE: Final = Array((("body", Bytes(most=MAX_GENESIS_BYTES)), ("signature", codec.SIGNATURE)))


def domain_id(body: bytes) -> bytes:
    """The 32-byte id of the domain with this genesis body."""
    return sha256(ID_CONTEXT + body).digest()


def make_genesis(
    creator: Identity,
    *,
    name: str,
    devnet: bool,
    private: bool = False,
    electors: tuple[bytes, ...],
    validators: tuple[bytes, ...],
    model: Model,
    tasks: tuple[Task, ...],
    recipe: Recipe,
    timings: Timings,
    policy: Policy,
    thresholds: Thresholds,
) -> bytes:
    """The signed genesis of a new domain; electors and validators are sorted here.

    Raises ``LocalError`` with what is wrong for a domain that others would refuse.
    """
    body = codec.encode(
        [
            FORMAT,
            name,
            creator.node,
            int(devnet),
            int(private),
            sorted(electors),
            sorted(validators),
            model.to_value(),
            [task.to_value() for task in tasks],
            recipe.to_value(),
            timings.to_value(),
            policy.to_value(),
            thresholds.to_value(),
        ]
    )
    data = codec.encode([body, creator.sign(identity.GENESIS, body)])
    try:
        parse_genesis(data)
    except PeerError as error:
        raise LocalError(str(error)) from None
    return data


def parse_genesis(data: bytes) -> Domain:
    """Parse and verify a signed genesis; raises ``PeerError``."""
    body, signature = codec.parse(data, _WIRE, max_bytes=MAX_GENESIS_BYTES, what="genesis")
    value = codec.parse(body, _BODY, max_bytes=MAX_GENESIS_BYTES, what="genesis")
    _, name, creator, devnet, private, electors, validators, model, tasks, recipe, timings, policy, thresholds = value
    if not name:
        raise PeerError("genesis: the domain has no name")
    _ascending(electors, "electors")
    _ascending(validators, "validators")
    identity.verify(creator, identity.GENESIS, body, signature, "genesis")
    parsed = Recipe.from_value(recipe)
    if (problem := parsed.problem()) is not None:
        raise PeerError(f"genesis: {problem}")
    architecture, config, tokenizer, manifest, whole, dtype = model
    return Domain(
        id=domain_id(body),
        body=body,
        name=name,
        creator=creator,
        devnet=devnet,
        private=private,
        electors=tuple(electors),
        validators=tuple(validators),
        model=Model(architecture, Blob(*config), Blob(*tokenizer), Blob(*manifest), whole, dtype),
        tasks=tuple(_task(task) for task in tasks),
        recipe=parsed,
        timings=Timings.from_value(timings),
        policy=Policy.from_value(policy),
        thresholds=Thresholds.from_value(thresholds),
    )


def _ascending(keys: list[bytes], what: str) -> None:
    if any(left >= right for left, right in pairwise(keys)):
        raise PeerError(f"genesis: {what} are not strictly ascending")


def _task(value: list[Any]) -> Task:
    kind, name, weight, parameters, version, data, items = value
    if not name:
        raise PeerError("genesis: a task has no name")
    if (kind in TASK_KINDS_WITH_DATA) != (data is not None):
        raise PeerError(f"genesis: task {name}: a task of kind {kind} and a data blob do not go together, or lack one")
    try:
        decoded = json.loads(parameters, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise PeerError(f"genesis: task {name}: the parameters are not JSON") from None
    if type(decoded) is not dict:
        raise PeerError(f"genesis: task {name}: the parameters are not a JSON object")
    found = (None if blob is None else Blob(*blob) for blob in (data, items))
    return Task(kind, name, weight, parameters, version, *found)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
