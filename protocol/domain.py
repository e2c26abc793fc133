"""A compute domain's genesis: the task, the model, the recipe and the rules that all its nodes share.

1. The body is a canonical array; ``domain id = SHA-256("farflung/domain/v1\\0" ‖ body)``.
2. The genesis travels as ``[body, signature]``; the creator named in the body signs the body (``identity.GENESIS``).
3. Electors and named validators are strictly ascending, so that a set has one encoding. There is an elector.
   Named trainers stand in the order in which they are called upon, none twice. Whoever is named is a member from the
   beginning.
4. Task parameters are the ASCII text of a JSON object; the text itself is pinned, not what it decodes to.
5. A task may be restricted to a set of its items, a blob (``protocol.taskset``). Its numbers are in ``protocol.rules``.

``parse_genesis`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Final, NoReturn

from protocol import codec, identity
from protocol.codec import Fields, Hash, Int, Key, Many, Optional, Text
from protocol.constants import MAX_GENESIS_BYTES, MAX_MANIFEST_BYTES, MAX_SET_BYTES, MILLION, PROTOCOL
from protocol.errors import PeerError, ours
from protocol.identity import Identity
from protocol.records import Blob, blob_of
from protocol.rules import Admission as Admission
from protocol.rules import Part as Part
from protocol.rules import Policy as Policy
from protocol.rules import Recipe as Recipe
from protocol.rules import Thresholds as Thresholds
from protocol.rules import Timings as Timings
from protocol.rules import default_admission as default_admission
from protocol.rules import default_timings as default_timings

ID_CONTEXT: Final = b"farflung/domain/v1\0"
MAX_ARCHITECTURE: Final = 64
DTYPES: Final = ("float32", "bfloat16")
TASK_KINDS: Final = ("reasoning-gym", "jsonl", "code", "package")
TASK_KINDS_WITH_DATA: Final = ("jsonl", "code")
MAX_ELECTORS: Final = 64
MAX_NAMED_VALIDATORS: Final = 256
MAX_NAMED_TRAINERS: Final = 256
MAX_TASKS: Final = 64

Flag = Annotated[int, Int(0, 1)]


@dataclass(frozen=True, slots=True)
class Model(Fields):
    """The model: its architecture (``model_type``), configuration and tokenizer blobs, version 0's manifest blob and
    hash of the whole (32 bytes), and the dtype in which every node generates."""

    architecture: Annotated[str, Text(MAX_ARCHITECTURE)]
    config: Blob
    tokenizer: Blob
    manifest: Annotated[Blob, blob_of(MAX_MANIFEST_BYTES)]
    whole: Hash
    compute_dtype: Annotated[str, Text(16, DTYPES)]


@dataclass(frozen=True, slots=True)
class Task(Fields):
    """One task of the mix. ``weight`` is its integer share, ``parameters`` JSON text, ``version`` what questions and
    scores come from, ``data`` the file of a "jsonl" or "code" task and of no other. ``items`` is the blob of the set
    (``protocol.taskset``) that its questions come from; None: all its items."""

    kind: Annotated[str, Text(16, TASK_KINDS)]
    name: Annotated[str, Text(64)]
    weight: Annotated[int, Int(1, MILLION)]
    parameters: Annotated[str, Text(2000)]
    version: Annotated[str, Text(200)]
    data: Blob | None
    items: Annotated[Blob | None, Optional(blob_of(MAX_SET_BYTES))] = None

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The blobs that this task names: a newcomer needs them."""
        return tuple(blob for blob in (self.data, self.items) if blob is not None)


@dataclass(frozen=True, slots=True)
class Domain(Fields):
    """A verified genesis. ``id`` and all keys have 32 bytes, ``devnet`` and ``private`` are 0 or 1. The nodes of a
    private domain give weights to one another only, and encrypted. ``trainers`` may train before anybody has earned
    standing, the first one first."""

    FORMAT = PROTOCOL

    name: Annotated[str, Text(64)]
    creator: Key
    devnet: Flag
    private: Flag
    electors: Annotated[tuple[bytes, ...], Many(codec.KEY, most=MAX_ELECTORS, least=1)]
    validators: Annotated[tuple[bytes, ...], Many(codec.KEY, most=MAX_NAMED_VALIDATORS)]
    trainers: Annotated[tuple[bytes, ...], Many(codec.KEY, most=MAX_NAMED_TRAINERS)]
    admission: Admission
    model: Model
    tasks: Annotated[tuple[Task, ...], Many(Task.ARRAY, most=MAX_TASKS, least=1)]
    recipe: Recipe
    timings: Timings
    policy: Policy
    thresholds: Thresholds
    body: bytes
    id: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", sha256(ID_CONTEXT + self.body).digest())

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The blobs that the genesis names: whoever takes part needs them."""
        model = self.model
        return (model.config, model.tokenizer, model.manifest, *(blob for task in self.tasks for blob in task.blobs))

    @property
    def named(self) -> frozenset[bytes]:
        """Everybody whom the genesis names: members from the beginning."""
        return frozenset((self.creator, *self.electors, *self.validators, *self.trainers))


_WIRE: Final = codec.envelope(MAX_GENESIS_BYTES)


def make_genesis(
    creator: Identity,
    *,
    name: str,
    devnet: bool,
    private: bool = False,
    electors: tuple[bytes, ...],
    validators: tuple[bytes, ...],
    trainers: tuple[bytes, ...] = (),
    admission: Admission | None = None,
    model: Model,
    tasks: tuple[Task, ...],
    recipe: Recipe,
    timings: Timings,
    policy: Policy,
    thresholds: Thresholds,
) -> bytes:
    """The signed genesis of a new domain; electors and validators are sorted here. Without ``admission`` it is the
    default one (``protocol.rules``).

    Raises ``LocalError`` with what is wrong for a domain that others would refuse.
    """
    sets = tuple(sorted(electors)), tuple(sorted(validators))
    admission = default_admission(devnet=devnet, private=private) if admission is None else admission
    head = name, creator.node, int(devnet), int(private), *sets, trainers, admission
    domain = Domain(*head, model, tasks, recipe, timings, policy, thresholds, b"")
    body = codec.encode(domain.to_value())
    data = codec.encode([body, creator.sign(identity.GENESIS, body)])
    with ours():
        parse_genesis(data)
    return data


def parse_genesis(data: bytes) -> Domain:
    """Parse and verify a signed genesis; raises ``PeerError``."""
    body, signature = codec.parse(data, _WIRE, max_bytes=MAX_GENESIS_BYTES, what="genesis")
    _check_format(body)
    value = codec.parse(body, Domain.ARRAY, max_bytes=MAX_GENESIS_BYTES, what="genesis")
    domain = Domain.from_value(value, body=body)
    if not domain.name:
        raise PeerError("genesis: the domain has no name")
    for what, keys in (("electors", domain.electors), ("validators", domain.validators)):
        if any(left >= right for left, right in pairwise(keys)):
            raise PeerError(f"genesis: {what} are not strictly ascending")
    if len(set(domain.trainers)) < len(domain.trainers):
        raise PeerError("genesis: a trainer is named twice")
    identity.verify(domain.creator, identity.GENESIS, body, signature, "genesis")
    if (problem := domain.recipe.problem()) is not None:
        raise PeerError(f"genesis: {problem}")
    for task in domain.tasks:
        _check_task(task)
    return domain


def _check_format(body: bytes) -> None:
    """Refuse a genesis of another protocol with a word about it, whatever else it holds."""
    value = codec.decode(body, max_bytes=MAX_GENESIS_BYTES, what="genesis")
    found = value[0] if type(value) is list and value else None
    if type(found) is int and found != PROTOCOL:
        raise PeerError(f"genesis: this domain was made for protocol {found}, and this program speaks {PROTOCOL}")


def _check_task(task: Task) -> None:
    if not task.name:
        raise PeerError("genesis: a task has no name")
    what = f"genesis: task {task.name}"
    if (task.kind in TASK_KINDS_WITH_DATA) != (task.data is not None):
        raise PeerError(f"{what}: a task of kind {task.kind} and a data blob do not go together, or lack one")
    try:
        decoded = json.loads(task.parameters, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise PeerError(f"{what}: the parameters are not JSON") from None
    if type(decoded) is not dict:
        raise PeerError(f"{what}: the parameters are not a JSON object")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
