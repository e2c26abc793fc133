"""What one gossip RPC may hold: the sizes of its fields, and the ids in its control messages.

Pure. What breaks a rule is a ``PeerError`` of whoever sent the RPC, for whoever passes something on looks at it first.

1. Every field of a message is of one size or bounded, and nothing that is not part of it travels with it: all of it is
   kept and forwarded, but only ``data`` is what a message is for.
2. Ids of messages have one size, and all lists of them in an RPC together have at most ``MAX_IDS``. An id counts once,
   however often it is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from typing import Any, Final

from node.net.guard import ID_PREFIX
from protocol.errors import PeerError

MAX_TOPIC: Final = 128
"""Longest gossip topic (characters)."""

MAX_RPC_MESSAGES: Final = 256
"""Messages, subscriptions or control items in one gossip RPC."""

MAX_IDS: Final = 1024
"""Ids in all IHAVE, or in all IWANT, of one RPC."""

ID_BYTES: Final = 20
SEQNO_BYTES: Final = 8
SIGNATURE_BYTES: Final = 64

_KEY_PREFIX: Final = b"\x08\x01\x12\x20"
"""Of an Ed25519 public key in libp2p's encoding; the key follows."""

MAX_ENVELOPE: Final = 384
"""Bytes that a message may have beside ``data``: 38 of origin, 8 of sequence number, 64 of signature, 36 of key, at
most ``MAX_TOPIC`` of (ASCII) topic, and three to five for each of them."""


def message_id(message: Any) -> bytes:
    """20 bytes of SHA-256 over origin, sequence number, topic and data (lengths make it injective)."""
    digest = hashlib.sha256()
    for part in (message.from_id, message.seqno, *(topic.encode() for topic in message.topicIDs), message.data):
        digest.update(len(part).to_bytes(4, "big"))
        digest.update(part)
    return digest.digest()[:ID_BYTES]


def check_items(rpc: Any) -> None:
    """Raises ``PeerError`` where an RPC has too many parts, before any of them is looked at."""
    control = rpc.control
    items = (rpc.publish, rpc.subscriptions, control.ihave, control.iwant, control.graft, control.prune)
    if any(len(item) > MAX_RPC_MESSAGES for item in items):
        raise PeerError("gossip: too many items in one RPC")
    if any(len(subscription.topicid) > MAX_TOPIC for subscription in rpc.subscriptions):
        raise PeerError("gossip: a topic is too long")


def check_message(message: Any) -> None:
    """Raises ``PeerError`` for a message whose fields have other sizes than they have here (rule 1)."""
    origin = message.from_id
    if len(origin) != len(ID_PREFIX) + 32 or not origin.startswith(ID_PREFIX):
        raise PeerError("gossip: the origin of a message is no Ed25519 peer id")
    if len(message.seqno) != SEQNO_BYTES or len(message.signature) != SIGNATURE_BYTES:
        raise PeerError("gossip: a message has a sequence number or a signature of a wrong size")
    if message.key not in (b"", _KEY_PREFIX + origin[len(ID_PREFIX) :]):
        raise PeerError("gossip: a message has another key than its origin's")
    if message.ByteSize() > len(message.data) + MAX_ENVELOPE:
        raise PeerError("gossip: a message carries more than belongs to it")


def unique_ids(lists: Iterable[Any]) -> list[bytes]:
    """The ids in these IHAVE or IWANT, each once, in order; raises ``PeerError`` for too many and for other things."""
    lists = list(lists)
    if sum(len(one.messageIDs) for one in lists) > MAX_IDS:
        raise PeerError("gossip: too many ids in one RPC")
    ids = list(dict.fromkeys(key for one in lists for key in one.messageIDs))
    if any(len(key) != ID_BYTES for key in ids):
        raise PeerError("gossip: the id of a message has another size")
    return ids


def spoken(items: Iterable[Any], topics: Container[str]) -> list[Any]:
    """The GRAFT, PRUNE or IHAVE about ``topics``, the last of each topic."""
    return list({item.topicID: item for item in items if item.topicID in topics}.values())
