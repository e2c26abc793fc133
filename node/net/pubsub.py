"""The containment of libp2p's pubsub (defect 3 of ``node.net.guard``).

1. An RPC that cannot be read or handled is blamed on the peer that sent it; nothing else notices.
2. Everything an RPC may hold is bounded (``node.net.gossip_rules``), and its messages are handled in order, without a
   task for each.
3. A message's origin is an Ed25519 node id and its signature is checked with PyNaCl, as everywhere else, but only
   after ``Inbox.afford`` let its bytes in.
4. A message is handed to the ``Inbox`` and goes on to others when that says so: nobody forwards what it has not judged.
5. Whoever lost a gossip stream to a living peer meets it anew, because subscriptions are announced once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import libp2p.pubsub.pubsub as pubsub_module
import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from libp2p.utils.varint import encode_varint_prefixed

from node.net.gossip_batches import Forwards
from node.net.gossip_memory import OutgoingQueue, Seen
from node.net.gossip_router import GuardedRouter, contain, no_record
from node.net.gossip_rules import MAX_RPC_MESSAGES, check_items, check_message, message_id
from node.net.guard import GuardedHost, GuardedSwarm, NetLimits, node_of, peer_of
from node.net.token_buckets import Buckets
from node.net.yamux_stream import MuxerStream
from protocol.errors import PeerError
from protocol.identity import verify

log = logging.getLogger(__name__)

TOGETHER: Final = 32 << 10
"""RPCs that wait for the same peer leave in one frame of up to so many bytes and an RPC."""

SENDING_TIMEOUT: Final = 60.0
"""Seconds that a peer may take for such a frame (a megabyte at most)."""

SUBSCRIPTIONS: Final = 64
SUBSCRIPTIONS_PER_SECOND: Final = 1
"""What one peer may announce or take back: so many at once, and then so many a second."""

pubsub_module.env_to_send_in_RPC = no_record
pubsub_module.RpcQueue = OutgoingQueue


class Inbox(Protocol):
    """Who judges messages and takes them."""

    def afford(self, forwarder: bytes, message: Any) -> bool:
        """Whether ``forwarder`` may send that much now; called before the signature is checked."""

    def accept(self, forwarder: bytes, message: Any) -> bool:
        """Take a message whose signature is right; whether it did."""


def _verify_message(message: Any) -> None:
    """Gossip messages are signed by Ed25519 peers; raises ``PeerError`` (the stock check drops them unseen)."""
    bare = rpc_pb2.Message(data=message.data, topicIDs=message.topicIDs, from_id=message.from_id, seqno=message.seqno)
    signed = bare.SerializeToString()
    verify(node_of(ID(message.from_id)), PUBSUB_SIGNING_PREFIX.encode(), signed, message.signature, "gossip")


def _remembering(message_id: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """``message_id`` that hashes a message once: it is asked for several times in a row."""
    last: tuple[Any, bytes] = (None, b"")

    def remembered(message: Any) -> bytes:
        nonlocal last
        if message is not last[0]:
            last = (message, message_id(message))
        return last[1]

    return remembered


class GuardedPubsub(Pubsub):  # type: ignore[misc]
    """Pubsub through ``host`` that no peer can stop (defect 3)."""

    seen_messages: Any

    def __init__(self, host: GuardedHost, limits: NetLimits, inbox: Inbox) -> None:
        super().__init__(
            host,
            GuardedRouter(),
            strict_signing=True,
            msg_id_constructor=_remembering(message_id),
            max_subscriptions_per_rpc=MAX_RPC_MESSAGES,
            max_subscriptions_per_peer=32,
            max_inbound_rpc_size=limits.gossip_rpc,
        )
        self.seen_messages._stop_event.set()  # the stock cache has no bound, and a thread that never ends
        self.seen_messages = Seen()
        self.forwards: dict[str, Forwards] = {}
        self._inbox = inbox
        self._announced = Buckets(SUBSCRIPTIONS, SUBSCRIPTIONS_PER_SECOND)

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
        self.router.remove_peer(peer)  # also of one that sent, but whom no stream was opened to yet
        swarm: GuardedSwarm = self.host.get_network()
        if self.manager.is_running and swarm.get_connections(peer):
            self.manager.run_task(swarm.drop, peer)

    async def handle_sending_messages(self, peer: Any, stream: Any, queue: OutgoingQueue) -> None:
        # The stock loop writes RPC by RPC, through a stream whose state nobody reads here but which has a lock.
        try:
            data = bytearray()
            while (rpc := await queue.pop()) is not None:
                rpc.ClearField("senderRecord")
                data += encode_varint_prefixed(rpc.SerializeToString())
                if len(queue) and len(data) < TOGETHER:
                    continue
                with trio.fail_after(SENDING_TIMEOUT):
                    await stream.muxed_stream.put(bytes(data))
                data.clear()
                if len(queue):
                    await trio.lowlevel.checkpoint()
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
        check_items(rpc)
        rpc.ClearField("senderRecord")
        if rpc.subscriptions:
            if not self._announced.take(peer.to_bytes(), len(rpc.subscriptions), trio.current_time()):
                raise PeerError("gossip: a flood of subscriptions")
            for subscription in rpc.subscriptions:
                self.handle_subscription(peer, subscription)
        for message in rpc.publish:
            check_message(message)
            if len(message.topicIDs) == 1 and self._is_subscribed_to_msg(message):
                key = self.get_message_id(message)
                if (forwards := self.forwards.get(message.topicIDs[0])) is not None:
                    forwards.has(key, peer)
                if not self.seen_messages.has(key):
                    with _blamed("a message"):
                        self._take(node_of(peer), message)
        if rpc.HasField("control"):
            with _blamed("control messages"):
                await self.router.handle_rpc(rpc, peer)

    def _take(self, forwarder: bytes, message: Any) -> None:
        if not self._inbox.afford(forwarder, message):
            return
        _verify_message(message)
        if self._inbox.accept(forwarder, message):
            self.seen_messages.add(self.get_message_id(message))

    async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
        """Send an own message: ``publish`` comes here."""
        self.seen_messages.add(self.get_message_id(msg))
        await self.router.publish(msg_forwarder, msg)

    async def forward(self, forwarder: bytes, message: Any) -> None:
        """Send a message of another node, which was found good, to the others."""
        try:
            await self.router.publish(peer_of(forwarder), message)
        except Exception as error:
            log.debug("gossip: forwarding failed: %r", error)


contain(
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
