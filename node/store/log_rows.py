"""What the log database looks like: its tables, and how their rows become objects again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, Final

from protocol.errors import PeerError
from protocol.log import entry as entries
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.quorum import CertifiedCut, CertifiedGrant

SCHEMA_VERSION: Final = 2

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS entries (
        position INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, author BLOB NOT NULL, seq INTEGER NOT NULL,
        body BLOB, signature BLOB, CHECK ((body IS NULL) = (signature IS NULL))
    )""",
    "CREATE INDEX IF NOT EXISTS places ON entries (author, seq)",
    "CREATE TABLE IF NOT EXISTS cuts (height INTEGER PRIMARY KEY, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS cut_positions ON cuts (position)",
    "CREATE TABLE IF NOT EXISTS grants (term INTEGER PRIMARY KEY, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS forks (id BLOB PRIMARY KEY, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS snapshot (
        one INTEGER PRIMARY KEY CHECK (one = 1), position INTEGER NOT NULL, hash BLOB NOT NULL, data BLOB NOT NULL
    )""",
)
READ: Final = """
    SELECT position, 'entry', body, signature FROM entries WHERE position > ?1 AND body IS NOT NULL
    UNION ALL SELECT position, 'cut', data, NULL FROM cuts WHERE position > ?1
    UNION ALL SELECT position, 'grant', data, NULL FROM grants WHERE position > ?1
    UNION ALL SELECT position, 'fork', data, NULL FROM forks WHERE position > ?1
    ORDER BY 1 LIMIT ?2
"""
READ_SIDES: Final = """
    SELECT position, 'grant', data, NULL FROM grants UNION ALL SELECT position, 'fork', data, NULL FROM forks ORDER BY 1
"""
SNAPSHOT_CONTEXT: Final = b"farflung/stored-snapshot/v1\0"

Item = Entry | CertifiedCut | CertifiedGrant | ForkProof
"""What the log consists of."""


def as_bytes(value: object) -> bytes:
    """What was read from a column: SQLite stores any type in any column, and parsers are made for bytes."""
    return value if isinstance(value, bytes) else b""


def decode_rows(rows: Iterable[tuple[Any, ...]], *, verify: bool) -> Iterator[Item]:
    """The items of ``READ``'s rows. Raises ``PeerError`` at the first one that does not parse."""
    for position, kind, *stored in rows:
        data, signature = map(as_bytes, stored)
        if not isinstance(position, int):
            raise PeerError("a row has no position")
        match kind:
            case "entry":
                yield entries.parse(data, signature, verify=verify)
            case "cut":
                yield CertifiedCut.parse(data)
            case "grant":
                yield CertifiedGrant.parse(data)
            case _:
                yield ForkProof.parse(data)


def snapshot_hash(position: int, data: bytes) -> bytes:
    """The hash that is stored beside a snapshot taken at this position."""
    return sha256(SNAPSHOT_CONTEXT + position.to_bytes(8, "big", signed=True) + data).digest()
