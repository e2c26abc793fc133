"""Amendments: what changes a domain's electors and thresholds after its genesis, and from which cut on.

1. An amendment's body is ``[format, domain, number, [elector, …], thresholds]``; numbers run from 1. Electors in force
   sign it (``identity.AMEND``), each one amendment a number. ``id = SHA-256("farflung/amend-id/v1\\0" ‖ body)``.
2. Anybody may carry it into the log as an ``amend`` entry. It counts where a cut covers that entry, its number is the
   next one, and its signers are a quorum of the electors of that very cut; else the entry stands and means nothing.
   Of several in one cut the one of lowest entry id counts.
3. It is in force for the cuts after the one that covers it. So whoever holds the cuts knows who may certify the next.

``parse`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any, Final

from protocol import codec, identity
from protocol.codec import Array, Bytes, Formatted, Hash, Int, Many
from protocol.constants import FORMAT, MAX_ENTRY_BYTES
from protocol.domain import MAX_ELECTORS, Domain, Thresholds
from protocol.errors import PeerError, ours
from protocol.identity import Identity
from protocol.log.entry import Entry
from protocol.log.quorum import Votes, check_quorum
from protocol.records import Amend

ID_CONTEXT: Final = b"farflung/amend-id/v1\0"
SNAPSHOT: Final = Many(Array((("height", Int()), ("body", Bytes(most=MAX_ENTRY_BYTES)))), most=codec.MAX_INT)
"""What ``Amendments.to_value`` gives."""


@dataclass(frozen=True, slots=True)
class Amendment(Formatted):
    """Electors, ascending, and thresholds that are to be in force."""

    domain: Hash
    number: Annotated[int, Int(1, 2**62)]
    electors: Annotated[tuple[bytes, ...], Many(codec.KEY, most=MAX_ELECTORS, least=1)]
    thresholds: Thresholds
    body: bytes
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", sha256(ID_CONTEXT + self.body).digest())

    @classmethod
    def make(cls, domain: bytes, number: int, electors: Iterable[bytes], thresholds: Thresholds) -> Amendment:
        """A new amendment; raises ``LocalError`` for one that others would refuse."""
        with ours():
            return cls.parse(codec.encode([FORMAT, domain, number, sorted(electors), thresholds.to_value()]))

    @classmethod
    def parse(cls, body: bytes) -> Amendment:
        """Parse a body; raises ``PeerError``."""
        made = cls.from_value(codec.parse(body, cls.ARRAY, max_bytes=MAX_ENTRY_BYTES, what="amendment"), body=body)
        if any(left >= right for left, right in pairwise(made.electors)):
            raise PeerError("amendment: the electors are not strictly ascending")
        return made

    @classmethod
    def of(cls, domain: bytes, payload: Amend) -> Amendment:
        """The amendment that an entry carries; raises ``PeerError``."""
        return cls.parse(codec.encode([FORMAT, domain, payload.number, payload.electors, payload.thresholds]))

    def sign(self, elector: Identity) -> bytes:
        """An elector's signature."""
        return elector.sign(identity.AMEND, self.body)

    def payload(self, votes: Mapping[bytes, bytes]) -> Amend:
        """The entry's payload, with these signatures (elector → signature)."""
        values = tuple(self.thresholds.to_value())
        return Amend(self.number, self.electors, values, tuple(sorted(votes.items())))

    def verify(self, votes: Votes, electors: tuple[bytes, ...]) -> None:
        """Raise ``PeerError`` unless a quorum of ``electors``, and nobody else, signed this."""
        check_quorum(votes, electors, "amendment")
        for elector, signature in votes:
            identity.verify(elector, identity.AMEND, self.body, signature, "amendment")


class Amendments:
    """The amendments of ``domain`` that count, as cuts bring them."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._heights: list[int] = []
        self._list: list[Amendment] = []

    @property
    def number(self) -> int:
        """Of the newest amendment, 0 before any."""
        return len(self._list)

    def number_at(self, height: int) -> int:
        """The number of the rules of the cut of ``height``."""
        return bisect_right(self._heights, height)

    def electors_at(self, height: int) -> tuple[bytes, ...]:
        """The electors of the cut of ``height``, as far as the cuts below are known."""
        found = self._at(height)
        return self._domain.electors if found is None else found.electors

    def thresholds_at(self, height: int) -> Thresholds:
        """The thresholds in force at the cut of ``height``."""
        found = self._at(height)
        return self._domain.thresholds if found is None else found.thresholds

    def cover(self, height: int, entries: Iterable[Entry]) -> bool:
        """Take notice of the ``amend`` entries that the cut of ``height`` covers; whether one counts. Cuts come in
        order."""
        electors = self.electors_at(height)
        for entry in sorted(entries, key=lambda entry: entry.id):
            assert isinstance(entry.payload, Amend)
            if entry.payload.number != self.number + 1:
                continue
            try:
                amendment = Amendment.of(self._domain.id, entry.payload)
                amendment.verify(entry.payload.votes, electors)
            except PeerError:
                continue
            self._heights.append(height + 1)
            self._list.append(amendment)
            return True
        return False

    def to_value(self) -> list[Any]:
        """All of them, for a snapshot."""
        return [[height, one.body] for height, one in zip(self._heights, self._list, strict=True)]

    @classmethod
    def from_value(cls, value: Any, domain: Domain) -> Amendments:
        """The inverse of ``to_value``, for a value that fits ``SNAPSHOT``; raises ``PeerError``."""
        self = cls(domain)
        for height, body in value:
            self._heights.append(height)
            self._list.append(Amendment.parse(body))
        return self

    def _at(self, height: int) -> Amendment | None:
        place = bisect_right(self._heights, height)
        return self._list[place - 1] if place else None
