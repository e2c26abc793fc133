"""The messages between electors: canonical msgpack, bounded on both sides. The proposer asks, the others answer.

A request is ``[format, op, argument]``; but for ``status`` an answer is ``[value or nil, refusal or nil]``:

=========  ============================================================  =======================================
op         argument                                                      value
=========  ============================================================  =======================================
status     nil                                                           [epoch, height, term, evidence or nil]
report     [epoch, height of the newest cut]                             [signed report, lock or nil]
propose    [epoch, cut body, [epoch, [[elector, signature], …]] or nil]  signature of the vote
prepared   a prepared cut                                                signature of the commit
certified  a certified cut                                               cosignature of its checkpoint, or nil
would      a grant's body                                                nil: it would sign
grant      a grant's body                                                signature
absent     [node, cut]                                                   signature of its absence
=========  ============================================================  =======================================

The third field of ``propose`` are the votes of the prepared cut that justifies it. A signed ballot is one that the
asker itself signed once: ``[0 vote | 1 commit, epoch, cut id, signature]``. A refusal is ``[reason, epoch, height,
term]``, what the refusing elector has reached.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from protocol import codec
from protocol.codec import Anything, Array, Bytes, Fields, Int, Many, Optional, Schema, Text
from protocol.constants import FORMAT, MAX_CUT_BYTES
from protocol.domain import MAX_ELECTORS
from protocol.errors import PeerError
from protocol.log.quorum import MAX_GRANT_BYTES, Cut, PreparedCut

MAX_MESSAGE: Final = 2 * MAX_CUT_BYTES + (64 << 10)
"""A report beside a lock is the longest."""
MAX_REASON: Final = 120

_COUNT: Final = Int(0, 2**62)
_Count = Annotated[int, _COUNT]
_CUT: Final = Bytes(most=MAX_CUT_BYTES)
_GRANT: Final = Bytes(most=MAX_GRANT_BYTES)
_VOTES: Final = Many(Array((("elector", codec.KEY), ("signature", codec.SIGNATURE))), most=MAX_ELECTORS, least=1)
_NOTHING: Final = Optional(Int(0, 0))
_ARGUMENTS: Final[dict[str, Schema]] = {
    "status": _NOTHING,
    "report": Array((("epoch", _COUNT), ("height", _COUNT))),
    "propose": Array(
        (("epoch", _COUNT), ("cut", _CUT), ("proof", Optional(Array((("epoch", _COUNT), ("votes", _VOTES))))))
    ),
    "prepared": _CUT,
    "certified": _CUT,
    "would": _GRANT,
    "grant": _GRANT,
    "absent": Array((("node", codec.KEY), ("seen", codec.HASH))),
}
_REQUEST: Final = Array(
    (("format", Int(FORMAT, FORMAT)), ("op", Text(16, tuple(_ARGUMENTS))), ("argument", Anything()))
)
_VALUES: Final[dict[str, Schema]] = {
    "report": Array((("report", _CUT), ("lock", Optional(_CUT)))),
    "propose": codec.SIGNATURE,
    "prepared": codec.SIGNATURE,
    "certified": Optional(Bytes(72)),
    "would": _NOTHING,
    "grant": codec.SIGNATURE,
    "absent": codec.SIGNATURE,
}


@dataclass(frozen=True, slots=True)
class Refusal(Fields):
    """Why an elector did not do what it was asked, and what it has reached."""

    reason: Annotated[str, Text(MAX_REASON)]
    epoch: _Count
    height: _Count
    term: _Count


@dataclass(frozen=True, slots=True)
class SignedBallot(Fields):
    """A ballot that somebody signed: a vote (``committed`` is 0), or a commit (1)."""

    committed: Annotated[int, Int(0, 1)]
    epoch: _Count
    cut: codec.Hash
    signature: codec.Signature


@dataclass(frozen=True, slots=True)
class Reached(Fields):
    """The answer to ``status``. Its evidence is not verified yet."""

    epoch: _Count
    height: _Count
    term: _Count
    evidence: SignedBallot | None


_ANSWERS: Final = {
    op: Array((("value", Optional(value)), ("refusal", Optional(Refusal.ARRAY)))) for op, value in _VALUES.items()
}


def request(op: str, argument: codec.Value) -> bytes:
    """Encode a request."""
    return codec.encode([FORMAT, op, argument])


def proposal(epoch: int, cut: Cut, proof: PreparedCut | None) -> codec.Value:
    """The argument of ``propose``."""
    return [epoch, cut.body, None if proof is None else [proof.epoch, proof.votes]]


def parse_request(data: bytes) -> tuple[str, Any]:
    """(op, argument) of a request."""
    _, op, argument = codec.parse(data, _REQUEST, max_bytes=MAX_MESSAGE, what="elector request")
    codec.check(argument, _ARGUMENTS[op], f"elector request {op}")
    return op, argument


def parse_proposal(argument: Any) -> tuple[int, Cut, PreparedCut | None]:
    """The inverse of ``proposal``, all signatures verified."""
    epoch, body, proof = argument
    cut = Cut.parse(body)
    if proof is None:
        return epoch, cut, None
    # Written out and read again: one parser knows what a prepared cut must be.
    return epoch, cut, PreparedCut.parse(codec.encode([body, *proof]))


def status(reached: Reached) -> bytes:
    """Encode the answer to ``status``."""
    return codec.encode(reached.to_value())


def parse_status(data: bytes) -> Reached:
    """The answer to ``status``."""
    return Reached.from_value(codec.parse(data, Reached.ARRAY, max_bytes=MAX_MESSAGE, what="answer to status"))


def answer(value: codec.Value | Refusal) -> bytes:
    """Encode an answer to anything else."""
    if isinstance(value, Refusal):
        text = value.reason.encode("ascii", "replace").decode()[:MAX_REASON]
        return codec.encode([None, replace(value, reason=text).to_value()])
    return codec.encode([value, None])


def parse_answer(op: str, data: bytes) -> Any:
    """The value of an answer to ``op``, or the ``Refusal``."""
    value, refusal = codec.parse(data, _ANSWERS[op], max_bytes=MAX_MESSAGE, what=f"answer to {op}")
    if refusal is not None:
        return Refusal.from_value(refusal)
    if value is None and op not in ("certified", "would"):
        raise PeerError(f"answer to {op}: it is empty")
    return value
