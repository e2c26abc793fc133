"""Which feeds ended by ``close`` or ``rebind``, and who goes on for whom: rules 3 to 5 of ``protocol.log.recovery``.

All of it depends on cuts only, so all replicas agree whatever the order in which entries came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Array, Fields, Int, Key, Many
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.log.recovery import commitment
from protocol.records import Close, Rebind


@dataclass(frozen=True, slots=True)
class FeedEnding(Fields):
    """A feed ended with the cut of ``height``; ``successor`` is the node that took over with the cut of height
    ``moved``, None and 0 where none did."""

    height: Annotated[int, Int(1, 2**62)]
    successor: Key | None
    moved: Annotated[int, Int(0, 2**62)]


ENDINGS: Final = Many(Array((("author", codec.KEY), *FeedEnding.SCHEMA)), most=codec.MAX_INT)
"""What ``Endings.to_value`` gives."""


class Endings:
    """Which feeds ended by close or rebind, cut by cut. ``ended`` is for reading only; ``changes`` counts changes."""

    def __init__(self) -> None:
        self.ended: dict[bytes, FeedEnding] = {}
        self.changes = 0
        self._predecessors: dict[bytes, list[bytes]] = {}
        self._at: dict[int, list[bytes]] = {}

    def cover(self, height: int, covered: Iterable[Entry], committed: Callable[[bytes], bytes | None]) -> list[bytes]:
        """Take the closes and rebinds among the entries ``covered`` newly by the cut of ``height``; heights ascend.

        ``committed(author)`` is what the author's join says of its recovery key, None where that cut does not cover it.
        Returns the authors whose feeds ended now.
        """
        now = []
        for entry in sorted(covered, key=lambda entry: entry.id):
            record = entry.payload
            if not isinstance(record, Close | Rebind) or committed(record.target) != commitment(record.recovery):
                continue
            target = record.target
            before = self.ended.get(target)
            if isinstance(record, Rebind):
                if (before is not None and before.successor is not None) or self.owner(entry.author) == target:
                    continue
                self._set(target, FeedEnding(height if before is None else before.height, entry.author, height))
            elif before is None:
                self._set(target, FeedEnding(height, None, 0))
            if before is None:
                now.append(target)
        return now

    def _set(self, target: bytes, ending: FeedEnding) -> None:
        self.changes += 1
        self.ended[target] = ending
        for height in {ending.height, ending.moved} - {0}:
            at = self._at.setdefault(height, [])
            if target not in at:
                at.append(target)
        if ending.successor is not None:
            self._predecessors.setdefault(ending.successor, []).append(target)

    def at(self, height: int) -> Iterable[bytes]:
        """Whose feeds ended or whose credit moved with the cut of this height."""
        return self._at.get(height, ())

    def owner(self, author: bytes, height: int | None = None) -> bytes:
        """Who goes on for ``author``, in the cut of ``height`` or today: the end of its chain of rebinds, if any."""
        while (ending := self.ended.get(author)) is not None and ending.successor is not None:
            if height is not None and ending.moved > height:
                break
            author = ending.successor
        return author

    def lost(self, author: bytes, height: int | None = None) -> list[bytes]:
        """The nodes whose credit ``author`` holds, in the cut of ``height`` or today, directly or through others,
        ascending; none where it passed its own on."""
        if self.owner(author, height) != author:
            return []
        found: list[bytes] = []
        waiting = [author]
        while waiting:
            for old in self._predecessors.get(waiting.pop(), ()):
                if height is None or self.ended[old].moved <= height:
                    found.append(old)
                    waiting.append(old)
        return sorted(found)

    def to_value(self) -> list[list[object]]:
        """``[[author, height, successor or nil, moved], …]`` ascending by author, for a snapshot."""
        return [[author, *self.ended[author].to_value()] for author in sorted(self.ended)]

    @classmethod
    def from_value(cls, value: codec.Value) -> Endings:
        """The inverse of ``to_value``; raises ``PeerError`` for anything else."""
        codec.check(value, ENDINGS, "endings")
        made = cls()
        for author, height, successor, moved in value:
            if (successor is None) != (moved == 0) or 0 < moved < height:
                raise PeerError("endings: a feed ends before its credit moves")
            made._set(author, FeedEnding(height, successor, moved))
        if made.to_value() != value or any(made._cyclic(author) for author in made.ended):
            raise PeerError("endings: not in the one order, or in a circle")
        return made

    def _cyclic(self, author: bytes) -> bool:
        seen = set()
        while (ending := self.ended.get(author)) is not None and ending.successor is not None:
            if author in seen:
                return True
            seen.add(author)
            author = ending.successor
        return False
