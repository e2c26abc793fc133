"""Whose logs a node compares with its own while strangers lie to it or keep it waiting."""

from __future__ import annotations

from collections import Counter

import trio
import trio.testing

from node.log import replication_messages
from node.net.requests import Refused
from protocol import codec
from protocol.records import Role
from tests.protocol.builders import key, small_domain
from tests.simulator import Network, Port, SimNode, World, converge, open_world

DOMAIN = small_domain()
ELECTOR = key("elector")
GREAT = 1 << 40


class Strangers:
    """Peers that never joined, and the requests of the log protocol that ``victim`` made of each node."""

    def __init__(self, world: World, victim: SimNode) -> None:
        self.world = world
        self.victim = victim
        self.hellos: Counter[bytes] = Counter()

    def watch(self, node: SimNode) -> None:
        """Count the rounds that ``node`` is given."""
        honest = node.port.handlers[node.sync.protocol]

        async def counted(peer: bytes, data: bytes) -> bytes:
            self.note(node.id, peer, data)
            return await honest(peer, data)

        node.port.handlers[node.sync.protocol] = counted

    def note(self, node: bytes, peer: bytes, data: bytes) -> None:
        if peer == self.victim.id and replication_messages.parse_request(data)[0] == "hello":
            self.hellos[node] += 1

    def port(self, name: str) -> Port:
        port = Port(self.world.network, key(name).node, self.world.nursery)
        self.world.network.ports[port.node] = port
        self.victim.sync.soon(port.node)
        return port

    def silent(self, name: str) -> bytes:
        port = self.port(name)

        async def stall(peer: bytes, data: bytes) -> bytes:
            self.note(port.node, peer, data)
            await trio.sleep_forever()
            raise AssertionError

        port.serve(self.victim.sync.protocol, stall, max_request=1 << 14)
        return port.node

    def refusing(self, name: str, *, after: float = 0.0) -> bytes:
        port = self.port(name)

        async def refuse(peer: bytes, data: bytes) -> bytes:
            await trio.sleep(after)
            self.note(port.node, peer, data)
            raise Refused("no")

        port.serve(self.victim.sync.protocol, refuse, max_request=1 << 14)
        return port.node

    def boasting(self, name: str) -> bytes:
        """One that says of itself, and asks all the time, that it holds a great many cuts, and lists none of them."""
        port = self.port(name)
        boast = [bytes(32), GREAT, bytes(32), 0, bytes(32), None]

        async def lie(peer: bytes, data: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            self.note(port.node, peer, data)
            op, _ = replication_messages.parse_request(data)
            answers = {"hello": [boast, None], "buckets": [bytes(32)] * 256, "checkpoint": None}
            return codec.encode(answers.get(op, []))

        async def ask() -> None:
            while True:
                payload = replication_messages.request("hello", boast)
                await port.request(self.victim.id, self.victim.sync.protocol, payload, timeout=5, max_response=1 << 20)

        port.serve(self.victim.sync.protocol, lie, max_request=1 << 14)
        self.world.nursery.start_soon(ask)
        return port.node


async def start(world: World) -> tuple[list[SimNode], Strangers]:
    nodes = [await world.start(identity) for identity in (ELECTOR, key("a"), key("b"))]
    await converge(nodes)
    strangers = Strangers(world, nodes[1])
    for node in nodes:
        node.port.topics.clear()  # anti-entropy alone
        strangers.watch(node)
    return nodes, strangers


async def test_a_peer_that_promises_a_great_height_takes_no_rounds_from_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes, strangers = await start(world)
        liar = strangers.boasting("liar")
        await trio.sleep(100)
        assert min(strangers.hellos[nodes[0].id], strangers.hellos[nodes[2].id]) > 30
        assert 3 < strangers.hellos[liar] < 20
        # What it says is not for people either.
        assert nodes[1].service.height_claimed < GREAT
        await nodes[2].service.append(Role("inference"))
        await converge(nodes, within=20)


async def test_a_height_is_shown_while_its_promise_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    network = Network(delay=2)
    async with open_world(DOMAIN, network) as world:
        elector = await world.start(ELECTOR)
        for _ in range(20):
            await elector.service.append(Role("inference"))
            await trio.sleep(1)
        height = len(elector.service.replica.cuts)
        late = await world.start(key("a"), join=False)
        late.sync.soon(ELECTOR.node)
        with trio.fail_after(60):
            while len(late.service.replica.cuts) < height:  # noqa: ASYNC110  a peer's promise has no event
                await trio.sleep(0.1)
        assert late.service.height_claimed >= height
        world.crash(elector)
        await trio.sleep(10)
        assert late.service.height_claimed == 0


async def test_silent_strangers_stop_no_rounds(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes, strangers = await start(world)
        witness = strangers.refusing("witness")
        await trio.sleep(15)
        before = strangers.hellos.copy()
        assert before[witness] >= 4
        silent = [strangers.silent(f"silent {number}") for number in range(40)]
        await trio.sleep(30)
        during = strangers.hellos - before
        assert all(during[one] >= 4 for one in (nodes[0].id, nodes[2].id, witness)), [
            during[one] for one in (nodes[0].id, nodes[2].id, witness)
        ]
        assert sum(during[one] for one in silent) <= 12
        # They are not shut out either: who is silent now may answer later.
        await trio.sleep(400)
        assert all(strangers.hellos[one] for one in silent)
        before = strangers.hellos.copy()
        await trio.sleep(30)
        during = strangers.hellos - before
        assert all(during[one] >= 6 for one in (nodes[0].id, nodes[2].id, witness)), [
            during[one] for one in (nodes[0].id, nodes[2].id, witness)
        ]


async def test_a_peer_that_comes_back_has_no_clean_slate(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes, strangers = await start(world)
        silent = strangers.silent("silent")
        await trio.sleep(100)
        asked = strangers.hellos[silent]
        for _ in range(20):
            port = world.network.ports.pop(silent)
            await trio.sleep(1)
            world.network.ports[silent] = port
            strangers.victim.sync.soon(silent)
            await trio.sleep(1)
        assert strangers.hellos[silent] - asked <= 2
        assert strangers.hellos[nodes[0].id] > 30


async def test_a_peer_that_answers_slowly_falls_behind(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes, strangers = await start(world)
        slow, quick = strangers.refusing("slow", after=8), strangers.refusing("quick")
        await trio.sleep(400)
        assert strangers.hellos[quick] > 60
        assert 3 < strangers.hellos[slow] < 20
        assert strangers.hellos[nodes[0].id] > 60
