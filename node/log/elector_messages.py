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
=========  ============================================================  =======================================

The third field of ``propose`` are the votes of the prepared cut that justifies it. A signed ballot is one that the
asker itself signed once: ``[0 vote | 1 commit, epoch, cut id, signature]``. A refusal is ``[reason, epoch, height,
term]``, what the refusing elector has reached.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from protocol import codec
from protocol.codec import Anything, Array, Bytes, Int, Many, Optional, Schema, Text
from protocol.constants import FORMAT, MAX_CUT_BYTES
from protocol.domain import MAX_ELECTORS
from protocol.errors import PeerError
from protocol.log.quorum import MAX_GRANT_BYTES, Cut, PreparedCut

MAX_MESSAGE: Final = 2 * MAX_CUT_BYTES + (64 << 10)
"""A report beside a lock is the longest."""
MAX_REASON: Final = 120

_COUNT: Final = Int(0, 2**62)
_CUT: Final = Bytes(most=MAX_CUT_BYTES)
_GRANT: Final = Bytes(most=MAX_GRANT_BYTES)
_VOTES: Final = Many(Array((("elector", codec.KEY), ("signature", codec.SIGNATURE))), most=MAX_ELECTORS, least=1)
_EVIDENCE: Final = Array(
    (("committed", Int(0, 1)), ("epoch", _COUNT), ("cut", codec.HASH), ("signature", codec.SIGNATURE))
)
_REFUSAL: Final = Array((("reason", Text(MAX_REASON)), ("epoch", _COUNT), ("height", _COUNT), ("term", _COUNT)))
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
}
_REQUEST: Final = Array(
    (("format", Int(FORMAT, FORMAT)), ("op", Text(16, tuple(_ARGUMENTS))), ("argument", Anything()))
)
_STATUS: Final = Array((("epoch", _COUNT), ("height", _COUNT), ("term", _COUNT), ("evidence", Optional(_EVIDENCE))))
_VALUES: Final[dict[str, Schema]] = {
    "report": Array((("report", _CUT), ("lock", Optional(_CUT)))),
    "propose": codec.SIGNATURE,
    "prepared": codec.SIGNATURE,
    "certified": Optional(Bytes(72)),
    "would": _NOTHING,
    "grant": codec.SIGNATURE,
}
_ANSWERS: Final = {
    op: Array((("value", Optional(value)), ("refusal", Optional(_REFUSAL)))) for op, value in _VALUES.items()
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an elector did not do what it was asked, and what it has reached."""

    reason: str
    epoch: int
    height: int
    term: int


@dataclass(frozen=True, slots=True)
class SignedBallot:
    """A ballot that somebody signed: a vote, or a commit."""

    committed: bool
    epoch: int
    cut: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Reached:
    """The answer to ``status``."""

    epoch: int
    height: int
    term: int
    evidence: SignedBallot | None


def request(op: str, argument: codec.Value) -> bytes:
    """Encode a request."""
    return codec.encode([FORMAT, op, argument])


def proposal(epoch: int, cut: Cut, proof: PreparedCut | None) -> bytes:
    """Encode a proposal."""
    return request("propose", [epoch, cut.body, None if proof is None else [proof.epoch, proof.votes]])


def parse_request(data: bytes) -> tuple[str, Any]:
    """(op, argument) of a request."""
    _, op, argument = codec.parse(data, _REQUEST, max_bytes=MAX_MESSAGE, what="elector request")
    codec.check(argument, _ARGUMENTS[op], f"elector request {op}")
    return op, argument


def parse_proposal(argument: Any) -> tuple[int, Cut, PreparedCut | None]:
    """(epoch, cut, justification) of a proposal's argument, all signatures verified."""
    epoch, body, proof = argument
    cut = Cut.parse(body)
    if proof is None:
        return epoch, cut, None
    # Written out and read again: one parser knows what a prepared cut must be.
    return epoch, cut, PreparedCut.parse(codec.encode([body, *proof]))


def status(reached: Reached) -> bytes:
    """Encode the answer to ``status``."""
    shown = reached.evidence
    evidence = None if shown is None else [int(shown.committed), shown.epoch, shown.cut, shown.signature]
    return codec.encode([reached.epoch, reached.height, reached.term, evidence])


def parse_status(data: bytes) -> Reached:
    """The answer to ``status``; the evidence is not verified yet."""
    epoch, height, term, evidence = codec.parse(data, _STATUS, max_bytes=MAX_MESSAGE, what="answer to status")
    if evidence is not None:
        evidence = SignedBallot(bool(evidence[0]), *evidence[1:])
    return Reached(epoch, height, term, evidence)


def answer(value: codec.Value | Refusal) -> bytes:
    """Encode an answer to anything else."""
    if isinstance(value, Refusal):
        text = value.reason.encode("ascii", "replace").decode()[:MAX_REASON]
        return codec.encode([None, [text, value.epoch, value.height, value.term]])
    return codec.encode([value, None])


def parse_answer(op: str, data: bytes) -> Any:
    """The value of an answer to ``op``, or the ``Refusal``."""
    value, refusal = codec.parse(data, _ANSWERS[op], max_bytes=MAX_MESSAGE, what=f"answer to {op}")
    if refusal is not None:
        return Refusal(*refusal)
    if value is None and op not in ("certified", "would"):
        raise PeerError(f"answer to {op}: it is empty")
    return value
