"""Self-contained proofs: every entry that is final has one, and nothing else has."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, merkle
from protocol.constants import FORMAT
from protocol.domain import parse_genesis
from protocol.entry import Entry
from protocol.errors import LocalError, PeerError
from protocol.heads import FROZEN, Head
from protocol.log_proof import MAX_PROOF_BYTES, Covering, LogProof
from protocol.quorum import CertifiedCut, Cut, certify, commit
from protocol.records import Leave, Role
from protocol.replica import Replica
from tests.protocol.builders import Writer, cut_for, digest, key, small_genesis
from tests.protocol.strategies import values

ELECTORS = ("e1", "e2", "e3", "e4")
GENESIS = small_genesis(ELECTORS)
DOMAIN = parse_genesis(GENESIS)


def grown() -> tuple[Replica, dict[str, Writer]]:
    """Five authors' feeds of different lengths under three cuts, and an entry more of each that no cut covers."""
    replica = Replica(DOMAIN)
    writers = {name: Writer(name, DOMAIN.id) for name in ("v", "w", "x", "y", "z")}
    for writer in writers.values():
        assert replica.add_entry(writer.entries[0])
    for most in (2, 4, 0):
        assert replica.add_cut(cut_for(replica, *ELECTORS[1:]))
        for place, writer in enumerate(writers.values()):
            writer.anchor = replica.newest_cut_id
            for _ in range(most - place if most else 1):
                assert replica.add_entry(writer.append(Role("relay")))
    return replica, writers


REPLICA, WRITERS = grown()
CUT = REPLICA.cuts[-1]


def ids(author: bytes) -> list[bytes]:
    """The ids of an author's entries."""
    return [entry.id for entry in REPLICA.entries(author)]


def proof(entry: Entry | None = None) -> LogProof:
    """The proof of an entry, by default of the second one of ``w``."""
    entry = entry or WRITERS["w"].entries[1]
    return LogProof.make(GENESIS, entry, ids(entry.author), REPLICA.certified, CUT)


RAW = proof().encode()
ROW_AT = RAW.index(codec.encode(REPLICA.certified[WRITERS["w"].node].to_value()))
INTEGERS = range(ROW_AT, ROW_AT + 150)


def changed(**fields: Any) -> LogProof:
    """The proof with other fields in its covering."""
    made = proof()
    return replace(made, covering=replace(made.covering, **fields))


def test_every_final_entry_has_a_proof() -> None:
    proved = 0
    for entry in REPLICA.arrivals:
        if entry.seq <= REPLICA.certified_head(entry.author):
            data = proof(entry).encode()
            read = LogProof.parse(data)
            assert read.encode() == data
            assert read == proof(entry)
            assert read.check(DOMAIN.id) == DOMAIN.electors
            assert read.covering.entry == entry
            assert len(data) < 4096
            proved += 1
    assert proved == 5 + 3 + 10


def test_what_is_not_final_has_none() -> None:
    last = WRITERS["w"].entries[-1]
    with pytest.raises(LocalError):
        proof(last)
    other = Writer("w", DOMAIN.id)
    other.append(Leave())
    with pytest.raises(LocalError):
        proof(other.entries[1])


def test_every_flipped_byte_is_rejected() -> None:
    for place in range(len(RAW)):
        # All eight where integers stand, which no signature or hash of its own covers.
        for bit in range(8) if place in INTEGERS else (place % 8,):
            with pytest.raises(PeerError):
                LogProof.parse(RAW[:place] + bytes([RAW[place] ^ (1 << bit)]) + RAW[place + 1 :]).check(DOMAIN.id)


def test_every_truncation_is_rejected_and_size_is_bounded() -> None:
    for length in range(0, len(RAW), 7):
        with pytest.raises(PeerError):
            LogProof.parse(RAW[:length])
    with pytest.raises(PeerError):
        LogProof.parse(RAW + b"\0")
    with pytest.raises(PeerError, match="at most"):
        LogProof.parse(bytes(MAX_PROOF_BYTES + 1))


def test_a_proof_is_of_its_own_domain() -> None:
    with pytest.raises(PeerError, match="is about the domain"):
        proof().check(digest("another"))
    # The same entries, cut and electors under another genesis: its id is another domain's.
    other = small_genesis(ELECTORS, name="other")
    moved = LogProof(other, parse_genesis(other), (), proof().covering)
    with pytest.raises(PeerError, match="another domain"):
        moved.check(parse_genesis(other).id)


def test_parts_of_different_proofs_do_not_fit() -> None:
    first, other = proof().covering, proof(WRITERS["x"].entries[1]).covering
    later = proof(WRITERS["w"].entries[2]).covering
    for wrong in (
        changed(entry=other.entry),
        changed(entry=later.entry),
        changed(row=other.row),
        changed(row=replace(first.row, seq=first.row.seq + 1)),
        changed(row=replace(first.row, status=FROZEN)),
        changed(row=replace(first.row, feed_root=digest("root"))),
        changed(sides=first.sides ^ 1),
        changed(sides=first.sides | 1 << len(first.heads_path)),
        changed(feed_path=first.feed_path[:-1]),
        changed(feed_path=later.feed_path),
        changed(heads_path=(*first.heads_path, digest("more"))),
        changed(heads_path=other.heads_path),
        changed(cut=REPLICA.cuts[0]),
        changed(cut=REPLICA.cuts[1]),
    ):
        with pytest.raises(PeerError):
            wrong.check(DOMAIN.id)


def test_an_elector_alone_proves_nothing() -> None:
    """Whoever signs a cut of its own making needs a quorum of the genesis' electors all the same."""
    forged = Writer("w", DOMAIN.id)
    forged.append(Role("trainer"))
    tree = [entry.id for entry in forged.entries]
    row = Head(forged.node, 1, tree[1], merkle.root(tree))
    body = Cut.make(DOMAIN.id, 9, digest("prev"), merkle.root([row.leaf()]), [row])
    strangers = tuple(key(f"s{number}").node for number in range(4))

    def signed(*names: str) -> LogProof:
        votes = sorted(commit(key(name), body, 9) for name in names)
        cut = CertifiedCut(body, 9, tuple(votes))
        covering = Covering.make(forged.entries[1], tree, {row.author: row}, cut)
        return LogProof.parse(LogProof(GENESIS, DOMAIN, (), covering).encode())

    for names in (("e1",), ("e1", "e2"), ("e1", "e2", "s1"), ("s0", "s1", "s2", "s3")):
        with pytest.raises(PeerError, match=r"no quorum|no elector"):
            signed(*names).check(DOMAIN.id)
    assert signed("e1", "e2", "e4").check(DOMAIN.id) == DOMAIN.electors
    with pytest.raises(LocalError):
        certify(body, 9, dict([commit(key("e1"), body, 9)]), strangers)


def test_there_is_room_for_amendments_and_none_yet() -> None:
    value = codec.decode(RAW, max_bytes=len(RAW))
    value[2] = [value[3]]
    read = LogProof.parse(codec.encode(value))
    assert read.amendments == (read.covering,)
    with pytest.raises(PeerError, match="amendments"):
        read.check(DOMAIN.id)


@settings(max_examples=40)
@given(values, st.integers(0, 5))
def test_any_value_is_a_proof_or_refused(value: object, place: int) -> None:
    whole = codec.decode(RAW, max_bytes=len(RAW))
    part = codec.decode(RAW, max_bytes=len(RAW))
    part[3][place] = value
    for wrong in (value, [FORMAT, value, [], whole[3]], [FORMAT, whole[1], value, whole[3]], part):
        with contextlib.suppress(PeerError):
            LogProof.parse(codec.encode(wrong)).check(DOMAIN.id)
            # Only what changed nothing may hold.
            assert codec.encode(wrong) == RAW
