"""Forwarding the messages of patient topics together."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing

from node.net.gossip_batches import Forwards
from node.net.guard import peer_of
from tests.node.net.helpers import network, until
from tests.node.net.test_gossip import meshed

Sent = list[tuple[float, str, list[str]]]


def recorder(delay: float, most: int = 128) -> tuple[Forwards, Sent]:
    sent: Sent = []
    return Forwards(delay, lambda peer, messages: sent.append((trio.current_time(), peer, messages)), most), sent


async def test_messages_of_one_delay_leave_together(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    forwards, sent = recorder(1.0)
    nursery.start_soon(forwards.run)
    start = trio.current_time()
    forwards.add(b"1", "one", ["a", "b"])
    await trio.sleep(0.5)
    forwards.add(b"2", "two", ["b", "c"])
    await trio.sleep(10)
    forwards.add(b"3", "three", ["a"])
    await trio.sleep(10)
    assert sorted(sent) == [
        (start + 1.0, "a", ["one"]),
        (start + 1.0, "b", ["one", "two"]),
        (start + 1.0, "c", ["two"]),
        (start + 11.5, "a", ["three"]),
    ]


async def test_who_has_a_message_is_not_sent_it(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    forwards, sent = recorder(1.0)
    nursery.start_soon(forwards.run)
    forwards.has(b"1", "a")  # of a message that is not here yet: its forwarder is left out by the caller
    forwards.add(b"1", "one", ["a", "b", "c"])
    forwards.has(b"1", "b")
    forwards.has(b"2", "c")
    await trio.sleep(2)
    forwards.has(b"1", "c")
    assert sorted((peer, messages) for _, peer, messages in sent) == [("a", ["one"]), ("c", ["one"])]


async def test_no_more_than_a_bounded_number_waits() -> None:
    forwards, sent = recorder(1.0, most=3)
    for number in range(4):
        forwards.add(bytes([number]), str(number), ["a"])
    assert [messages for _, _, messages in sent] == [["0", "1", "2"]]
    forwards.flush()
    assert [messages for _, _, messages in sent] == [["0", "1", "2"], ["3"]]
    await trio.lowlevel.checkpoint()


async def test_a_patient_topic_crosses_a_line_in_one_frame() -> None:
    heard: list[bytes] = []
    async with network(1) as first, network(2) as middle, network(3) as last:
        for one in (first, middle):
            one.subscribe("roles", lambda origin, data: None, delay=3600)
        last.subscribe("roles", lambda origin, data: heard.append(data))
        await first.connect(middle.addresses[0], 5)
        await last.connect(middle.addresses[0], 5)
        await until(lambda: len(middle.peers) == 2)
        await meshed(first, middle, last)
        pubsub = middle.gossip.pubsub
        await until(lambda: peer_of(last.node) in pubsub.router.mesh["farflung/test/roles"])
        await first.publish("roles", b"one")
        await first.publish("roles", b"two")
        (forwards,) = pubsub.forwards.values()
        await until(lambda: len(forwards) == 2)
        assert heard == []
        frames: list[int] = []
        stock = pubsub.router.send_rpc

        def send_rpc(peer: Any, rpc: Any, priority: bool = False) -> None:
            if rpc.publish:
                frames.append(len(rpc.publish))
            stock(peer, rpc, priority)

        pubsub.router.send_rpc = send_rpc
        forwards.flush()
        await until(lambda: heard == [b"one", b"two"])
        assert frames == [2]


async def test_a_failure_to_forward_stays_here() -> None:
    async with network(1) as first:
        first.subscribe("roles", lambda origin, data: None, delay=3600)
        await until(lambda: first.gossip.pubsub is not None and bool(first.gossip.pubsub.forwards))
        (forwards,) = first.gossip.pubsub.forwards.values()
        forwards.add(b"1", "not a message", ["a"])
        forwards.flush()
        assert not len(forwards)
