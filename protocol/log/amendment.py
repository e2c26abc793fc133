"""Amendments: what changes whom a domain's genesis names, and its thresholds, and from which cut on.

1. An amendment's body is ``[format, domain, number, electors, validators, trainers, thresholds]``, nil for what stays
   as it is; numbers run from 1. Electors in force sign it (``identity.AMEND``), each one amendment a number.
   ``id = SHA-256("farflung/amend-id/v1\\0" ‖ body)``.
2. Anybody may carry it into the log as an ``amend`` entry. It counts where a cut covers that entry, its number is the
   next one, and its signers are a quorum of the electors of that very cut; else the entry stands and means nothing.
   Of several in one cut the one of lowest entry id counts.
3. It is in force for the cuts after the one that covers it. So whoever holds the cuts knows who may certify the next.

``parse`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any, Final

from protocol import codec, identity
from protocol.codec import Array, Bytes, Formatted, Hash, Int, Many, Optional
from protocol.constants import FORMAT, MAX_ENTRY_BYTES
from protocol.domain import MAX_ELECTORS, Domain, Thresholds
from protocol.errors import PeerError, ours
from protocol.identity import Identity
from protocol.log.entry import Entry
from protocol.log.quorum import Votes, check_quorum
from protocol.records import Amend

ID_CONTEXT: Final = b"farflung/amend-id/v1\0"
MAX_AMENDED: Final = 64
"""Named validators or trainers of one amendment, as an entry has no room for more."""
SNAPSHOT: Final = Many(Array((("height", Int()), ("body", Bytes(most=MAX_ENTRY_BYTES)))), most=codec.MAX_INT)
"""What ``Amendments.to_value`` gives."""


@dataclass(frozen=True, slots=True)
class Amendment(Formatted):
    """Electors and named validators, ascending, named trainers in their order, and thresholds that are to be in force;
    None where nothing changes."""

    domain: Hash
    number: Annotated[int, Int(1, 2**62)]
    electors: Annotated[tuple[bytes, ...] | None, Optional(Many(codec.KEY, most=MAX_ELECTORS, least=1))]
    validators: Annotated[tuple[bytes, ...] | None, Optional(Many(codec.KEY, most=MAX_AMENDED))]
    trainers: Annotated[tuple[bytes, ...] | None, Optional(Many(codec.KEY, most=MAX_AMENDED))]
    thresholds: Thresholds | None
    body: bytes
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", sha256(ID_CONTEXT + self.body).digest())

    @classmethod
    def make(
        cls,
        domain: bytes,
        number: int,
        electors: Iterable[bytes] | None = None,
        thresholds: Thresholds | None = None,
        *,
        validators: Iterable[bytes] | None = None,
        trainers: Sequence[bytes] | None = None,
    ) -> Amendment:
        """A new amendment; raises ``LocalError`` for one that others would refuse."""
        sets = [None if keys is None else sorted(keys) for keys in (electors, validators)]
        order = None if trainers is None else list(trainers)
        values = None if thresholds is None else thresholds.to_value()
        with ours():
            return cls.parse(codec.encode([FORMAT, domain, number, *sets, order, values]))

    @classmethod
    def parse(cls, body: bytes) -> Amendment:
        """Parse a body; raises ``PeerError``."""
        made = cls.from_value(codec.parse(body, cls.ARRAY, max_bytes=MAX_ENTRY_BYTES, what="amendment"), body=body)
        for what, keys in (("electors", made.electors), ("validators", made.validators)):
            if any(left >= right for left, right in pairwise(keys or ())):
                raise PeerError(f"amendment: the {what} are not strictly ascending")
        if len(set(made.trainers or ())) < len(made.trainers or ()):
            raise PeerError("amendment: a trainer is named twice")
        return made

    @classmethod
    def of(cls, domain: bytes, payload: Amend) -> Amendment:
        """The amendment that an entry carries; raises ``PeerError``."""
        changes = [payload.electors, payload.validators, payload.trainers, payload.thresholds]
        return cls.parse(codec.encode([FORMAT, domain, payload.number, *changes]))

    def sign(self, elector: Identity) -> bytes:
        """An elector's signature."""
        return elector.sign(identity.AMEND, self.body)

    def payload(self, votes: Mapping[bytes, bytes]) -> Amend:
        """The entry's payload, with these signatures (elector → signature)."""
        values = None if self.thresholds is None else tuple(self.thresholds.to_value())
        changes = self.electors, self.validators, self.trainers, values
        return Amend(self.number, *changes, tuple(sorted(votes.items())))

    def verify(self, votes: Votes, electors: tuple[bytes, ...]) -> None:
        """Raise ``PeerError`` unless a quorum of ``electors``, and nobody else, signed this."""
        check_quorum(votes, electors, "amendment")
        for elector, signature in votes:
            identity.verify(elector, identity.AMEND, self.body, signature, "amendment")


@dataclass(frozen=True, slots=True)
class _InForce:
    """What holds until the next amendment."""

    electors: tuple[bytes, ...]
    validators: tuple[bytes, ...]
    trainers: tuple[bytes, ...]
    thresholds: Thresholds

    def amended(self, by: Amendment) -> _InForce:
        """What holds from then on."""
        return _InForce(
            self.electors if by.electors is None else by.electors,
            self.validators if by.validators is None else by.validators,
            self.trainers if by.trainers is None else by.trainers,
            self.thresholds if by.thresholds is None else by.thresholds,
        )


class Amendments:
    """The amendments of ``domain`` that count, as cuts bring them."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._heights: list[int] = []
        self._list: list[Amendment] = []
        self._rules = [_InForce(domain.electors, domain.validators, domain.trainers, domain.thresholds)]

    @property
    def number(self) -> int:
        """Of the newest amendment, 0 before any."""
        return len(self._list)

    def number_at(self, height: int) -> int:
        """The number of the rules of the cut of ``height``."""
        return bisect_right(self._heights, height)

    def electors_at(self, height: int) -> tuple[bytes, ...]:
        """The electors of the cut of ``height``, as far as the cuts below are known."""
        return self._at(height).electors

    def thresholds_at(self, height: int) -> Thresholds:
        """The thresholds in force at the cut of ``height``."""
        return self._at(height).thresholds

    def validators_at(self, height: int) -> tuple[bytes, ...]:
        """The validators that are named at the cut of ``height``."""
        return self._at(height).validators

    def trainers_at(self, height: int) -> tuple[bytes, ...]:
        """The trainers that are named at the cut of ``height``, the first in line first."""
        return self._at(height).trainers

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
            self._take(height + 1, amendment)
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
            self._take(height, Amendment.parse(body))
        return self

    def _take(self, height: int, amendment: Amendment) -> None:
        self._heights.append(height)
        self._list.append(amendment)
        self._rules.append(self._rules[-1].amended(amendment))

    def _at(self, height: int) -> _InForce:
        return self._rules[bisect_right(self._heights, height)]
