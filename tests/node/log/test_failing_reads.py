"""A disk that cannot be read: whoever asks is refused, a round fails, and nothing of it ends a node that runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
import trio
import trio.testing

from node.errors import Refused, UserError
from node.log import replication_messages as wire
from node.log.checkpoint_exchange import Checkpoints
from node.log.elector import open_elector
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.store.log_store import LogStore, open_log_store
from protocol.log.entry import make
from protocol.log.heads import RangeRequest
from protocol.log.replica import Replica
from protocol.records import Leave, Role
from tests.protocol.builders import Writer, key, small_domain
from tests.simulator import Disk, Network, SimNode, World, converge, open_world

DOMAIN = small_domain()
ELECTOR = key("elector")
NODE = b"n" * 32

READS: dict[str, Callable[[LogStore], Awaitable[object]]] = {
    "read": lambda store: store.read(0),
    "meta": lambda store: store.meta("domain"),
    "snapshot": lambda store: store.snapshot(),
    "sides": lambda store: store.sides(),
    "entries_by_id": lambda store: store.entries_by_id([NODE]),
    "entries_at": lambda store: store.entries_at([(NODE, 0)]),
    "ids_at": lambda store: store.ids_at([(NODE, 0)]),
    "ranges": lambda store: store.ranges([RangeRequest(NODE, 0, 4)], 1000),
    "cuts": lambda store: store.cuts(0, 10, 1000),
}


def spoil(path: Path) -> None:
    """Make all tables of the database unreadable behind the store's back."""
    with closing(sqlite3.connect(path)) as connection:
        for table in ("entries", "cuts", "grants", "forks", "meta", "snapshot"):
            connection.execute(f"DROP TABLE {table}")


@pytest.mark.parametrize("name", READS)
async def test_what_sqlite_cannot_read_is_an_os_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log.db"
    async with open_log_store(path, DOMAIN) as store:
        await READS[name](store)
        assert store.unreadable is None
        spoil(path)
        with pytest.raises(OSError, match="cannot be read"):
            await READS[name](store)
        assert "cannot be read" in str(store.unreadable)


async def test_a_failed_read_leaves_no_transaction_open(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    (entry,) = Writer("a", DOMAIN.id).entries
    async with open_log_store(path, DOMAIN) as store:
        spoil(path)
        with pytest.raises(OSError, match="cannot be read"):
            await store.append([entry], exclusive={entry.id})
        with closing(sqlite3.connect(path, timeout=0)) as connection:
            connection.execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize("column", ["body", "signature"])
async def test_a_row_that_is_not_what_was_written_is_an_os_error(tmp_path: Path, column: str) -> None:
    path = tmp_path / "log.db"
    (entry,) = Writer("a", DOMAIN.id).entries
    async with open_log_store(path, DOMAIN) as store:
        await store.append([entry])
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE entries SET {column} = 7")
            connection.commit()
        for read in (store.entries_by_id([entry.id]), store.entries_at([(entry.author, 0)])):
            with pytest.raises(OSError, match="cannot be read"):
                await read


async def test_the_opening_says_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with open_log_store(path, DOMAIN) as store:
        service = LogService(ELECTOR, Replica(DOMAIN), store, fresh=True)
        spoil(path)
        with pytest.raises(UserError, match=r"cannot be read.*check rights and disk"):
            await load(store, DOMAIN)
        with pytest.raises(UserError, match="state of the elector is damaged"):
            await open_elector(service, ELECTOR)
        checkpoints = Checkpoints(service.replica, store)
        await checkpoints.load()
        assert checkpoints.newest is None
        await service.answer()  # the daemon is alive, whatever its disk does


async def settled(world: World) -> list[SimNode]:
    """Three nodes that keep little in memory."""
    nodes = [await world.start(key(name)) for name in ("elector", "a", "b")]
    for number in range(8):
        for node in nodes:
            await node.service.append(Role("inference" if number % 2 else "relay"))
        await trio.sleep(1.5)
    await converge(nodes)
    return nodes


async def test_a_peer_that_asks_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), 4) as world:
        node, peer, _ = await settled(world)
        below = wire.request("ranges", [[peer.id, 0, 1]])
        assert wire.parse_answer("ranges", await node.sync.handle(peer.id, below))
        node.disk.broken = True
        for request in (below, wire.request("cuts", 0)):
            with pytest.raises(Refused, match="its disk fails"):
                await node.sync.handle(peer.id, request)
        assert node.port.blamed == []


async def test_rounds_go_on_where_reading_fails(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), 4) as world:
        node, *others = await settled(world)
        # A newcomer is behind what the node has in memory, so that each round looks into its store.
        newcomer = await world.start(key("late"), Disk(), join=False)
        node.disk.broken = newcomer.disk.broken = True
        rounds = node.sync.rounds
        await trio.sleep(60)
        assert node.sync.rounds > rounds + 20
        node.disk.broken = newcomer.disk.broken = False
        await others[0].service.append(Role("none"))
        await converge([node, *others, newcomer])
        assert all(one.port.blamed == [] for one in (node, *others, newcomer))


async def test_a_fork_that_cannot_be_looked_up_disturbs_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), 4) as world:
        node, peer, _ = await settled(world)
        author = peer.identity
        (held,) = (await node.disk.entries_at([(author.node, 2)]))[author.node, 2]
        rival = make(author, DOMAIN.id, 2, held.prev, held.anchor, Leave()).encode()
        fresh = Writer("new", DOMAIN.id).entries[0].encode()
        node.disk.broken = True
        received = await node.service.intake.receive(entries=[rival, fresh])
        assert (received.added, received.errors) == (1, [])
        assert not node.service.replica.frozen(author.node)
        node.disk.broken = False
        assert (await node.service.intake.receive(entries=[rival])).added == 1
        assert node.service.replica.frozen(author.node)


async def test_an_elector_goes_on_where_reading_fails(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), 4) as world:
        node, *others = await settled(world)
        height = len(node.service.replica.cuts)
        node.disk.broken = True
        for number in range(4):
            await others[0].service.append(Role("relay" if number % 2 else "none"))
            await trio.sleep(3)
        assert len(node.service.replica.cuts) > height
