"""What follows from the final part of a log, as one value: a node that has it need not read that part again.

1. A snapshot is taken at the newest cut. It holds the state of every feed at its certified head, what its join says of
   the recovery key, which feeds were closed or rebound, the ids of all cuts, the amendments, the settled terms, whom
   cuts admitted, who is absent, what authors spent of their budgets, the final fold and the history of roles and
   reputations, and names the entries in memory that no cut covers.
2. It is a cache of one node, never sent and never trusted by another: who finds it damaged drops it and reads the log.
3. Grants and proofs of forks are not in it; they are few, and read whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from protocol import codec
from protocol.codec import Array, Bytes, Int, Many
from protocol.constants import MAX_CUT_BYTES
from protocol.credit import attendance, fold_state, history
from protocol.credit.ledger import Ledger
from protocol.domain import Domain
from protocol.errors import Evidence, PeerError
from protocol.log import absence, admission, amendment
from protocol.log.absence import Absences
from protocol.log.admission import Admissions
from protocol.log.amendment import Amendments
from protocol.log.budget import Budgets
from protocol.log.chain import FeedState
from protocol.log.endings import ENDINGS, Endings
from protocol.log.fork_proof import ForkProof
from protocol.log.grants import Terms
from protocol.log.merkle import CompactRange
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.log.replica import Replica

FORMAT: Final = 2
"""Changes with whatever a snapshot is made from, rules included: an older one is dropped."""

MAX_BYTES: Final = 1 << 30
_FEED: Final = Array(
    (
        ("author", codec.KEY),
        ("next", Int(1)),
        ("head", codec.HASH),
        ("anchor_height", Int()),
        ("on_anchor", Int()),
        ("frozen", Int(0, 1)),
        ("nodes", Bytes(most=64 * 32)),
    )
)
_SNAPSHOT: Final = Array(
    (
        ("format", Int(FORMAT, FORMAT)),
        ("domain", codec.HASH),
        ("cut", Bytes(most=MAX_CUT_BYTES)),
        ("cuts", Bytes(most=MAX_BYTES)),
        ("cut_nodes", Bytes(most=64 * 32)),
        ("feeds", Many(_FEED, most=codec.MAX_INT)),
        ("recoveries", Bytes(most=MAX_BYTES)),
        ("endings", ENDINGS),
        ("tail", Bytes(most=MAX_BYTES)),
        ("amendments", amendment.SNAPSHOT),
        ("settled", Many(Int(), most=codec.MAX_INT)),
        ("highest_term", Int()),
        ("admissions", admission.SNAPSHOT),
        ("absences", absence.SNAPSHOT),
        ("spent", Many(Array((("author", codec.KEY), ("entries", Int()))), most=codec.MAX_INT)),
        ("history", history.SCHEMA),
        ("attendance", attendance.SCHEMA),
        ("fold", fold_state.SCHEMA),
    )
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checked value. ``tail`` are the ids of entries that were in memory and that no cut covers."""

    domain: Domain
    value: list[Any]
    tail: tuple[bytes, ...]

    @classmethod
    def take(cls, ledger: Ledger) -> Snapshot | None:
        """The state of ``ledger`` and its replica at the newest cut; None before the first."""
        ledger.note_final()
        replica = ledger.replica
        newest = replica.newest_cut
        if newest is None:
            return None
        frozen = {author for author, head in replica.certified.items() if head.status}
        tail = tuple(replica.uncertified())
        value = [
            FORMAT,
            replica.domain.id,
            newest.encode(),
            b"".join(replica.cut_ids()),
            b"".join(replica.cut_range.nodes),
            [_feed(state, state.author in frozen) for state in replica.final_feeds()],
            b"".join(replica.commitments[author] for author in replica.certified),
            replica.endings.to_value(),
            b"".join(tail),
            replica.amendments.to_value(),
            sorted(replica.terms.settled),
            replica.terms.highest,
            replica.admissions.to_value(),
            replica.absences.to_value(),
            [list(pair) for pair in replica.budgets.spent.items()],
            *ledger.to_value(),
        ]
        return cls(replica.domain, value, tail)

    def encode(self) -> bytes:
        """The bytes to store. Takes a second for 100,000 authors, and touches nothing that changes."""
        return codec.encode(self.value)

    @classmethod
    def parse(cls, data: bytes, domain: Domain) -> Snapshot:
        """The inverse of ``encode``; raises ``PeerError`` for what is damaged or of another format or domain."""
        value = codec.parse(data, _SNAPSHOT, max_bytes=MAX_BYTES, what="snapshot")
        if value[1] != domain.id:
            raise PeerError("snapshot: it belongs to another domain")
        return cls(domain, value, _ids(value[8]))

    def resume(self, sides: Iterable[CertifiedGrant | ForkProof]) -> Ledger:
        """A ledger over a replica with nothing but the newest cut in memory. ``sides`` are all grants and proofs of
        forks that are stored. Raises ``PeerError`` where the parts do not fit each other."""
        _, _, cut, cut_ids, cut_nodes, feeds, recoveries, endings, _, *later = self.value
        amendments, settled, highest, admissions, absences, spent, past, attended, fold = later
        states = [_state(row) for row in feeds]
        frozen = {row[0] for row in feeds if row[5]}
        newest = CertifiedCut.parse(cut)
        over = Endings.from_value(endings)
        heights = _ids(cut_ids)
        tree = _range(len(heights), cut_nodes)
        replica = Replica.resume(self.domain, states, frozen, _ids(recoveries), over, heights, tree, newest)
        replica.amendments = Amendments.from_value(amendments, self.domain)
        replica.terms = Terms(settled, highest)
        replica.admissions = Admissions.from_value(admissions, self.domain)
        replica.absences = Absences.from_value(absences, self.domain.id)
        replica.budgets = Budgets(self.domain.admission.budget, dict(spent))
        for side in sides:
            with suppress(Evidence):
                if isinstance(side, ForkProof):
                    replica.add_fork(side)
                else:
                    replica.add_grant(side)
        return Ledger.resume(replica, past, attended, fold)


def _feed(state: FeedState, frozen: bool) -> list[Any]:
    nodes = b"".join(state.ids.nodes)
    return [state.author, state.next_seq, state.head, state.anchor_height, state.on_anchor, int(frozen), nodes]


def _state(row: list[Any]) -> FeedState:
    author, next_seq, head, anchor_height, on_anchor, _, nodes = row
    return FeedState(author, next_seq, head, anchor_height, on_anchor, _range(next_seq, nodes))


def _range(size: int, nodes: bytes) -> CompactRange:
    found = CompactRange(size, _ids(nodes))
    if len(found.nodes) != size.bit_count():
        raise PeerError("snapshot: a compact range does not fit its size")
    return found


def _ids(data: bytes) -> tuple[bytes, ...]:
    if len(data) % 32:
        raise PeerError("snapshot: ids have 32 bytes")
    return tuple(data[place : place + 32] for place in range(0, len(data), 32))
