"""The messages by which two nodes compare and complete their logs: canonical msgpack, bounded on both sides.

A request is ``[format, op, argument]``:

==========  ===================================================  ===================================================
op          argument                                             answer
==========  ===================================================  ===================================================
hello       summary of the asker                                 [summary, the asker's newest entry or nil]
buckets     nil                                                  256 digests
heads       [bucket numbers, author after whom to list]          rows by bucket and author; fewer than fit: the end
ranges      [[author, first seq, last seq], …]                   encoded entries, in the order asked, what fits
cuts        height after which to list                           encoded cuts, what fits, at least one if there is one
grants      term after which to list                             [term, encoded grant], likewise, ascending
forks       author after whom to list                            [author, encoded fork proof], likewise, ascending
checkpoint  size of the newest cosigned checkpoint held          the newest one held, nil where it is no larger
==========  ===================================================  ===================================================

A summary is ``[heads root, height of the newest cut, its id or nil, highest granted term, digest, id of the newest own
entry or nil]``, the digest that of grants and forks. The newest entry of the asker's feed is shown as the signed entry
itself, and not at all where it is the one that the asker named. Gossip (``News``) is ``[format, entries, cuts, grants,
forks]``, each a list of encoded objects.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final

from protocol import codec
from protocol.codec import Anything, Array, Bytes, Fields, Formatted, Hash, Int, Many, Optional, Schema, Text
from protocol.constants import FORMAT, MAX_CUT_BYTES
from protocol.log.checkpoint import MAX_CHECKPOINT_BYTES
from protocol.log.entry import MAX_WIRE_BYTES
from protocol.log.fork_proof import MAX_FORK_PROOF_BYTES
from protocol.log.heads import BUCKETS, HEAD
from protocol.log.quorum import MAX_GRANT_BYTES

ANSWER_BYTES: Final = 1 << 20
"""An answer lists objects up to this size; a single larger object (a cut) goes alone."""

MAX_REQUEST: Final = 16 << 10
MAX_ANSWER: Final = MAX_CUT_BYTES + (64 << 10)
MAX_NEWS: Final = 256 << 10
"""Longest gossip message; what does not fit travels by anti-entropy alone."""

MAX_RANGES: Final = 256
"""Ranges of one request: a cut moves many feeds by a few entries each."""

MAX_CUTS: Final = 512
"""Cuts of one answer: with the entries below them they wait in memory until they fit."""

MAX_ROWS: Final = 6000
"""Rows of one ``heads`` answer: about 140 bytes each."""

FIRST: Final = bytes(32)
"""Before every author."""

_COUNT: Final = Int(0, 2**62)


@dataclass(frozen=True, slots=True)
class LogSummary(Fields):
    """A replica in a few numbers, and the id of the newest entry of its own node's feed that it holds."""

    heads_root: Hash
    height: Annotated[int, _COUNT]
    cut: Annotated[bytes | None, Optional(codec.HASH)]
    term: Annotated[int, _COUNT]
    side: Hash
    own: Annotated[bytes | None, Optional(codec.HASH)] = None

    def agrees(self, other: LogSummary) -> bool:
        """Whether both summarise the same log, whoever they are."""
        return self.to_value()[:-1] == other.to_value()[:-1]


_SUMMARY: Final = Array(LogSummary.SCHEMA)
_ARGUMENTS: Final[dict[str, Schema]] = {
    "hello": _SUMMARY,
    "buckets": Optional(Int(0, 0)),
    "heads": Array((("buckets", Many(Int(0, BUCKETS - 1), most=BUCKETS, least=1)), ("after", codec.KEY))),
    "ranges": Many(Array((("author", codec.KEY), ("first", _COUNT), ("last", _COUNT))), most=MAX_RANGES, least=1),
    "cuts": _COUNT,
    "grants": _COUNT,
    "forks": codec.KEY,
    "checkpoint": _COUNT,
}
_REQUEST: Final = Array(
    (("format", Int(FORMAT, FORMAT)), ("op", Text(16, tuple(_ARGUMENTS))), ("argument", Anything()))
)
_ENTRY: Final = Bytes(most=MAX_WIRE_BYTES)
_CUT: Final = Bytes(most=MAX_CUT_BYTES)
_GRANT: Final = Bytes(most=MAX_GRANT_BYTES)
_FORK: Final = Bytes(most=MAX_FORK_PROOF_BYTES)
_ANSWERS: Final[dict[str, Schema]] = {
    "hello": Array((("summary", _SUMMARY), ("yours", Optional(_ENTRY)))),
    "buckets": Many(codec.HASH, most=BUCKETS, least=BUCKETS),
    "heads": Many(HEAD, most=MAX_ROWS),
    "ranges": Many(_ENTRY, most=ANSWER_BYTES),
    "cuts": Many(_CUT, most=ANSWER_BYTES),
    "grants": Many(Array((("term", _COUNT), ("grant", _GRANT))), most=ANSWER_BYTES),
    "forks": Many(Array((("author", codec.KEY), ("fork", _FORK))), most=ANSWER_BYTES),
    "checkpoint": Optional(Bytes(most=MAX_CHECKPOINT_BYTES)),
}


@dataclass(frozen=True, slots=True)
class News(Formatted):
    """A gossip message: encoded objects."""

    entries: Annotated[Sequence[bytes], Many(_ENTRY, most=MAX_NEWS)] = ()
    cuts: Annotated[Sequence[bytes], Many(_CUT, most=MAX_NEWS)] = ()
    grants: Annotated[Sequence[bytes], Many(_GRANT, most=MAX_NEWS)] = ()
    forks: Annotated[Sequence[bytes], Many(_FORK, most=MAX_NEWS)] = ()

    def encode(self) -> bytes | None:
        """The message; None where it is too long for one."""
        if sum(map(len, chain(self.entries, self.cuts, self.grants, self.forks))) > MAX_NEWS:
            return None
        data = codec.encode(self.to_value())
        return data if len(data) <= MAX_NEWS else None

    @classmethod
    def parse(cls, data: bytes) -> News:
        """The inverse of ``encode``."""
        return cls.from_value(codec.parse(data, cls.ARRAY, max_bytes=MAX_NEWS, what="log news"))


def request(op: str, argument: codec.Value) -> bytes:
    """Encode a request."""
    return codec.encode([FORMAT, op, argument])


def parse_request(data: bytes) -> tuple[str, Any]:
    """(op, argument) of a request."""
    _, op, argument = codec.parse(data, _REQUEST, max_bytes=MAX_REQUEST, what="log request")
    codec.check(argument, _ARGUMENTS[op], f"log request {op}")
    return op, argument


def parse_answer(op: str, data: bytes) -> Any:
    """The checked value of an answer to ``op``."""
    return codec.parse(data, _ANSWERS[op], max_bytes=MAX_ANSWER, what=f"answer to {op}")


def fitting(objects: Iterable[bytes]) -> list[bytes]:
    """As many of the first ``objects`` as fit an answer, at least one if there is one; no more are drawn."""
    size = 0
    fits: list[bytes] = []
    for data in objects:
        size += len(data) + 5
        if size > ANSWER_BYTES and fits:
            break
        fits.append(data)
    return fits
