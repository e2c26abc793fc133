"""Absence: how a member that is gone for good loses its standing, without anybody deciding it alone.

1. Electors in force sign ``[format, domain, node, cut]`` (``identity.ABSENT``): each only where it heard nothing of the
   node itself for ``term_silence_ms``, and ``cut`` is the newest that it held, or the domain's id.
2. Anybody may carry that into the log as an ``absent`` entry. It counts where a cut covers it, its signers are a quorum
   of the electors of that very cut, the named cut is one of the ``TICKET_CUTS`` before, and the node's newest ``role``
   entry that is covered anchors on that cut or an earlier one. So an old one that is brought again does nothing.
3. From the cut on that covers it the node stands for nothing. A ``role`` entry that anchors on that cut or a later one
   restores it.
4. A validator that left ``MISSED_VERDICTS`` due verdicts in a row to the others loses its standing as well
   (``protocol.credit.fold``); what it may do about it is the same, but later each time.

``check`` raises ``PeerError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from protocol import codec, identity
from protocol.codec import Array, Int, Many
from protocol.constants import FORMAT, TICKET_CUTS
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.log.entry import Entry
from protocol.log.quorum import check_quorum
from protocol.records import Absent, Role

SNAPSHOT: Final = Many(Array((("node", codec.KEY), ("anchor", Int()), ("absent", Int()))), most=codec.MAX_INT)
"""What ``Absences.to_value`` gives."""


def statement(domain: bytes, node: bytes, seen: bytes) -> bytes:
    """What electors sign."""
    return codec.encode([FORMAT, domain, node, seen])


def sign(elector: Identity, domain: bytes, node: bytes, seen: bytes) -> tuple[bytes, bytes]:
    """(elector, signature)."""
    return elector.node, elector.sign(identity.ABSENT, statement(domain, node, seen))


def check(domain: bytes, payload: Absent, electors: Sequence[bytes]) -> None:
    """Raise ``PeerError`` unless a quorum of ``electors``, and nobody else, signed this."""
    check_quorum(payload.votes, electors, "absent")
    message = statement(domain, payload.node, payload.seen)
    for elector, signature in payload.votes:
        identity.verify(elector, identity.ABSENT, message, signature, "absent")


def make(domain: bytes, node: bytes, seen: bytes, votes: Mapping[bytes, bytes]) -> Absent:
    """The payload with these signatures (elector → signature)."""
    return Absent(node, seen, tuple(sorted(votes.items())))


class Absences:
    """Who is absent, cut by cut. ``since`` maps those who are to the height from which on; for reading only."""

    def __init__(self, domain: bytes) -> None:
        self._domain = domain
        self.since: dict[bytes, int] = {}
        self._at: dict[int, list[bytes]] = {}
        self._anchors: dict[bytes, int] = {}
        """The height that the newest covered role entry of each author anchors on."""

    def cover(
        self,
        height: int,
        covered: Iterable[Entry],
        electors: Sequence[bytes],
        height_of: Callable[[bytes], int | None],
    ) -> None:
        """Take notice of the entries that the cut of ``height`` covers newly; heights ascend."""
        roles: list[Entry] = []
        words: list[Absent] = []
        for entry in covered:
            if isinstance(entry.payload, Role):
                roles.append(entry)
            elif isinstance(entry.payload, Absent):
                words.append(entry.payload)
        for word in words:
            seen = height_of(word.seen)
            if seen is None or seen < height - TICKET_CUTS or self._anchors.get(word.node, -1) > seen:
                continue
            if word.node in self.since:
                continue
            try:
                check(self._domain, word, electors)
            except PeerError:
                continue
            self.since[word.node] = height
            self._at.setdefault(height, []).append(word.node)
        for entry in roles:
            anchor = height_of(entry.anchor)
            assert anchor is not None
            self._anchors[entry.author] = anchor
            if anchor >= self.since.get(entry.author, anchor + 1):
                del self.since[entry.author]

    def at(self, height: int) -> Sequence[bytes]:
        """Who is absent from the cut of this height on, as far as it is kept."""
        return self._at.get(height, ())

    def forget(self) -> None:
        """Drop what the newest cut and those below brought."""
        self._at.clear()

    def to_value(self) -> list[Any]:
        """All of it, for a snapshot; 0 for who is not absent."""
        return [
            [node, self._anchors.get(node, 0), self.since.get(node, 0)]
            for node in sorted(self._anchors.keys() | self.since)
        ]

    @classmethod
    def from_value(cls, value: Any, domain: bytes) -> Absences:
        """The inverse, for a value that fits ``SNAPSHOT``."""
        self = cls(domain)
        for node, anchor, absent in value:
            self._anchors[node] = anchor
            if absent:
                self.since[node] = absent
        return self
