"""One entry of a feed: body, id, signature.

1. The body is the canonical array ``[format, domain, author, seq, prev, anchor, kind, payload]``, at most
   ``MAX_ENTRY_BYTES`` long.
2. ``id = SHA-256("farflung/entry-id/v1\\0" ‖ body)``. The signature covers ``"farflung/entry/v1\\0" ‖ body`` and is
   not part of the id: an author can make many valid signatures over one body, and signing again is no fork.
3. ``prev`` is the id of the author's entry before; entry 0 has 32 zero bytes, and no other has.
4. ``anchor`` is the id of the newest cut that the author had seen, or the domain's id before any cut.
5. Entry 0 is a ``join``, and no other entry is.
6. A ``close`` or ``rebind`` holds its recovery key's signature (see ``protocol.log.recovery``), whoever parses it.
7. On the wire an entry is the canonical array ``[body, signature]``.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from dataclasses import field
from hashlib import sha256
from typing import Final

from protocol import codec, identity
from protocol.codec import Anything, Array, Int, Tagged, Text
from protocol.constants import FORMAT, MAX_ENTRY_BYTES
from protocol.errors import PeerError, ours
from protocol.identity import Identity
from protocol.log import recovery
from protocol.records import KINDS, SCHEMAS, Close, Join, Rebind, Record, make_payload, parse_payload
from protocol.values import value

ID_CONTEXT: Final = b"farflung/entry-id/v1\0"
NO_PREV: Final = bytes(32)
MAX_WIRE_BYTES: Final = MAX_ENTRY_BYTES + 72
"""Longest wire form: the body with its 3-byte header, the signature with its 2-byte header, the array's byte."""

_BODY: Final = Array(
    (
        ("format", Int(FORMAT, FORMAT)),
        ("domain", codec.HASH),
        ("author", codec.KEY),
        ("seq", Int(0, 2**62)),
        ("prev", codec.HASH),
        ("anchor", codec.HASH),
        ("kind", Text(16, KINDS)),
        ("payload", Anything()),
    )
)
_WHOLE: Final = Tagged(
    6,
    {
        kind: Array(tuple({**dict(_BODY.fields), "kind": Text(16, (kind,)), "payload": schema}.items()))
        for kind, schema in SCHEMAS.items()
    },
)
"""A body with its payload."""
WIRE: Final = codec.envelope(MAX_ENTRY_BYTES)


@value
class Entry:
    """A parsed entry. ``domain``, ``author``, ``prev``, ``anchor`` and ``id`` have 32 bytes, ``signature`` 64."""

    domain: bytes
    author: bytes
    seq: int
    prev: bytes
    anchor: bytes
    kind: str
    payload: Record
    body: bytes
    signature: bytes
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", entry_id(self.body))

    def encode(self) -> bytes:
        """The wire form ``[body, signature]``."""
        return codec.pack_pair(self.body, self.signature)


def entry_id(body: bytes) -> bytes:
    """The 32-byte id of an entry with this body."""
    return sha256(ID_CONTEXT + body).digest()


def make(author: Identity, domain: bytes, seq: int, prev: bytes, anchor: bytes, payload: Record) -> Entry:
    """Sign a new entry. Raises ``LocalError`` for one that others would refuse, so that it is never signed."""
    body = codec.encode([FORMAT, domain, author.node, seq, prev, anchor, payload.KIND, payload.to_value()])
    with ours("refusing to sign a bad entry: "):
        parse(body, bytes(64), verify=False)
    return parse(body, author.sign(identity.ENTRY, body), verify=False)


def parse(body: bytes, signature: bytes, *, verify: bool = True) -> Entry:
    """Parse a body with its signature; raises ``PeerError``.

    ``verify=False`` skips the signature, for entries that this node verified before it stored them.
    """
    value = codec.attempt(body, _WHOLE, max_bytes=MAX_ENTRY_BYTES)
    fits = value is not codec.FAILED
    if not fits:
        # Step by step, to say what is wrong.
        value = codec.parse(body, _BODY, max_bytes=MAX_ENTRY_BYTES, what="entry")
    _, domain, author, seq, prev, anchor, kind, payload = value
    if (seq == 0) != (kind == Join.KIND):
        raise PeerError("entry: the first entry of a feed is a join, and no other is")
    if (seq == 0) != (prev == NO_PREV):
        raise PeerError("entry: the first entry of a feed has no predecessor, and every other has one")
    record = make_payload(kind, payload) if fits else parse_payload(kind, payload)
    if isinstance(record, Close | Rebind):
        # Rare, so verified each time: what no recovery key signed is no entry at all.
        recovery.check(record, domain, author)
    if len(signature) != 64:
        raise PeerError("entry: a signature has 64 bytes")
    if verify:
        identity.verify(author, identity.ENTRY, body, signature, "entry")
    return Entry(domain, author, seq, prev, anchor, kind, record, body, signature)


def decode(data: bytes, *, verify: bool = True) -> Entry:
    """Parse the wire form ``[body, signature]``; raises ``PeerError``."""
    pair = codec.split_pair(data, 64) if len(data) <= MAX_WIRE_BYTES else None
    if pair is None or len(pair[0]) > MAX_ENTRY_BYTES:
        pair = codec.parse(data, WIRE, max_bytes=MAX_WIRE_BYTES, what="entry")
    return parse(*pair, verify=verify)
