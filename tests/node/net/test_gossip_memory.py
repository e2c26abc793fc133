"""What gossip keeps."""

from __future__ import annotations

from typing import Any

import trio
from libp2p.pubsub.pb import rpc_pb2

from node.net.gossip_memory import (
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    MAX_RECENT,
    MAX_RECENT_BYTES,
    MAX_TOLD,
    SEEN_SECONDS,
    OutgoingQueue,
    RecentMessages,
    Seen,
)
from node.net.gossip_rules import message_id


def message(number: int, size: int = 1, topic: str = "t") -> Any:
    return rpc_pb2.Message(data=bytes(size), topicIDs=[topic], from_id=b"o", seqno=number.to_bytes(8, "big"))


def test_recent_messages_are_told_for_a_while_and_kept_a_little_longer() -> None:
    recent = RecentMessages(window=2, history=3)
    one, other = message(1), message(2, topic="u")
    recent.put(one)
    recent.put(one)
    recent.shift()
    recent.put(other)
    assert (recent.window("t"), recent.window("u")) == ([message_id(one)], [message_id(other)])
    recent.shift()
    assert (recent.window("t"), recent.get(message_id(one))) == ([], one)
    recent.shift()
    assert (recent.get(message_id(one)), recent.get(message_id(other)), len(recent)) == (None, other, 1)
    recent.shift()
    assert (len(recent), recent.bytes) == (0, 0)


def test_recent_messages_are_bounded_in_number_and_bytes_and_so_is_what_is_told_of_them() -> None:
    recent = RecentMessages(window=3, history=5)
    for number in range(MAX_RECENT + 10):
        recent.put(message(number))
    assert len(recent) == MAX_RECENT
    assert recent.get(message_id(message(9))) is None
    assert recent.window("t") == [message_id(message(MAX_RECENT + 10 - left)) for left in range(MAX_TOLD, 0, -1)]
    for number in range(MAX_RECENT_BYTES // (256 << 10) + 8):
        recent.put(message(1 << 20 | number, 256 << 10))
    assert MAX_RECENT_BYTES - (512 << 10) < recent.bytes <= MAX_RECENT_BYTES
    assert len(recent) < 129


async def test_a_queue_is_bounded_in_number_and_bytes() -> None:
    queue = OutgoingQueue()
    small, large = rpc_pb2.RPC(publish=[message(1)]), rpc_pb2.RPC(publish=[message(2, 1 << 20)])
    assert [queue.push(large) for _ in range(4)] == [True, True, True, False]
    assert queue.bytes <= MAX_QUEUED_BYTES
    assert await queue.pop() == large
    assert queue.push(large)
    for _ in range(3):
        await queue.pop()
    assert queue.bytes == 0
    assert sum(queue.push(small) for _ in range(MAX_QUEUED + 5)) == MAX_QUEUED


async def test_seen_messages_are_forgotten_and_bounded(autojump_clock: object) -> None:
    seen = Seen(most=3)
    assert [seen.add(key) for key in (b"1", b"2", b"1", b"3", b"4")] == [True, True, False, True, True]
    assert [seen.has(key) for key in (b"1", b"2", b"3", b"4")] == [False, True, True, True]
    await trio.sleep(SEEN_SECONDS)
    assert not seen.has(b"4")
    assert seen.add(b"4")
    assert len(seen) == 1
