"""What a peer's control messages can make a node do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2

from node.net.gossip_memory import OutgoingQueue, Seen
from node.net.gossip_router import ANSWER_BYTES, ANSWER_BYTES_PER_SECOND, CLAIMS, MAX_BACK_OFF, GuardedRouter
from node.net.gossip_rules import MAX_IDS, message_id
from node.net.guard import peer_of
from protocol.errors import PeerError
from tests.node.net.helpers import identity

TOPIC = "farflung/test/log"
ME, PEER, OTHER = (peer_of(identity(number).node) for number in (1, 2, 3))


@dataclass
class OnePeer:
    """What the router sees of a pubsub with two peers."""

    my_id: Any = ME
    seen_messages: Seen = field(default_factory=Seen)
    peer_queues: dict[Any, OutgoingQueue] = field(default_factory=lambda: {PEER: OutgoingQueue()})
    peer_topics: dict[str, set[Any]] = field(default_factory=lambda: {TOPIC: {PEER}})
    peers: dict[Any, Any] = field(default_factory=lambda: {PEER: None})
    forwards: dict[str, Any] = field(default_factory=dict)


def router() -> GuardedRouter:
    made = GuardedRouter()
    made.pubsub = OnePeer()
    made.add_peer(PEER, made.protocols[0])
    made.mesh[TOPIC] = set()
    return made


async def sent(made: GuardedRouter) -> list[Any]:
    """The RPCs that wait for the peer."""
    queue = made.pubsub.peer_queues[PEER]
    return [await queue.pop() for _ in range(len(queue))]


def message(number: int, size: int = 10) -> Any:
    origin = peer_of(identity(9).node).to_bytes()
    return rpc_pb2.Message(data=bytes(size), topicIDs=[TOPIC], from_id=origin, seqno=number.to_bytes(8, "big"))


def iwant(*ids: bytes) -> Any:
    rpc = rpc_pb2.RPC()
    rpc.control.iwant.add().messageIDs.extend(ids)
    return rpc


def ihave(topic: str, *ids: bytes) -> Any:
    rpc = rpc_pb2.RPC()
    rpc.control.ihave.append(rpc_pb2.ControlIHave(topicID=topic, messageIDs=ids))
    return rpc


async def test_a_message_that_is_asked_for_a_thousand_times_is_sent_once() -> None:
    made = router()
    large = message(1, 250_000)
    made.mcache.put(large)
    await made.handle_rpc(iwant(*[message_id(large)] * MAX_IDS), PEER)
    assert [list(rpc.publish) for rpc in await sent(made)] == [[large]]
    with pytest.raises(PeerError, match="too many ids"):
        await made.handle_rpc(iwant(*[message_id(large)] * 6000), PEER)
    assert await sent(made) == []


async def test_what_a_peer_gets_by_asking_is_bounded_in_time(autojump_clock: object) -> None:
    made = router()
    large = message(1, 250_000)
    made.mcache.put(large)

    async def asked(times: int) -> int:
        answers = 0
        for _ in range(times):
            await made.handle_rpc(iwant(message_id(large)), PEER)
            answers += len(await sent(made))
        return answers

    size = large.ByteSize()
    assert await asked(100) == ANSWER_BYTES // size
    left = ANSWER_BYTES % size
    await trio.sleep((5 * size - left) / ANSWER_BYTES_PER_SECOND + 0.1)
    assert await asked(100) == 5
    made.remove_peer(PEER)
    made.add_peer(PEER, made.protocols[0])
    assert await asked(10) == 0  # who comes back has no new budget


async def test_whoever_subscribes_again_and_again_gets_what_it_missed_from_the_same_budget(
    autojump_clock: object,
) -> None:
    made = router()
    large = message(1, 250_000)
    made.mcache.put(large)
    for _ in range(100):
        await made.send_recent_messages(PEER, TOPIC)
        await made.handle_rpc(iwant(message_id(large)), PEER)
    assert len(await sent(made)) == ANSWER_BYTES // large.ByteSize()


async def test_only_unknown_ids_of_spoken_topics_are_asked_for_and_so_many_in_time(autojump_clock: object) -> None:
    made = router()
    known, fresh = bytes(20), b"\1" * 20
    made.pubsub.seen_messages.add(known)
    await made.handle_rpc(ihave("made up", b"\2" * 20), PEER)
    assert await sent(made) == []
    await made.handle_rpc(ihave(TOPIC, known, fresh, fresh), PEER)
    (rpc,) = await sent(made)
    assert [list(want.messageIDs) for want in rpc.control.iwant] == [[fresh]]
    wanted = 0
    for number in range(100):
        ids = [(number * MAX_IDS + index).to_bytes(20, "big") for index in range(1, MAX_IDS)]
        await made.handle_rpc(ihave(TOPIC, *ids), PEER)
        wanted += sum(len(want.messageIDs) for rpc in await sent(made) for want in rpc.control.iwant)
    assert 0 < wanted <= CLAIMS


async def test_topics_that_are_not_spoken_leave_nothing_behind_and_get_no_answer() -> None:
    made = router()
    for number in range(2000):
        rpc = ihave(f"h{number}", number.to_bytes(20, "big"))
        rpc.control.prune.append(rpc_pb2.ControlPrune(topicID=f"p{number}", backoff=1 << 40))
        rpc.control.graft.append(rpc_pb2.ControlGraft(topicID=f"g{number}"))
        await made.handle_rpc(rpc, PEER)
    assert await sent(made) == []
    by_topic = (made.back_off, made.graft_flood_tracking[PEER], made.ihave_message_limits[PEER], made.fanout)
    assert [len(kept) for kept in by_topic] == [0, 0, 0, 0]
    assert list(made.mesh) == [TOPIC]


async def test_a_graft_and_a_prune_of_a_spoken_topic_count_and_end_with_the_peer() -> None:
    made = router()
    rpc = rpc_pb2.RPC()
    rpc.control.graft.append(rpc_pb2.ControlGraft(topicID=TOPIC))
    await made.handle_rpc(rpc, PEER)
    assert made.mesh[TOPIC] == {PEER}
    rpc = rpc_pb2.RPC()
    rpc.control.prune.append(rpc_pb2.ControlPrune(topicID=TOPIC, backoff=1 << 40))
    began = made.back_off.get(TOPIC)
    await made.handle_rpc(rpc, PEER)
    assert made.mesh[TOPIC] == set()
    assert began is None
    assert set(made.back_off[TOPIC]) == {PEER}
    made._add_back_off(OTHER, TOPIC, False, MAX_BACK_OFF)
    assert made.back_off[TOPIC][PEER] <= made.back_off[TOPIC][OTHER]
    made.remove_peer(PEER)
    assert set(made.back_off[TOPIC]) == {OTHER}


async def test_nothing_is_kept_for_a_peer_that_never_subscribes() -> None:
    made = router()
    made.pubsub.peer_topics.clear()
    for number in range(200):
        await made.publish(OTHER, message(number, 1000))
    assert (await sent(made), len(made._pending_messages), made.mcache.window(TOPIC)[0]) == (
        [],
        0,
        message_id(message(0, 1000)),
    )
