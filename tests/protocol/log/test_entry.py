"""Entries: body, id, signature, wire form."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings

from protocol import codec, identity
from protocol.constants import FORMAT, MAX_ENTRY_BYTES
from protocol.errors import LocalError, PeerError
from protocol.log import entry
from protocol.log.entry import ID_CONTEXT, MAX_WIRE_BYTES, NO_PREV, Entry
from protocol.records import Join, Leave, Record, Role
from tests.protocol.builders import Writer, digest, key
from tests.protocol.strategies import plain_records
from tests.vectors import golden
from tests.vectors.make import golden_entry

AUTHOR = key("author")
DOMAIN = digest("domain")
JOIN = Join(digest("recovery"), "farflung/test", "author")


def signed(body: list[Any], author: identity.Identity = AUTHOR) -> bytes:
    """The wire form of any body, however wrong, with a right signature."""
    raw = codec.encode(body)
    return codec.encode([raw, author.sign(identity.ENTRY, raw)])


@settings(max_examples=50)
@given(plain_records)
def test_what_is_made_reads_as_itself(record: Record) -> None:
    first = isinstance(record, Join)
    made = entry.make(AUTHOR, DOMAIN, 0 if first else 7, NO_PREV if first else digest("prev"), DOMAIN, record)
    assert entry.decode(made.encode()) == made
    assert entry.parse(made.body, made.signature) == made
    assert made.id == sha256(ID_CONTEXT + made.body).digest()
    assert made.payload == record
    assert made.kind == record.KIND
    assert len(made.encode()) <= MAX_WIRE_BYTES


def test_every_flipped_byte_is_rejected() -> None:
    raw = entry.make(AUTHOR, DOMAIN, 0, NO_PREV, DOMAIN, JOIN).encode()
    for place in range(len(raw)):
        with pytest.raises(PeerError):
            entry.decode(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])


def test_every_truncation_is_rejected() -> None:
    raw = entry.make(AUTHOR, DOMAIN, 0, NO_PREV, DOMAIN, JOIN).encode()
    for length in range(len(raw)):
        with pytest.raises(PeerError):
            entry.decode(raw[:length])
    with pytest.raises(PeerError):
        entry.decode(raw + b"\x00")


def test_the_id_does_not_cover_the_signature() -> None:
    made = entry.make(AUTHOR, DOMAIN, 0, NO_PREV, DOMAIN, JOIN)
    unsigned = entry.parse(made.body, bytes(64), verify=False)
    assert unsigned.id == made.id
    with pytest.raises(PeerError):
        entry.decode(unsigned.encode())


def test_anothers_signature_is_refused() -> None:
    body = [FORMAT, DOMAIN, AUTHOR.node, 0, NO_PREV, DOMAIN, "join", JOIN.to_value()]
    assert isinstance(entry.decode(signed(body)), Entry)
    with pytest.raises(PeerError, match="signature"):
        entry.decode(signed(body, key("another")))


@pytest.mark.parametrize(
    "body",
    [
        [FORMAT + 1, DOMAIN, AUTHOR.node, 0, NO_PREV, DOMAIN, "join", JOIN.to_value()],
        [FORMAT, DOMAIN[1:], AUTHOR.node, 0, NO_PREV, DOMAIN, "join", JOIN.to_value()],
        [FORMAT, DOMAIN, AUTHOR.node, 1, digest("prev"), DOMAIN, "join", JOIN.to_value()],
        [FORMAT, DOMAIN, AUTHOR.node, 0, NO_PREV, DOMAIN, "leave", []],
        [FORMAT, DOMAIN, AUTHOR.node, 0, digest("prev"), DOMAIN, "join", JOIN.to_value()],
        [FORMAT, DOMAIN, AUTHOR.node, 1, NO_PREV, DOMAIN, "leave", []],
        [FORMAT, DOMAIN, AUTHOR.node, 1, digest("prev"), DOMAIN, "leave", [0]],
        [FORMAT, DOMAIN, AUTHOR.node, 1, digest("prev"), DOMAIN, "close", []],
        [FORMAT, DOMAIN, AUTHOR.node, 1, digest("prev"), DOMAIN, "leave"],
        [FORMAT, DOMAIN, AUTHOR.node, 1, digest("prev"), None, "leave", []],
        [FORMAT, DOMAIN, AUTHOR.node, 2**62 + 1, digest("prev"), DOMAIN, "leave", []],
        None,
        [],
    ],
    ids=lambda body: str(body)[:40],
)
def test_bodies_that_break_a_rule_are_refused(body: Any) -> None:
    with pytest.raises(PeerError):
        entry.decode(signed(body))


def test_a_body_is_bounded() -> None:
    with pytest.raises(PeerError, match=r"wrong length"):
        entry.decode(codec.encode([bytes(MAX_ENTRY_BYTES + 1), bytes(64)]))
    with pytest.raises(PeerError, match=f"at most {MAX_ENTRY_BYTES} "):
        entry.parse(bytes(MAX_ENTRY_BYTES + 1), bytes(64))
    with pytest.raises(PeerError, match=f"at most {MAX_WIRE_BYTES} "):
        entry.decode(bytes(MAX_WIRE_BYTES + 1))


def test_a_signature_has_64_bytes() -> None:
    made = entry.make(AUTHOR, DOMAIN, 0, NO_PREV, DOMAIN, JOIN)
    with pytest.raises(PeerError, match="64 bytes"):
        entry.parse(made.body, b"", verify=False)


@pytest.mark.parametrize(
    ("seq", "prev", "payload"),
    [(0, NO_PREV, Leave()), (1, NO_PREV, Leave()), (1, digest("prev"), JOIN), (1, digest("prev"), Role("king"))],
)
def test_what_others_would_refuse_is_never_signed(seq: int, prev: bytes, payload: Record) -> None:
    with pytest.raises(LocalError):
        entry.make(AUTHOR, DOMAIN, seq, prev, DOMAIN, payload)


def test_a_feed_of_entries_is_linked() -> None:
    writer = Writer("author", DOMAIN)
    writer.append(Role("relay"))
    writer.append(Leave())
    assert [made.seq for made in writer.entries] == [0, 1, 2]
    assert [made.prev for made in writer.entries] == [NO_PREV, writer.entries[0].id, writer.entries[1].id]


def test_golden_entries() -> None:
    stored = golden("entry")
    assert golden_entry() == stored
    for case in stored["entries"]:
        read = entry.decode(bytes.fromhex(case["wire"]))
        assert read.id.hex() == case["id"]
        assert read.kind == case["kind"]
