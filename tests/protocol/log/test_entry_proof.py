"""Self-contained proofs: every entry that is final has one, and nothing else has."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import FORMAT
from protocol.domain import parse_genesis
from protocol.errors import LocalError, PeerError
from protocol.log import merkle
from protocol.log.amendment import Amendment
from protocol.log.entry import Entry
from protocol.log.entry_proof import MAX_PROOF_BYTES, Covering, LogProof
from protocol.log.heads import FROZEN, Head, heads_root
from protocol.log.quorum import CertifiedCut, Cut, certify, commit
from protocol.log.replica import Replica
from protocol.records import Amend, Leave, Role
from tests.protocol.builders import Writer, cut_for, digest, key, small_genesis
from tests.protocol.strategies import values

ELECTORS = ("e1", "e2", "e3", "e4")
GENESIS = small_genesis(ELECTORS, members=("v", "w", "x", "y", "z"))
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


class Amended:
    """A domain whose four electors are replaced one by one, by entries of ``w``, each final with a cut of its own."""

    genesis = GENESIS

    def __init__(self) -> None:
        self.replica = Replica(DOMAIN)
        self.writer = Writer("w", DOMAIN.id)
        assert self.replica.add_entry(self.writer.entries[0])
        self.coverings: list[Covering] = []
        names = list(ELECTORS)
        for number, new in enumerate(("n1", "n2", "n3"), 1):
            before = tuple(names)
            names[number - 1] = new
            entry = self.writer.append(amended(number, tuple(names), before[:3]))
            assert self.replica.add_entry(entry)
            self.cut(*before)
            self.coverings.append(self.covering(entry))
        self.last = self.writer.append(Role("relay"))
        assert self.replica.add_entry(self.last)
        self.electors = tuple(sorted(key(name).node for name in names))
        self.cut(*names)

    def cut(self, *names: str) -> None:
        """Certify everything by three of these electors."""
        assert self.replica.add_cut(cut_by(self.replica, *names[:3]))
        self.writer.anchor = self.replica.newest_cut_id

    def covering(self, entry: Entry) -> Covering:
        """Of an entry of ``w``, by the newest cut."""
        ids = [made.id for made in self.writer.entries]
        return Covering.make(entry, ids, dict(self.replica.certified), self.replica.cuts[-1])

    def proof(self, *amendments: Covering) -> LogProof:
        """Of the last entry, whether it holds or not, through the wire form."""
        made = LogProof(GENESIS, DOMAIN, amendments, self.covering(self.last))
        return LogProof.parse(made.encode())


def amended(number: int, electors: tuple[str, ...], signers: tuple[str, ...]) -> Amend:
    """An amendment that changes the electors alone."""
    made = Amendment.make(DOMAIN.id, number, [key(name).node for name in electors], DOMAIN.thresholds)
    return made.payload({key(name).node: made.sign(key(name)) for name in signers})


def cut_by(replica: Replica, *names: str) -> CertifiedCut:
    """A cut of everything by these electors, whoever is in force."""
    rows = replica.uncovered()
    root = heads_root({**replica.certified, **{head.author: head for head in rows}}.values())
    body = Cut.make(DOMAIN.id, len(replica.cuts) + 1, replica.newest_cut_id, root, rows)
    return CertifiedCut(body, 1, tuple(sorted(commit(key(name), body, 1) for name in names)))


def test_amendments_lead_to_the_electors_in_force() -> None:
    world = Amended()
    first, second, third = world.coverings
    proof = world.proof(first, second, third)
    assert proof.check(DOMAIN.id) == world.electors == world.replica.electors_at(9)
    assert LogProof.parse(proof.encode()) == proof
    for amendments, why in (
        ((), "no elector"),
        ((first,), "no elector"),
        ((first, second), "no elector"),
        ((second, third), "amendment 1 is missing"),
        ((first, third), "amendment 2 is missing"),
        ((second, first, third), "amendment 1 is missing"),
        ((first, second, third, third), "amendment 4 is missing"),
        ((first, second, third, world.covering(world.last)), "amendment 4 is missing"),
    ):
        with pytest.raises(PeerError, match=why):
            world.proof(*amendments).check(DOMAIN.id)


def test_an_amendment_counts_from_the_cut_after_it() -> None:
    world = Amended()
    first, second, third = world.coverings
    # The cut that covered the first amendment was certified by the old electors.
    with pytest.raises(PeerError, match="not in force for the cut"):
        LogProof(GENESIS, DOMAIN, (first,), first).check(DOMAIN.id)
    assert LogProof(GENESIS, DOMAIN, (), first).check(DOMAIN.id) == DOMAIN.electors
    # One cut brings one amendment.
    early = replace(second, cut=first.cut, row=first.row, feed_path=first.feed_path)
    with pytest.raises(PeerError, match="before the one before it"):
        LogProof(GENESIS, DOMAIN, (first, early, third), world.covering(world.last)).check(DOMAIN.id)


def test_amendments_without_their_quorum_lead_nowhere() -> None:
    replica, writer = Replica(DOMAIN), Writer("w", DOMAIN.id)
    for entry in (*writer.entries, writer.append(amended(1, ("s1", "s2", "s3", "s4"), ELECTORS[:2]))):
        assert replica.add_entry(entry)
    assert replica.add_cut(cut_by(replica, *ELECTORS[:3]))
    ids = [entry.id for entry in writer.entries]
    amendment = Covering.make(writer.entries[1], ids, dict(replica.certified), replica.cuts[-1])
    with pytest.raises(PeerError, match="no quorum"):
        LogProof(GENESIS, DOMAIN, (amendment,), amendment).check(DOMAIN.id)


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
