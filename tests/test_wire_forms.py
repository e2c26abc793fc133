"""Whatever happens to the bytes of an object: it reads as what has exactly these bytes, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.log import replication_messages
from protocol import codec
from protocol.constants import FORMAT
from protocol.domain import parse_genesis
from protocol.errors import PeerError
from protocol.log import entry, recovery
from protocol.log.entry_proof import LogProof
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import HEAD, Head
from protocol.log.quorum import CertifiedCut, CertifiedGrant, Cut, Grant, PreparedCut
from protocol.log.replica import Replica
from protocol.log.signed_note import Note, Signature
from protocol.records import Leave, Role, StepBlob
from tests.protocol.builders import Writer, cut_for, digest, grant_for, key, small_genesis

GENESIS = small_genesis()
DOMAIN = parse_genesis(GENESIS)


def world() -> dict[str, tuple[bytes, Callable[[bytes], bytes]]]:
    """Objects of each kind: their bytes, and reading and writing them again without any signature verified."""
    replica = Replica(DOMAIN)
    one, other = Writer("a", DOMAIN.id), Writer("a", DOMAIN.id)
    for made in (*one.entries, one.append(Role("relay"))):
        replica.add_entry(made)
    other.append(Leave())
    cut = cut_for(replica, "elector")
    replica.add_cut(cut)
    grant = grant_for(DOMAIN, 1, one.node)
    rebind = Writer("b", DOMAIN.id)
    rebind.append(recovery.rebind(key("recovery a"), DOMAIN.id, one.node, rebind.node))
    proof = LogProof.make(GENESIS, one.entries[1], [made.id for made in one.entries], replica.certified, cut)
    note = Note("a text\n", (Signature("name", bytes(4), bytes(70)),))
    blob = StepBlob(((digest("rollout"), (digest("verdict"),)),))
    heads = replication_messages.request("heads", [[1, 2, 250], one.node])
    return {
        "entry": (one.entries[1].body, lambda data: entry.parse(data, bytes(64), verify=False).body),
        "rebind": (rebind.entries[1].body, lambda data: entry.parse(data, bytes(64), verify=False).body),
        "wire entry": (one.entries[0].encode(), lambda data: entry.decode(data, verify=False).encode()),
        "cut": (cut.cut.body, lambda data: Cut.parse(data).body),
        "certified cut": (cut.encode(), lambda data: CertifiedCut.parse(data, verify=False).encode()),
        "prepared cut": (cut.encode(), lambda data: PreparedCut.parse(data, verify=False).encode()),
        "grant": (grant.grant.body, lambda data: Grant.parse(data).body),
        "certified grant": (grant.encode(), lambda data: CertifiedGrant.parse(data, verify=False).encode()),
        "fork proof": (
            ForkProof.of(one.entries[1], other.entries[1]).encode(),
            lambda data: ForkProof.parse(data).encode(),
        ),
        "step blob": (blob.encode(), lambda data: StepBlob.parse(data).encode()),
        "proof": (proof.encode(), lambda data: LogProof.parse(data).encode()),
        "note": (note.encode(), lambda data: Note.parse(data, max_bytes=1000).encode()),
        "head": (
            replica.heads[one.node].leaf(),
            lambda data: Head.from_value(codec.parse(data, HEAD, max_bytes=1000, what="head")).leaf(),
        ),
        "request": (heads, lambda data: replication_messages.request(*replication_messages.parse_request(data))),
        "news": (
            codec.encode([FORMAT, [b"entry"], [b"cut"], [], [b"fork"]]),
            lambda data: replication_messages.News.parse(data).encode() or b"",
        ),
    }


OBJECTS = world()


def altered(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """The bytes after one to three small accidents."""
    raw = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(raw) - 1, 0)))
        match draw(st.sampled_from(["change", "insert", "delete", "repeat"])):
            case "change" if raw:
                raw[place] = draw(st.integers(0, 255))
            case "insert":
                raw.insert(place, draw(st.integers(0, 255)))
            case "delete":
                del raw[place : place + draw(st.integers(1, 40))]
            case "repeat":
                part = raw[place : place + draw(st.integers(1, 40))]
                raw[place:place] = part
            case _:
                pass
    return bytes(raw)


@pytest.mark.parametrize("name", OBJECTS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_are_an_objects_own_or_refused(name: str, data: st.DataObject) -> None:
    good, again = OBJECTS[name]
    assert again(good) == good
    raw = altered(good, data.draw)
    try:
        read = again(raw)
    except PeerError:
        return
    assert read == raw
