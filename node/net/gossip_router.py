"""GossipSub as this network runs it, with a bound on all that a peer's control messages can make it do.

1. Control messages about topics that are not spoken here leave nothing behind, and get no answer.
2. What a peer asks for (IWANT, and what a new subscriber missed) is paid from a budget of bytes a peer; beyond it
   requests are ignored. So are its claims (IHAVE) beyond a number of ids in time.
3. Back-off ends with the peer's connection: the stock class keeps it for ever, by topics that peers make up.
4. Others' messages are forwarded by whoever found them good (``GuardedPubsub.forward``); those of patient topics
   (``forwards``) together.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import libp2p.pubsub.gossipsub as gossipsub_module
import trio
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pb import rpc_pb2

from node.net.gossip_memory import RecentMessages
from node.net.gossip_rules import MAX_IDS, message_id, spoken, unique_ids
from node.net.token_buckets import Buckets

log = logging.getLogger(__name__)

HEARTBEAT: Final = 2
"""Seconds between checks of the mesh. Who subscribes or leaves changes it at once, and own messages do not need it."""

LAZY_PEERS: Final = 1
"""Peers outside the mesh that each heartbeat tells what is here. Every holder tells three of a message, and what still
is missed is not lost: the next presence comes in seconds, and comparing logs finds the rest. GossipSub's six would be
half of an idle node's frames."""

WINDOW: Final = 3
HISTORY: Final = 5
"""Heartbeats during which peers are told of a message, and during which it is kept for those who ask."""

ANSWER_BYTES: Final = 2 << 20
ANSWER_BYTES_PER_SECOND: Final = 128 << 10
"""What one peer gets by asking: so much at once, and then so much a second. All others' messages of ten seconds in a
busy network are less; who lost more compares logs."""

CLAIMS: Final = 2 * MAX_IDS
CLAIMS_PER_SECOND: Final = 256
"""Ids of messages that one peer may say it has."""

BACK_OFF: Final = 10
MAX_BACK_OFF: Final = 60
"""Seconds that a pruned peer is left alone, and the longest that it may ask for."""


def no_record(host: Any) -> tuple[bytes, bool]:
    """Stands in for ``env_to_send_in_RPC``; the empty field is removed before sending."""
    return b"", False


# A record of the sender's addresses, attached to every RPC for a quarter of the CPU; Noise proves the sender.
gossipsub_module.env_to_send_in_RPC = no_record


def contain(owner: type, *names: str) -> None:
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


class GuardedRouter(GossipSub):  # type: ignore[misc]  # libp2p is untyped here
    """GossipSub 1.1. Version 1.2 would double the RPCs of small messages."""

    def __init__(self) -> None:
        super().__init__(
            protocols=[PROTOCOL_ID_V11],
            degree=3,
            degree_low=2,
            degree_high=4,
            heartbeat_interval=HEARTBEAT,
            time_to_live=60,
            prune_back_off=BACK_OFF,
            spam_protection_enabled=False,  # it silently stops forwarding above 10 messages a second and topic
            adaptive_gossip_enabled=False,
            eclipse_protection_enabled=False,
        )
        self.scorer = None  # all its weights are zero; node.net.peer_scores judges peers
        self.mcache = RecentMessages(WINDOW, HISTORY)
        # The stock class keeps these for ever.
        self.recent_message_deliveries: Any = collections.defaultdict(lambda: collections.deque(maxlen=1))
        self._answers = Buckets(ANSWER_BYTES, ANSWER_BYTES_PER_SECOND)
        self._claims = Buckets(CLAIMS, CLAIMS_PER_SECOND)

    async def publish(self, msg_forwarder: Any, message: Any) -> None:
        """Send a message on. Others' messages of patient topics wait.

        Whoever is connected and has not subscribed yet gets it from ``send_recent_messages`` when it does; the stock
        class keeps a hundred messages of any size for each.
        """
        (topic,) = message.topicIDs
        self.mcache.put(message)
        forwards = self.pubsub.forwards.get(topic)
        if forwards is not None and msg_forwarder != self.pubsub.my_id:
            mesh: set[ID] = self.mesh.get(topic, set())
            forwards.add(message_id(message), message, mesh - {msg_forwarder, ID(message.from_id)})
            return
        rpc = rpc_pb2.RPC(publish=[message])
        for peer in self._get_peers_to_send([topic], msg_forwarder, ID(message.from_id)):
            self.send_rpc(peer, rpc)

    def _get_peers_to_send(self, topic_ids: Any, msg_forwarder: Any, origin: Any, msg_id: bytes | None = None) -> Any:
        # Flood publishing (GossipSub 1.1): own messages go to all listeners, also to those the mesh has not taken yet.
        if msg_forwarder == self.pubsub.my_id:
            return [peer for topic in topic_ids for peer in self.pubsub.peer_topics.get(topic, ())]
        return super()._get_peers_to_send(topic_ids, msg_forwarder, origin, msg_id)

    def _get_adaptive_gossip_peers_count(self, topic: str, total_peers: int) -> int:
        return LAZY_PEERS

    async def handle_rpc(self, rpc: Any, sender_peer_id: Any) -> None:
        """Control messages (rules 1 and 2); raises ``PeerError``. Those of later versions are not read."""
        control = rpc.control
        claimed = unique_ids(control.ihave)
        wanted = unique_ids(control.iwant)
        if any(ihave.topicID in self.mesh for ihave in control.ihave):
            named = unique_ids(ihave for ihave in control.ihave if ihave.topicID in self.mesh)
            unknown = [key for key in named if not self.pubsub.seen_messages.has(key)]
            if self._take(self._claims, sender_peer_id, len(claimed)) and unknown:
                await self.emit_iwant(unknown, sender_peer_id)
        self._answer(sender_peer_id, wanted)
        for graft in spoken(control.graft, self.mesh):
            await self.handle_graft(graft, sender_peer_id)
        for prune in spoken(control.prune, self.mesh):
            # Without the peers it names: addresses are learnt from those who have them.
            backoff = min(prune.backoff, MAX_BACK_OFF)
            await self.handle_prune(rpc_pb2.ControlPrune(topicID=prune.topicID, backoff=backoff), sender_peer_id)

    async def send_recent_messages(self, peer_id: Any, topic: str) -> None:
        """What a new subscriber has missed, from the same budget as what it asks for."""
        self._answer(peer_id, self.mcache.window(topic))

    def _answer(self, peer: Any, ids: Iterable[bytes]) -> None:
        found = [message for key in ids if (message := self.mcache.get(key)) is not None]
        sent = [message for message in found if self._take(self._answers, peer, message.ByteSize())]
        if sent:
            self.send_rpc(peer, rpc_pb2.RPC(publish=sent))

    @staticmethod
    def _take(buckets: Buckets, peer: Any, tokens: int) -> bool:
        return buckets.take(peer.to_bytes(), tokens, trio.current_time())

    def remove_peer(self, peer_id: Any) -> None:
        """Forget a peer, with its back-off (rule 3)."""
        super().remove_peer(peer_id)
        for topic in list(self.back_off):
            self.back_off[topic].pop(peer_id, None)


contain(GuardedRouter, "flush_pending_messages", "on_peer_subscribed", "_emit_control_msgs", "_maintain_mesh_quality")
