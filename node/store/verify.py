"""Checking a node's whole log offline, trusting nothing of what the daemon that wrote it believed.

Every row of ``log/log.db`` is parsed, its signatures are verified, and a new replica is built from all rows in whatever
order fits: chains, payload rules, anchors, cuts with their certificates and roots. The database is read in one
transaction, so a daemon may go on writing meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from node.errors import UserError
from node.store.directory import DataDirectory
from protocol import entry as entries
from protocol.credit import Account
from protocol.domain import Domain, parse_genesis
from protocol.entry import Entry
from protocol.errors import Evidence, PeerError
from protocol.feed import ForkProof
from protocol.ledger import Ledger
from protocol.quorum import CertifiedCut, CertifiedGrant
from protocol.replica import Outcome, Replica

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogReport:
    """What a log holds. ``problems`` are lines for people; without any, two logs with equal heads, cuts and grants
    give equal reports."""

    domain: Domain
    replica: Replica
    names: dict[bytes, str]
    accounts: dict[bytes, Account]
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 for a sound log, 1 for any other."""
        return 1 if self.problems else 0

    def text(self) -> str:
        """The report for standard output: the same bytes on every node that holds the same log."""
        replica = self.replica
        newest = replica.newest_cut
        kinds = Counter(entry.kind for entry in replica.arrivals)
        lines = [
            f"domain {self.domain.id.hex()} {self.domain.name}",
            f"heads root {replica.heads_root().hex()}",
            f"newest cut {'none' if newest is None else f'{newest.cut.height} {newest.cut.id.hex()}'}",
            f"terms {len(replica.grants)}",
            f"entries {len(replica.arrivals)}: " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)),
        ]
        for author, head in sorted(replica.heads.items()):
            account = self.accounts.get(author)
            credit = "no credit" if account is None else f"credit {account.credit} reputation {account.reputation}"
            state = " frozen" if head.status else ""
            final = replica.certified_head(author) + 1
            lines.append(
                f"node {author.hex()} {credit} entries {head.seq + 1} final {final}{state} {self.names[author]}"
            )
        return "\n".join(lines) + "\n"


def verify(directory: DataDirectory, *, signatures: bool = True) -> LogReport:
    """Check the log of ``directory``. Raises ``UserError`` where there is none, or no valid genesis.

    ``signatures`` False skips those of entries, nine tenths of the time: for a caller who only wants to know what the
    log says and whose own daemons verified them when they arrived.
    """
    genesis = directory.genesis()
    if genesis is None:
        raise UserError(f"{directory.path}: there is no genesis", "give the data directory of a node that has run")
    try:
        domain = parse_genesis(genesis)
    except PeerError as error:
        raise UserError(f"{directory.genesis_file}: {error}", "restore it from a backup") from None
    tables = _read(directory.log_database)
    problems: list[str] = []
    replica = Replica(domain)
    _rebuild(replica, domain, tables, problems, signatures)
    ledger = Ledger(replica)
    names = {author: ledger.name(author) for author in replica.heads}
    return LogReport(domain, replica, names, ledger.accounts(final=True), tuple(problems))


def _read(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    if not path.is_file():
        raise UserError(f"{path}: there is no log", "give the data directory of a node that has run")
    statements = {
        "entries": "SELECT id, author, seq, body, signature FROM entries ORDER BY author, seq, position",
        "cuts": "SELECT height, data FROM cuts ORDER BY height",
        "grants": "SELECT term, data FROM grants ORDER BY term",
        "forks": "SELECT data FROM forks ORDER BY id",
    }
    try:
        with closing(_connect(path)) as connection:
            connection.execute("BEGIN")
            return {table: connection.execute(statement).fetchall() for table, statement in statements.items()}
    except sqlite3.Error as error:
        raise UserError(
            f"{path}: cannot be read ({error})", "run as its owner; a damaged log can be deleted and fetched again"
        ) from None


def _bytes(value: object) -> bytes:
    """SQLite stores any type in any column, and parsers are made for bytes."""
    return value if isinstance(value, bytes) else b""


def _connect(path: Path) -> sqlite3.Connection:
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


def _rebuild(
    replica: Replica, domain: Domain, tables: dict[str, list[tuple[Any, ...]]], problems: list[str], signatures: bool
) -> None:
    parsed = [_entry(row, problems, signatures) for row in tables["entries"]]
    queues: dict[bytes, list[Entry]] = {}
    for entry in parsed:
        if entry is not None:
            queues.setdefault(entry.author, []).append(entry)
    grants: list[CertifiedGrant] = []
    for term, data in tables["grants"]:
        grant = _try(problems, f"grant {term}", partial(CertifiedGrant.parse, _bytes(data)))
        if grant is not None:
            if grant.grant.term != term:
                problems.append(f"grant {term}: it is of term {grant.grant.term}")
            grants.append(grant)
    cuts: list[CertifiedCut] = []
    for height, data in tables["cuts"]:
        cut = _try(problems, f"cut {height}", partial(CertifiedCut.parse, _bytes(data)))
        if cut is not None:
            if cut.cut.height != height:
                problems.append(f"cut {height}: it is of height {cut.cut.height}")
            cuts.append(cut)
    for (data,) in tables["forks"]:
        proof = _try(problems, "fork proof", partial(ForkProof.parse, _bytes(data)))
        if proof is not None:
            _try(problems, "fork proof", partial(replica.add_fork, proof))
    left = iter(cuts)
    cut = next(left, None)
    while True:
        # A grant may stand on the newest cut, and the next one on the grant.
        grants = [grant for grant in grants if _waits(replica, grant, problems)]
        for queue in queues.values():
            queue[:] = _drain(replica, queue, problems)
        if cut is None:
            break
        outcome = _try(problems, f"cut {cut.cut.height}", partial(replica.add_cut, cut))
        if outcome not in (Outcome.ADDED, Outcome.KNOWN):
            if outcome is not None:
                problems.append(f"cut {cut.cut.height}: {outcome.value}")
            unread = sum(1 for _ in left)
            if unread:
                problems.append(f"cuts: {unread} more above it cannot be checked")
            break
        cut = next(left, None)
    problems.extend(f"grant {grant.grant.term}: its anchor is missing" for grant in grants)
    for author, queue in queues.items():
        if queue:
            seqs = f"{queue[0].seq} to {queue[-1].seq}" if len(queue) > 1 else f"{queue[0].seq}"
            problems.append(f"{author.hex()}: entries {seqs} hang on something that is missing")


def _entry(row: tuple[Any, ...], problems: list[str], signatures: bool) -> Entry | None:
    entry_id, author, seq, body, signature = row
    what = f"{_bytes(author).hex()} entry {seq}"
    entry = _try(problems, what, partial(entries.parse, _bytes(body), _bytes(signature), verify=signatures))
    if entry is not None and (entry.id, entry.author, entry.seq) != (entry_id, author, seq):
        problems.append(f"{what}: the row is labelled wrongly")
    return entry


def _waits(replica: Replica, grant: CertifiedGrant, problems: list[str]) -> bool:
    """Hand a grant over; whether it waits for its anchor."""
    return _try(problems, f"grant {grant.grant.term}", partial(replica.add_grant, grant)) is Outcome.MISSING_CUT


def _drain(replica: Replica, queue: list[Entry], problems: list[str]) -> list[Entry]:
    """Hand an author's entries over as far as they go; returns those that are left."""
    left: list[Entry] = []
    waiting = iter(queue)
    for entry in waiting:
        try:
            outcome = replica.add_entry(entry)
        except Evidence:
            continue  # a fork, kept and shown as such; the log is sound all the same
        except PeerError as error:
            problems.append(f"{entry.author.hex()} entry {entry.seq}: {error}")
            continue
        if outcome in (Outcome.MISSING_PREV, Outcome.MISSING_ANCHOR):
            left.append(entry)
            if outcome is Outcome.MISSING_ANCHOR or entry.seq > replica.next_for(entry.author):
                break
    return [*left, *waiting]


def _try(problems: list[str], what: str, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except Evidence:
        return None
    except PeerError as error:
        problems.append(f"{what}: {error}")
        return None
