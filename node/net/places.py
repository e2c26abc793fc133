"""Who may hold one of this node's connections, and who may be at the handshake for one.

Keys are free, addresses are not quite: strangers are counted by IPv4 address or IPv6 /64 (``neighbourhood``).

1. Too many handshakes in progress: the oldest one of the neighbourhood with the most makes room, so that connections
   that say nothing shut nobody out. A newcomer from that same neighbourhood waits its turn where the oldest is younger
   than ``HASTE``: many honest ones at once would else push each other out for ever.
2. Inbound and outbound connections are counted apart. Some inbound places are for preferred peers; where all are taken
   a preferred peer gets that of a stranger, the newest of the neighbourhood that holds most, but for the last few:
   newcomers need them.
   ``may_dial`` is for company: what this node has to ask of a peer may take a few places more.
3. Who is preferred is asked whenever it matters, for it changes.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from node.net.net_limits import NetLimits
from node.net.token_buckets import Buckets

HASTE: Final = 1.0
"""Seconds after which a handshake may be broken off for another one from the same neighbourhood."""

HANDSHAKES: Final = 64
HANDSHAKES_PER_SECOND: Final = 4.0
"""That one neighbourhood may begin: so many at once, and then so many a second (a handshake costs milliseconds)."""


def neighbourhood(address: str) -> str:
    """What a stranger has to have more than one of to count as several: an IPv4 address or an IPv6 /64."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 128 if parsed.is_loopback else 64), strict=False))


def _is_here(where: str) -> bool:
    return ipaddress.ip_network(where).is_loopback


@dataclass(slots=True, eq=False)
class Handshake:
    """One in progress; ``give_up()`` ends it."""

    where: str
    began: float
    give_up: Callable[[], None]


class Handshakes:
    """Those in progress, oldest first; times are seconds of any monotonic clock."""

    def __init__(self, limits: NetLimits) -> None:
        self._limits = limits
        self._pending: dict[Handshake, None] = {}
        self._begun = Buckets(HANDSHAKES, HANDSHAKES_PER_SECOND)
        self.counts: Counter[str] = Counter()
        """By neighbourhood."""

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, where: str, now: float, give_up: Callable[[], None]) -> Handshake | None:
        """One more, or None where it may not begin."""
        if not _is_here(where) and not self._begun.take(where, 1, now):
            return None
        crowded = self.counts[where] >= self._limits.handshakes_per_address
        if crowded or len(self._pending) >= self._limits.handshakes:
            fullest = where if crowded else max(self.counts, key=lambda one: self.counts[one])
            oldest = next(handshake for handshake in self._pending if handshake.where == fullest)
            if self.counts[fullest] <= self.counts[where] and now - oldest.began < HASTE:
                return None
            self.end(oldest)
            oldest.give_up()
        handshake = Handshake(where, now, give_up)
        self._pending[handshake] = None
        self.counts[where] += 1
        return handshake

    def end(self, handshake: Handshake) -> None:
        """It is over, however it went."""
        if handshake in self._pending:
            del self._pending[handshake]
            self.counts[handshake.where] -= 1
            if not self.counts[handshake.where]:
                del self.counts[handshake.where]


class Connection(Protocol):
    """What holds a place (``node.net.yamux.Muxer``)."""

    @property
    def is_closed(self) -> bool:
        """Whether the place is free again."""

    def abort(self) -> None:
        """End it now."""


@dataclass(frozen=True, slots=True)
class _Place:
    node: bytes
    inbound: bool
    where: str


class Places:
    """The connections that are open. ``preferred(node)`` tells who goes first."""

    def __init__(self, limits: NetLimits, preferred: Callable[[bytes], bool]) -> None:
        self._limits = limits
        self._preferred = preferred
        self._held: dict[Connection, _Place] = {}

    def _open(self, inbound: bool) -> dict[Connection, _Place]:
        self._held = {one: place for one, place in self._held.items() if not one.is_closed}
        return {one: place for one, place in self._held.items() if place.inbound == inbound}

    @property
    def inbound(self) -> int:
        """Connections that others opened."""
        return len(self._open(True))

    @property
    def outbound(self) -> int:
        """Connections that this node opened."""
        return len(self._open(False))

    def may_dial(self, node: bytes) -> bool:
        """Whether to connect to ``node`` for no other reason than that it is there."""
        extra = self._limits.reserved_connections if self._preferred(node) else 0
        return self.outbound < self._limits.outbound_connections + extra

    def take(self, connection: Connection, node: bytes, inbound: bool, where: str) -> str | None:
        """Give ``connection`` a place; why it gets none, or None."""
        limits, held = self._limits, self._open(inbound)
        most = limits.inbound_connections if inbound else limits.outbound_connections + limits.reserved_connections
        strangers = {one: place for one, place in held.items() if not self._preferred(place.node)}
        counts = Counter(place.where for place in strangers.values())
        full = len(held) >= most
        if self._preferred(node):
            if len(held) - len(strangers) >= (most - limits.newcomer_connections if inbound else most):
                return "every place is taken"
            if full:
                crowd = max(counts.values())
                newest = [one for one, place in strangers.items() if counts[place.where] == crowd][-1]
                self.leave(newest)
                newest.abort()
        elif full or (inbound and len(strangers) >= most - limits.reserved_connections):
            return "every place for strangers is taken"
        elif inbound and counts[where] >= limits.connections_per_address and not _is_here(where):
            return "too many connections from there"
        self._held[connection] = _Place(node, inbound, where)
        return None

    def leave(self, connection: Connection) -> None:
        """``connection`` holds no place any longer."""
        self._held.pop(connection, None)
