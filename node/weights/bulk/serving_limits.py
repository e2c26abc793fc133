"""How much the data plane gives, and to whom: connections, requests and bytes, of each peer and in all.

1. A connection belongs to nobody until its first valid token; of those there are at most half of all, of one host only
   what two peers may have, and not for long. Of one host there is at most half of all, or two peers' share: keys are
   free.
2. A peer has so many connections and so many requests a second; above it hears 429 and is to ask elsewhere.
3. Rates are token buckets of ``BURST`` seconds. A sender over its rate sleeps, on its own thread.

All methods may be called from any thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final

from node.weights.bulk.bearer_tokens import LOCAL, TokenGrant

BURST: Final = 0.25
REQUESTS: Final = 300
"""Requests of a peer a second, over ten seconds."""
_PATIENCE: Final = 10
MAX_PEERS: Final = 1024

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """``total`` and ``of_peer`` are connections, ``rate`` and ``peer_rate`` bytes a second, 0 for no limit.

    ``proxied``: a proxy stands in front, so that hosts and connections say nothing about who asks.
    """

    total: int = 512
    of_peer: int = 32
    rate: int = 0
    peer_rate: int = 0
    proxied: bool = False


class Bucket:
    """A rate in bytes (or requests) a second that may be ahead of itself by ``burst`` of them; 0 is without end."""

    def __init__(self, rate: float, burst: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._clock = clock
        self._at = clock()
        self._lock = Lock()

    def take(self, amount: float, *, ahead: bool = True) -> float:
        """Take ``amount`` now; the seconds after which the level is even again. Without ``ahead`` nothing is taken
        where that are any."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
            after = level - amount
            self._level = after if ahead or after >= 0 else level
            return max(0.0, -after / self._rate)


@dataclass(slots=True)
class _Peer:
    bucket: Bucket
    requests: Bucket
    connections: int = 0


@dataclass(slots=True, eq=False)
class ServingPlace:
    """One connection's place in the books. Made by ``Gate.enter``."""

    host: bytes
    node: bytes | None = None
    """Whose it is, once it showed a token."""
    seen: tuple[str, TokenGrant] | None = None
    """The last good token and what it says."""


class Gate:
    """The books of one server."""

    def __init__(self, limits: ServingLimits, *, clock: Clock = time.monotonic, max_peers: int = MAX_PEERS) -> None:
        self.limits = limits
        self._clock = clock
        self._max_peers = max_peers
        self._lock = Lock()
        self._strangers: Counter[bytes] = Counter()
        self._hosts: Counter[bytes] = Counter()
        self.peers: dict[bytes, _Peer] = {}
        """Those of whom anything is remembered, the one seen last at the end."""
        self._bucket = Bucket(limits.rate, limits.rate * BURST, clock)
        # Pieces so small that several senders share a low rate evenly, and so large that a high one is not slowed.
        rates = [rate for rate in (limits.rate, limits.peer_rate) if rate]
        self.piece = max(16 << 10, min(min(rates) // 10, 1 << 20)) if rates else 1 << 30
        """Bytes to send before asking how long to pause."""

    def enter(self, host: bytes) -> ServingPlace | None:
        """A place for a new connection from ``host``; None where there is none."""
        with self._lock:
            limits = self.limits
            crowded = not limits.proxied and (
                self._strangers.total() >= limits.total // 2
                or (host != LOCAL and self._hosts[host] >= max(limits.total // 2, 2 * limits.of_peer))
                # Of this machine itself there may be many nodes.
                or (host != LOCAL and self._strangers[host] >= 2 * limits.of_peer)
            )
            if self.count >= limits.total or crowded:
                return None
            self._strangers[host] += 1
            self._hosts[host] += 1
            return ServingPlace(host)

    @property
    def count(self) -> int:
        """Open connections."""
        return self._hosts.total()

    def claim(self, place: ServingPlace, node: bytes) -> bool:
        """The connection's request is ``node``'s; False where that node is over a limit."""
        with self._lock:
            peer = self.peers.pop(node, None)
            if peer is None:
                self._prune()
                rate = self.limits.peer_rate
                requests = Bucket(REQUESTS, REQUESTS * _PATIENCE, self._clock)
                peer = _Peer(Bucket(rate, rate * BURST, self._clock), requests)
            self.peers[node] = peer
            if place.node != node:
                if not self.limits.proxied and peer.connections >= self.limits.of_peer:
                    return False
                self._release(place)
                peer.connections += 1
                place.node = node
        return not peer.requests.take(1, ahead=False)

    def pause(self, place: ServingPlace, amount: int) -> float:
        """Seconds to wait after ``amount`` bytes were sent over the connection."""
        with self._lock:
            peer = self.peers.get(place.node or b"")
        return max(self._bucket.take(amount), 0.0 if peer is None else peer.bucket.take(amount))

    def _release(self, place: ServingPlace) -> None:
        if place.node is None:
            self._strangers -= Counter([place.host])
        else:
            self.peers[place.node].connections -= 1

    def leave(self, place: ServingPlace) -> None:
        """The connection is closed."""
        with self._lock:
            self._hosts -= Counter([place.host])
            self._release(place)

    def _prune(self) -> None:
        if len(self.peers) >= self._max_peers:
            idle = [node for node, peer in self.peers.items() if not peer.connections]
            for node in idle[: self._max_peers // 2]:
                del self.peers[node]
