"""Gossip: GossipSub topics with handlers, bounded and rate-limited.

1. A topic travels as ``farflung/TAG/TOPIC``; TAG keeps domains apart on shared connections.
2. A message's id is the hash of its origin, sequence number, topic and data: GossipSub's default id repeats after a
   restart, and such messages vanish silently.
3. Messages of more than ``NetLimits.gossip_message`` bytes are their forwarder's fault. An origin that sends more than
   its bucket allows is dropped, not blamed; a forwarder has a wider bucket, because keys are free. All that travels is
   charged, not ``data`` alone.
4. A message is forwarded once its handler took it. A ``PeerError`` of the handler's scores down its origin and, by the
   share ``FORWARDED``, the peer that it came from, which should have found out too; it could not where that depends on
   something that came later. Any other exception is logged. Own messages do not come back.
5. Gossip is a hint: a full queue or bucket drops messages without notice.
6. Others' messages of a topic with a ``delay`` are forwarded together (``node.net.gossip_batches``), all else at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
from libp2p.tools.anyio_service import background_trio_service

from node.net.gossip_rules import MAX_TOPIC
from node.net.guard import GuardedHost, NetLimits, node_of
from node.net.pubsub import GuardedPubsub
from node.net.requests import Count
from node.net.token_buckets import Buckets
from protocol.errors import LocalError, PeerError

log = logging.getLogger(__name__)

GossipHandler = Callable[[bytes, bytes], Awaitable[None] | None]
"""``handler(origin's node id, data)``."""

TOKEN_BYTES: Final = 16 << 10
"""A message costs one token and another for each so many bytes."""

FORWARDER_FACTOR: Final = 16
"""How many origins' worth of messages one peer may forward."""

FORWARDED: Final = 0.25
"""What passing on garbage counts, of a mistake."""

QUEUE: Final = 512
MAX_WAITING_BYTES: Final = 32 << 20
"""Messages of one topic that wait for its handler, and those of all topics together."""

REGISTRATION_PERIOD: Final = 5.0
REGISTRATION_ATTEMPTS: Final = 3


class Gossip:
    """Topics and their handlers; they outlive the libp2p host, which may be restarted under them."""

    def __init__(
        self,
        node: bytes,
        tag: str,
        limits: NetLimits,
        *,
        count: Count,
        blame: Callable[[bytes, PeerError, float], None],
        banned: Callable[[bytes], bool],
    ) -> None:
        self._node = node
        self._prefix = f"farflung/{tag}/"
        self._limits = limits
        self._count = count
        self._blame = blame
        self._banned = banned
        self._topics: dict[str, tuple[GossipHandler, float]] = {}
        """Handlers, and the seconds that others' messages may wait to be forwarded."""
        self._waiting: dict[str, trio.MemorySendChannel[tuple[bytes, Any]]] = {}
        """Messages that wait for their handlers, with who sent them here, by the topic's full name."""
        self._waiting_bytes = 0
        self._origins = Buckets(limits.gossip_burst, limits.gossip_per_second)
        self._forwarders = Buckets(limits.gossip_burst * FORWARDER_FACTOR, limits.gossip_per_second * FORWARDER_FACTOR)
        self.pubsub: Any = None
        self._nursery: trio.Nursery | None = None

    def subscribe(self, topic: str, handler: GossipHandler, *, delay: float = 0.0) -> None:
        """Call ``handler`` for every message of others on ``topic``, and forward them within ``delay`` seconds."""
        if topic in self._topics:
            raise LocalError(f"topic {topic} has a handler already")
        if len(self._prefix + topic) > MAX_TOPIC:
            raise LocalError(f"topic {topic} is too long")
        self._topics[topic] = (handler, delay)
        if self._nursery is not None:
            self._nursery.start_soon(self._listen, self.pubsub, topic)

    async def publish(self, topic: str, data: bytes) -> None:
        """Send ``data`` to all who listen to ``topic``; lost silently while nobody is connected."""
        if len(data) > self._limits.gossip_message:
            raise LocalError(f"a gossip message of {len(data)} bytes, at most {self._limits.gossip_message} travel")
        pubsub = self.pubsub
        if pubsub is None:
            return
        try:
            await pubsub.publish(self._prefix + topic, data)
        except Exception as error:
            log.debug("gossip: publishing failed: %r", error)
            return
        self._count.sent += len(data)
        self._count.requests_sent += 1

    def listeners(self, topic: str) -> list[bytes]:
        """Connected peers that listen to ``topic``."""
        if self.pubsub is None:
            return []
        return [node_of(peer) for peer in self.pubsub.peer_topics.get(self._prefix + topic, ())]

    async def run(self, host: GuardedHost, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Gossip through ``host`` until it dies."""
        pubsub = GuardedPubsub(host, self._limits, self)
        self._waiting.clear()
        self._waiting_bytes = 0
        async with background_trio_service(pubsub), background_trio_service(pubsub.router):
            await pubsub.wait_until_ready()
            async with trio.open_nursery() as nursery:
                self.pubsub, self._nursery = pubsub, nursery
                try:
                    for topic in self._topics:
                        await nursery.start(self._listen, pubsub, topic)
                    task_status.started()
                    await self._register_forever(pubsub, host)
                finally:
                    self.pubsub = self._nursery = None

    async def _listen(self, pubsub: Any, topic: str, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        name, (handler, delay) = self._prefix + topic, self._topics[topic]
        self._waiting[name], waiting = trio.open_memory_channel[tuple[bytes, Any]](QUEUE)
        await pubsub.subscribe(name)
        if delay:
            pubsub.forward_together(name, delay)
        task_status.started()
        async for forwarder, message in waiting:
            self._waiting_bytes -= message.ByteSize()
            origin = node_of_bytes(message.from_id)
            self._count.received += len(message.data)
            self._count.requests_received += 1
            try:
                pending = handler(origin, message.data)
                if pending is not None:
                    await pending
            except PeerError as error:
                self._blame(origin, error, 1.0)
                if forwarder != origin:
                    self._blame(forwarder, error, FORWARDED)
            except Exception:
                log.exception("gossip: the handler of %s failed", topic)
            else:
                await pubsub.forward(forwarder, message)

    def afford(self, forwarder: bytes, message: Any) -> bool:
        """Whether ``forwarder`` may send that much now; raises ``PeerError`` for what nobody may send."""
        if len(message.data) > self._limits.gossip_message:
            raise PeerError(f"gossip: a message of {len(message.data)} bytes")
        return self._forwarders.take(forwarder, _cost(message), trio.current_time())

    def accept(self, forwarder: bytes, message: Any) -> bool:
        """Take a message whose signature has been checked, unless its origin is banned or sends too much."""
        origin = node_of_bytes(message.from_id)
        if origin == self._node:
            return True  # it is known again, and nobody hears of it
        waiting = self._waiting.get(message.topicIDs[0])
        if waiting is None or self._banned(origin):
            return False
        if not self._origins.take(origin, _cost(message), trio.current_time()):
            return False
        size = message.ByteSize()
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            return False
        try:
            waiting.send_nowait((forwarder, message))
        except trio.WouldBlock:
            return False
        self._waiting_bytes += size
        return True

    async def _register_forever(self, pubsub: Any, host: GuardedHost) -> None:
        """Stock pubsub gives up on a peer whose first gossip stream failed; try a few times more."""
        attempts: Counter[Any] = Counter()
        while True:
            await trio.sleep(REGISTRATION_PERIOD)
            connected = set(host.get_network().connections)
            for peer in attempts.keys() - connected:
                del attempts[peer]
            for peer in connected - pubsub.peers.keys():
                if attempts[peer] < REGISTRATION_ATTEMPTS:
                    attempts[peer] += 1
                    pubsub._schedule_peer_stream_retry(peer)


def _cost(message: Any) -> int:
    return 1 + int(message.ByteSize()) // TOKEN_BYTES


def node_of_bytes(from_id: bytes) -> bytes:
    """The node id in a message's ``from_id``, which the signature check has proven to be an Ed25519 peer id."""
    return from_id[-32:]
