"""Relays push: they offer those who lag the newest version before these have heard of it themselves.

1. A relay that holds the newest version, whole or in part, offers it to each connected node whose presence says neither
   that it holds it nor that it is arriving; to each again after ``AGAIN`` presence intervals.
2. An offer makes its relay a holder at once, of what it says it has when it is asked: no presence need have arrived.
3. Only a relay may offer, and few offers are remembered, so that they cost others nothing.
4. Fetching and serving are every node's (``node.weights.following``). That others ask a relay first and leave it a head
   start, and that it offers what it has, is all of that role: it needs no child process.

Wire (canonical codec), on ``/farflung/offer/1``: ``[weights entry id]``; the answer is empty.
"""

from __future__ import annotations

from typing import Final

import trio

from node.context import Node
from node.errors import Refused, Unreachable
from node.peers.presences import Presences
from node.weights.following import WeightsService
from protocol import codec
from protocol.errors import PeerError

PROTOCOL: Final = "/farflung/offer/1"
MAX_REQUEST: Final = 64
REQUEST: Final = codec.Array((("weights", codec.HASH),))

AGAIN: Final = 3
AT_ONCE: Final = 8
TIMEOUT: Final = 5.0


def serve(node: Node, weights: WeightsService, presences: Presences) -> None:
    """Take the offers of relays."""

    async def handler(peer: bytes, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        (version,) = codec.parse(request, REQUEST, max_bytes=MAX_REQUEST, what="offer")
        if presences.standing().get(peer) != "relay":
            raise Refused("only relays offer versions")
        weights.holders_of.on_offer(peer, version)
        return b""

    node.network.serve(PROTOCOL, handler, max_request=MAX_REQUEST)


async def push(node: Node, weights: WeightsService) -> None:
    """Offer the newest version to those who lag, for ever."""
    interval = node.domain.timings.presence_ms / 1000
    offered_to: dict[bytes, tuple[bytes, float]] = {}
    limit = trio.CapacityLimiter(AT_ONCE)
    async with trio.open_nursery() as nursery:
        while True:
            newest, now = node.log.ledger.newest_weights(), trio.current_time()
            lagging = weights.holders_of.lagging()
            for peer in lagging:
                assert newest is not None
                version, until = offered_to.get(peer, (b"", 0.0))
                if version != newest.id or until <= now:
                    offered_to[peer] = newest.id, now + AGAIN * interval
                    nursery.start_soon(_offer, node, peer, newest.id, limit)
            offered_to = {peer: row for peer, row in offered_to.items() if peer in lagging}
            await weights.notice.wait(interval)


async def _offer(node: Node, peer: bytes, weights: bytes, limit: trio.CapacityLimiter) -> None:
    async with limit:
        try:
            await node.network.request(peer, PROTOCOL, codec.encode([weights]), timeout=TIMEOUT, max_response=0)
        except PeerError as error:
            node.network.blame(peer, error)
        except Unreachable as error:
            node.logger.debug("an offer to %s: %s", peer.hex()[:8], error)
