"""A compute domain's genesis: the task, the model, the recipe and the rules that all its nodes share.

1. The body is a canonical array; ``domain id = SHA-256("farflung/domain/v1\\0" ‖ body)``.
2. The genesis travels as ``[body, signature]``; the creator named in the body signs the body (``identity.GENESIS``).
3. Electors and named validators are strictly ascending, so that a set has one encoding. There is an elector.
4. Task parameters are the ASCII text of a JSON object; the text itself is pinned, not what it decodes to.
5. "micro" is millionths. Learning rates are in units of 10⁻¹² ("pico"). Times are milliseconds.
6. The default timings of a devnet are ten times shorter than a public domain's or more.
7. Target lengths are strictly ascending and no longer than a response may be. Where there are any, the recipe's budget
   prompt has one place ``{}`` for the number.

``parse_genesis`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import pairwise
from typing import Any, ClassVar, Final, NoReturn, Self

from protocol import codec, identity
from protocol.codec import Array, Bytes, Int, Many, Optional, Schema, Text
from protocol.constants import FORMAT, MAX_GENESIS_BYTES, MAX_MANIFEST_BYTES, MILLION
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.records import Blob

ID_CONTEXT: Final = b"farflung/domain/v1\0"
ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
DTYPES: Final = ("float32", "bfloat16")
TASK_KINDS: Final = ("reasoning-gym", "jsonl", "code", "package")
TASK_KINDS_WITH_DATA: Final = ("jsonl", "code")
NORMALISATIONS: Final = ("token", "sequence")
MAX_TARGET_LENGTHS: Final = 64
MAX_ELECTORS: Final = 64
MAX_NAMED_VALIDATORS: Final = 256
MAX_TASKS: Final = 64

_COUNT = Int(1, 2**20)
_MICRO = Int(0, 1000 * MILLION)
_SHARE = Int(0, MILLION)
_MS = Int(1, 2**40)


@dataclass(frozen=True, slots=True)
class Part:
    """Base of the genesis' flat parts: fields in declaration order, each with a schema."""

    SCHEMA: ClassVar[tuple[tuple[str, Schema], ...]] = ()

    def to_value(self) -> list[Any]:
        """The fields in declaration order, ready for ``codec.encode``."""
        return [getattr(self, item.name) for item in fields(self)]

    @classmethod
    def from_value(cls, value: codec.Value) -> Self:
        """The inverse of ``to_value`` for a value that was checked against ``SCHEMA``."""
        return cls(*value)


@dataclass(frozen=True, slots=True)
class Recipe(Part):
    """How rollouts are made and trained on. The fields' units: counts, tokens, micro, pico (learning rate).

    ``normalisation``: whether every token of an optimizer step weighs the same, or every response. ``target_lengths``
    in tokens (none: no length control): the prompt's seed draws one of them, ``budget_prompt`` tells it to the model,
    and each token more or less than it takes ``length_penalty`` (micro) off the reward.
    """

    SCHEMA: ClassVar = (
        ("async_level", Int(0, 64)),
        ("group_size", Int(1, 256)),
        ("groups_per_submission", Int(1, 1024)),
        ("groups_per_step", Int(1, 2**16)),
        ("max_prompt_tokens", _COUNT),
        ("max_response_tokens", _COUNT),
        ("temperature", Int(1, 100 * MILLION)),
        ("min_p", _SHARE),
        ("clip_low", _SHARE),
        ("clip_high", _MICRO),
        ("clip_max", Int(MILLION, 1000 * MILLION)),
        ("importance_max", Int(MILLION, 1000 * MILLION)),
        ("learning_rate", Int(0, 10**12)),
        ("warmup_steps", Int(0, 2**20)),
        ("weight_decay", _MICRO),
        ("grad_clip", _MICRO),
        ("entropy", _MICRO),
        ("kl", _MICRO),
        ("inner_steps", Int(1, 1024)),
        ("normalisation", Text(16, NORMALISATIONS)),
        ("target_lengths", Many(_COUNT, most=MAX_TARGET_LENGTHS)),
        ("length_penalty", _SHARE),
        ("budget_prompt", Text(200)),
    )

    async_level: int
    group_size: int
    groups_per_submission: int
    groups_per_step: int
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: int
    min_p: int
    clip_low: int
    clip_high: int
    clip_max: int
    importance_max: int
    learning_rate: int
    warmup_steps: int
    weight_decay: int
    grad_clip: int
    entropy: int
    kl: int
    inner_steps: int
    normalisation: str
    target_lengths: tuple[int, ...]
    length_penalty: int
    budget_prompt: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_lengths", tuple(self.target_lengths))

    def problem(self) -> str | None:
        """What is wrong between fields that each fit their own schema, or None."""
        targets = self.target_lengths
        if any(left >= right for left, right in pairwise(targets)):
            return "the target lengths are not strictly ascending"
        if targets and targets[-1] > self.max_response_tokens:
            return "a target length is longer than a response may be"
        if targets and self.budget_prompt.count("{}") != 1:
            return "the budget prompt needs one {} for the target length"
        return None


@dataclass(frozen=True, slots=True)
class Timings(Part):
    """Milliseconds: between presences, between attempts to cut, a trainer's silence that ends its term, the wait
    for a verdict before a submission counts as late, and the wait after the first peer before a first term."""

    SCHEMA: ClassVar = (
        ("presence_ms", _MS),
        ("epoch_ms", _MS),
        ("term_silence_ms", _MS),
        ("verdict_wait_ms", _MS),
        ("founding_wait_ms", _MS),
    )

    presence_ms: int
    epoch_ms: int
    term_silence_ms: int
    verdict_wait_ms: int
    founding_wait_ms: int


@dataclass(frozen=True, slots=True)
class Policy(Part):
    """How many nodes take which role (``*_per_million`` of the nodes present), the reputation (micro) that makes
    a validator where the genesis names none such, and the least share (micro) of a submission's groups to replay."""

    SCHEMA: ClassVar = (
        ("min_nodes", _COUNT),
        ("relays_min", Int(0, 2**20)),
        ("relays_per_million", _SHARE),
        ("validators_min", Int(0, 2**20)),
        ("validators_per_million", _SHARE),
        ("validator_reputation", _SHARE),
        ("audit_share", _SHARE),
    )

    min_nodes: int
    relays_min: int
    relays_per_million: int
    validators_min: int
    validators_per_million: int
    validator_reputation: int
    audit_share: int


@dataclass(frozen=True, slots=True)
class Thresholds(Part):
    """Limits of the rollout checks, all in micro; what each bounds is defined in ``proofs.checks``. They are for the
    domain's compute dtype, audited in float32, and hold for all engines that it admits.

    ``deficit_clip`` is in units of the score; ``deficit_honest`` and ``deficit_mean``, an honest author's largest and a
    forger's least mean deficit, are in millionths of the clip.
    """

    SCHEMA: ClassVar = (
        ("deficit_clip", Int(1, 100 * MILLION)),
        ("deficit_honest", Int(1, MILLION)),
        ("deficit_mean", Int(1, MILLION)),
        ("mismatch_share", _SHARE),
        ("activation_mismatch_share", _SHARE),
        ("mantissa_mean", Int()),
        ("mantissa_median", Int()),
        ("logprob_error", Int()),
    )

    deficit_clip: int
    deficit_honest: int
    deficit_mean: int
    mismatch_share: int
    activation_mismatch_share: int
    mantissa_mean: int
    mantissa_median: int
    logprob_error: int


@dataclass(frozen=True, slots=True)
class Model:
    """The model: configuration and tokenizer blobs, version 0's manifest blob and hash of the whole (32 bytes),
    and the dtype in which every node generates."""

    SCHEMA: ClassVar[Array] = Array(
        (
            ("architecture", Text(16, ARCHITECTURES)),
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
    scores come from, ``data`` the file of a "jsonl" or "code" task and of no other."""

    SCHEMA: ClassVar[Array] = Array(
        (
            ("kind", Text(16, TASK_KINDS)),
            ("name", Text(64)),
            ("weight", Int(1, MILLION)),
            ("parameters", Text(2000)),
            ("version", Text(200)),
            ("data", Optional(Blob.SCHEMA)),
        )
    )

    kind: str
    name: str
    weight: int
    parameters: str
    version: str
    data: Blob | None

    def to_value(self) -> list[Any]:
        """The fields in declaration order, ready for ``codec.encode``."""
        data = None if self.data is None else self.data.to_value()
        return [self.kind, self.name, self.weight, self.parameters, self.version, data]


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


def default_timings(devnet: bool) -> Timings:
    """The timings that a new domain starts from."""
    if devnet:
        return Timings(500, 500, 6_000, 6_000, 1_000)
    return Timings(5_000, 10_000, 60_000, 60_000, 10_000)


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
    kind, name, weight, parameters, version, data = value
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
    return Task(kind, name, weight, parameters, version, None if data is None else Blob(*data))


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
