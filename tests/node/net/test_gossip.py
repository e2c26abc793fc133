"""Gossip topics."""

from __future__ import annotations

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2
from trio.testing import wait_all_tasks_blocked

from node.net.gossip_rules import message_id
from node.net.guard import NetLimits
from node.net.host import Network
from protocol.errors import LocalError, PeerError
from tests.node.net.helpers import network, until


async def meshed(*networks: Network, topic: str = "roles") -> None:
    """Wait until neighbours know of each other's subscription."""
    await until(lambda: all(set(one.peers) and set(one.peers) <= set(one.gossip.listeners(topic)) for one in networks))


async def test_a_message_crosses_a_line_and_does_not_come_back() -> None:
    heard: dict[int, list[tuple[bytes, bytes]]] = {1: [], 2: [], 3: []}
    async with network(1) as first, network(2) as middle, network(3) as last:
        for number, one in ((1, first), (2, middle), (3, last)):

            async def hear(origin: bytes, data: bytes, number: int = number) -> None:
                await trio.lowlevel.checkpoint()
                heard[number].append((origin, data))

            one.subscribe("roles", hear)
        await first.connect(middle.addresses[0], 5)
        await last.connect(middle.addresses[0], 5)
        await until(lambda: len(middle.peers) == 2)
        await meshed(first, middle, last)
        await first.publish("roles", b"to all")
        await last.publish("roles", b"to all")  # the same content from another origin is another message
        await until(lambda: len(heard[1]) == 1 and len(heard[2]) == 2 and len(heard[3]) == 1)
        assert heard[1] == [(last.node, b"to all")]
        assert heard[3] == [(first.node, b"to all")]
        assert first.counts["gossip"].sent == 6
        assert first.counts["gossip"].received == 6


async def test_tags_keep_domains_apart() -> None:
    heard: list[bytes] = []
    async with network(1, tag="a") as first, network(2, tag="b") as second, network(3, tag="a") as third:
        for one in (first, second, third):
            one.subscribe("roles", lambda origin, data, one=one: heard.append(one.node))  # type: ignore[misc]
        await second.connect(first.addresses[0], 5)
        await third.connect(first.addresses[0], 5)
        await until(
            lambda: first.gossip.listeners("roles") == [third.node] and third.gossip.listeners("roles") == [first.node]
        )
        await first.publish("roles", b"x")
        await until(lambda: heard == [third.node])
        assert second.gossip.listeners("roles") == []


async def test_a_burst_arrives_whole() -> None:
    heard: list[bytes] = []
    async with network(1) as first, network(2) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: heard.append(data))
        await first.connect(second.addresses[0], 5)
        await meshed(first, second)
        for number in range(200):
            await first.publish("roles", number.to_bytes(2, "big"))
        await until(lambda: len(heard) == 200)


async def test_an_origin_above_its_rate_is_dropped_and_not_blamed() -> None:
    heard: list[bytes] = []
    async with network(1) as first, network(2, NetLimits(gossip_burst=10, gossip_per_second=0.001)) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: heard.append(data))
        await first.connect(second.addresses[0], 5)
        await meshed(first, second)
        for number in range(30):
            await first.publish("roles", bytes([number]))
        await until(lambda: len(heard) == 10)
        await wait_all_tasks_blocked(0.01)
        assert len(heard) == 10
        assert second.scores.reasons(first.node) == {}


async def test_a_large_message_arrives_and_a_larger_one_is_refused_here() -> None:
    heard: list[int] = []
    async with network(1) as first, network(2) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: heard.append(len(data)))
        await first.connect(second.addresses[0], 5)
        await meshed(first, second)
        await first.publish("roles", bytes(256 << 10))
        await until(lambda: heard == [256 << 10])
        with pytest.raises(LocalError, match="at most 262144"):
            await first.publish("roles", bytes((256 << 10) + 1))


async def test_an_oversized_message_is_its_forwarders_fault() -> None:
    async with network(1, NetLimits(gossip_message=512 << 10)) as first, network(2) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: None)
        await first.connect(second.addresses[0], 5)
        await meshed(first, second)
        await first.publish("roles", bytes(300 << 10))
        await until(lambda: bool(second.scores.reasons(first.node)))


async def test_garbage_is_not_passed_on_and_both_its_origin_and_who_brought_it_are_blamed() -> None:
    def picky(origin: bytes, data: bytes) -> None:
        if data == b"garbage":
            raise PeerError("garbage")
        heard.append(data)

    heard: list[bytes] = []
    async with network(1) as origin, network(2) as careless, network(3) as careful, network(4) as last:
        careless.subscribe("roles", lambda origin, data: None)
        origin.subscribe("roles", lambda origin, data: None)
        careful.subscribe("roles", picky)
        last.subscribe("roles", lambda origin, data: heard.append(b"last " + data))
        await origin.connect(careless.addresses[0], 5)
        await careless.connect(careful.addresses[0], 5)
        await careful.connect(last.addresses[0], 5)
        await until(lambda: len(careful.peers) == 2)
        await meshed(origin, careless, careful, last)
        await origin.publish("roles", b"garbage")
        await until(lambda: bool(careful.scores.reasons(careless.node)))
        await origin.publish("roles", b"fine")
        await until(lambda: sorted(heard) == [b"fine", b"last fine"])
        assert careful.scores.reasons(origin.node) == careful.scores.reasons(careless.node) == {"garbage": 1}
        assert not last.scores.reasons(careful.node)


async def test_who_sends_more_than_its_share_is_dropped_by_the_size_of_all_that_travels() -> None:
    heard: list[bytes] = []
    async with network(1) as first, network(2, NetLimits(gossip_burst=10, gossip_per_second=0.001)) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: heard.append(data))
        await first.connect(second.addresses[0], 5)
        await meshed(first, second)
        for number in range(30):  # with its envelope each is two tokens' worth
            await first.publish("roles", bytes([number]) * ((16 << 10) - 50))
        await until(lambda: len(heard) == 5)
        await wait_all_tasks_blocked(0.05)
        assert len(heard) == 5


async def test_gossip_recovers_when_all_connections_are_lost() -> None:
    heard: list[bytes] = []
    async with network(1) as first, network(2) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: heard.append(data))
        await first.add_peer(second.addresses[0])
        await until(lambda: bool(first.peers) and bool(second.peers))
        await meshed(first, second)
        await second.disconnect(first.node)
        await until(lambda: not first.peers)
        await until(lambda: bool(first.peers) and bool(second.peers))
        await meshed(first, second)
        await first.publish("roles", b"again")
        await until(lambda: heard == [b"again"])


async def test_a_lost_gossip_stream_is_mended() -> None:
    heard: list[bytes] = []
    async with network(1) as first, network(2) as second:
        first.subscribe("roles", lambda origin, data: None)
        second.subscribe("roles", lambda origin, data: heard.append(data))
        await first.add_peer(second.addresses[0])
        await until(lambda: bool(first.peers) and bool(second.peers))
        await meshed(first, second)
        pubsub = first.gossip.pubsub
        (stream,) = pubsub.peers.values()
        await stream.reset()
        await first.publish("roles", b"noticed")  # the write fails, so the peer is met anew
        await until(lambda: not first.peers)
        await until(lambda: bool(first.peers) and bool(second.peers))
        await meshed(first, second)
        await first.publish("roles", b"again")
        await until(lambda: b"again" in heard)


async def test_a_topic_has_one_handler_and_a_short_name() -> None:
    async with network(1) as first:
        first.subscribe("roles", lambda origin, data: None)
        with pytest.raises(LocalError):
            first.subscribe("roles", lambda origin, data: None)
        with pytest.raises(LocalError):
            first.subscribe("t" * 200, lambda origin, data: None)


def test_every_part_of_a_message_is_in_its_id() -> None:
    def make(from_id: bytes, seqno: bytes, topic: str, data: bytes) -> bytes:
        return message_id(rpc_pb2.Message(from_id=from_id, seqno=seqno, topicIDs=[topic], data=data))

    ids = {
        make(b"a", b"1", "t", b"x"),
        make(b"b", b"1", "t", b"x"),
        make(b"a", b"2", "t", b"x"),
        make(b"a", b"1", "u", b"x"),
        make(b"a", b"1", "t", b"y"),
        make(b"a1", b"", "t", b"x"),
    }
    assert len(ids) == 6
    assert {len(one) for one in ids} == {20}


async def test_what_a_peer_says_it_has_is_not_asked_for_again() -> None:
    """The cache and the "seen" ids name a message alike; the stock ones do not, and send most messages twice."""
    async with network(1) as first:
        pubsub = first.gossip.pubsub
        message = rpc_pb2.Message(data=b"x", topicIDs=["t"], from_id=b"o", seqno=b"1")
        pubsub.router.mcache.put(message)
        assert pubsub.router.mcache.window("t") == [message_id(message)] == [pubsub.get_message_id(message)]
