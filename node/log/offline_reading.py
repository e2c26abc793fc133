"""A node's log database opened for reading, in one transaction: a daemon may go on writing meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from node.errors import UserError
from node.store.data_directory import DataDirectory
from protocol.domain import Domain, parse_genesis
from protocol.errors import PeerError

REMEDY: Final = "give the data directory of a node that has run"


def domain_of(directory: DataDirectory) -> tuple[bytes, Domain]:
    """The directory's signed genesis, and the domain that it says. Raises ``UserError``."""
    genesis = directory.genesis()
    if genesis is None:
        raise UserError(f"{directory.path}: there is no genesis", REMEDY)
    try:
        return genesis, parse_genesis(genesis)
    except PeerError as error:
        raise UserError(f"{directory.genesis_file}: {error}", "restore it from a backup") from None


@contextmanager
def reading(directory: DataDirectory) -> Iterator[sqlite3.Connection]:
    """The log of ``directory`` as it is now. Raises ``UserError`` where there is none, or what SQLite cannot read."""
    path = directory.log_database
    if not path.is_file():
        raise UserError(f"{path}: there is no log", REMEDY)
    try:
        with closing(_connect(path)) as connection:
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as error:
        raise UserError(
            f"{path}: cannot be read ({error})", "run as its owner; a damaged log can be deleted and fetched again"
        ) from None


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that only reads the log at ``path``, also where the folder cannot be written to."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A folder that cannot be written to has no place for SQLite's shared memory. Without a daemon none is needed.
        connection.close()
        wal = path.with_name(path.name + "-wal")
        if wal.exists() and wal.stat().st_size:
            raise
        connection = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
    return connection
