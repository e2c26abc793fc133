"""A proof that an entry is final, for somebody who holds nothing but the domain's id.

1. A *covering* is an entry with all that shows a quorum certified it: the path from its id to its author's feed root,
   the author's row (its head) in which that root stands, the path from the row to the heads root, and the certified
   cut that names the heads root.
2. A proof is the signed genesis, whose body hashes to the domain's id, and the covering of one entry. Between the two
   stand the coverings of those ``amend`` entries that lead from the genesis' electors to the electors in force, by
   number, each by the first cut that covered it (``protocol.log.amendment``). Cut and amendment are signed by the
   electors in force for that cut; the new ones are in force from the cut after it on.
3. On the wire a proof is the canonical array ``[format, genesis, [covering…], covering]``, a covering
   ``[entry, [h…], row, sides, [h…], cut]``: encoded entry, path, the row as a cut lists it, on which sides the next
   path's siblings stand (see ``protocol.log.merkle``), path, encoded certified cut.
4. What it proves: this entry was signed by its author, and a quorum of the electors in force certified it, at the cut's
   height or before. It does not prove what the entry claims about the world, nor that nothing came after it: electors
   who left office could still certify what they like to who does not know of the amendment that replaced them.

``LogProof.parse`` and ``LogProof.check`` raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Array, Bytes, Fields, Int, Many
from protocol.constants import FORMAT, MAX_CUT_BYTES, MAX_GENESIS_BYTES
from protocol.domain import Domain, parse_genesis
from protocol.errors import PeerError, ours
from protocol.log import entry as entries
from protocol.log import merkle
from protocol.log.amendment import Amendment
from protocol.log.entry import MAX_WIRE_BYTES, Entry
from protocol.log.heads import Head
from protocol.log.quorum import CertifiedCut, check_quorum
from protocol.records import Amend

MAX_PROOF_BYTES: Final = 2 * MAX_CUT_BYTES
"""Largest encoded proof: the largest cut, the genesis, and many small cuts of amendments."""

MAX_AMENDMENTS: Final = 256
MAX_PATH: Final = 63
"""Hashes of one path: no tree has more leaves than 2**62."""

Path = Annotated[tuple[bytes, ...], Many(codec.HASH, most=MAX_PATH)]


@dataclass(frozen=True, slots=True)
class Covering(Fields):
    """An entry and what shows that a cut covers it (rule 1). The signatures in it were verified by the parser."""

    entry: Annotated[Entry, Bytes(most=MAX_WIRE_BYTES, parse=entries.decode, pack=Entry.encode)]
    feed_path: Path
    row: Head
    sides: Annotated[int, Int()]
    heads_path: Path
    cut: Annotated[CertifiedCut, Bytes(most=MAX_CUT_BYTES, parse=CertifiedCut.parse, pack=CertifiedCut.encode)]

    @classmethod
    def make(cls, entry: Entry, ids: Sequence[bytes], heads: Mapping[bytes, Head], cut: CertifiedCut) -> Covering:
        """From the ids of all entries of the author's feed up to its row, and all rows of ``cut`` by author."""
        row = heads[entry.author]
        authors = sorted(heads)
        index = authors.index(entry.author)
        feed_path = merkle.inclusion_proof(ids[: row.seq + 1], entry.seq)
        heads_path = merkle.inclusion_proof([heads[author].leaf() for author in authors], index)
        sides = merkle.sides(index, len(authors))
        return cls(entry, tuple(feed_path), row, sides, tuple(heads_path), cut)

    def check(self, domain: bytes, electors: Sequence[bytes]) -> None:
        """Raise ``PeerError`` unless a quorum of ``electors`` certified the entry in ``domain``."""
        entry, row, cut = self.entry, self.row, self.cut.cut
        if entry.domain != domain:
            raise PeerError("the entry belongs to another domain")
        if cut.domain != domain:
            raise PeerError("the cut belongs to another domain")
        if row.author != entry.author:
            raise PeerError("the row is another author's")
        if entry.seq == row.seq and entry.id != row.entry_id:
            raise PeerError("the row ends in another entry")
        merkle.verify_inclusion(merkle.leaf_hash(entry.id), entry.seq, row.seq + 1, self.feed_path, row.feed_root)
        merkle.verify_path(merkle.leaf_hash(row.leaf()), self.sides, self.heads_path, cut.heads_root)
        check_quorum(self.cut.votes, electors, "the cut")


_PROOF: Final = Array(
    (
        ("format", Int(FORMAT, FORMAT)),
        ("genesis", Bytes(most=MAX_GENESIS_BYTES)),
        ("amendments", Many(Covering.ARRAY, most=MAX_AMENDMENTS)),
        ("covering", Covering.ARRAY),
    )
)


@dataclass(frozen=True, slots=True)
class LogProof:
    """A proof; ``genesis`` is the signed genesis, ``domain`` what it says. Nothing is proved before ``check``."""

    genesis: bytes
    domain: Domain
    amendments: tuple[Covering, ...]
    covering: Covering

    @classmethod
    def make(
        cls,
        genesis: bytes,
        entry: Entry,
        ids: Sequence[bytes],
        heads: Mapping[bytes, Head],
        cut: CertifiedCut,
        amendments: Iterable[Covering] = (),
    ) -> LogProof:
        """A new proof (arguments as for ``Covering.make``); raises ``LocalError`` for one that would not hold."""
        domain = parse_genesis(genesis)
        made = cls(genesis, domain, tuple(amendments), Covering.make(entry, ids, heads, cut))
        with ours("the proof would not hold: "):
            made.check(domain.id)
        return made

    def encode(self) -> bytes:
        """The bytes of the proof file."""
        amendments = [amendment.to_value() for amendment in self.amendments]
        return codec.encode([FORMAT, self.genesis, amendments, self.covering.to_value()])

    @classmethod
    def parse(cls, data: bytes) -> LogProof:
        """Strict parser; verifies all signatures under the keys that are named, and nothing else."""
        value = codec.parse(data, _PROOF, max_bytes=MAX_PROOF_BYTES, what="proof")
        _, genesis, amendments, covering = value
        return cls(
            genesis,
            parse_genesis(genesis),
            tuple(map(Covering.from_value, amendments)),
            Covering.from_value(covering),
        )

    def check(self, domain: bytes) -> tuple[bytes, ...]:
        """The electors in force for the cut, once everything holds in the domain of this id; else ``PeerError``."""
        if self.domain.id != domain:
            raise PeerError(f"it is about the domain {self.domain.id.hex()}, not {domain.hex()}")
        electors, since = self.domain.electors, 0
        for number, covering in enumerate(self.amendments, 1):
            payload, height = covering.entry.payload, covering.cut.cut.height
            if not isinstance(payload, Amend) or payload.number != number:
                raise PeerError(f"amendment {number} is missing")
            if height < since:
                raise PeerError(f"amendment {number} became final before the one before it was in force")
            covering.check(domain, electors)
            Amendment.of(domain, payload).verify(payload.votes, electors)
            electors, since = electors if payload.electors is None else payload.electors, height + 1
        if self.covering.cut.cut.height < since:
            raise PeerError("the last amendment was not in force for the cut")
        self.covering.check(domain, electors)
        return electors
