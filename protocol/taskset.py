"""A task set: the items of a task that a domain asks, where it does not ask all of them.

1. The file is the canonical array ``[FORMAT, items]``. ``items`` is one byte string of 32-bit little-endian integers,
   strictly ascending and below 2³¹; there is at least one, and the file has at most ``MAX_SET_BYTES``. The genesis
   names it by the BLAKE3 hash of its bytes.
2. A prompt's seed draws an item below 2³¹ (``protocol.work.schedule``). With a set of n items, the item at the place of
   that number modulo n is asked instead: every node gets the same question, and nobody a choice.

``TaskSet.parse`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Bytes, Formatted
from protocol.constants import MAX_SET_BYTES
from protocol.errors import LocalError, PeerError
from protocol.work.rollout import pack, unpack

MAX_ITEM: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TaskSet(Formatted):
    """The ascending ``items`` of a set."""

    items: Annotated[tuple[int, ...], Bytes(most=MAX_SET_BYTES, parse=unpack, pack=pack)]

    @classmethod
    def of(cls, items: Iterable[int]) -> TaskSet:
        """The set of these items. Raises ``LocalError`` where there is none, or one is named twice or out of range."""
        made = cls(tuple(sorted(items)))
        problem = made._problem()
        if problem is not None:
            raise LocalError(problem)
        return made

    @classmethod
    def parse(cls, data: bytes) -> TaskSet:
        """Strict parser; raises ``PeerError``."""
        made = cls.from_value(codec.parse(data, cls.ARRAY, max_bytes=MAX_SET_BYTES, what="task set"))
        problem = made._problem()
        if problem is not None:
            raise PeerError(f"task set: {problem}")
        return made

    def _problem(self) -> str | None:
        if not self.items:
            return "there is no item in it"
        if min(self.items) < 0 or max(self.items) > MAX_ITEM:
            return f"an item is not from 0 to {MAX_ITEM}"
        if any(left >= right for left, right in pairwise(self.items)):
            return "its items are not strictly ascending"
        return None

    def encode(self) -> bytes:
        """The file's bytes; ``LocalError`` where there are too many items."""
        data = codec.encode(self.to_value())
        if len(data) > MAX_SET_BYTES:
            raise LocalError(f"a task set of {len(self.items)} items is too large")
        return data

    def pick(self, item: int) -> int:
        """The item that is asked where a seed draws ``item`` (rule 2)."""
        return self.items[item % len(self.items)]
