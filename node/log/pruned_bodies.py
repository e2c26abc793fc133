"""Checking the part of a log whose bodies were removed: what the cuts certify must fit the ids that are left.

1. Every cut up to the snapshot's is parsed, its signatures are verified, it follows the one before, and its heads root
   is that of the rows so far.
2. For every row of a cut the feed root over the ids that are left, with the id at its place, is the one certified.
3. The snapshot's feeds then stand where the newest of these cuts says (``Replica.resume``). What the bodies said
   (roles, credit, electors) is as the snapshot has it: that cannot be checked any more, and is told.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from itertools import groupby

from node.store.log_rows import as_bytes
from protocol.credit.ledger import Ledger
from protocol.credit.snapshot import Snapshot
from protocol.domain import Domain
from protocol.errors import PeerError
from protocol.log.fork_proof import ForkProof
from protocol.log.head_table import HeadTable
from protocol.log.merkle import EMPTY_RANGE, CompactRange
from protocol.log.quorum import CertifiedCut, CertifiedGrant, check_quorum


def pruned(connection: sqlite3.Connection) -> bool:
    """Whether bodies are missing."""
    return bool(connection.execute("SELECT 1 FROM entries WHERE body IS NULL LIMIT 1").fetchall())


def resume(
    connection: sqlite3.Connection, domain: Domain, sides: Iterable[CertifiedGrant | ForkProof], problems: list[str]
) -> Ledger | None:
    """The ledger of the snapshot, after what lies below it was checked; None where there is none to go on from."""
    for (data,) in connection.execute("SELECT data FROM snapshot").fetchall():
        try:
            ledger = Snapshot.parse(data, domain).resume(sides)
        except PeerError as error:
            problems.append(f"bodies of entries are missing, and the snapshot is of no use: {error}")
            return None
        _check_cuts(connection, ledger, problems)
        return ledger
    problems.append("bodies of entries are missing, and there is no snapshot that sums them up")
    return None


def _check_cuts(connection: sqlite3.Connection, ledger: Ledger, problems: list[str]) -> None:
    replica = ledger.replica
    table = HeadTable()
    feeds = _Feeds(connection)
    previous = replica.domain.id
    newest = len(replica.cuts)
    rows = connection.execute("SELECT height, data FROM cuts WHERE height <= ? ORDER BY height", (newest,))
    count = 0
    for height, data in rows:
        count += 1
        try:
            certified = CertifiedCut.parse(as_bytes(data))
            cut = certified.cut
            check_quorum(certified.votes, replica.electors_at(height), "cut")
            if (cut.height, cut.prev, cut.domain) != (count, previous, replica.domain.id):
                raise PeerError("cut: it does not follow the one before")
            if table.root_with(cut.changes) != cut.heads_root:
                raise PeerError("cut: the heads root is wrong")
            for head in cut.changes:
                if feeds.root(head.author, head.seq) != (head.entry_id, head.feed_root):
                    raise PeerError(f"cut: the ids of {head.author.hex()} do not fit it")
                table.set(head)
        except PeerError as error:
            problems.append(f"cut {height}: {error}; those above it cannot be checked")
            return
        previous = cut.id
    if (count, previous) != (newest, replica.newest_cut_id):
        problems.append(f"cuts: {newest - count} below the snapshot are missing")


class _Feeds:
    """The feed roots over the stored ids, feed by feed as far as somebody asked."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ranges: dict[bytes, CompactRange] = {}

    def root(self, author: bytes, seq: int) -> tuple[bytes, bytes] | None:
        """(id, feed root) at an author's entry; None where ids are missing, or two stand at one place."""
        ids = self._ranges.get(author, EMPTY_RANGE)
        newest = None
        statement = "SELECT seq, id FROM entries WHERE author = ? AND seq BETWEEN ? AND ? ORDER BY seq, position"
        rows = self._connection.execute(statement, (author, ids.size, seq)).fetchall()
        for place, group in groupby(rows, key=lambda row: row[0]):
            found = [row[1] for row in group]
            if place != ids.size or len(found) > 1:
                return None
            newest = found[0]
            ids = ids.append(newest)
        self._ranges[author] = ids
        return None if newest is None or ids.size != seq + 1 else (newest, ids.root)
