"""Nodes that sum up what is final: restarts, newcomers, forks below what is in memory, and logs without old bodies."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from node.log.log_opening import load
from node.log.replicated_log import NotReady
from protocol.errors import PeerError
from protocol.log.entry import make
from protocol.records import Leave, Role
from tests.protocol.builders import key, small_domain
from tests.simulator import Disk, Network, SimNode, World, converge, open_world

DOMAIN = small_domain()
ELECTOR = key("elector")
NAMES = ("a", "b", "c")


OFTEN = 8
"""A snapshot for every few entries."""


async def start_all(world: World, *, archive: bool = True) -> list[SimNode]:
    return [await world.start(identity, archive=archive) for identity in (ELECTOR, *(key(name) for name in NAMES))]


async def work(nodes: list[SimNode], rounds: int) -> None:
    """Entries by all nodes, and cuts between them."""
    for number in range(rounds):
        for node in nodes:
            await node.service.append(Role("inference" if number % 2 else "relay"))
        await trio.sleep(1.5)
    await converge(nodes)


def same(one: SimNode, other: SimNode) -> None:
    """Fail unless two nodes that converged say the same, whatever each has in memory."""
    first, second = one.service.ledger, other.service.ledger
    assert first.accounts(final=True) == second.accounts(final=True)
    assert first.replica.certified == second.replica.certified
    for author in first.authors():
        assert first.name(author) == second.name(author)
        assert first.standing_role(author) == second.standing_role(author)
    assert first.final_entries == second.final_entries


async def test_a_node_goes_on_from_its_snapshot(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world)
        await work(nodes, 8)
        for node in nodes:
            assert node.disk.summary is not None
            assert len(node.service.replica.arrivals) < 16 < node.service.ledger.final_entries
        disk = world.crash(nodes[3])
        await work(nodes[:3], 3)
        again = await world.start(key("c"), disk, known=[ELECTOR.node])
        assert again.service.replica.cuts.lowest > 1
        await work([*nodes[:3], again], 4)
        whole = Disk(list(again.disk.items), dict(again.disk.values), set(again.disk.places))
        replayed = await load(whole, DOMAIN, OFTEN)
        assert replayed.accounts(final=True) == again.service.ledger.accounts(final=True)
        assert replayed.replica.heads_root() == again.service.replica.heads_root()
        for node in nodes[:3]:
            same(node, again)
        assert all(node.port.blamed == [] for node in (*nodes[:3], again))


async def test_a_newcomer_gets_from_the_disk_what_is_not_in_memory(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world)
        await work(nodes, 8)
        newcomer = await world.start(key("newcomer"))
        await converge([*nodes, newcomer])
        await trio.sleep(3)
        await converge([*nodes, newcomer])
        same(nodes[0], newcomer)
        assert newcomer.port.blamed == []
        assert not newcomer.sync.unserved


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
async def test_a_damaged_snapshot_is_dropped(
    damage: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world)
        await work(nodes, 6)
        disk = world.crash(nodes[3])
        assert disk.summary is not None
        position, data = disk.summary
        wrong = {
            "flip": (position, data[:100] + bytes([data[100] ^ 1]) + data[101:]),
            "cut": (position, data[:-5]),
            "other": (position, b"\x90"),
        }[damage]
        disk.summary = wrong
        expected = nodes[3].service.replica.heads_root()
        with caplog.at_level(logging.WARNING):
            ledger = await load(disk, DOMAIN, OFTEN)
        assert ledger.replica.heads_root() == expected
        assert ledger.accounts(final=True) == nodes[3].service.ledger.accounts(final=True)
        assert "the snapshot of the log is of no use" in caplog.text
        assert disk.summary != wrong


async def test_a_fork_below_what_is_in_memory_is_proven(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world)
        await work(nodes, 8)
        node, author = nodes[0], nodes[1].identity
        replica = node.service.replica
        (held,) = (await node.disk.entries_at([(author.node, 2)]))[author.node, 2]
        assert replica.base_for(author.node) > 3
        assert (await node.service.intake.receive(entries=[held.encode()])).added == 0
        assert not replica.frozen(author.node)
        rival = make(author, DOMAIN.id, 2, held.prev, held.anchor, Leave())
        forged = rival.encode()[:-40] + bytes(40)
        received = await node.service.intake.receive(entries=[forged])
        assert (received.added, len(received.errors)) == (0, 1)
        received = await node.service.intake.receive(entries=[rival.encode()])
        assert received.added == 1
        assert replica.frozen(author.node)
        await converge(nodes)
        assert all(other.service.replica.frozen(author.node) for other in nodes)
        # What was final stays, on every node.
        assert {other.service.replica.certified_head(author.node) for other in nodes} == {
            replica.certified_head(author.node)
        }


async def test_without_old_bodies_everything_above_still_works(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world, archive=False)
        await work(nodes, 8)
        assert all(node.disk.pruned for node in nodes)
        disk = world.crash(nodes[3])
        again = await world.start(key("c"), disk, known=[ELECTOR.node], archive=False)
        await work([*nodes[:3], again], 3)
        same(nodes[0], again)
        # A newcomer finds nobody who has the beginning, until an archive comes.
        newcomer = await world.start(key("newcomer"))
        await trio.sleep(20)
        assert newcomer.service.replica.newest_cut is None
        assert newcomer.sync.unserved == {node.id for node in (*nodes[:3], again)}
        assert newcomer.port.blamed == []
        everything = Disk(list(disk.items), dict(disk.values), set(disk.places))
        world.crash(again)
        await world.start(key("c"), everything, known=[ELECTOR.node])
        await trio.sleep(10)
        await converge([*nodes[:3], newcomer])
        same(nodes[0], newcomer)
        assert not newcomer.sync.unserved


async def test_a_restored_backup_does_not_fork_where_nobody_keeps_old_bodies(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world, archive=False)
        await work(nodes, 2)
        backup = nodes[3].disk.copy()
        await work(nodes, 8)
        world.crash(nodes[3])
        for _ in range(6):
            for node in nodes[:3]:
                await node.service.append(Role("relay"))
            await trio.sleep(1.5)
        await converge(nodes[:3])
        assert all(node.service.replica.base_for(key("c").node) > 8 for node in nodes[:3])
        again = await world.start(key("c"), backup, known=[ELECTOR.node], archive=False)
        await trio.sleep(20)
        with pytest.raises(NotReady):
            await again.service.append(Leave(), timeout=5)
        assert not nodes[0].service.replica.forks


async def test_a_full_disk_keeps_everything_in_memory(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world)
        await work(nodes, 2)
        nodes[1].disk.full = True
        for _ in range(6):
            await nodes[2].service.append(Role("inference"))
            await trio.sleep(1.5)
        await converge(nodes)
        assert nodes[1].service.disk_trouble is not None
        nodes[1].disk.full = False
        await work(nodes, 2)
        same(nodes[0], nodes[1])
        assert (await load(nodes[1].disk, DOMAIN, OFTEN)).replica.heads_root() == nodes[1].service.replica.heads_root()


async def test_a_liar_who_offers_cuts_without_entries_costs_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(), OFTEN) as world:
        nodes = await start_all(world)
        await work(nodes, 3)

        def refuse(data: bytes) -> bytes:
            raise PeerError("a liar")

        nodes[1].port.tamper = refuse
        newcomer = await world.start(key("newcomer"))
        await converge([nodes[0], *nodes[2:], newcomer])
        assert not newcomer.sync.unserved - {nodes[1].id}
