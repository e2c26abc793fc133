"""Tokens for the data plane, over libp2p: a node asks a holder where its weights are, and with what to ask for them.

Wire (canonical codec), on ``/farflung/bulk/1``: the request is empty, in a private domain the asker's certificate
(DER). The answer is ``[token, lifetime in seconds, certificate, [addresses]]``; in a public domain the certificate is
empty.

1. In a private domain only a node whose ``join`` is held, and whose feed is not ended, gets a token.
2. Certificates travel between peers that libp2p has authenticated, and name them as libp2p's TLS does; each side then
   trusts that certificate alone (``node.weights.bulk.pinned_tls``).
   Each has one for as long as it runs: it is not taken for a new one's that comes within ``CERTIFICATE_SECONDS``.
3. A route is asked for once and kept for most of its token's life. A peer that gave none is left alone for a while.
4. A *foreign* address is another than those where libp2p reached the peer. It may be a proxy's, or that of somebody who
   knows nothing of all this. Where it gave no weights, nobody is sent there again for ``MISLED_SECONDS``, then twice as
   long, and so on: neither to that host, whoever names it, nor by that peer, whatever it names. Naming another one
   counts as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from node.context import Node
from node.errors import Refused
from node.weights.bulk import bearer_tokens, bulk_address, node_certificate
from node.weights.bulk.bulk_process import BulkProcess
from node.weights.bulk.pinned_tls import MAX_CERTIFICATE
from protocol import codec
from protocol.errors import PeerError

PROTOCOL: Final = "/farflung/bulk/1"
TIMEOUT: Final = 10.0
MAX_ANSWER: Final = 4096
MAX_LIFETIME: Final = 86400
MAX_ADDRESSES: Final = 4
RENEW: Final = 0.7
"""The share of a token's life after which a new one is asked for."""
MIN_ROUTE_SECONDS: Final = 10.0
MAX_ROUTES: Final = 1024
CERTIFICATE_SECONDS: Final = 10.0
MISLED_SECONDS: Final = 60.0
MAX_MISLED_SECONDS: Final = 3600.0

ANSWER: Final = codec.Array(
    (
        ("token", codec.Text(256)),
        ("lifetime", codec.Int(1, MAX_LIFETIME)),
        ("certificate", codec.Bytes(most=MAX_CERTIFICATE)),
        ("addresses", codec.Many(codec.Text(bulk_address.MAX_ADDRESS), most=MAX_ADDRESSES)),
    )
)


K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Route:
    """How to fetch weights from a node: where, with which token until when (trio's clock), and whether the address is
    foreign (rule 4)."""

    address: str
    token: str
    until: float
    foreign: bool = False


class TokenExchange:
    """Both sides of the hand-out for one node."""

    def __init__(self, node: Node, bulk: BulkProcess) -> None:
        self._node = node
        self._bulk = bulk
        self._routes: dict[bytes, Route] = {}
        self._changed: dict[bytes, float] = {}
        """When a peer last had a new certificate."""
        self._foreign: dict[bytes, str] = {}
        """The foreign host that a peer named last."""
        self._vain: dict[bytes | str, tuple[int, float]] = {}
        """Of peers, and of hosts: how often it was in vain, and until when they are left alone."""

    def serve(self) -> None:
        """Hand out tokens to those who may have one."""
        self._node.network.serve(PROTOCOL, self._answer, max_request=MAX_CERTIFICATE, max_concurrent_per_peer=2)

    def may_have(self, peer: bytes) -> bool:
        """Whether ``peer`` may have this domain's weights."""
        log = self._node.log
        return not self._bulk.private or (log.ledger.joined(peer) and not log.replica.frozen(peer))

    def may_read(self, peer: bytes, digest: bytes) -> bool:
        """Whether ``peer`` may read the blob ``digest``. What the genesis names is read by those who are about to join;
        the rest (manifests, submissions) tells of the weights and what they do."""
        if self.may_have(peer):
            return True
        return any(blob.hash == digest for blob in self._node.domain.blobs)

    async def _answer(self, peer: bytes, request: bytes) -> bytes:
        bulk = self._bulk
        if not self.may_have(peer):
            raise Refused("only nodes that joined this domain get its weights")
        if bulk.private:
            if not await self._admit(peer, request):
                raise Refused("nothing is served at the moment")
        elif request:
            raise PeerError("bulk: a request with something in it")
        if not bulk.addresses:
            raise Refused("nothing is served at the moment")
        hosts: list[bytes] = []
        if not bulk.private and not self._node.config.bulk.proxied:
            own = _hosts(self._node.network.addresses)
            for host in self._node.network.hosts(peer):
                with suppress(ValueError):
                    hosts.append(bearer_tokens.host_of(host, own))
            if not hosts:
                raise Refused("the connection has gone")
        token = bearer_tokens.mint(bulk.secret, peer, hosts, time.monotonic() + bearer_tokens.LIFETIME)
        return codec.encode([token, bearer_tokens.LIFETIME, self._bulk.certificate, bulk.addresses])

    async def route(self, peer: bytes) -> Route:
        """How to fetch from ``peer``; asks it where that is not known (any more).

        Raises ``Unreachable`` (``Refused`` where it serves nothing) or ``PeerError``.
        """
        known = self._routes.get(peer)
        if known is not None and trio.current_time() < known.until:
            await trio.lowlevel.checkpoint()
            return known
        self._routes.pop(peer, None)
        now = trio.current_time()
        data = await self._node.network.request(
            peer, PROTOCOL, self._bulk.certificate, timeout=TIMEOUT, max_response=MAX_ANSWER
        )
        token, lifetime, theirs, places = codec.parse(data, ANSWER, max_bytes=MAX_ANSWER, what="bulk token")
        if not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
            raise PeerError("bulk token: not base64")
        if self._bulk.private and not await self._admit(peer, theirs):
            raise Refused("the process that fetches weights does not run")
        chosen = self.choose(peer, [bulk_address.parse(text) for text in places])
        foreign = self._is_foreign(chosen, self._node.network.hosts(peer))
        if foreign:
            before = self._foreign.pop(peer, chosen.host)
            _put(self._foreign, peer, chosen.host)
            if before != chosen.host:
                self._in_vain(peer)
                raise Refused("the peer names one address after the other")
        until = now + max(lifetime * RENEW, MIN_ROUTE_SECONDS)
        route = Route(str(chosen), token, until, foreign)
        _put(self._routes, peer, route)
        return route

    async def _admit(self, peer: bytes, theirs: bytes) -> bool:
        """Know a peer by this certificate from now on; whether a child does as well."""
        if self._bulk.known.get(peer) != theirs:
            now = trio.current_time()
            if now < self._changed.get(peer, -math.inf) + CERTIFICATE_SECONDS:
                raise Refused("another certificate so soon")
            node_certificate.check(theirs, peer)
            _put(self._changed, peer, now)
        return await self._bulk.admit(peer, theirs)

    def misled(self, peer: bytes) -> None:
        """At the address that a peer named there are no weights: rule 4."""
        route = self._routes.get(peer)
        if route is not None and route.foreign:
            self._in_vain(peer)
            self._in_vain(bulk_address.parse(route.address).host)
        self.spoil(peer)

    def _in_vain(self, who: bytes | str) -> None:
        now = trio.current_time()
        times, until = self._vain.pop(who, (0, now))
        if now > until + MAX_MISLED_SECONDS:
            times = 0  # long ago
        pause = min(MISLED_SECONDS * 2.0**times, MAX_MISLED_SECONDS)
        _put(self._vain, who, (min(times + 1, 10), now + pause))

    def _is_left_alone(self, who: bytes | str) -> bool:
        return who in self._vain and trio.current_time() < self._vain[who][1]

    def _is_foreign(self, place: bulk_address.BulkAddress, remote: Sequence[str]) -> bool:
        return place.host not in remote and not bulk_address.loopback(place.host)

    def spoil(self, peer: bytes) -> None:
        """A token was refused, or nobody answered at the address: ask again next time."""
        self._routes.pop(peer, None)

    def choose(self, peer: bytes, places: Sequence[bulk_address.BulkAddress]) -> bulk_address.BulkAddress:
        """The address that is likeliest to work, and that the token is bound for: where libp2p reached the peer."""
        remote = self._node.network.hosts(peer)
        near = any(bulk_address.loopback(host) or host in _hosts(self._node.network.addresses) for host in remote)
        usable = [
            place
            for place in places
            if (place.secure or not self._bulk.private)
            and bulk_address.may_dial(place, remote, near=near)
            and not (self._is_foreign(place, remote) and (self._is_left_alone(peer) or self._is_left_alone(place.host)))
        ]

        def rank(place: bulk_address.BulkAddress) -> int:
            if place.host in remote:
                return 0
            if bulk_address.loopback(place.host):
                return 1
            return 2 if any((":" in place.host) == (":" in host) for host in remote) else 3

        if not usable:
            raise Refused("the peer names no address that can be used")
        return min(usable, key=rank)


def _put(where: dict[K, V], key: K, value: V) -> None:
    """Remember something, and ``MAX_ROUTES`` such things at most."""
    where.pop(key, None)
    while len(where) >= MAX_ROUTES:
        del where[next(iter(where))]
    where[key] = value


def _hosts(texts: Sequence[str]) -> list[str]:
    return [text.split("/")[2] for text in texts]
