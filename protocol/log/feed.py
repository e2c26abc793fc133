"""One author's feed: a hash chain of entries, the rules by which it grows, and the proof that it was forked.

1. Entry n+1 names the id of entry n as ``prev``; sequence numbers have no gap.
2. Anchors never go back: the height of the anchored cut (0 for the domain's id) never falls within a feed.
3. At most ``MAX_ENTRIES_PER_ANCHOR`` entries of an author stand on one anchor.
4. Two signed bodies of the same domain, author and seq with different ids prove a fork. Signing one body twice
   proves nothing. A fork proof on the wire is ``[body a, signature a, body b, signature b]``, lower body first.

All are rules of validity: every replica refuses the same entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protocol import codec
from protocol.codec import Array, Bytes
from protocol.constants import MAX_ENTRIES_PER_ANCHOR, MAX_ENTRY_BYTES
from protocol.errors import Evidence, LocalError, PeerError
from protocol.log import entry
from protocol.log.entry import NO_PREV, Entry
from protocol.log.merkle import EMPTY_RANGE, CompactRange
from protocol.values import value

MAX_FORK_PROOF_BYTES: Final = 2 * entry.MAX_WIRE_BYTES

_BODY = Bytes(most=MAX_ENTRY_BYTES)
_PROOF: Final = Array(
    (("body_a", _BODY), ("signature_a", codec.SIGNATURE), ("body_b", _BODY), ("signature_b", codec.SIGNATURE))
)


@value
class FeedState:
    """Where a feed stands: ``next_seq`` and ``head`` (id of the newest entry, 32 zero bytes before the first), the
    height of its newest anchor and how many entries stand on it, and the compact range over its entry ids."""

    author: bytes
    next_seq: int = 0
    head: bytes = NO_PREV
    anchor_height: int = 0
    on_anchor: int = 0
    ids: CompactRange = EMPTY_RANGE

    def extend(self, new: Entry, anchor_height: int) -> FeedState:
        """The state after ``new``, whose anchor is the cut of that height; raises ``PeerError`` where a rule breaks."""
        if new.author != self.author:
            raise LocalError("an entry was handed to another author's feed")
        if new.seq != self.next_seq:
            raise PeerError(f"feed: entry {new.seq} where {self.next_seq} comes next")
        if new.prev != self.head:
            raise PeerError(f"feed: entry {new.seq} does not follow the one before")
        if anchor_height < self.anchor_height:
            raise PeerError(f"feed: the anchor of entry {new.seq} goes back")
        on_anchor = 1 if anchor_height > self.anchor_height else self.on_anchor + 1
        if on_anchor > MAX_ENTRIES_PER_ANCHOR:
            raise PeerError(f"feed: more than {MAX_ENTRIES_PER_ANCHOR} entries stand on one anchor")
        return FeedState(self.author, new.seq + 1, new.id, anchor_height, on_anchor, self.ids.append(new.id))


@dataclass(frozen=True, slots=True)
class ForkProof:
    """Two entries that no honest author signs both. Make it with ``of`` or ``parse``."""

    a: Entry
    b: Entry

    @property
    def domain(self) -> bytes:
        """The domain in which the feed was forked."""
        return self.a.domain

    @property
    def author(self) -> bytes:
        """Who forked its feed."""
        return self.a.author

    @property
    def seq(self) -> int:
        """The place for which there are two entries; the branches may part below it."""
        return self.a.seq

    @classmethod
    def of(cls, one: Entry, other: Entry) -> ForkProof:
        """The proof from two entries whose signatures are already verified; ``PeerError`` if they prove nothing."""
        if (one.domain, one.author, one.seq) != (other.domain, other.author, other.seq) or one.id == other.id:
            raise PeerError("fork proof: the two entries do not conflict")
        return cls(one, other) if one.body < other.body else cls(other, one)

    def encode(self) -> bytes:
        """The wire form."""
        return codec.encode([self.a.body, self.a.signature, self.b.body, self.b.signature])

    @classmethod
    def parse(cls, data: bytes) -> ForkProof:
        """Parse and verify a proof; raises ``PeerError``."""
        value = codec.parse(data, _PROOF, max_bytes=MAX_FORK_PROOF_BYTES, what="fork proof")
        body_a, signature_a, body_b, signature_b = value
        if body_a >= body_b:
            raise PeerError("fork proof: the bodies are not ascending")
        return cls.of(entry.parse(body_a, signature_a), entry.parse(body_b, signature_b))


def evidence(proof: ForkProof) -> Evidence:
    """The error that carries ``proof``."""
    return Evidence(f"{proof.author.hex()[:8]} signed two entries for place {proof.seq}", proof.encode())
