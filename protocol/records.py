"""The payloads of log entries: one class a kind, and the blob that a ``step`` entry names.

1. A payload is an array with exactly the fields of its class, in the order in which the class declares them.
2. Everything is an integer, bytes or printable ASCII. "micro" means millionths. Times are milliseconds measured
   by the author: they inform people and decide nothing.
3. ``join`` opens a feed (see ``protocol.log.entry``); ``leave`` and ``role`` change what its author stands for.
4. ``weights``: number 0 has no predecessor and no step; every other number has a predecessor. The ``step`` is
   also missing where unchanged weights are announced again.
5. ``verdict``: "accepted" goes with severity "none" and reason "ok" and neither appears elsewhere; "rejected" is
   "soft" or "hard"; "void" (nobody could decide, or the submission counts for nothing) is always "soft".
6. ``amend`` and ``absent`` carry what electors signed, with their signatures, ascending; what they mean see
   ``protocol.log.amendment`` and ``protocol.log.absence``. ``invite`` see ``protocol.log.admission``.
7. ``close`` and ``rebind`` carry a signature by the target's recovery key (see ``protocol.log.recovery``).

``parse_payload`` and ``StepBlob.parse`` raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Final

from protocol import codec
from protocol.codec import Array, Fields, Formatted, Hash, Int, Key, Many, Optional, Signature, Text
from protocol.constants import (
    MAX_BLOB_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_STEP_BLOB_BYTES,
    MAX_SUBMISSION_BYTES,
    MILLION,
)
from protocol.errors import LocalError, PeerError
from protocol.values import value

ROLES: Final = ("trainer", "relay", "validator", "inference", "none")
OUTCOMES: Final = ("accepted", "rejected", "void")
SEVERITIES: Final = ("none", "soft", "hard")

Count = Annotated[int, Int(0, 2**31 - 1)]
VOTES: Final = Many(Array((("elector", codec.KEY), ("signature", codec.SIGNATURE))), most=64, least=1)
"""Signatures of electors; 64 is ``protocol.domain.MAX_ELECTORS``."""


@value
class Payload(Fields):
    """Base of all payloads; ``KIND`` is the entry kind that carries the class."""

    KIND: ClassVar[str] = ""

    def problem(self) -> str | None:
        """What is wrong between fields that each fit their own schema, or None."""
        return None


@value
class Join(Payload):
    """Opens a feed. ``recovery`` is SHA-256 of the recovery public key, ``agent`` names the program."""

    KIND: ClassVar[str] = "join"

    recovery: Hash
    agent: Annotated[str, Text(64)]
    name: Annotated[str, Text(32)]


@value
class Leave(Payload):
    """The author no longer takes part; a later ``role`` entry brings it back."""

    KIND: ClassVar[str] = "leave"


@value
class Role(Payload):
    """The role that the author now stands for, one of ``ROLES``."""

    KIND: ClassVar[str] = "role"

    role: Annotated[str, Text(16, ROLES)]


@value
class Weights(Payload):
    """A version: ``manifest`` is the BLAKE3 of the manifest blob, ``whole`` the hash of all weight bytes, ``delta`` the
    BLAKE3 of the manifest (``delta_size`` bytes) of its difference to the predecessor, where there is one."""

    KIND: ClassVar[str] = "weights"

    term: Annotated[int, Int(1)]
    number: Annotated[int, Int()]
    predecessor: Hash | None
    manifest: Hash
    manifest_size: Annotated[int, Int(1, MAX_MANIFEST_BYTES)]
    whole: Hash
    size: Annotated[int, Int(1)]
    step: Hash | None
    delta: Hash | None = None
    delta_size: Annotated[int, Int(0, MAX_MANIFEST_BYTES)] = 0

    def problem(self) -> str | None:
        if (self.number == 0) != (self.predecessor is None):
            return "version 0 and no other has no predecessor"
        if self.number == 0 and self.step is not None:
            return "no step makes version 0"
        if (self.delta is None) != (self.delta_size == 0):
            return "a delta and its size go together"
        if self.number == 0 and self.delta is not None:
            return "version 0 differs from nothing"
        return None


@value
class Rollout(Payload):
    """Announces a submission of ``groups`` consecutive groups, ``responses`` responses and ``tokens`` response
    tokens in all, generated with the version whose entry id is ``weights``; the file has ``size`` bytes. ``signal`` of
    the groups have rewards that differ, so that something can be learnt from them: all nodes see when there is enough.
    """

    KIND: ClassVar[str] = "rollout"

    weights: Hash
    first_counter: Annotated[int, Int(0, 2**62)]
    groups: Annotated[int, Int(1, 2**16)]
    responses: Annotated[int, Int(1, 2**20)]
    tokens: Annotated[int, Int(1, 2**31 - 1)]
    submission: Hash
    size: Annotated[int, Int(1, MAX_SUBMISSION_BYTES)]
    signal: Annotated[int, Int(0, 2**16)]

    def problem(self) -> str | None:
        if not self.groups <= self.responses <= self.tokens:
            return "every group has a response and every response a token"
        if self.signal > self.groups:
            return "more groups have a signal than there are"
        return None


@value
class Verdict(Payload):
    """A validator's result for the rollout entry ``rollout``. ``score`` is in micro, a share; ``draw`` is the
    validator's signature over the submission (``protocol.work.schedule``); ``audited`` counts replayed groups."""

    KIND: ClassVar[str] = "verdict"

    rollout: Hash
    outcome: Annotated[str, Text(16, OUTCOMES)]
    severity: Annotated[str, Text(16, SEVERITIES)]
    reason: Annotated[str, Text(32)]
    score: Annotated[int, Int(0, MILLION)]
    draw: Signature
    audited: Annotated[int, Int(0, 2**16)]

    def problem(self) -> str | None:
        if not self.reason:
            return "a verdict gives a reason"
        accepted = self.outcome == "accepted"
        if accepted != (self.severity == "none") or accepted != (self.reason == "ok"):
            return "accepted, severity none and reason ok go together"
        if self.outcome == "void" and self.severity != "soft":
            return "a void verdict is soft"
        return None


@value
class Step(Payload):
    """A training step that makes version (``term``, ``number``) from the weights entry ``base``.

    ``blob`` names the ``StepBlob``. ``reward`` is the mean over all accepted responses gathered, before any is
    dropped, and ``lag_mean`` the mean policy lag, both in micro. ``accepted``, ``rejected`` (refused or rejected
    since the last step) and ``trained`` count responses, ``tokens`` response tokens trained on.

    The trainer's time between two versions is ``train_ms`` + ``wait_ms`` + ``blocked_ms``: it trained, it stood still
    for want of rollouts, it stood still because the version before was not published yet. ``publish_ms``, from the end
    of training to the version's entry, is beside it: the next step may be trained meanwhile.
    """

    KIND: ClassVar[str] = "step"

    term: Annotated[int, Int(1)]
    number: Annotated[int, Int(1)]
    base: Hash
    blob: Hash
    blob_size: Annotated[int, Int(1, MAX_STEP_BLOB_BYTES)]
    reward: Annotated[int, Int(0, MILLION)]
    lag_mean: Annotated[int, Int()]
    lag_max: Count
    groups: Count
    accepted: Count
    rejected: Count
    trained: Count
    tokens: Annotated[int, Int()]
    train_ms: Annotated[int, Int()]
    wait_ms: Annotated[int, Int()]
    publish_ms: Annotated[int, Int()]
    blocked_ms: Annotated[int, Int()]

    def problem(self) -> str | None:
        if self.trained > self.accepted:
            return "a step trains on accepted responses only"
        if self.lag_mean > self.lag_max * MILLION:
            return "the mean lag exceeds the largest"
        return None


@value
class Close(Payload):
    """Ends the feed of ``target``. ``recovery`` is the recovery public key that the target's join committed to,
    ``signature`` its own over this statement."""

    KIND: ClassVar[str] = "close"

    target: Key
    recovery: Key
    signature: Signature


@value
class Rebind(Payload):
    """Ends the feed of ``target``, whose owner goes on as the author of this entry. Fields as in ``Close``."""

    KIND: ClassVar[str] = "rebind"

    target: Key
    recovery: Key
    signature: Signature


def _ascending(votes: Sequence[tuple[bytes, bytes]]) -> str | None:
    return "the signers are not strictly ascending" if any(a[0] >= b[0] for a, b in pairwise(votes)) else None


@value
class Amend(Payload):
    """New electors, named validators, named trainers and thresholds, nil where they stay as they are, signed by
    electors. 64 is ``MAX_ELECTORS``; an entry has room for about 25 with a quorum's signatures."""

    KIND: ClassVar[str] = "amend"

    number: Annotated[int, Int(1, 2**62)]
    electors: Annotated[tuple[bytes, ...] | None, Optional(Many(codec.KEY, most=64, least=1))]
    validators: Annotated[tuple[bytes, ...] | None, Optional(Many(codec.KEY, most=64))]
    trainers: Annotated[tuple[bytes, ...] | None, Optional(Many(codec.KEY, most=64))]
    thresholds: Annotated[tuple[int, ...] | None, Optional(Many(Int(), most=8, least=8))]
    votes: Annotated[tuple[tuple[bytes, bytes], ...], VOTES]

    def problem(self) -> str | None:
        for what, keys in (("electors", self.electors), ("validators", self.validators)):
            if any(left >= right for left, right in pairwise(keys or ())):
                return f"the {what} are not strictly ascending"
        return _ascending(self.votes)


@value
class Absent(Payload):
    """Electors heard nothing of ``node`` for the domain's ``term_silence_ms`` before the cut ``seen``, the newest one
    that they held."""

    KIND: ClassVar[str] = "absent"

    node: Key
    seen: Hash
    votes: Annotated[tuple[tuple[bytes, bytes], ...], VOTES]

    def problem(self) -> str | None:
        return _ascending(self.votes)


@value
class Invite(Payload):
    """An invitation: up to ``uses`` nodes that its ``key`` signed for may be admitted by cuts up to the height
    ``expires``. One of the same key again replaces what is left of it; with no uses it is taken back."""

    KIND: ClassVar[str] = "invite"

    key: Key
    uses: Annotated[int, Int(0, 2**20)]
    expires: Annotated[int, Int(0, 2**62)]


Record = Join | Leave | Role | Weights | Rollout | Verdict | Step | Amend | Absent | Invite | Close | Rebind

_CLASSES: Final[dict[str, type[Record]]] = {
    cls.KIND: cls for cls in (Join, Leave, Role, Weights, Rollout, Verdict, Step, Amend, Absent, Invite, Close, Rebind)
}
KINDS: Final = tuple(_CLASSES)
SCHEMAS: Final[dict[str, Array]] = {kind: cls.ARRAY for kind, cls in _CLASSES.items()}


def parse_payload(kind: str, value: codec.Value) -> Record:
    """The payload that ``value`` (decoded msgpack) is for ``kind``; ``PeerError`` for anything else."""
    if kind not in SCHEMAS:
        raise PeerError(f"entry: unknown kind {kind!r}")
    codec.check(value, SCHEMAS[kind], kind)
    return make_payload(kind, value)


def make_payload(kind: str, value: codec.Value) -> Record:
    """The same for a value that fits the kind's schema."""
    record = _CLASSES[kind].from_value(value)
    problem = record.problem()
    if problem is not None:
        raise PeerError(f"{kind}: {problem}")
    return record


@dataclass(frozen=True, slots=True)
class StepBlob(Formatted):
    """What a step was trained on: (rollout entry id, ids of the verdicts it was accepted by) pairs, each rollout
    once. The order is the trainer's own."""

    submissions: Annotated[
        tuple[tuple[bytes, tuple[bytes, ...]], ...],
        Many(Array((("rollout", codec.HASH), ("verdicts", Many(codec.HASH, most=64)))), most=MAX_STEP_BLOB_BYTES),
    ]

    def encode(self) -> bytes:
        """The blob's bytes; ``LocalError`` where they exceed ``MAX_STEP_BLOB_BYTES``."""
        data = codec.encode(self.to_value())
        if len(data) > MAX_STEP_BLOB_BYTES:
            raise LocalError(f"a step blob of {len(data)} bytes is too large")
        return data

    @classmethod
    def parse(cls, data: bytes) -> StepBlob:
        """Strict parser; raises ``PeerError``."""
        blob = cls.from_value(codec.parse(data, cls.ARRAY, max_bytes=MAX_STEP_BLOB_BYTES, what="step blob"))
        if len({rollout for rollout, _ in blob.submissions}) != len(blob.submissions):
            raise PeerError("step blob: a rollout is listed twice")
        return blob


@dataclass(frozen=True, slots=True)
class Blob(Fields):
    """A named blob: BLAKE3 ``hash`` of its bytes and their number."""

    hash: Hash
    size: Annotated[int, Int(1, MAX_BLOB_BYTES)]


def blob_of(most: int) -> Array:
    """The schema of a blob of at most so many bytes."""
    return Array((("hash", codec.HASH), ("size", Int(1, most))), Blob)
