"""The log on disk: one SQLite database, written through aiosqlite under trio-asyncio.

1. WAL with ``synchronous=FULL``: what ``append`` returned from survives a crash and a power cut.
2. ``append`` is one transaction. Rows of all tables share one counter, ``position``, so that they are read back in
   the order in which the replica took them, in which every anchor and every covered entry is already known.
3. What is stored already is left alone. The node's own new entries go in ``exclusive``: another entry at such a place
   is an error, so that not even a commit of unknown outcome makes a node fork its feed.
4. Signatures were verified before rows were stored; readers check the rules of the chain again, not them.
5. A snapshot (``protocol.credit.snapshot``) lies beside the rows that it sums up, with the position it was taken at and
   a hash over both. One that does not fit its hash is no snapshot.
6. What SQLite refuses, be it writing or reading, is an ``OSError``, and so is what is read and cannot be what was
   written; ``unreadable`` tells of the last of the latter until the process ends, since a damaged page stays damaged.
7. ``prune`` takes the bodies of final entries away, and leaves id, author and place. Nothing is read back from those.

``node.log.offline_verification`` trusts nothing of this.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import aiosqlite
import trio
import trio_asyncio

from node.errors import UserError
from node.store.log_rows import READ, READ_SIDES, SCHEMA, SCHEMA_VERSION, Item, as_bytes, decode_rows, snapshot_hash
from protocol import codec
from protocol.domain import Domain
from protocol.errors import Error, LocalError
from protocol.log import entry as entries
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import RangeRequest
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.records import Amend

logger = logging.getLogger(__name__)

BATCH: Final = 4096
"""Rows that are read at a time."""

WRITTEN_AT_ONCE: Final = 128
"""Rows that one statement stores."""

RANGES_AT_ONCE: Final = 200
"""Ranges that one statement reads."""

ROWS_AT_ONCE: Final = 1024
"""Entries that one statement reads, unless one range has more: at most 4 MB."""

PRUNED_AT_ONCE: Final = 2000


class LogStore:
    """The database of one node. Make it with ``open_log_store``."""

    def __init__(self, path: Path, domain: Domain, connection: aiosqlite.Connection, loop: Any) -> None:
        self.path = path
        self.unreadable: str | None = None
        """What could not be read, for people; None where all could."""
        self._domain = domain
        self._connection = connection
        self._loop = loop
        self._lock = trio.Lock()
        self._position = 0

    async def _run(self, function: Any, *arguments: Any) -> Any:
        # The loop is named, because a task that was started elsewhere does not inherit it.
        return await trio_asyncio.aio_as_trio(function, loop=self._loop)(*arguments)

    async def _all(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        try:
            return list(await self._run(self._connection.execute_fetchall, statement, arguments))
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> OSError:
        """The error of something that cannot be read."""
        if self.unreadable is None:
            logger.error("%s cannot be read: %s", self.path, error)
        self.unreadable = f"{self.path} cannot be read: {error}"
        return OSError(self.unreadable)

    def _entries(self, rows: Iterable[tuple[bytes, bytes]]) -> list[Entry]:
        """The entries of (body, signature) that were verified before they were stored."""
        try:
            return [entries.parse(body, signature, verify=False) for body, signature in rows]
        except (Error, TypeError) as error:
            raise self._failed(error) from None

    async def _prepare(self) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "wal_autocheckpoint=1000"):
            await self._all(f"PRAGMA {pragma}")
        ((version,),) = await self._all("PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise UserError(f"{self.path}: a newer Farflung wrote this log", "upgrade Farflung")
        if 0 < version < SCHEMA_VERSION:
            remedy = f"delete {self.path.parent}: peers give the log back"
            raise UserError(f"{self.path}: a Farflung from before the first release wrote this log", remedy)
        for step in ("BEGIN IMMEDIATE", *SCHEMA, f"PRAGMA user_version={SCHEMA_VERSION}", "COMMIT"):
            await self._run(self._connection.execute, step)
        owner = await self.meta("domain")
        if owner is None:
            await self.append((), {"domain": self._domain.id})
        elif owner != self._domain.id:
            raise UserError(f"{self.path}: this log belongs to another domain", "use a new data directory")
        tables = ("entries", "cuts", "grants", "forks")
        newest = " UNION ALL ".join(f"SELECT MAX(position) FROM {table}" for table in tables)  # noqa: S608
        self._position = max((row[0] for row in await self._all(newest) if isinstance(row[0], int)), default=0)

    async def read(self, after: int) -> tuple[list[Item], int]:
        """The next items after the position ``after``, and the position of the last; none at the end of the log.
        Signatures of entries are not verified again."""
        rows = await self._all(READ, after, BATCH)
        return await self._decoded(rows), rows[-1][0] if rows else after

    async def _decoded(self, rows: list[tuple[Any, ...]]) -> list[Item]:
        try:
            return await trio.to_thread.run_sync(lambda: list(decode_rows(rows, verify=False)))
        except Error as error:
            raise _damaged(self.path, error) from None

    async def append(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        """Store ``items``, in this order, and the values of ``meta`` in one durable transaction.

        It is not cancelled half-way. Raises ``OSError`` where the disk is full or fails (nothing is stored then, or
        the outcome is unknown), and ``LocalError`` where an ``exclusive`` entry (by id) finds its place taken.
        """
        async with self._transaction():
            await self._refuse_taken(item for item in items if isinstance(item, Entry) and item.id in exclusive)
            # A commit of unknown outcome may have taken its positions: none is used twice.
            first = self._position + 1
            self._position += len(items)
            for one, group in groupby(map(stored, count(first), items), itemgetter(0)):
                rows = [row for _, row in group]
                # Several rows a statement: the interpreter's lock changes hands with each of them.
                whole = len(rows) - len(rows) % WRITTEN_AT_ONCE
                if whole:
                    many = one + f", ({', '.join('?' * len(rows[0]))})" * (WRITTEN_AT_ONCE - 1)
                    parts = [rows[start : start + WRITTEN_AT_ONCE] for start in range(0, whole, WRITTEN_AT_ONCE)]
                    await self._run(self._connection.executemany, many, [list(chain(*part)) for part in parts])
                await self._run(self._connection.executemany, one, rows[whole:])
            if meta:
                keep = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
                await self._run(self._connection.executemany, keep, list(meta.items()))
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        """Nothing cancels it half-way. What SQLite refuses is an ``OSError``."""
        with trio.CancelScope(shield=True):
            async with self._lock:
                try:
                    await self._run(self._connection.execute, "BEGIN IMMEDIATE")
                    yield
                    await self._run(self._connection.execute, "COMMIT")
                except (sqlite3.Error, OSError, LocalError) as error:
                    # After some errors (a full disk) SQLite has rolled back by itself.
                    with suppress(sqlite3.Error):
                        await self._run(self._connection.execute, "ROLLBACK")
                    if isinstance(error, sqlite3.Error):
                        raise OSError(f"{self.path}: {error}") from None
                    raise

    async def _refuse_taken(self, own: Iterable[Entry]) -> None:
        for entry in own:
            if await self._all("SELECT 1 FROM entries WHERE author = ? AND seq = ?", entry.author, entry.seq):
                raise LocalError(f"{self.path}: entry {entry.seq} of the own feed is stored already")

    async def meta(self, key: str) -> bytes | None:
        """A value stored beside the log, or None."""
        rows = await self._all("SELECT value FROM meta WHERE key = ?", key)
        return as_bytes(rows[0][0]) if rows else None

    # Snapshots

    async def snapshot(self) -> tuple[int, bytes] | None:
        """(position, bytes) of the snapshot, if there is one that fits its hash."""
        for position, digest, data in await self._all("SELECT position, hash, data FROM snapshot"):
            if isinstance(position, int) and isinstance(data, bytes) and digest == snapshot_hash(position, data):
                return position, data
        return None

    async def save_snapshot(self, data: bytes) -> None:
        """Put a snapshot of all that was appended so far in the place of the last one; raises ``OSError``."""
        async with self._transaction():
            values = (1, self._position, snapshot_hash(self._position, data), data)
            await self._run(self._connection.execute, "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?)", values)

    async def drop_snapshot(self) -> None:
        """Remove the snapshot; raises ``OSError``."""
        async with self._transaction():
            await self._run(self._connection.execute, "DELETE FROM snapshot")

    # What is not in memory

    async def sides(self) -> list[CertifiedGrant | ForkProof]:
        """All grants and proofs of forks, in the order in which they were stored."""
        found = await self._decoded(await self._all(READ_SIDES))
        return [item for item in found if isinstance(item, CertifiedGrant | ForkProof)]

    async def entries_by_id(self, ids: Sequence[bytes]) -> list[Entry]:
        """Those entries, as far as they are stored, in the order in which they were."""
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            marks = ",".join("?" * len(some))
            statement = f"SELECT position, body, signature FROM entries WHERE id IN ({marks}) AND body IS NOT NULL"  # noqa: S608
            rows += await self._all(statement, *some)
        return self._entries((body, signature) for _, body, signature in sorted(rows))

    async def entries_at(self, places: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], list[Entry]]:
        """The entries stored for these (author, seq)."""
        found: dict[tuple[bytes, int], list[Entry]] = {}
        for author, seq, _, body, signature in await self._at(places):
            if body is not None:
                found.setdefault((author, seq), []).extend(self._entries([(body, signature)]))
        return found

    async def ids_at(self, places: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], bytes]:
        """The ids of the first entries stored for these (author, seq), with or without a body."""
        found: dict[tuple[bytes, int], bytes] = {}
        for author, seq, entry_id, _, _ in await self._at(places):
            found.setdefault((author, seq), entry_id)
        return found

    async def _at(self, places: Sequence[tuple[bytes, int]]) -> list[tuple[Any, ...]]:
        """(author, seq, id, body, signature) of all entries at these places, of one place the first stored first."""
        wanted = [RangeRequest(author, seq, seq) for author, seq in dict.fromkeys(places)]
        return [
            (some[place].author, seq, *rest)
            for _, some in _parts(wanted)
            for place, seq, _, *rest in await self._rows(some)
        ]

    async def ranges(self, wanted: Sequence[RangeRequest], most: int) -> list[list[bytes]]:
        """The encoded entries of each of these ranges, in all up to about ``most`` bytes.

        Of several entries at a place all are given. A range ends where a body is missing.
        """
        found: list[list[bytes]] = [[] for _ in wanted]
        for start, some in _parts(wanted):
            if most <= 0:
                break
            ended: set[int] = set()
            for place, _, _, _, body, signature in await self._rows(some):
                if not (isinstance(body, bytes) and isinstance(signature, bytes)):
                    ended.add(place)
                if most > 0 and place not in ended:
                    data = codec.pack_pair(body, signature)
                    found[start + place].append(data)
                    most -= len(data)
        return found

    async def _rows(self, wanted: Sequence[RangeRequest]) -> list[tuple[Any, ...]]:
        """(index in ``wanted``, seq, position, id, body, signature) of all entries in these ranges, ascending."""
        marks = ", ".join(["(?, ?, ?, ?)"] * len(wanted))
        query = f"""WITH wanted (place, who, low, high) AS (VALUES {marks})
            SELECT place, seq, position, id, body, signature FROM wanted
            CROSS JOIN entries ON author = who AND seq BETWEEN low AND high"""  # noqa: S608
        values = [part for place, one in enumerate(wanted) for part in (place, one.author, one.first_seq, one.last_seq)]
        return sorted(await self._all(query, *values), key=lambda found: found[:3])

    async def cuts(self, after: int, most: int, room: int) -> list[bytes]:
        """The encoded cuts above the height ``after``, at most so many, and up to about ``room`` bytes."""
        statement = "SELECT height, LENGTH(data) FROM cuts WHERE height > ? ORDER BY height LIMIT ?"
        last = after
        for last, size in await self._all(statement, after, most):  # noqa: B007
            room -= size
            if room <= 0:
                break
        statement = "SELECT data FROM cuts WHERE height > ? AND height <= ? ORDER BY height"
        return [row[0] for row in await self._all(statement, after, last)]

    async def prune(self, ranges: Sequence[RangeRequest]) -> int:
        """Remove the bodies of the entries in these ranges, a few at a time; returns how many went.

        Those of ``amend`` entries (and of what looks like one) stay: proofs rest on them (``node.log.offline_proof``).
        """
        statement = """UPDATE entries SET body = NULL, signature = NULL
            WHERE author = ? AND seq BETWEEN ? AND ? AND body IS NOT NULL AND NOT instr(body, ?)"""
        amend = codec.encode(Amend.KIND)
        gone = 0
        for one in ranges:
            for first in range(one.first_seq, one.last_seq + 1, PRUNED_AT_ONCE):
                last = min(first + PRUNED_AT_ONCE - 1, one.last_seq)
                async with self._transaction():
                    cursor = await self._run(self._connection.execute, statement, (one.author, first, last, amend))
                gone += cursor.rowcount
        return gone


def stored(position: int, item: Item) -> tuple[str, tuple[Any, ...]]:
    """The statement that stores an item at a position, and its values."""
    match item:
        case Entry():
            values = position, item.id, item.author, item.seq, item.body, item.signature
            return "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?)", values
        case CertifiedCut():
            return "INSERT OR IGNORE INTO cuts VALUES (?, ?, ?)", (item.cut.height, position, item.encode())
        case CertifiedGrant():
            # One that became void, see ``protocol.log.grants``, gives its place to a later one.
            return "INSERT OR REPLACE INTO grants VALUES (?, ?, ?)", (item.grant.term, position, item.encode())
        case ForkProof():
            fork = item.author + item.seq.to_bytes(8, "big")
            return "INSERT OR IGNORE INTO forks VALUES (?, ?, ?)", (fork, position, item.encode())


def _parts(wanted: Sequence[RangeRequest]) -> Iterator[tuple[int, Sequence[RangeRequest]]]:
    """``wanted`` in parts that one statement reads, each with the index of its first."""
    start = 0
    while start < len(wanted):
        end, room = start, ROWS_AT_ONCE
        while end < min(len(wanted), start + RANGES_AT_ONCE) and (end == start or room > 0):
            room -= wanted[end].last_seq - wanted[end].first_seq + 1
            end += 1
        yield start, wanted[start:end]
        start = end


@asynccontextmanager
async def open_log_store(path: Path, domain: Domain) -> AsyncIterator[LogStore]:
    """The store in the file ``path``, made where it is missing; it brings its own asyncio loop.

    Raises ``UserError`` for a file that is damaged, unreadable, of a newer Farflung or of another domain. The block's
    own exceptions come out as they are.
    """
    failure: Exception | None = None
    async with trio_asyncio.open_loop() as loop:
        try:
            async with _connection(path, loop) as connection:
                store = LogStore(path, domain, connection, loop)
                try:
                    await store._prepare()
                except (sqlite3.Error, OSError) as error:
                    raise _damaged(path, error) from None
                yield store
        except Exception as error:
            failure = error  # raised below: the loop would wrap it in groups
    if failure is not None:
        raise failure


@asynccontextmanager
async def _connection(path: Path, loop: Any) -> AsyncIterator[aiosqlite.Connection]:
    # Opening and closing are not cancelled half-way: SQLite's thread would be left behind.
    with trio.CancelScope(shield=True):
        try:
            # aiosqlite leaves its thread behind where connecting fails, so a plain connection tries first.
            await trio.to_thread.run_sync(lambda: sqlite3.connect(path).close())
            connection = await trio_asyncio.aio_as_trio(aiosqlite.connect, loop=loop)(path, isolation_level=None)
        except sqlite3.Error as error:
            raise _damaged(path, error) from None
    try:
        yield connection
    finally:
        with trio.CancelScope(shield=True):
            await trio_asyncio.aio_as_trio(connection.close, loop=loop)()


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: the log cannot be used ({error})",
        f"check rights and disk; if it is damaged, delete {path.parent}: peers give the log back",
    )
