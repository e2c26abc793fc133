"""The log in SQLite: durable, in order, and refused where it is not ours."""

from __future__ import annotations

import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import trio

from node.errors import UserError
from node.log.elector import open_elector
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.store.log_rows import Item
from node.store.log_store import RANGES_AT_ONCE, WRITTEN_AT_ONCE, LogStore, open_log_store
from protocol.errors import LocalError
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import RangeRequest
from protocol.log.replica import Replica
from protocol.records import Join, Leave, Role
from tests.protocol.builders import Writer, cut_for, digest, key, small_domain

DOMAIN = small_domain()
ELECTOR = key("elector")
JOIN = Join(digest("recovery"), "farflung/test", "elector")


async def everything(store: LogStore) -> list[Item]:
    """What is stored, in order."""
    items, position = await store.read(0)
    found = list(items)
    while items:
        items, position = await store.read(position)
        found += items
    return found


async def test_what_was_appended_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    writer = Writer("a", DOMAIN.id)
    async with open_log_store(path, DOMAIN) as store:
        service = LogService(ELECTOR, Replica(DOMAIN), store, fresh=True)
        elector = await open_elector(service, ELECTOR)
        await service.append(JOIN, Role("relay"))
        await service.intake.receive(entries=[writer.entries[0].encode()])
        await elector.cut()
        await service.append(Leave())
        await elector.grant_term(writer.node)
        writer.anchor = service.replica.newest_cut_id
        await service.intake.receive(entries=[writer.append(Role("trainer")).encode()])
        expected = await everything(store)
        root = service.replica.heads_root()
    assert [type(item).__name__ for item in expected] == [
        *["Entry"] * 3,
        "CertifiedCut",
        "Entry",
        "CertifiedGrant",
        "Entry",
    ]
    async with open_log_store(path, DOMAIN) as store:
        assert await everything(store) == expected
        ledger = await load(store, DOMAIN)
        assert ledger.replica.heads_root() == root
        service = LogService(ELECTOR, ledger, store, fresh=True)
        elector = await open_elector(service, ELECTOR)
        cut = await elector.cut()
        assert cut is not None
        assert cut.cut.height == 2
        assert len(await everything(store)) == len(expected) + 1


async def test_a_fork_comes_back(tmp_path: Path) -> None:
    one, other = Writer("a", DOMAIN.id), Writer("a", DOMAIN.id)
    one.append(Role("relay"))
    other.append(Role("trainer"))
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        service = LogService(ELECTOR, Replica(DOMAIN), store, fresh=True)
        await service.intake.receive(entries=[entry.encode() for entry in one.entries])
        await service.intake.receive(entries=[other.entries[1].encode()])
        assert service.replica.frozen(one.node)
        items = await everything(store)
        assert isinstance(items[-1], ForkProof)
        replica = (await load(store, DOMAIN)).replica
        assert replica.frozen(one.node)
        assert replica.heads_root() == service.replica.heads_root()


async def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    writer = Writer("a", DOMAIN.id)
    writer.append(Role("relay"))
    rival = Writer("a", DOMAIN.id)
    rival.append(Role("trainer"))
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        await store.append(writer.entries, {"key": b"value"})
        await store.append(writer.entries)  # known already
        with pytest.raises(LocalError, match="stored already"):
            await store.append(
                [Writer("b", DOMAIN.id).entries[0], rival.entries[1]], {"key": b"new"}, exclusive={rival.entries[1].id}
            )
        assert await everything(store) == writer.entries
        assert await store.meta("key") == b"value"
        assert await store.meta("other") is None
        await store.append([rival.entries[1]])  # evidence may stand beside it
        assert len(await everything(store)) == 3


async def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    writer = Writer("a", DOMAIN.id)
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # no file of this process grows beyond it
        try:
            with pytest.raises(OSError, match="disk"):
                await store.append([Writer(f"w{number}", DOMAIN.id).entries[0] for number in range(400)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        kept = len(await everything(store))
        await store.append(writer.entries)
        assert len(await everything(store)) == kept + 1


async def test_tasks_from_elsewhere_may_use_it(tmp_path: Path) -> None:
    writer = Writer("a", DOMAIN.id)
    async with trio.open_nursery() as nursery, open_log_store(tmp_path / "log.db", DOMAIN) as store:
        done = trio.Event()

        async def use() -> None:
            await store.append(writer.entries)
            done.set()

        nursery.start_soon(use)  # this nursery knows nothing of the store's asyncio loop
        await done.wait()
        assert await everything(store) == writer.entries


async def test_a_cancelled_append_is_whole(tmp_path: Path) -> None:
    writer = Writer("a", DOMAIN.id)
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.append(writer.entries)
        assert scope.cancelled_caught
        assert await everything(store) in ([], writer.entries)
        await store.append([Writer("b", DOMAIN.id).entries[0]])


async def test_durability_settings(tmp_path: Path) -> None:
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2)):
            assert await store._run(store._connection.execute_fetchall, f"PRAGMA {pragma}") == [(value,)]


async def test_logs_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with open_log_store(path, DOMAIN):
        pass
    with pytest.raises(UserError, match="another domain"):
        async with open_log_store(path, small_domain(electors=("a",))):
            pass
    for version, why in ((99, "newer Farflung"), (1, "before the first release")):
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version={version}")
        connection.close()
        with pytest.raises(UserError, match=why):
            async with open_log_store(path, DOMAIN):
                pass
    path.write_bytes(b"no database at all, whatever anybody says" * 100)
    with pytest.raises(UserError, match="cannot be used"):
        async with open_log_store(path, DOMAIN):
            pass
    with pytest.raises(UserError, match="cannot be used"):
        async with open_log_store(tmp_path / "missing" / "log.db", DOMAIN):
            pass


async def test_many_rows_and_many_ranges(tmp_path: Path) -> None:
    """More than one statement writes or reads."""
    writers = [Writer(f"w{number}", DOMAIN.id) for number in range(RANGES_AT_ONCE + 50)]
    for writer in writers:
        writer.append(Role("relay"))
        writer.append(Leave())
    items = [writer.entries[place] for place in range(3) for writer in writers]
    assert len(items) > 2 * WRITTEN_AT_ONCE
    assert len(items) % WRITTEN_AT_ONCE
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        await store.append(items[:5])
        await store.append(items)
        assert await everything(store) == items
        wanted = [RangeRequest(writer.node, 1, 9) for writer in reversed(writers)]
        expected = [[entry.encode() for entry in writer.entries[1:]] for writer in reversed(writers)]
        assert await store.ranges(wanted, 1 << 30) == expected
        assert await store.ranges([*wanted[:3], RangeRequest(bytes(32), 0, 5)], 1 << 30) == [*expected[:3], []]
        # A long range is read with a statement of its own, and what has no room is left out.
        assert await store.ranges([RangeRequest(writers[0].node, 0, 1 << 40), *wanted[:1]], 1 << 30) == [
            [entry.encode() for entry in writers[0].entries],
            expected[0],
        ]
        size = len(expected[0][0])
        assert await store.ranges(wanted, size + 1) == [expected[0], *([[]] * (len(wanted) - 1))]
        assert await store.ranges(wanted, size) == [expected[0][:1], *([[]] * (len(wanted) - 1))]
        places = [(writer.node, 1) for writer in writers]
        assert await store.ids_at([*places, *places, (bytes(32), 0)]) == {
            (writer.node, 1): writer.entries[1].id for writer in writers
        }
        assert await store.entries_at(places) == {(writer.node, 1): [writer.entries[1]] for writer in writers}
        # A range ends where a body is missing; ids stay.
        assert await store.prune([RangeRequest(writers[0].node, 1, 1)]) == 1
        assert await store.ranges([RangeRequest(writers[0].node, 0, 2)], 1 << 30) == [[writers[0].entries[0].encode()]]
        assert await store.entries_at(places[:1]) == {}
        assert await store.ids_at(places[:1]) == {places[0]: writers[0].entries[1].id}


async def test_of_two_entries_at_a_place_the_first_stored_comes_first(tmp_path: Path) -> None:
    one, other = Writer("a", DOMAIN.id), Writer("a", DOMAIN.id)
    first, second = one.append(Role("relay")), other.append(Role("validator"))
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        await store.append([one.entries[0], first, second])
        place = (one.node, 1)
        assert await store.entries_at([place]) == {place: [first, second]}
        assert await store.ids_at([place]) == {place: first.id}
        assert await store.ranges([RangeRequest(one.node, 1, 1)], 1 << 30) == [[first.encode(), second.encode()]]


async def test_damaged_rows_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    writer = Writer("a", DOMAIN.id)
    async with open_log_store(path, DOMAIN) as store:
        await store.append(writer.entries)
        connection = sqlite3.connect(path)
        connection.execute("UPDATE entries SET body = substr(body, 2)")
        connection.commit()
        connection.close()
        with pytest.raises(UserError, match="delete"):
            await everything(store)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE cuts SET data = 7",
        "UPDATE cuts SET data = 3.5",
        "UPDATE cuts SET position = 'x'",
        "UPDATE cuts SET position = x'90'",
        "UPDATE entries SET body = 3.5",
        "UPDATE entries SET signature = 7",
        "UPDATE meta SET value = 3.5",
    ],
)
async def test_values_of_another_type_are_noticed(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "log.db"
    replica, writer = Replica(DOMAIN), Writer("a", DOMAIN.id)
    assert replica.add_entry(writer.entries[0])
    async with open_log_store(path, DOMAIN) as store:
        await store.append([*writer.entries, cut_for(replica, "elector")])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(UserError):
        async with open_log_store(path, DOMAIN) as store:
            await load(store, DOMAIN)


@pytest.mark.parametrize("change", ["position = 'x'", "position = -1", "position = 3.5", "data = 7", "hash = 7"])
async def test_a_snapshot_of_another_type_is_none(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log.db"
    async with open_log_store(path, DOMAIN) as store:
        await store.save_snapshot(b"data")
        assert await store.snapshot() == (0, b"data")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE snapshot SET {change}")
            connection.commit()
        assert await store.snapshot() is None


async def test_a_page_of_cuts_is_bounded_in_bytes(tmp_path: Path) -> None:
    replica, writer = Replica(DOMAIN), Writer("a", DOMAIN.id)
    cuts = []
    for _ in range(5):
        assert replica.add_entry(writer.entries[-1])
        cuts.append(cut_for(replica, "elector"))
        assert replica.add_cut(cuts[-1])
        writer.anchor = replica.newest_cut_id
        writer.append(Role("relay"))
    wires = [cut.encode() for cut in cuts]
    async with open_log_store(tmp_path / "log.db", DOMAIN) as store:
        await store.append(cuts)
        assert await store.cuts(0, 9, 1 << 20) == wires
        assert await store.cuts(1, 2, 1 << 20) == wires[1:3]
        assert await store.cuts(1, 9, len(wires[1]) + 1) == wires[1:3]
        assert await store.cuts(2, 9, 1) == wires[2:3]
        assert await store.cuts(5, 9, 1 << 20) == []


SCRIPT = """
import sys
from pathlib import Path
import trio
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.store.log_store import open_log_store
from protocol.records import Join, Role
from tests.protocol.builders import key, small_domain

async def main():
    domain = small_domain()
    async with open_log_store(Path(sys.argv[1]), domain) as store:
        service = LogService(key("elector"), await load(store, domain), store, fresh=True)
        await service.append(Join(bytes(32), "farflung/test", "elector"))
        while True:
            (entry,) = await service.append(Role("relay"))
            print(entry.seq, flush=True)

trio.run(main)
"""


async def test_kill_minus_nine_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    root = Path(__file__).parents[3]
    with subprocess.Popen(  # noqa: ASYNC220  a test may wait
        [sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().splitlines()]
    copy = tmp_path / "copy"  # and what a power cut finds: database and write-ahead log, no shared memory
    copy.mkdir()
    for name in ("log.db", "log.db-wal"):
        shutil.copy(tmp_path / name, copy / name)
    for place in (path, copy / "log.db"):
        async with open_log_store(place, DOMAIN) as store:
            replica = (await load(store, DOMAIN)).replica
            assert replica.next_for(ELECTOR.node) - 1 in (acknowledged[-1], acknowledged[-1] + 1)
