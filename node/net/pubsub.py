"""The containment of libp2p's pubsub (defect 3 of ``node.net.guard``), and GossipSub as this network runs it.

1. An RPC that cannot be read or handled is blamed on the peer that sent it; nothing else notices.
2. Everything an RPC may hold is bounded, and its messages are handled in order, without a task for each.
3. A message's origin is an Ed25519 node id and its signature is checked with PyNaCl, as everywhere else.
4. Whoever lost a gossip stream to a living peer meets it anew, because subscriptions are announced once.
5. Messages of patient topics (``GuardedPubsub.forwards``, by topic) are forwarded together.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import libp2p.pubsub.gossipsub as gossipsub_module
import libp2p.pubsub.mcache as mcache_module
import libp2p.pubsub.pubsub as pubsub_module
import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from libp2p.utils.varint import encode_varint_prefixed

from node.net.gossip_batches import Forwards
from node.net.guard import GuardedHost, GuardedSwarm, NetLimits, node_of
from node.net.yamux_stream import MuxerStream
from protocol.errors import PeerError
from protocol.identity import verify

log = logging.getLogger(__name__)

MAX_TOPIC: Final = 128
"""Longest gossip topic (characters)."""

MAX_RPC_MESSAGES: Final = 256
"""Messages, subscriptions or control items in one gossip RPC."""

SEEN_SECONDS: Final = 120.0
"""How long a message is known again. GossipSub's caches keep messages for five heartbeats."""

MAX_SEEN: Final = 1 << 16

TOGETHER: Final = 32 << 10
"""RPCs that wait for the same peer leave in one frame of up to so many bytes and an RPC."""

HEARTBEAT: Final = 2
"""Seconds between checks of the mesh. Who subscribes or leaves changes it at once, and own messages do not need it."""

LAZY_PEERS: Final = 1
"""Peers outside the mesh that each heartbeat tells what is here. Every holder tells three of a message, and what still
is missed is not lost: the next presence comes in seconds, and comparing logs finds the rest. GossipSub's six would be
half of an idle node's frames."""


def _no_record(host: Any) -> tuple[bytes, bool]:
    """Stands in for ``env_to_send_in_RPC``; the empty field is removed before sending."""
    return b"", False


def _verify_message(message: Any) -> bool:
    """Gossip messages are signed by Ed25519 peers; raises ``PeerError`` (the stock check drops them unseen)."""
    bare = rpc_pb2.Message(data=message.data, topicIDs=message.topicIDs, from_id=message.from_id, seqno=message.seqno)
    signed = bare.SerializeToString()
    verify(node_of(ID(message.from_id)), PUBSUB_SIGNING_PREFIX.encode(), signed, message.signature, "gossip")
    return True


pubsub_module.signature_validator = _verify_message
for _module in (pubsub_module, gossipsub_module):
    # A record of the sender's addresses, attached to every RPC for a quarter of the CPU; Noise proves the sender.
    _module.env_to_send_in_RPC = _no_record
# The stock queues hold 32 items and drop the rest without an error: a burst of 200 messages arrives as 16.
pubsub_module.SUBSCRIPTION_CHANNEL_SIZE = 512
RpcQueue.__init__.__defaults__ = (512, *RpcQueue.__init__.__defaults__[1:])


class Seen:
    """Ids of the messages of the last ``SEEN_SECONDS``, at most ``most`` of them."""

    def __init__(self, most: int = MAX_SEEN) -> None:
        self._most = most
        self._added: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._added)

    def has(self, key: bytes) -> bool:
        """Whether ``key`` was added not long ago."""
        added = self._added.get(key)
        return added is not None and trio.current_time() - added < SEEN_SECONDS

    def add(self, key: bytes) -> bool:
        """Remember ``key``; whether it is new."""
        new = not self.has(key)
        if new:
            self._added.pop(key, None)
            self._added[key] = now = trio.current_time()
            oldest = next(iter(self._added))
            while len(self._added) > self._most or now - self._added[oldest] >= SEEN_SECONDS:
                del self._added[oldest]
                oldest = next(iter(self._added))
        return new


def _remembering(message_id: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """``message_id`` that hashes a message once: libp2p asks for the same one's id five times in a row."""
    last: tuple[Any, bytes] = (None, b"")

    def remembered(message: Any) -> bytes:
        nonlocal last
        if message is not last[0]:
            last = (message, message_id(message))
        return last[1]

    return remembered


def _contain(owner: type, *names: str) -> None:
    """Have these methods of ``owner``'s base log what they raise: it would cancel the pubsub service or the swarm."""

    def contained(name: str, function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def method(self: Any, *args: Any, **options: Any) -> None:
            try:
                await function(self, *args, **options)
            except Exception as error:
                log.debug("gossip: %s failed: %r", name, error)

        return method

    for name in names:
        setattr(owner, name, contained(name, getattr(owner, name)))


class GuardedRouter(GossipSub):  # type: ignore[misc]
    """GossipSub 1.1. Version 1.2 would double the RPCs of small messages."""

    pubsub: GuardedPubsub

    def __init__(self) -> None:
        super().__init__(
            protocols=[PROTOCOL_ID_V11],
            degree=3,
            degree_low=2,
            degree_high=4,
            heartbeat_interval=HEARTBEAT,
            gossip_window=3,
            gossip_history=5,
            time_to_live=60,
            prune_back_off=10,
            spam_protection_enabled=False,  # it silently stops forwarding above 10 messages a second and topic
            adaptive_gossip_enabled=False,
            eclipse_protection_enabled=False,
        )
        self.scorer = None  # all its weights are zero; node.net.peer_scores judges peers
        # The stock class keeps these for ever.
        self.recent_message_deliveries: Any = collections.defaultdict(lambda: collections.deque(maxlen=1))

    async def publish(self, msg_forwarder: Any, message: Any) -> None:
        """Messages of patient topics wait, if they are others'."""
        forwards = self.pubsub.forwards.get(message.topicIDs[0])
        if forwards is None or msg_forwarder == self.pubsub.my_id:
            await super().publish(msg_forwarder, message)
            return
        self.mcache.put(message)
        mesh: set[ID] = self.mesh.get(message.topicIDs[0], set())
        forwards.add(self.pubsub.get_message_id(message), message, mesh - {msg_forwarder, ID(message.from_id)})

    def _get_peers_to_send(self, topic_ids: Any, msg_forwarder: Any, origin: Any, msg_id: bytes | None = None) -> Any:
        # Flood publishing (GossipSub 1.1): own messages go to all listeners, also to those the mesh has not taken yet.
        if msg_forwarder == self.pubsub.my_id:
            return [peer for topic in topic_ids for peer in self.pubsub.peer_topics.get(topic, ())]
        return super()._get_peers_to_send(topic_ids, msg_forwarder, origin, msg_id)

    def _get_adaptive_gossip_peers_count(self, topic: str, total_peers: int) -> int:
        return LAZY_PEERS


_contain(GuardedRouter, "flush_pending_messages", "on_peer_subscribed", "_emit_control_msgs", "_maintain_mesh_quality")


class GuardedPubsub(Pubsub):  # type: ignore[misc]
    """Pubsub through ``host`` that no peer can stop (defect 3)."""

    seen_messages: Any

    def __init__(self, host: GuardedHost, limits: NetLimits, message_id: Callable[[Any], bytes]) -> None:
        message_id = _remembering(message_id)
        # The stock cache names messages otherwise than "seen" does: what a peer says it has would be asked for again.
        mcache_module.default_msg_id_fn = message_id
        super().__init__(
            host,
            GuardedRouter(),
            strict_signing=True,
            msg_id_constructor=message_id,
            validation_cache_size=64,
            max_subscriptions_per_rpc=MAX_RPC_MESSAGES,
            max_subscriptions_per_peer=32,
            max_inbound_rpc_size=limits.gossip_rpc,
        )
        self.seen_messages._stop_event.set()  # the stock cache has no bound, and a thread that never ends
        self.seen_messages = Seen()
        self.forwards: dict[str, Forwards] = {}

    def forward_together(self, topic: str, delay: float) -> None:
        """From now on ``topic`` is a patient one: others' messages leave within ``delay`` seconds."""

        def send(peer: Any, messages: list[Any]) -> None:
            try:
                self.router.send_rpc(peer, rpc_pb2.RPC(publish=messages))
            except Exception as error:
                log.debug("gossip: forwarding failed: %r", error)

        self.forwards[topic] = Forwards(delay, send)
        self.manager.run_task(self.forwards[topic].run)

    def get_hello_packet(self) -> Any:
        packet = super().get_hello_packet()
        packet.ClearField("senderRecord")
        return packet

    async def write_msg(self, stream: Any, rpc: Any) -> bool:
        rpc.ClearField("senderRecord")
        sent: bool = await super().write_msg(stream, rpc)
        return sent

    def _handle_dead_peer(self, peer: Any) -> None:
        # Subscriptions are announced once: whoever lost a gossip stream to a living peer must meet it anew.
        try:
            super()._handle_dead_peer(peer)
        except Exception as error:
            log.debug("gossip: forgetting a peer failed: %r", error)
        swarm: GuardedSwarm = self.host.get_network()
        if self.manager.is_running and swarm.get_connections(peer):
            self.manager.run_task(swarm.drop, peer)

    async def handle_sending_messages(self, peer: Any, stream: Any, queue: RpcQueue) -> None:
        # The stock loop writes RPC by RPC, through a stream whose state nobody reads here but which has a lock.
        try:
            data = bytearray()
            while (rpc := await queue.pop()) is not None:
                rpc.ClearField("senderRecord")
                data += encode_varint_prefixed(rpc.SerializeToString())
                if not len(queue):
                    await stream.muxed_stream.put(bytes(data))
                    data.clear()
                elif len(data) >= TOGETHER:
                    await stream.muxed_stream.write(bytes(data))
                    data.clear()
        except Exception as error:
            log.debug("gossip: sending failed: %r", error)
            self._handle_dead_peer(peer)

    async def stream_handler(self, stream: Any) -> None:
        """Read a peer's RPCs until its stream ends. What it raises is the host's to contain."""
        peer = stream.muxed_conn.peer_id
        muxed: MuxerStream = stream.muxed_stream
        try:
            while self.manager.is_running:
                await self._handle_rpc(peer, _parse_rpc(await muxed.read_prefixed(self.max_inbound_rpc_size)))
                if muxed.buffer:  # many RPCs at once must not keep the others waiting
                    await trio.lowlevel.checkpoint()
        except PeerError as error:
            self.host.blame(node_of(peer), error)
            await stream.reset()
            self._handle_dead_peer(peer)

    async def _handle_rpc(self, peer: Any, rpc: Any) -> None:
        """The stock loop's body, with bounds, in order (no task a message), and with the peer named for every fault."""
        control = rpc.control
        items = (rpc.publish, rpc.subscriptions, control.ihave, control.iwant, control.graft, control.prune)
        if any(len(item) > MAX_RPC_MESSAGES for item in items):
            raise PeerError("gossip: too many items in one RPC")
        rpc.ClearField("senderRecord")
        for subscription in rpc.subscriptions:
            if len(subscription.topicid) > MAX_TOPIC:
                raise PeerError("gossip: a topic is too long")
            self.handle_subscription(peer, subscription)
        for message in rpc.publish:
            if len(message.topicIDs) == 1 and self._is_subscribed_to_msg(message):
                key = self.get_message_id(message)
                if (forwards := self.forwards.get(message.topicIDs[0])) is not None:
                    forwards.has(key, peer)
                if not self.seen_messages.has(key):
                    with _blamed("a message"):
                        await self.push_msg(peer, message)
        if rpc.HasField("control"):
            with _blamed("control messages"):
                await self.router.handle_rpc(rpc, peer)


_contain(
    GuardedPubsub,
    "_replay_recent_messages",
    "_handle_new_peer_with_retry",
    "_peer_stream_retry_task",
    "_run_announce_retry",
    "_teardown_if_connected",
)


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Whatever goes wrong in handling ``what`` is a fault of the peer that sent it."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"gossip: {what} that cannot be handled ({type(error).__name__})") from None


def _parse_rpc(data: bytes) -> Any:
    """One gossip RPC; raises ``PeerError`` for rubbish."""
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(data)
    except DecodeError:
        raise PeerError("gossip: not an RPC") from None
    return rpc
