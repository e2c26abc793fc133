"""What the log needs of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from node.store.log_rows import Item
from protocol.log.entry import Entry
from protocol.log.feed import ForkProof
from protocol.log.heads import RangeRequest
from protocol.log.quorum import CertifiedGrant


class Store(Protocol):
    """What ``LogService`` needs of a store."""

    async def read(self, after: int) -> tuple[Sequence[Item], int]:
        """The next of what was appended after the position ``after``, in that order, and the position of the last."""

    async def append(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        """Store all of it durably, or nothing; raises ``OSError`` where the disk refuses.

        ``exclusive``: ids of entries that must be the first at their place, else ``LocalError``.
        """

    async def meta(self, key: str) -> bytes | None:
        """A value stored beside the log."""

    async def snapshot(self) -> tuple[int, bytes] | None:
        """(position, bytes) of the snapshot, if there is a whole one."""

    async def save_snapshot(self, data: bytes) -> None:
        """Put a snapshot of all that was appended so far in the place of the last one; raises ``OSError``."""

    async def drop_snapshot(self) -> None:
        """Remove the snapshot, which turned out to be of no use."""

    async def sides(self) -> Sequence[CertifiedGrant | ForkProof]:
        """All grants and proofs of forks."""

    async def entries_by_id(self, ids: Sequence[bytes]) -> Sequence[Entry]:
        """Those entries, as far as they are stored, in the order in which they were."""

    async def entries_at(self, places: Sequence[tuple[bytes, int]]) -> Mapping[tuple[bytes, int], Sequence[Entry]]:
        """The entries stored for these (author, seq)."""

    async def ids_at(self, places: Sequence[tuple[bytes, int]]) -> Mapping[tuple[bytes, int], bytes]:
        """The ids of the first entries stored for these (author, seq), with or without a body."""

    async def ranges(self, wanted: Sequence[RangeRequest], most: int) -> Sequence[Sequence[bytes]]:
        """The encoded entries of each of these ranges, in all up to about ``most`` bytes."""

    async def cuts(self, after: int, most: int, room: int) -> Sequence[bytes]:
        """The encoded cuts above the height ``after``, at most so many, and up to about ``room`` bytes."""

    async def prune(self, ranges: Sequence[RangeRequest]) -> int:
        """Remove the bodies of the entries in these ranges; returns how many went. Raises ``OSError``."""
