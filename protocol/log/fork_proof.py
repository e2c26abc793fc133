"""The proof that an author forked its feed.

Two signed bodies of the same domain, author and seq with different ids prove a fork. Signing one body twice proves
nothing. A fork proof on the wire is ``[body a, signature a, body b, signature b]``, lower body first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protocol import codec
from protocol.codec import Array, Bytes
from protocol.constants import MAX_ENTRY_BYTES
from protocol.errors import Evidence, PeerError
from protocol.log import entry
from protocol.log.entry import Entry

MAX_FORK_PROOF_BYTES: Final = 2 * entry.MAX_WIRE_BYTES

_BODY = Bytes(most=MAX_ENTRY_BYTES)
_PROOF: Final = Array(
    (("body_a", _BODY), ("signature_a", codec.SIGNATURE), ("body_b", _BODY), ("signature_b", codec.SIGNATURE))
)


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
