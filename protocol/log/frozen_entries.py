"""Entries of frozen feeds that are not in the log: they wait aside, since a cut may certify the branch they are on.

1. Of one author ``MAX_ASIDE`` entries wait, the newest, beside those that a certified cut waits for: of these none is
   dropped.
2. While a cut waits for entries of an author, what leads to its row is fetched from the row downwards. Where the room
   is used up then, what is not on that branch is dropped but for the newest half of ``MAX_ASIDE``, and from there on
   there is room for ``MAX_ASIDE`` entries beside the branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from protocol.log.entry import Entry
from protocol.log.heads import Head

MAX_ASIDE: Final = 512
"""Entries of one frozen author that wait aside, beside those that a certified cut waits for: of these none is dropped.
Only entries no cut covers yet can come back from there."""


class FrozenEntries:
    """What waits aside; iterating gives all of it."""

    def __init__(self) -> None:
        self._entries: dict[bytes, dict[bytes, Entry]] = {}
        # The rows of the certified cut that waits for entries, and how many may wait aside before some are dropped.
        self._wanted: dict[bytes, Head] = {}
        self._room: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[Entry]:
        return (entry for aside in self._entries.values() for entry in aside.values())

    def branch(self, head: Head) -> Iterator[Entry]:
        """The entries that wait on the branch of ``head``, from it downwards without a gap."""
        aside = self._entries.get(head.author, {})
        wanted, seq = head.entry_id, head.seq
        while (entry := aside.get(wanted)) is not None and entry.seq == seq:
            yield entry
            wanted, seq = entry.prev, seq - 1

    def want(self, rows: Iterable[Head]) -> None:
        """A certified cut with these rows waits for entries."""
        self._wanted = {row.author: row for row in rows}

    def satisfied(self) -> None:
        """No cut waits any more."""
        self._wanted = {}
        self._room.clear()

    def put(self, entry: Entry) -> None:
        """Put an entry aside, and drop others where there is no room."""
        author = entry.author
        aside = self._entries.setdefault(author, {})
        aside[entry.id] = entry
        if len(aside) <= self._room.get(author, MAX_ASIDE):
            return
        wanted = self._wanted.get(author)
        if wanted is None:
            del aside[next(iter(aside))]
            return
        # What leads to a certified row is fetched from the row downwards, the newest half may be what just comes.
        needed = {below.id for below in self.branch(wanted)}
        others = [entry_id for entry_id in aside if entry_id not in needed]
        for gone in others[: -MAX_ASIDE // 2]:
            del aside[gone]
        self._room[author] = len(needed) + MAX_ASIDE

    def remove(self, author: bytes, entries: Iterable[Entry]) -> None:
        """These entries of ``author`` are in the log (again)."""
        aside = self._entries.get(author, {})
        for entry in entries:
            aside.pop(entry.id, None)
