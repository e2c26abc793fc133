"""What gossip keeps of what strangers send: ids, recent messages, and what waits to be sent. All of it is bounded."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import trio
from libp2p.pubsub.rpc_queue import RpcQueue

from node.net.gossip_rules import message_id

SEEN_SECONDS: Final = 120.0
"""How long a message is known again. Recent messages are kept for five heartbeats."""

MAX_SEEN: Final = 1 << 16

MAX_RECENT: Final = 4096
MAX_RECENT_BYTES: Final = 32 << 20
"""Recent messages, in number and together."""

MAX_TOLD: Final = 256
"""Ids of one topic that a peer is told at once, newest last."""

MAX_QUEUED: Final = 512
MAX_QUEUED_BYTES: Final = 4 << 20
"""RPCs that wait for one peer; beyond that they are dropped. The stock queues hold 32 items of any size: a burst of 200
messages arrives as 16, and a peer that reads nothing holds 32 MB."""


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


class RecentMessages:
    """The messages of the last ``history`` heartbeats, and the ids of the last ``window`` ones to tell others of.

    It stands where GossipSub's cache was, which keeps whatever comes and names messages otherwise than ``Seen`` does:
    what a peer says it has would be asked for again.
    """

    def __init__(self, window: int, history: int) -> None:
        self._window = window
        self._history = history
        self._beat = 0
        self._kept: dict[bytes, tuple[int, Any, int]] = {}
        """By id, oldest first: the heartbeat in which it came, the message, its size."""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, message: Any) -> None:
        """Keep ``message``."""
        key = message_id(message)
        if key in self._kept:
            return
        size = message.ByteSize()
        self._kept[key] = (self._beat, message, size)
        self.bytes += size
        while len(self._kept) > MAX_RECENT or self.bytes > MAX_RECENT_BYTES:
            self._forget_oldest()

    def get(self, key: bytes) -> Any:
        """The message whose id is ``key``, or None."""
        kept = self._kept.get(key)
        return None if kept is None else kept[1]

    def window(self, topic: str) -> list[bytes]:
        """The ids of the newest messages on ``topic``."""
        found: deque[bytes] = deque(maxlen=MAX_TOLD)
        found.extend(
            key
            for key, (beat, message, _) in self._kept.items()
            if self._beat - beat < self._window and topic in message.topicIDs
        )
        return list(found)

    def shift(self) -> None:
        """A heartbeat has passed."""
        self._beat += 1
        while self._kept and self._beat - next(iter(self._kept.values()))[0] >= self._history:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self.bytes -= self._kept.pop(next(iter(self._kept)))[2]


class OutgoingQueue(RpcQueue):  # type: ignore[misc]  # libp2p is untyped here
    """The RPCs that wait for one peer, bounded in number and bytes."""

    def __init__(self) -> None:
        super().__init__(MAX_QUEUED)
        self.bytes = 0

    def push(self, rpc: Any, priority: bool = False) -> bool:
        """Whether there was room for ``rpc``."""
        size = rpc.ByteSize()
        if self.bytes + size > MAX_QUEUED_BYTES or not super().push(rpc, priority):
            return False
        self.bytes += size
        return True

    async def pop(self) -> Any:
        """The next RPC; None at the end."""
        rpc = await super().pop()
        if rpc is not None:
            self.bytes -= rpc.ByteSize()
        return rpc
