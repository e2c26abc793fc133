"""Who had joined, who stood for what and who was trusted how far, in each cut of the past and in the newest.

1. A node's standing role in a cut is that of its newest ``role`` entry that the cut covers; after ``join`` or ``leave``
   it is "none", and so it is from the cut on with which its feed was closed or rebound. Where it lost its standing
   (``protocol.log.absence``), a ``role`` entry counts again that anchors on a late enough cut.
2. What counts is the height of the cut that first covered an entry, so a few numbers an author answer for all cuts.
3. Reputations are kept of those who stood as validators in some cut, from the first one on, and only where the policy
   asks for any.
4. Standings (``protocol.credit.sequential_test``) are kept of everybody whose submissions were decided about, the
   newest ``KEPT_STANDINGS`` that differ: versions that are of use anchor on recent cuts.

What no cut covers yet is laid over it (``overlay``), for answers about the present.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, Final

from protocol import codec
from protocol.codec import Array, Int, Many, Schema, Text
from protocol.constants import MILLION
from protocol.credit.sequential_test import FLOOR, NEWCOMER, Standing
from protocol.log.entry import Entry
from protocol.records import ROLES, Join, Leave, Role

KEPT_STANDINGS: Final = 64
"""Changes of an author's standing that are kept. A change of this number alters who is audited how far."""


def _changes(*fields: tuple[str, Schema]) -> Many:
    """The schema of what ``_Track.to_value`` gives."""
    return Many(Array((("height", Int()), *fields)), most=codec.MAX_INT)


SCHEMA: Final = Many(
    Array(
        (
            ("author", codec.KEY),
            ("name", Text(32)),
            ("joined", Int()),
            ("barred", Int()),
            ("roles", _changes(("role", Text(16, ROLES)))),
            ("reputations", _changes(("micro", Int(0, MILLION)))),
            ("standings", _changes(("tier", Int()), ("deficits", Int()), ("borders", Int()))),
        )
    ),
    most=codec.MAX_INT,
)


class _Track:
    """What changed at which height, ascending."""

    __slots__ = ("heights", "values")

    def __init__(self) -> None:
        self.heights: list[int] = []
        self.values: list[Any] = []

    def set(self, height: int, value: Any) -> None:
        if self.heights and self.heights[-1] == height:
            # Begun anew without what the same cut said before: a row never repeats the one below it.
            del self.heights[-1], self.values[-1]
            self.set(height, value)
        elif not self.values or self.values[-1] != value:
            self.heights.append(height)
            self.values.append(value)

    def keep(self, count: int) -> None:
        """Forget all but the newest changes."""
        del self.heights[:-count], self.values[:-count]

    def at(self, height: int | None, default: Any) -> Any:
        place = len(self.heights) if height is None else bisect_right(self.heights, height)
        return self.values[place - 1] if place else default

    def to_value(self) -> list[Any]:
        return [list(pair) for pair in zip(self.heights, self.values, strict=True)]


def _role(entry: Entry) -> str | None:
    """What its author stands for from this entry on, if it says so."""
    if isinstance(entry.payload, Leave):
        return "none"
    return entry.payload.role if isinstance(entry.payload, Role) else None


class History:
    """The history. ``names`` maps everybody whose join is final to the name it gave itself."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}
        self._joined: dict[bytes, int] = {}
        self._barred: dict[bytes, int] = {}
        """The height below which role entries of an author anchor in vain."""
        self._roles: dict[bytes, _Track] = {}
        self._reputations: dict[bytes, _Track] = {}
        self._standings: dict[bytes, _Track] = {}
        self._new_names: dict[bytes, str] = {}
        self._new_roles: dict[bytes, str] = {}

    def add(self, entry: Entry, height: int, anchor: int = 0) -> None:
        """Take an entry, anchored on the cut of height ``anchor``, that the cut of ``height`` made final; an author's
        come in order, and so do heights."""
        if isinstance(entry.payload, Join):
            self.names[entry.author] = entry.payload.name
            self._joined[entry.author] = height
        elif (role := _role(entry)) is not None and anchor >= self._barred.get(entry.author, 0):
            self._roles.setdefault(entry.author, _Track()).set(height, role)

    def bar(self, author: bytes, height: int, until: int) -> None:
        """The author lost its standing with the cut of ``height``, after its entries; role entries that anchor below
        ``until`` do not bring it back."""
        self.end(author, height)
        self._barred[author] = max(until, self._barred.get(author, 0))
        self._new_roles.pop(author, None)

    def barred(self, author: bytes) -> int:
        """The height of the first cut on which a role entry of the author may anchor."""
        return self._barred.get(author, 0)

    def stands_since(self, author: bytes) -> int:
        """The height of the cut with which the author's newest change of role became final."""
        track = self._roles.get(author)
        return track.heights[-1] if track is not None and track.heights else 0

    def end(self, author: bytes, height: int) -> None:
        """Take notice that the author's feed was closed or rebound with the cut of ``height``, after its entries."""
        if author in self._roles:
            self._roles[author].set(height, "none")

    def trust(self, author: bytes, height: int, micro: int) -> None:
        """Note an author's reputation in the cut of ``height``."""
        self._reputations.setdefault(author, _Track()).set(height, micro)

    def judge(self, author: bytes, height: int, standing: Standing) -> None:
        """Note an author's standing in the cut of ``height``."""
        if standing == NEWCOMER and author not in self._standings:
            return
        track = self._standings.setdefault(author, _Track())
        track.set(height, standing)
        track.keep(KEPT_STANDINGS)

    def standing(self, author: bytes, height: int) -> Standing:
        """The author's standing in the cut of this height; the oldest that is kept where that is later."""
        track = self._standings.get(author)
        if track is None or (len(track.heights) < KEPT_STANDINGS and height < track.heights[0]):
            return NEWCOMER
        found: Standing = track.at(height, track.values[0])
        return found

    def tracked(self, author: bytes) -> bool:
        """Whether the author's reputations are kept."""
        return author in self._reputations

    def overlay(self, entry: Entry, anchor: int = 0) -> None:
        """Take an entry, anchored as for ``add``, that no cut covers, or that one does in the meantime."""
        if isinstance(entry.payload, Join):
            self._new_names[entry.author] = entry.payload.name
        elif (role := _role(entry)) is not None and anchor >= self._barred.get(entry.author, 0):
            self._new_roles[entry.author] = role

    def lift(self) -> None:
        """Take the overlay off."""
        self._new_names.clear()
        self._new_roles.clear()

    # Reading

    def authors(self) -> Iterable[bytes]:
        """Everybody whose join is held."""
        return self.names.keys() | self._new_names.keys()

    def name(self, author: bytes) -> str | None:
        """The author's name, None where its join is not held."""
        return self._new_names.get(author) or self.names.get(author, self._new_names.get(author))

    def joined_by(self, author: bytes, height: int) -> bool:
        """Whether the cut of this height covers the author's join."""
        return self._joined.get(author, height + 1) <= height

    def role(self, author: bytes, height: int | None = None) -> str:
        """The standing role in the cut of this height or, where that is None, in all that is held."""
        if height is None and author in self._new_roles:
            return self._new_roles[author]
        track = self._roles.get(author)
        role: str = "none" if track is None else track.at(height, "none")
        return role

    def validators(self, height: int) -> list[bytes]:
        """Whose standing role in the cut of this height is "validator"."""
        return [author for author, track in self._roles.items() if track.at(height, "none") == "validator"]

    def reputation(self, author: bytes, height: int) -> int:
        """The author's reputation in the cut of this height; 0 where it is not kept."""
        track = self._reputations.get(author)
        return 0 if track is None else int(track.at(height, 0))

    # The snapshot

    def to_value(self) -> list[Any]:
        """What is final, ready for ``codec.encode``."""
        empty = _Track()
        return [
            [
                author,
                name,
                self._joined[author],
                self._barred.get(author, 0),
                self._roles.get(author, empty).to_value(),
                self._reputations.get(author, empty).to_value(),
                [
                    [height, standing.tier, standing.deficits - FLOOR, standing.borders - FLOOR]
                    for height, standing in self._standings.get(author, empty).to_value()
                ],
            ]
            for author, name in self.names.items()
        ]

    @classmethod
    def from_value(cls, value: Any) -> History:
        """The inverse of ``to_value``, for a value that fits ``SCHEMA``."""
        self = cls()
        for author, name, joined, barred, roles, reputations, standings in value:
            self.names[author] = name
            if barred:
                self._barred[author] = barred
            self._joined[author] = joined
            past = [[height, Standing(tier, low + FLOOR, high + FLOOR)] for height, tier, low, high in standings]
            for rows, tracks in ((roles, self._roles), (reputations, self._reputations), (past, self._standings)):
                for height, change in rows:
                    tracks.setdefault(author, _Track()).set(height, change)
        return self
