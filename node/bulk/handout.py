"""Tokens for the data plane, over libp2p: a node asks a holder where its weights are, and with what to ask for them.

Wire (canonical codec), on ``/farflung/bulk/1``: the request is empty, in a private domain the asker's certificate
(DER). The answer is ``[token, lifetime in seconds, certificate, [addresses]]``; in a public domain the certificate is
empty.

1. In a private domain only a node whose ``join`` is held, and whose feed is not ended, gets a token.
2. Certificates travel between peers that libp2p has authenticated, and name them as libp2p's TLS does; each side then
   trusts that certificate alone (``node.bulk.tls``).
3. A route is asked for once and kept for most of its token's life. A peer that gave none is left alone for a while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from node.bulk import address, certificate, tokens
from node.bulk.client import Bulk
from node.bulk.tls import MAX_CERTIFICATE
from node.context import Node
from node.errors import Refused
from protocol import codec
from protocol.errors import PeerError

PROTOCOL: Final = "/farflung/bulk/1"
TIMEOUT: Final = 10.0
MAX_ANSWER: Final = 4096
MAX_LIFETIME: Final = 86400
MAX_ADDRESSES: Final = 4
RENEW: Final = 0.7
"""The share of a token's life after which a new one is asked for."""
MAX_ROUTES: Final = 1024

ANSWER: Final = codec.Array(
    (
        ("token", codec.Text(256)),
        ("lifetime", codec.Int(1, MAX_LIFETIME)),
        ("certificate", codec.Bytes(most=MAX_CERTIFICATE)),
        ("addresses", codec.Many(codec.Text(address.MAX_ADDRESS), most=MAX_ADDRESSES)),
    )
)


@dataclass(frozen=True, slots=True)
class Route:
    """How to fetch weights from a node: where, and with which token until when (trio's clock)."""

    address: str
    token: str
    until: float


class Routes:
    """Both sides of the hand-out for one node."""

    def __init__(self, node: Node, bulk: Bulk) -> None:
        self._node = node
        self._bulk = bulk
        self._routes: dict[bytes, Route] = {}
        self._certificate = b""
        if bulk.private:
            bulk.own, self._certificate = certificate.make(node.identity)

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
        model, tasks = self._node.domain.model, self._node.domain.tasks
        blobs = [model.manifest, model.config, model.tokenizer, *(blob for task in tasks for blob in task.blobs)]
        return any(blob.hash == digest for blob in blobs)

    async def _answer(self, peer: bytes, request: bytes) -> bytes:
        bulk = self._bulk
        if not self.may_have(peer):
            raise Refused("only nodes that joined this domain get its weights")
        if bulk.private:
            certificate.check(request, peer)
            if not await bulk.admit(peer, request):
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
                    hosts.append(tokens.host_of(host, own))
            if not hosts:
                raise Refused("the connection has gone")
        token = tokens.mint(bulk.secret, peer, hosts, time.monotonic() + tokens.LIFETIME)
        return codec.encode([token, tokens.LIFETIME, self._certificate, bulk.addresses])

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
            peer, PROTOCOL, self._certificate, timeout=TIMEOUT, max_response=MAX_ANSWER
        )
        token, lifetime, theirs, places = codec.parse(data, ANSWER, max_bytes=MAX_ANSWER, what="bulk token")
        if not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
            raise PeerError("bulk token: not base64")
        if self._bulk.private:
            certificate.check(theirs, peer)
            if not await self._bulk.admit(peer, theirs):
                raise Refused("the process that fetches weights does not run")
        chosen = self._choose(peer, [address.parse(text) for text in places])
        if len(self._routes) >= MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        route = self._routes[peer] = Route(str(chosen), token, now + lifetime * RENEW)
        return route

    def spoil(self, peer: bytes) -> None:
        """A token was refused, or nobody answered at the address: ask again next time."""
        self._routes.pop(peer, None)

    def _choose(self, peer: bytes, places: Sequence[address.BulkAddress]) -> address.BulkAddress:
        """The address that is likeliest to work, and that the token is bound for: where libp2p reached the peer."""
        remote = self._node.network.hosts(peer)
        near = any(address.loopback(host) or host in _hosts(self._node.network.addresses) for host in remote)
        usable = [
            place
            for place in places
            if (place.secure or not self._bulk.private) and address.may_dial(place, remote, near=near)
        ]

        def rank(place: address.BulkAddress) -> int:
            if place.host in remote:
                return 0
            if address.loopback(place.host):
                return 1
            return 2 if any((":" in place.host) == (":" in host) for host in remote) else 3

        if not usable:
            raise Refused("the peer names no address that can be used")
        return min(usable, key=rank)


def _hosts(texts: Sequence[str]) -> list[str]:
    return [text.split("/")[2] for text in texts]
