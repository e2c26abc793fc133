"""Logs of several nodes over a simulated network: convergence, crashes, backups, lies."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from node.log import replication_messages
from node.log.log_opening import load
from node.log.replicated_log import LogService, NotReady
from node.log.replication_round import FRUITLESS
from node.net.requests import Refused
from protocol import codec
from protocol.errors import LocalError, PeerError
from protocol.log.entry import Entry
from protocol.log.heads import Head
from protocol.records import Leave, Role
from tests.protocol.builders import digest, key, small_domain
from tests.simulator import Disk, Network, SimNode, World, converge, open_world

DOMAIN = small_domain()
ELECTOR = key("elector")
NAMES = ("a", "b", "c")


async def start_all(world: World) -> list[SimNode]:
    return [await world.start(identity) for identity in (ELECTOR, *(key(name) for name in NAMES))]


async def write(node: SimNode, count: int, *, pause: float = 0.0) -> None:
    for _ in range(count):
        await node.service.append(Role("inference"))
        await trio.sleep(pause)


def own_entries(disk: Disk, node: bytes) -> dict[int, bytes]:
    return {item.seq: item.id for item in disk.items if isinstance(item, Entry) and item.author == node}


async def test_gossip_and_cuts_reach_everybody(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        for node in nodes:
            await write(node, 5)
        await converge(nodes)
        await trio.sleep(2)
        for node in nodes:
            replica = node.service.replica
            assert all(replica.next_for(other.id) == 6 for other in nodes)
            assert all(replica.certified_head(other.id) == 5 for other in nodes)
            assert node.port.blamed == []
            assert (await load(node.disk, DOMAIN)).replica.heads_root() == replica.heads_root()


async def test_no_cut_where_nothing_moves(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        await trio.sleep(5)
        height = len(nodes[0].service.replica.cuts)
        await trio.sleep(20)
        assert len(nodes[0].service.replica.cuts) == height > 0


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_lossy_links_and_partitions(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    network = Network(seed, loss=0.1, delay=0.2)
    async with open_world(DOMAIN, network) as world:
        nodes = await start_all(world)
        network.partition([nodes[0].id, nodes[1].id], [nodes[2].id, nodes[3].id])
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(partial(write, node, 20, pause=0.3))
        network.heal()
        await converge(nodes, within=600)
        assert all(node.service.replica.next_for(other.id) == 21 for node in nodes for other in nodes)
        assert [node.port.blamed for node in nodes] == [[], [], [], []]


async def test_a_late_node_fetches_a_long_log(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network(delay=0.001)) as world:
        nodes = await start_all(world)
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(partial(write, node, 60, pause=0.5))
        await converge(nodes)
        late = await world.start(key("late"), join=False)
        result = await late.sync.sync_with(nodes[1].id)
        assert result.errors == []
        # Its own round beside this one may have brought a part of it.
        assert sum(late.service.replica.next_for(author) for author in late.service.replica.heads) >= 4 * 61
        assert late.service.replica.heads_root() == nodes[1].service.replica.heads_root()
        assert late.service.replica.newest_cut_id == nodes[1].service.replica.newest_cut_id
        again = await late.sync.sync_with(nodes[1].id)
        assert again.added == 0
        assert again.received < 5000


async def test_a_log_that_grows_faster_than_it_is_fetched_keeps_no_newcomer_waiting(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = Network(delay=2)  # an answer takes two seconds, a cut comes every half
    async with open_world(DOMAIN, network) as world:
        elector = await world.start(ELECTOR)
        world.nursery.start_soon(partial(write, elector, 600, pause=0.25))
        await trio.sleep(10)
        late = await world.start(key("a"), Disk(), known=[ELECTOR.node])
        with trio.fail_after(40):
            await late.service.ready.wait()


async def test_a_restarted_node_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await write(nodes[1], 3)
        await converge(nodes)
        disk = world.crash(nodes[1])
        await write(nodes[2], 3)
        again = await world.start(key("a"), disk, known=[ELECTOR.node])
        await write(again, 2)
        await converge([nodes[0], again, *nodes[2:]])
        assert again.service.replica.next_for(again.id) == 6


async def test_a_restored_backup_does_not_fork(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await write(nodes[1], 2)
        backup = nodes[1].disk.copy()
        await write(nodes[1], 4)
        await converge(nodes)
        before = own_entries(world.crash(nodes[1]), key("a").node)
        known = [node.id for node in nodes if node is not nodes[1]]
        restored = await world.start(key("a"), backup, known=known)
        assert not restored.service.ready.is_set()
        await write(restored, 1)
        await converge([restored, nodes[0], *nodes[2:]])
        after = own_entries(restored.disk, restored.id)
        assert len(before) == 7
        assert after.items() >= before.items()
        assert len(after) == 8
        assert not nodes[0].service.replica.forks


async def test_an_empty_log_under_an_old_key_does_not_fork(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await write(nodes[1], 2)
        await converge(nodes)
        world.crash(nodes[1])
        lost = await world.start(key("a"), Disk(), known=[ELECTOR.node])
        await write(lost, 1)
        await converge([lost, nodes[0], *nodes[2:]])
        assert lost.service.replica.next_for(lost.id) == 4
        assert not lost.service.replica.forks


async def test_a_lonely_backup_waits_and_still_serves(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        for node in nodes:
            world.crash(node)
        first = await world.start(key("a"), nodes[1].disk, known=[node.id for node in nodes])
        with pytest.raises(NotReady, match="0 of 3 known peers"):
            await first.service.append(Role("relay"), timeout=30)
        # A cold start of all: they tell each other, so nobody waits for ever.
        others = [
            await world.start(key(name), node.disk, known=[n.id for n in nodes])
            for name, node in zip(("b", "c"), nodes[2:], strict=True)
        ]
        elector = await world.start(ELECTOR, nodes[0].disk, known=[n.id for n in nodes])
        everybody = [first, elector, *others]
        async with trio.open_nursery() as nursery:
            for node in everybody:
                nursery.start_soon(write, node, 1)
        await converge(everybody)
        assert all(first.service.replica.next_for(node.id) == 2 for node in everybody)


async def test_a_restored_elector_does_not_cut_twice(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        backup = nodes[0].disk.copy()
        for _ in range(5):
            await write(nodes[1], 1)
            await trio.sleep(1)
        await converge(nodes)
        cuts = [cut.cut.id for cut in nodes[1].service.replica.cuts]
        world.crash(nodes[0])
        restored = await world.start(ELECTOR, backup, known=[node.id for node in nodes[1:]])
        await write(nodes[1], 1)
        await converge([restored, *nodes[1:]])
        await trio.sleep(5)
        await converge([restored, *nodes[1:]])
        assert [cut.cut.id for cut in nodes[1].service.replica.cuts][: len(cuts)] == cuts
        assert len(nodes[1].service.replica.cuts) > len(cuts)
        assert [node.port.blamed for node in nodes[1:]] == [[], [], []]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_crash_between_storing_and_sending(moment: str, autojump_clock: trio.testing.MockClock) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        await trio.sleep(2)
        setattr(nodes[1].disk, moment, kill)
        sent = len(nodes[1].port.sent)
        with pytest.raises(Killed):
            await nodes[1].service.append(Role("relay"))
        assert len(nodes[1].port.sent) == sent
        disk = world.crash(nodes[1]).copy()
        again = await world.start(key("a"), disk, known=[ELECTOR.node])
        await write(again, 1)
        await converge([nodes[0], again, *nodes[2:]])
        assert again.service.replica.next_for(again.id) == (2 if moment == "before" else 3)
        assert not nodes[0].service.replica.forks


async def test_altered_entries_are_the_senders_fault_alone(autojump_clock: trio.testing.MockClock) -> None:
    def corrupt(data: bytes) -> bytes:
        """Flip a bit in each entry of a delivery and leave the message well-formed."""
        value = codec.decode(data, max_bytes=1 << 30)
        if type(value) is not list:
            return data
        entries = value[1] if len(value) == 5 and value[0] == 1 else value
        for index, item in enumerate(entries):
            if type(item) is bytes and len(item) > 100:
                entries[index] = item[:-1] + bytes([item[-1] ^ 1])
        return codec.encode(value)

    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        liar = nodes[3]
        liar.port.tamper = corrupt
        await write(liar, 1)
        for node in nodes[:3]:
            await write(node, 3)
        await trio.sleep(10)
        await converge(nodes[:3])
        for node in nodes[:3]:
            assert node.service.replica.next_for(nodes[1].id) == 4
            assert node.service.replica.next_for(liar.id) == 1
            assert node.port.blamed
            assert {peer for peer, _ in node.port.blamed} == {liar.id}


@pytest.mark.parametrize("answer", [b"", b"\x90", b"\xc1", b"\x92\xc0\xc0", bytes(300)])
async def test_nonsense_answers_are_blamed(answer: bytes, autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        nodes[3].port.tamper = lambda data: answer
        await write(nodes[1], 3)
        await trio.sleep(10)
        await converge(nodes[:3])
        assert {peer for node in nodes[:3] for peer, _ in node.port.blamed} == {nodes[3].id}


async def test_a_peer_that_stalls_holds_nobody_up(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)

        async def stall(peer: bytes, data: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        for node in nodes:
            node.port.topics.clear()  # anti-entropy alone
        nodes[3].port.handlers[nodes[3].sync.protocol] = stall
        await write(nodes[1], 3)
        await converge(nodes[:3], within=20)
        assert nodes[2].service.replica.next_for(nodes[1].id) == 4


async def test_a_peer_that_lists_heads_for_ever_holds_no_round(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_messages, "MAX_ROWS", 4)
    pages = 0
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        liar = nodes[3]
        honest = liar.port.handlers[liar.sync.protocol]

        async def endless(peer: bytes, data: bytes) -> bytes:
            nonlocal pages
            op, argument = replication_messages.parse_request(data)
            if op == "buckets":
                return codec.encode([digest(f"bucket {number}") for number in range(256)])
            if op == "heads":
                pages += 1
                authors = [(int.from_bytes(argument[1], "big") + one).to_bytes(32, "big") for one in range(1, 5)]
                return codec.encode([Head(author, 0, author, author).to_value() for author in authors])
            if op == "hello":
                mine, _ = replication_messages.parse_answer(op, await honest(peer, data))
                return codec.encode([[digest("heads"), *mine[1:]], None])
            return await honest(peer, data)

        liar.port.handlers[liar.sync.protocol] = endless
        result = await nodes[0].sync.sync_with(liar.id)
        assert result.added == 0
        assert 1 < pages <= FRUITLESS


@pytest.mark.parametrize("wrong", ["order", "bucket"])
async def test_heads_that_nobody_asked_for_are_blamed(wrong: str, autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        await write(nodes[1], 1)
        differing = nodes[1].id[0]
        honest = nodes[1].port.handlers[nodes[1].sync.protocol]

        async def other(peer: bytes, data: bytes) -> bytes:
            op, _ = replication_messages.parse_request(data)
            if op != "heads":
                return await honest(peer, data)
            first = differing if wrong == "order" else differing ^ 1
            authors = [bytes([first]) + bytes(30) + bytes([place]) for place in (2, 1)]
            return codec.encode([Head(author, 0, author, author).to_value() for author in authors])

        for node in nodes:
            node.port.topics.clear()
        nodes[1].port.handlers[nodes[1].sync.protocol] = other
        await write(nodes[1], 1)
        with pytest.raises(PeerError, match="nobody asked"):
            await nodes[0].sync.sync_with(nodes[1].id)


async def test_nonsense_requests_are_blamed(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        protocol, most = nodes[3].sync.protocol, replication_messages.MAX_ANSWER
        ask = partial(nodes[3].port.request, nodes[0].id, protocol, timeout=10, max_response=most)
        good = replication_messages.request("ranges", [[key("a").node, 0, 2**62]])
        for payload in (
            b"",
            good[:-1],
            good + b"\0",
            replication_messages.request("ranges", []),
            replication_messages.request("steal", None),
        ):
            before = len(nodes[0].port.blamed)
            with pytest.raises(Refused):
                await ask(payload)
            assert len(nodes[0].port.blamed) == before + 1
        assert replication_messages.parse_answer("ranges", await ask(good))


async def test_two_machines_with_one_key_are_frozen(autojump_clock: trio.testing.MockClock) -> None:
    network = Network()
    async with open_world(DOMAIN, network) as world:
        nodes = await start_all(world)
        await write(nodes[1], 1)
        await converge(nodes)
        twin_disk = nodes[1].disk.copy()
        await nodes[1].service.append(Leave())
        # The twin is told that its key is new: the one thing that makes it append without asking.
        twin = LogService(key("a"), await load(twin_disk, DOMAIN), twin_disk, fresh=True)
        entry = (await twin.append(Role("relay")))[0]
        await nodes[2].service.intake.receive(entries=[entry.encode()])
        await converge(nodes)
        for node in nodes:
            assert node.service.replica.frozen(key("a").node)
            assert node.port.blamed == []
        with pytest.raises(LocalError, match="frozen"):
            await nodes[1].service.append(Role("relay"))
        # It survives a restart, and the rest goes on.
        disk = world.crash(nodes[2])
        again = await world.start(key("b"), disk, known=[ELECTOR.node])
        assert again.service.replica.frozen(key("a").node)
        await write(again, 2)
        await converge([nodes[0], nodes[1], again, nodes[3]])
        await trio.sleep(3)
        assert nodes[0].service.replica.certified_head(again.id) == 2


async def test_a_full_disk_pauses_and_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        await converge(nodes)
        await trio.sleep(2)
        nodes[1].disk.full = True
        with pytest.raises(OSError, match="no space"):
            await nodes[1].service.append(Role("relay"))
        await write(nodes[2], 3)
        await trio.sleep(3)
        assert "no space" in str(nodes[1].service.disk_trouble)
        assert nodes[1].service.replica.next_for(nodes[2].id) == 4
        nodes[1].disk.full = False
        await write(nodes[1], 1)
        await converge(nodes)
        await write(nodes[2], 1)
        await converge(nodes)
        assert str(nodes[1].service.disk_trouble) == "None"
        assert (await load(nodes[1].disk, DOMAIN)).replica.heads_root() == nodes[1].service.replica.heads_root()


async def test_terms_are_granted_once(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        elector = nodes[0].elector
        assert elector is not None
        first = await elector.grant_term(nodes[1].id)
        assert (first.grant.term, first.grant.base, first.grant.trainer) == (1, DOMAIN.id, nodes[1].id)
        await converge(nodes)
        disk = world.crash(nodes[0])
        again = await world.start(ELECTOR, disk, known=[nodes[1].id])
        assert again.elector is not None
        assert (await again.elector.grant_term(nodes[2].id)).grant.term == 2
        await converge([again, *nodes[1:]])
        grant = nodes[3].service.ledger.grant()
        assert grant is not None
        assert grant.trainer == nodes[2].id


async def test_gossip_lost_altogether(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = await start_all(world)
        for node in nodes:
            node.port.topics.clear()
        for node in nodes:
            await write(node, 5)
        elector = nodes[0].elector
        assert elector is not None
        await elector.grant_term(nodes[1].id)
        await converge(nodes)
        assert nodes[3].service.replica.next_for(nodes[1].id) == 6
        assert nodes[3].service.replica.grants
