"""Checking a node's whole log offline, trusting nothing of what the daemon that wrote it believed.

Every row of ``log/log.db`` is parsed, its signatures are verified, and a new replica is built from all rows, cut by
cut: chains, payload rules, anchors, cuts with their certificates and roots. The daemon's snapshot is not looked at.
What is final need not stay in memory. Where bodies were removed ``node.log.pruned_bodies`` checks what is left of them.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from node.log import pruned_bodies
from node.log.offline_reading import domain_of, reading
from node.store.data_directory import DataDirectory
from node.store.log_rows import as_bytes
from protocol.credit.ledger import Ledger
from protocol.errors import Evidence, PeerError
from protocol.log import entry as entries
from protocol.log.branches import Outcome
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import Head
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.log.replica import Replica

T = TypeVar("T")

LAST: Final = 2**62
AT_ONCE: Final = 256
"""Rows that one thread checks in one go."""
FORGET_FROM: Final = 10_000
"""Final entries that stay in memory at least before they are forgotten."""


@dataclass(frozen=True, slots=True)
class LogReport:
    """What a log holds. ``problems`` are lines for people; without any, two logs with equal heads, cuts and grants
    give equal reports."""

    ledger: Ledger
    problems: tuple[str, ...]
    kinds: Counter[str]
    notes: tuple[str, ...] = ()

    @property
    def replica(self) -> Replica:
        """The chains and cuts under the ledger."""
        return self.ledger.replica

    @property
    def exit_code(self) -> int:
        """0 for a sound log, 1 for any other."""
        return 1 if self.problems else 0

    def text(self) -> str:
        """The report for standard output: the same bytes on every node that holds the same log."""
        replica, kinds = self.replica, self.kinds
        newest, accounts = replica.newest_cut, self.ledger.accounts(final=True)
        lines = [
            f"domain {replica.domain.id.hex()} {replica.domain.name}",
            f"heads root {replica.heads_root().hex()}",
            f"newest cut {'none' if newest is None else f'{newest.cut.height} {newest.cut.id.hex()}'}",
            f"terms {len(replica.grants)}",
            f"entries {kinds.total()}: " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)),
        ]
        for author, head in sorted(replica.heads.items()):
            account = accounts.get(author)
            credit = "no credit" if account is None else f"credit {account.credit} reputation {account.reputation}"
            state = " frozen" if head.status else ""
            final = replica.certified_head(author) + 1
            name = self.ledger.name(author)
            lines.append(f"node {author.hex()} {credit} entries {head.seq + 1} final {final}{state} {name}")
        return "\n".join(lines) + "\n"


Progress = Callable[[int, int], None]
"""Called with the number of rows that are checked, and of all."""

Each = Callable[[Entry | CertifiedCut, Ledger], None]
"""Called with what is in the log, and the ledger so far: cut by cut the entries that it covers and the cut, and at
last, author by author, the entries that no cut covers."""


def verify(
    directory: DataDirectory,
    *,
    signatures: bool = True,
    keep: bool = True,
    progress: Progress = lambda done, total: None,
    each: Each | None = None,
    forget_from: int = FORGET_FROM,
) -> LogReport:
    """Check the log of ``directory``. Raises ``UserError`` where there is none, or no valid genesis.

    ``signatures`` False skips those of entries, nine tenths of the time: for a caller who only wants to know what the
    log says and whose own daemons verified them when they arrived. ``keep`` False: the report's replica does not keep
    entries and cuts that are final, so that a log of millions of entries takes little memory. ``each`` sees them all
    the same, but for those whose bodies were removed.
    """
    _, domain = domain_of(directory)
    with reading(directory) as connection, ThreadPoolExecutor(os.cpu_count()) as threads:
        ledger, most = Ledger(Replica(domain)), None if keep else forget_from
        checking = _Checking(ledger, connection, threads, signatures, most, progress, each)
        checking.run()
    kinds = checking.kinds + Counter(entry.kind for entry in checking.replica.arrivals)
    return LogReport(checking.ledger, tuple(checking.problems), kinds, tuple(checking.notes))


@dataclass(slots=True)
class _Checking:
    """One check; ``ledger``, ``problems``, ``notes`` and ``kinds`` (of what left memory) are its result."""

    ledger: Ledger
    connection: sqlite3.Connection
    threads: ThreadPoolExecutor
    signatures: bool
    forget_from: int | None
    progress: Progress
    each: Each | None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    _shown: dict[bytes, int] = field(default_factory=dict)
    # Per author the seq up to which rows were read, and the entries of them that found no place.
    _read: dict[Any, int] = field(default_factory=dict)
    _queues: dict[bytes, list[Entry]] = field(default_factory=dict)
    _grants: list[CertifiedGrant] = field(default_factory=list)
    _total: int = 0
    _done: int = 0
    _summed_up: int = 0

    @property
    def replica(self) -> Replica:
        """The chains and cuts under the ledger."""
        return self.ledger.replica

    def run(self) -> None:
        """Read and check all."""
        ((self._total,),) = self._rows("SELECT COUNT(*) FROM entries")
        self._read_sides()
        if pruned_bodies.pruned(self.connection) and not self._resume():
            return
        below = len(self.replica.cuts)
        heights = [row[0] for row in self._rows("SELECT height FROM cuts WHERE height > ? ORDER BY height", below)]
        for place, height in enumerate(heights):
            # A grant may stand on the newest cut, and the next one on the grant.
            self._drain_grants()
            if not self._take_cut(height):
                if place + 1 < len(heights):
                    self.problems.append(f"cuts: {len(heights) - place - 1} more above it cannot be checked")
                break
            self._forget()
        self._drain_grants()
        self.problems.extend(f"grant {grant.grant.term}: its anchor is missing" for grant in self._grants)
        for (author,) in self._rows("SELECT DISTINCT author FROM entries"):
            self._feed([(author, LAST)])
        self._forget()
        self._show([head for _, head in sorted(self.replica.heads.items())])
        for author, queue in self._queues.items():
            if queue:
                seqs = f"{queue[0].seq} to {queue[-1].seq}" if len(queue) > 1 else f"{queue[0].seq}"
                self.problems.append(f"{author.hex()}: entries {seqs} hang on something that is missing")

    def _resume(self) -> bool:
        """Begin at the snapshot, where the bodies below it were removed; False where that cannot be."""
        sides: list[CertifiedGrant | ForkProof] = [*self._grants, *self.replica.forks.values()]
        ledger = pruned_bodies.resume(self.connection, self.replica.domain, sides, self.problems)
        if ledger is None:
            return False
        self.ledger = ledger
        self._read = {author: head.seq for author, head in self.replica.certified.items()}
        self._shown = {author: head.seq + 1 for author, head in self.replica.certified.items()}
        self._done = self._summed_up = ledger.final_entries
        ((gone,),) = self._rows("SELECT COUNT(*) FROM entries WHERE body IS NULL")
        self.kinds["removed"] = ledger.final_entries
        self.notes.append(
            f"{gone} entries have no bodies: their ids fit the cuts, which are all certified; what they said is as the "
            f"snapshot at cut {len(self.replica.cuts)} has it"
        )
        return True

    def _rows(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement, arguments).fetchall()

    def _read_sides(self) -> None:
        for term, data in self._rows("SELECT term, data FROM grants ORDER BY term"):
            grant = _try(self.problems, f"grant {term}", partial(CertifiedGrant.parse, as_bytes(data)))
            if grant is not None:
                if grant.grant.term != term:
                    self.problems.append(f"grant {term}: it is of term {grant.grant.term}")
                self._grants.append(grant)
        for (data,) in self._rows("SELECT data FROM forks ORDER BY id"):
            proof = _try(self.problems, "fork proof", partial(ForkProof.parse, as_bytes(data)))
            if proof is not None:
                _try(self.problems, "fork proof", partial(self.replica.add_fork, proof))

    def _take_cut(self, height: int) -> bool:
        """Check the cut of this height and what it covers; whether the next one can be checked."""
        what = f"cut {height}"
        ((data,),) = self._rows("SELECT data FROM cuts WHERE height = ?", height)
        cut = _try(self.problems, what, partial(CertifiedCut.parse, as_bytes(data)))
        if cut is None:
            return True
        if cut.cut.height != height:
            self.problems.append(f"{what}: it is of height {cut.cut.height}")
        self._feed([(head.author, head.seq) for head in cut.cut.changes])
        outcome = _try(self.problems, f"cut {cut.cut.height}", partial(self.replica.add_cut, cut, self.ledger))
        if outcome is Outcome.MISSING_ENTRIES:
            # It may be on a branch of which a part lies above the row, or hang on entries that were labelled wrongly.
            self._feed([(head.author, LAST) for head in cut.cut.changes])
            outcome = _try(self.problems, f"cut {cut.cut.height}", partial(self.replica.add_cut, cut, self.ledger))
        if outcome is Outcome.ADDED:
            self._show(cut.cut.changes, cut)
        if outcome in (Outcome.ADDED, Outcome.KNOWN):
            return True
        if outcome is not None:
            self.problems.append(f"cut {cut.cut.height}: {outcome.value}")
        return False

    def _show(self, heads: Iterable[Head], cut: CertifiedCut | None = None) -> None:
        """Show the entries up to these heads that were not shown yet, and the cut."""
        if self.each is None:
            return
        for head in heads:
            for entry in self.replica.entries(head.author, self._shown.get(head.author, 0), head.seq):
                self.each(entry, self.ledger)
            self._shown[head.author] = head.seq + 1
        if cut is not None:
            self.each(cut, self.ledger)

    def _drain_grants(self) -> None:
        """Hand the grants over; those whose anchors are missing go on waiting."""
        self._grants = [
            grant
            for grant in self._grants
            if _try(self.problems, f"grant {grant.grant.term}", partial(self.replica.add_grant, grant))
            is Outcome.MISSING_CUT
        ]

    def _feed(self, wanted: list[tuple[Any, int]]) -> None:
        """Read these authors' rows up to these seqs, and hand over what fits."""
        statement = """SELECT id, author, seq, body, signature FROM entries
            WHERE author IS ? AND seq > ? AND seq <= ? ORDER BY seq, position"""
        rows: list[tuple[Any, ...]] = []
        for author, last in wanted:
            # Seqs of another type sort behind all numbers: only a read of everything finds them.
            behind = "x" if last == LAST else last
            rows += self._rows(
                statement if last != LAST else statement.replace("seq <= ?", "? IS NOT NULL"),
                author,
                self._read.get(author, -1),
                behind,
            )
            self._read[author] = max(last, self._read.get(author, -1))
        parts = [rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)]
        for found, problems in self.threads.map(partial(_entries, signatures=self.signatures), parts):
            self.problems += problems
            for entry in found:
                self._queues.setdefault(entry.author, []).append(entry)
        for author, _ in wanted:
            if queue := self._queues.pop(author, None):
                left = _drain(self.replica, queue, self.problems)
                if left:
                    self._queues[author] = left
        self._done += len(rows)
        self.progress(self._done, self._total)

    def _forget(self) -> None:
        self.ledger.note_final()
        most = self.forget_from
        if most is not None and self.ledger.final_entries - self._summed_up >= most:
            self._summed_up = self.ledger.final_entries
            final = self.replica.certified_head
            self.kinds.update(entry.kind for entry in self.replica.arrivals if entry.seq <= final(entry.author))
            self.ledger.forget()


def _entries(rows: list[tuple[Any, ...]], signatures: bool) -> tuple[list[Entry], list[str]]:
    """The entries of these rows, and what is wrong with them."""
    found: list[Entry] = []
    problems: list[str] = []
    for entry_id, author, seq, body, signature in rows:
        what = f"{as_bytes(author).hex()} entry {seq}"
        entry = _try(problems, what, partial(entries.parse, as_bytes(body), as_bytes(signature), verify=signatures))
        if entry is not None:
            found.append(entry)
            if (entry.id, entry.author, entry.seq) != (entry_id, author, seq):
                problems.append(f"{what}: the row is labelled wrongly")
    return found, problems


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
        if outcome in (Outcome.MISSING_PREV, Outcome.MISSING_ANCHOR, Outcome.MISSING_GRANT):
            left.append(entry)
            if outcome is not Outcome.MISSING_PREV or entry.seq > replica.next_for(entry.author):
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
