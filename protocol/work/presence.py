"""A node's advert of itself: who it is, what it can do, what it is willing to be, which versions it holds.

1. A presence travels as ``[body, signature]``; the node named in the body signs the body (``identity.PRESENCE``).
2. ``(boot, counter)`` orders a node's presences: the boot counter grows with each start, the counter with each
   presence. One that is not newer than the newest known is stale and changes nothing.
3. A presence lapses three intervals after it was received, by the receiver's monotonic clock. No clock of the
   sender's is read, and a stale copy that comes round again revives nobody.
4. Hardware numbers are claims; ``tokens_per_second`` and ``bandwidth_kbps`` are what the node measured, 0 where it
   did not. Versions are entry ids of ``weights`` entries whose bytes the node holds whole; of those arriving it
   serves the chunks that it has so far.
5. ``bulk`` are the multiaddresses, ending in ``/http`` or ``/https``, at which it serves weights beside libp2p.

``Presence.parse`` raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from protocol import codec, identity
from protocol.codec import Formatted, Hash, Int, Key, Many, Text
from protocol.constants import MAX_PRESENCE_BYTES
from protocol.errors import LocalError, PeerError, ours
from protocol.identity import Identity
from protocol.records import ROLES

LAPSE_INTERVALS: Final = 3
MAX_ADDRESSES: Final = 8
MAX_VERSIONS: Final = 8
MAX_BULK: Final = 4
MAX_ARRIVING: Final = 2
MAX_KNOWN: Final = 2**16
"""Presences a table remembers; beyond it those not heard for longest are forgotten."""

WILLING: Final = tuple(role for role in ROLES if role != "none")

_WIRE: Final = codec.envelope(MAX_PRESENCE_BYTES)


@dataclass(frozen=True, slots=True)
class Presence(Formatted):
    """One presence. ``domain``, ``node`` and the versions have 32 bytes, ``addresses`` and ``bulk`` are multiaddress
    texts, ``memory_mb`` and ``gpu_mb`` are MiB, ``load`` is in micro, ``paused`` 0 or 1."""

    domain: Hash
    node: Key
    boot: Annotated[int, Int()]
    counter: Annotated[int, Int()]
    name: Annotated[str, Text(32)]
    role: Annotated[str, Text(16, ROLES)]
    willing: Annotated[tuple[str, ...], Many(Text(16, WILLING), most=len(WILLING))]
    addresses: Annotated[tuple[str, ...], Many(Text(128), most=MAX_ADDRESSES)]
    bulk: Annotated[tuple[str, ...], Many(Text(128), most=MAX_BULK)]
    versions: Annotated[tuple[bytes, ...], Many(codec.HASH, most=MAX_VERSIONS)]
    arriving: Annotated[tuple[bytes, ...], Many(codec.HASH, most=MAX_ARRIVING)]
    cpus: Annotated[int, Int(0, 2**20)]
    memory_mb: Annotated[int, Int(0, 2**40)]
    gpu_mb: Annotated[int, Int(0, 2**40)]
    tokens_per_second: Annotated[int, Int(0, 2**40)]
    bandwidth_kbps: Annotated[int, Int(0, 2**40)]
    load: Annotated[int, Int()]
    paused: Annotated[int, Int(0, 1)]

    @classmethod
    def parse(cls, data: bytes) -> Presence:
        """Parse and verify the wire form; raises ``PeerError``."""
        body, signature = codec.parse(data, _WIRE, max_bytes=MAX_PRESENCE_BYTES, what="presence")
        presence = cls.from_value(codec.parse(body, cls.ARRAY, max_bytes=MAX_PRESENCE_BYTES, what="presence"))
        for several in (presence.willing, presence.addresses, presence.bulk, presence.versions, presence.arriving):
            if len(set(several)) != len(several):
                raise PeerError("presence: something is listed twice")
        identity.verify(presence.node, identity.PRESENCE, body, signature, "presence")
        return presence

    def sign(self, key: Identity) -> bytes:
        """The signed wire form; ``LocalError`` for a key that is not the node's or a presence others would refuse."""
        if key.node != self.node:
            raise LocalError("a presence is signed by its own node")
        body = codec.encode(self.to_value())
        data = codec.encode([body, key.sign(identity.PRESENCE, body)])
        with ours():
            self.parse(data)
        return data


class PresenceTable:
    """The newest presence of each node of one domain. ``interval`` is the domain's presence interval in seconds."""

    def __init__(self, domain: bytes, interval: float, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._domain = domain
        self._lifetime = LAPSE_INTERVALS * interval
        # ordered by the time of receipt, oldest first
        self._heard: dict[bytes, tuple[float, Presence]] = {}

    def update(self, presence: Presence, now: float) -> bool:
        """Take a presence in at monotonic time ``now`` (seconds); False where it is stale.

        ``PeerError`` for a presence of another domain.
        """
        if presence.domain != self._domain:
            raise PeerError("presence: it belongs to another domain")
        known = self._heard.get(presence.node)
        if known is not None:
            if (presence.boot, presence.counter) <= (known[1].boot, known[1].counter):
                return False
            del self._heard[presence.node]
        elif len(self._heard) >= self._most:
            del self._heard[next(iter(self._heard))]
        self._heard[presence.node] = (now, presence)
        return True

    def drop(self, node: bytes) -> None:
        """Forget a node."""
        self._heard.pop(node, None)

    def live(self, now: float) -> dict[bytes, Presence]:
        """The presences that have not lapsed at monotonic time ``now``, by node."""
        return {node: presence for node, (heard, presence) in self._heard.items() if now - heard <= self._lifetime}
