"""Opening of a stored log: from its newest snapshot on, or all of it; and the taking of snapshots.

1. A snapshot is a cache. One that does not fit its hash, this program or what is stored is dropped, and all is read.
2. What is stored was verified before: signatures are not checked again. A log that breaks a rule is damaged, and is not
   opened.
3. What becomes final leaves memory on the way, so that an opening needs no more of it than a running node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from node.errors import UserError
from node.log.intake import check_draws
from node.log.waiting_room import add
from node.store.log_rows import Item
from node.store.log_store import LogStore
from protocol.credit.ledger import Ledger
from protocol.credit.snapshot import Snapshot
from protocol.domain import Domain
from protocol.errors import Evidence, PeerError
from protocol.log.branches import Outcome
from protocol.log.entry import Entry
from protocol.log.replica import Replica

logger = logging.getLogger(__name__)

DELETE: Final = "delete the folder log in the data directory: peers give the log back"
OPENED_AT_ONCE: Final = 512
"""Stored entries that are taken without a pause for others."""

SNAPSHOT_ENTRIES: Final = 5_000
"""Entries that become final between two snapshots, at least: 10 MB of memory, and a third of a second of an opening. At
least as many, too, as there are feeds, since a snapshot has a row for each."""

SPARSE: Final = 10
"""A snapshot is taken so much more rarely while a log is fetched, which waits for it."""


async def load(store: LogStore, domain: Domain, snapshot_entries: int = SNAPSHOT_ENTRIES) -> Ledger:
    """The ledger, with its replica, over what the store holds: from the snapshot on, or all of it.

    Raises ``UserError`` where what was stored breaks a rule or cannot be read.
    """
    try:
        if (stored := await store.snapshot()) is not None:
            position, data = stored
            try:
                snapshot = await trio.to_thread.run_sync(Snapshot.parse, data, domain)
                ledger = snapshot.resume(await store.sides())
                first = await store.entries_by_id(snapshot.tail)
                await _fill(ledger, store, position, snapshot_entries, first)
                return ledger
            except (PeerError, UserError) as error:
                # Whatever is wrong with it: it says nothing that the log itself does not.
                logger.warning("the snapshot of the log is of no use, all is read again: %s", error)
                await store.drop_snapshot()
        ledger = Ledger(Replica(domain))
        await _fill(ledger, store, 0, snapshot_entries)
        await sum_up(ledger, store, snapshot_entries)
        return ledger
    except OSError as error:
        raise UserError(str(error), f"check rights and disk, or {DELETE}") from None


async def sum_up(ledger: Ledger, store: LogStore, entries: int = SNAPSHOT_ENTRIES, *, more: bool = False) -> bool:
    """Where enough became final since the last time, ``entries`` at least, store a snapshot and let go of what it sums
    up; whether one was stored. Where ``more`` is about to become final, what did leaves memory all the same, and a
    snapshot has time."""
    ledger.note_final()
    enough = max(entries, len(ledger.replica.certified))
    if ledger.final_entries - ledger.summed_up < (enough * SPARSE if more else enough):
        if more and ledger.final_entries - ledger.forgotten >= enough:
            ledger.forget()
        return False
    snapshot = Snapshot.take(ledger)
    if snapshot is None:
        return False
    ledger.summed_up = ledger.final_entries
    try:
        await store.save_snapshot(await trio.to_thread.run_sync(snapshot.encode))
    except OSError as error:
        logger.warning("no snapshot of the log is stored: %s", error)
        return False
    ledger.forget()
    return True


async def _fill(ledger: Ledger, store: LogStore, position: int, most: int, first: Sequence[Item] = ()) -> None:
    """Hand over ``first`` and then what is stored after ``position``; what becomes final leaves memory on the way, with
    ``most`` entries of it at the latest."""
    _take_stored(ledger, first)
    while True:
        batch, position = await store.read(position)
        if not batch:
            return
        await check_draws(ledger, batch, ledger.announced)
        for start in range(0, len(batch), OPENED_AT_ONCE):
            _take_stored(ledger, batch[start : start + OPENED_AT_ONCE])
            await trio.lowlevel.checkpoint()
        ledger.note_final()
        if ledger.final_entries - ledger.forgotten >= most:
            ledger.forget()


def _take_stored(ledger: Ledger, items: Sequence[Item]) -> None:
    for item in items:
        try:
            # What is stored was within its author's budget when it came, and that may have shrunk since.
            outcome = ledger.replica.add_entry(item) if isinstance(item, Entry) else add(ledger, item)
        except Evidence:
            continue
        except PeerError as error:
            raise _damaged(str(error)) from None
        if outcome not in (Outcome.ADDED, Outcome.KNOWN, Outcome.FROZEN, Outcome.BELOW, Outcome.OUTDATED):
            raise _damaged(outcome.value)


def _damaged(why: str) -> UserError:
    return UserError(f"the stored log is damaged: {why}", DELETE)
