"""The log on disk: one SQLite database, written through aiosqlite under trio-asyncio.

1. WAL with ``synchronous=FULL``: what ``append`` returned from survives a crash and a power cut.
2. ``append`` is one transaction. Rows of all tables share one counter, ``position``, so that they are read back in
   the order in which the replica took them, in which every anchor and every covered entry is already known.
3. What is stored already is left alone. The node's own new entries go in ``exclusive``: another entry at such a place
   is an error, so that not even a commit of unknown outcome makes a node fork its feed.
4. Signatures were verified before rows were stored; ``load`` checks the rules of the chain again, not them.

``node.store.verify`` trusts nothing of this.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import aiosqlite
import trio
import trio_asyncio

from node.errors import UserError
from protocol import entry as entries
from protocol.domain import Domain
from protocol.entry import Entry
from protocol.errors import Error, LocalError
from protocol.feed import ForkProof
from protocol.quorum import CertifiedCut, CertifiedGrant

SCHEMA_VERSION: Final = 1

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS entries (
        id BLOB PRIMARY KEY, author BLOB NOT NULL, seq INTEGER NOT NULL, position INTEGER NOT NULL,
        body BLOB NOT NULL, signature BLOB NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS places ON entries (author, seq)",
    "CREATE TABLE IF NOT EXISTS cuts (height INTEGER PRIMARY KEY, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS grants (term INTEGER PRIMARY KEY, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS forks (id BLOB PRIMARY KEY, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)

READ_ALL: Final = """
    SELECT position, 'entry', body, signature FROM entries
    UNION ALL SELECT position, 'cut', data, NULL FROM cuts
    UNION ALL SELECT position, 'grant', data, NULL FROM grants
    UNION ALL SELECT position, 'fork', data, NULL FROM forks
    ORDER BY 1
"""

Item = Entry | CertifiedCut | CertifiedGrant | ForkProof
"""What the log consists of."""


class Store(Protocol):
    """What ``LogService`` needs of a store."""

    async def load(self) -> Sequence[Item]:
        """Everything that was appended, in that order."""

    async def append(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        """Store all of it durably, or nothing; raises ``OSError`` where the disk refuses.

        ``exclusive``: ids of entries that must be the first at their place, else ``LocalError``.
        """

    async def meta(self, key: str) -> bytes | None:
        """A value stored beside the log."""


def decode_rows(rows: Iterator[tuple[Any, ...]], *, verify: bool) -> Iterator[Item]:
    """The items of ``READ_ALL``'s rows. Raises ``PeerError`` at the first one that does not parse."""
    for _, kind, data, signature in rows:
        match kind:
            case "entry":
                yield entries.parse(data, signature, verify=verify)
            case "cut":
                yield CertifiedCut.parse(data)
            case "grant":
                yield CertifiedGrant.parse(data)
            case _:
                yield ForkProof.parse(data)


class LogStore:
    """The database of one node. Make it with ``open_log_store``."""

    def __init__(self, path: Path, domain: Domain, connection: aiosqlite.Connection, loop: Any) -> None:
        self.path = path
        self._domain = domain
        self._connection = connection
        self._loop = loop
        self._lock = trio.Lock()
        self._position = 0

    async def _run(self, function: Any, *arguments: Any) -> Any:
        # The loop is named, because a task that was started elsewhere does not inherit it.
        return await trio_asyncio.aio_as_trio(function, loop=self._loop)(*arguments)

    async def _prepare(self) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "wal_autocheckpoint=1000"):
            await self._run(self._connection.execute_fetchall, f"PRAGMA {pragma}")
        ((version,),) = await self._run(self._connection.execute_fetchall, "PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise UserError(f"{self.path}: a newer Farflung wrote this log", "upgrade Farflung")
        for statement in SCHEMA:
            await self._run(self._connection.execute, statement)
        await self._run(self._connection.execute, f"PRAGMA user_version={SCHEMA_VERSION}")
        owner = await self.meta("domain")
        if owner is None:
            await self.append((), {"domain": self._domain.id})
        elif owner != self._domain.id:
            raise UserError(f"{self.path}: this log belongs to another domain", "use a new data directory")
        tables = ("entries", "cuts", "grants", "forks")
        newest = " UNION ALL ".join(f"SELECT MAX(position) FROM {table}" for table in tables)  # noqa: S608
        rows = await self._run(self._connection.execute_fetchall, newest)
        self._position = max((row[0] for row in rows if row[0] is not None), default=0)

    async def load(self) -> list[Item]:
        """Everything in the order in which it was appended; signatures of entries are not verified again."""
        rows = await self._run(self._connection.execute_fetchall, READ_ALL)
        try:
            return await trio.to_thread.run_sync(lambda: list(decode_rows(iter(rows), verify=False)))
        except Error as error:
            raise _damaged(self.path, error) from None

    async def append(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        """Store ``items``, in this order, and the values of ``meta`` in one durable transaction.

        It is not cancelled half-way. Raises ``OSError`` where the disk is full or fails (nothing is stored then, or
        the outcome is unknown), and ``LocalError`` where an ``exclusive`` entry (by id) finds its place taken.
        """
        with trio.CancelScope(shield=True):
            async with self._lock:
                try:
                    await self._run(self._connection.execute, "BEGIN IMMEDIATE")
                    await self._refuse_taken(item for item in items if isinstance(item, Entry) and item.id in exclusive)
                    for statement, rows in groupby(enumerate(items, self._position + 1), _statement):
                        await self._run(self._connection.executemany, statement, [_row(*row) for row in rows])
                    if meta:
                        statement = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
                        await self._run(self._connection.executemany, statement, list(meta.items()))
                    await self._run(self._connection.execute, "COMMIT")
                except (sqlite3.Error, LocalError) as error:
                    # After some errors (a full disk) SQLite has rolled back by itself.
                    with suppress(sqlite3.Error):
                        await self._run(self._connection.execute, "ROLLBACK")
                    if isinstance(error, LocalError):
                        raise
                    raise OSError(f"{self.path}: {error}") from None
                self._position += len(items)
        await trio.lowlevel.checkpoint()

    async def _refuse_taken(self, own: Iterable[Entry]) -> None:
        for entry in own:
            found = await self._run(
                self._connection.execute_fetchall,
                "SELECT 1 FROM entries WHERE author = ? AND seq = ?",
                (entry.author, entry.seq),
            )
            if found:
                raise LocalError(f"{self.path}: entry {entry.seq} of the own feed is stored already")

    async def meta(self, key: str) -> bytes | None:
        """A value stored beside the log, or None."""
        rows = await self._run(self._connection.execute_fetchall, "SELECT value FROM meta WHERE key = ?", (key,))
        return bytes(rows[0][0]) if rows else None


def _statement(row: tuple[int, Item]) -> str:
    match row[1]:
        case Entry():
            return "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?)"
        case CertifiedCut():
            return "INSERT OR IGNORE INTO cuts VALUES (?, ?, ?)"
        case CertifiedGrant():
            return "INSERT OR IGNORE INTO grants VALUES (?, ?, ?)"
        case ForkProof():
            return "INSERT OR IGNORE INTO forks VALUES (?, ?, ?)"


def _row(position: int, item: Item) -> tuple[Any, ...]:
    match item:
        case Entry():
            return item.id, item.author, item.seq, position, item.body, item.signature
        case CertifiedCut():
            return item.cut.height, position, item.encode()
        case CertifiedGrant():
            return item.grant.term, position, item.encode()
        case ForkProof():
            return item.author + item.seq.to_bytes(8, "big"), position, item.encode()


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
