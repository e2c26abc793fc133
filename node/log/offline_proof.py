"""Proofs and checkpoints from a node's own log, without replaying it.

What the proof rests on is checked when it is made; nothing else of the log is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from node.errors import UserError
from node.log.offline_reading import domain_of, reading
from node.store.data_directory import DataDirectory
from node.store.log_rows import as_bytes
from protocol import codec
from protocol.domain import Domain
from protocol.errors import Error, LocalError, PeerError
from protocol.log import entry as entries
from protocol.log.amendment import Amendment
from protocol.log.checkpoint import CosignedCheckpoint
from protocol.log.entry import Entry
from protocol.log.entry_proof import Covering, LogProof
from protocol.log.heads import Head
from protocol.log.merkle import consistency_path, leaf_hash
from protocol.log.quorum import CertifiedCut, check_quorum
from protocol.records import Amend, Join

CHECKPOINT: Final = "checkpoint"
"""Where ``node.log.checkpoint_exchange`` keeps the newest one."""

AMEND: Final = codec.encode(Amend.KIND)
"""What the body of an ``amend`` entry holds, and hardly another."""

SHORTEST: Final = 8
"""Hexadecimal digits of an entry's id that are enough to name it, where only one entry begins so."""


class NotFinal(Error):
    """The entry is held, and no cut covers it: there is nothing to prove yet."""


def prove(directory: DataDirectory, wanted: str) -> LogProof:
    """The proof of the entry whose id begins with the hexadecimal digits ``wanted``, at the newest cut.

    Raises ``UserError`` where there is no such entry or no sound log, ``NotFinal`` where no cut covers it.
    """
    with _reading_sound(directory) as connection:
        genesis, domain = domain_of(directory)
        entry = _find(connection, wanted)
        heads, cut = _newest_vector(connection)
        row = heads.get(entry.author)
        if cut is None or row is None or row.seq < entry.seq:
            raise NotFinal(f"entry {entry.id.hex()} is not final: no cut covers it")
        ids = _feed(connection, row)
        certified = CertifiedCut.parse(cut.encode())
        # Looking for amendments takes a look at every entry: not where the genesis' electors certified the cut.
        try:
            check_quorum(certified.votes, domain.electors, "cut")
            amendments = []
        except PeerError:
            amendments = _amendments(connection, domain, cut.cut.height)
        if ids[entry.seq] != entry.id:
            raise NotFinal(f"entry {entry.id.hex()} will never be final: another one was certified in its place")
        return LogProof.make(genesis, entry, ids, heads, certified, amendments)


def find_entry(directory: DataDirectory, wanted: str) -> Entry:
    """The entry whose id begins with the hexadecimal digits ``wanted``. Raises ``UserError`` where there is none."""
    with _reading_sound(directory) as connection:
        return _find(connection, wanted)


@contextmanager
def _reading_sound(directory: DataDirectory) -> Iterator[sqlite3.Connection]:
    """``reading``, where what does not parse or fit together is a ``UserError`` as well."""
    try:
        with reading(directory) as connection:
            yield connection
    except (PeerError, LocalError) as error:
        raise UserError(f"{directory.path}: the log is damaged ({error})", "farflung log verify tells more") from None


def _find(connection: sqlite3.Connection, wanted: str) -> Entry:
    digits = wanted.lower()
    if not SHORTEST <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
        raise UserError(
            f"{wanted}: an entry's id has 64 hexadecimal digits, of which the first {SHORTEST} or more are needed",
            "farflung log show lists entries with their ids",
        )
    low, high = bytes.fromhex(digits.ljust(64, "0")), bytes.fromhex(digits.ljust(64, "f"))
    rows = connection.execute(
        "SELECT id, body, signature FROM entries WHERE id BETWEEN ? AND ? LIMIT 2", (low, high)
    ).fetchall()
    if not rows:
        raise UserError(f"{wanted}: this log holds no such entry", "farflung log show lists entries with their ids")
    if len(rows) > 1:
        raise UserError(f"{wanted}: several entries begin so", "give more digits of the id")
    if rows[0][1] is None:
        raise UserError(
            f"{wanted}: this node dropped what the entry says, as nodes do that are no archives", "ask an archive"
        )
    return entries.parse(as_bytes(rows[0][1]), as_bytes(rows[0][2]))


def _amendments(connection: sqlite3.Connection, domain: Domain, height: int) -> list[Covering]:
    """The amendments in force for the cut of ``height``, in order, each with the first cut that covered it."""
    rows = connection.execute("SELECT body, signature FROM entries WHERE instr(body, ?)", (AMEND,)).fetchall()
    parsed = [entries.parse(as_bytes(body), as_bytes(signature)) for body, signature in rows]
    written = [entry for entry in parsed if isinstance(entry.payload, Amend)]
    found: list[Covering] = []
    heads: dict[bytes, Head] = {}
    electors = domain.electors
    for (data,) in connection.execute("SELECT data FROM cuts WHERE height < ? ORDER BY height", (height,)).fetchall():
        cut = CertifiedCut.parse(as_bytes(data), verify=False)
        fresh: list[tuple[Entry, list[bytes]]] = []
        for row in cut.cut.changes:
            final = heads[row.author].seq if row.author in heads else -1
            here = [entry for entry in written if entry.author == row.author and final < entry.seq <= row.seq]
            feed = _feed(connection, row) if here else []
            fresh += [(entry, feed) for entry in here if feed[entry.seq] == entry.id]
            heads[row.author] = row
        # As ``protocol.log.amendment`` has it: of the next number the lowest id that a quorum signed, one a cut.
        for entry, feed in sorted(fresh, key=lambda item: item[0].id):
            payload = entry.payload
            if isinstance(payload, Amend) and payload.number == len(found) + 1 and _signed(domain, payload, electors):
                electors = electors if payload.electors is None else payload.electors
                found.append(Covering.make(entry, feed, heads, CertifiedCut.parse(cut.encode())))
                break
    return found


def _signed(domain: Domain, payload: Amend, electors: tuple[bytes, ...]) -> bool:
    try:
        Amendment.of(domain.id, payload).verify(payload.votes, electors)
    except PeerError:
        return False
    return True


def _newest_vector(connection: sqlite3.Connection) -> tuple[dict[bytes, Head], CertifiedCut | None]:
    """Every author's row in the newest cut, from what each cut changed."""
    heads: dict[bytes, Head] = {}
    cut = None
    for (data,) in connection.execute("SELECT data FROM cuts ORDER BY height"):
        cut = CertifiedCut.parse(as_bytes(data), verify=False)
        heads.update((head.author, head) for head in cut.cut.changes)
    return heads, cut


def _feed(connection: sqlite3.Connection, row: Head) -> list[bytes]:
    """The ids of the certified feed that ends in ``row``: of several entries for one place the one that is linked."""
    places: dict[int, list[bytes]] = {}
    found = connection.execute("SELECT seq, id FROM entries WHERE author = ? AND seq <= ?", (row.author, row.seq))
    for seq, entry_id in found:
        places.setdefault(seq, []).append(entry_id)
    ids: list[bytes] = []
    wanted = row.entry_id
    for seq in range(row.seq, -1, -1):
        here = places.get(seq, [])
        if wanted not in here:
            raise PeerError(f"entry {seq} of {row.author.hex()} is missing")
        ids.append(wanted)
        if seq and len(below := places.get(seq - 1, [])) == 1:
            wanted = below[0]  # there is no other, and the feed root shows whether it is the right one
        elif seq:
            ((body,),) = connection.execute("SELECT body FROM entries WHERE id = ?", (wanted,)).fetchall()
            wanted = entries.parse(as_bytes(body), bytes(64), verify=False).prev
    return ids[::-1]


@dataclass(frozen=True, slots=True)
class Published:
    """The newest cosigned checkpoint that a node holds, as the signed note that it stored, and who cosigned it."""

    note: bytes
    cosigned: CosignedCheckpoint


def published(directory: DataDirectory) -> Published | None:
    """The newest cosigned checkpoint in the directory; None where there is none yet. Raises ``UserError``.

    Each cosignature holds under the key that it names; whether they are a quorum was checked when it was stored.
    """
    with _reading_sound(directory) as connection:
        _, domain = domain_of(directory)
        for (value,) in connection.execute("SELECT value FROM meta WHERE key = ?", (CHECKPOINT,)):
            note = as_bytes(value)
            return Published(note, CosignedCheckpoint.parse(note, domain.id))
    return None


def consistency(directory: DataDirectory, first: int, second: int) -> list[bytes]:
    """The proof that the checkpoint of ``second`` cuts continues that of ``first``. Raises ``UserError``."""
    try:
        with reading(directory) as connection:
            rows = connection.execute("SELECT data FROM cuts WHERE height <= ? ORDER BY height", (second,))
            hashes = [leaf_hash(CertifiedCut.parse(as_bytes(data), verify=False).cut.body) for (data,) in rows]
        if len(hashes) != second:
            raise LocalError(f"there is no checkpoint of {second} cuts")
        return consistency_path(hashes, first)
    except (PeerError, LocalError) as error:
        raise UserError(
            f"{directory.log_database}: there is no proof from {first} to {second} cuts ({error})",
            "a smaller size is 1 or more",
        ) from None


def own_join(directory: DataDirectory) -> Join | None:
    """What the directory's own node said when it joined, None as long as that is not in its log."""
    if not directory.log_database.is_file():
        return None
    node = directory.read_identity().node
    # farflung log verify is for telling what is wrong with a log
    with suppress(UserError, PeerError), reading(directory) as connection:
        for (body,) in connection.execute("SELECT body FROM entries WHERE author = ? AND seq = 0", (node,)):
            payload = entries.parse(as_bytes(body), bytes(64), verify=False).payload
            if isinstance(payload, Join):
                return payload
    return None
