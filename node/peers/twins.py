"""Is a node alive? Asking peers for the newest presence they heard of it.

Protocol ``/farflung/presence/1``: the request is a node id (32 bytes), the answer that node's newest signed presence
that has not lapsed, or nothing. It is checked like any other: a peer can hold one back, but not make one up.

Two nodes with one key fork their feed sooner or later, so a daemon asks about itself before it says anything:

1. A presence of this node that is still fresh may be its own last one, from before a restart. So peers are asked again
   after more than an interval: only a node that runs goes on counting.
2. A peer could play two old presences one after the other. So most of the peers that answered must say the same.
3. A peer that does not answer says nothing. A node that reaches no peer starts: it disturbs nobody then, and what its
   feed may have become is asked again before it appends (``node.log.replicated_log``).
4. Two copies that start in the same seconds hear nothing of each other at first. So a node asks once more when its
   presences are out, and before it can have a role: what goes on counting and was not signed here is the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from node.context import Node
from node.errors import UserError
from node.net.host import Network
from node.net.requests import Unreachable
from node.peers.presences import Presences
from protocol.constants import MAX_PRESENCE_BYTES
from protocol.errors import PeerError
from protocol.work.presence import Presence

PROTOCOL: Final = "/farflung/presence/1"
PEER_PATIENCE: Final = 5.0
"""Seconds that a restarted node waits for a peer that may tell whether it runs elsewhere."""
LOOKS: Final = (1.5, 4.0, 8.0)
"""Presence intervals after which a node asks whether its twin appeared meanwhile."""
ANSWER_SECONDS: Final = 3.0
MAX_ASKED: Final = 8
"""Peers asked: enough for a majority that one liar cannot make."""
PAUSE_INTERVALS: Final = 1.5
"""Presence intervals between the two questions; in each a node that runs publishes once at least."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What peers know of a node: how many answered, how many heard it alive, and its newest presence."""

    answered: int
    alive: int
    presence: Presence | None

    @property
    def elsewhere(self) -> bool:
        """Whether most of those that answered heard a node that is not the one that asks (rule 2)."""
        return self.alive * 2 > self.answered


def serve(network: Network, presences: Presences) -> None:
    """Tell whoever asks."""

    async def answer(peer: bytes, request: bytes) -> bytes:
        if len(request) != 32:
            raise PeerError("a question for a presence is a node id")
        return presences.signed(request)

    network.serve(PROTOCOL, answer, max_request=32)


async def sighted(network: Network, peers: Iterable[bytes], domain: bytes, node: bytes) -> dict[bytes, Presence | None]:
    """The newest presence of ``node`` in ``domain`` by each of ``peers`` that answers; None where it heard none."""
    found: dict[bytes, Presence | None] = {}

    async def ask(peer: bytes) -> None:
        try:
            data = await network.request(
                peer, PROTOCOL, node, timeout=ANSWER_SECONDS, max_response=MAX_PRESENCE_BYTES + 128
            )
            presence = Presence.parse(data) if data else None
            if presence is not None and (presence.node, presence.domain) != (node, domain):
                raise PeerError("the answer is another node's presence")
        except Unreachable:
            return
        except PeerError as error:
            network.blame(peer, error)
            return
        found[peer] = presence

    async with trio.open_nursery() as nursery:
        for peer in list(peers)[:MAX_ASKED]:
            nursery.start_soon(ask, peer)
    return found


async def sight(
    network: Network,
    peers: Iterable[bytes],
    domain: bytes,
    node: bytes,
    interval: float,
    ours: Callable[[Presence], bool] = lambda presence: False,
) -> Sighting:
    """Whether ``node`` runs elsewhere. ``interval`` is the domain's, in seconds.

    ``ours`` tells the presences that this very process signed: they are no sign of another. Takes no longer than the
    answers where nobody heard the node lately, else ``PAUSE_INTERVALS`` intervals more.
    """
    first = await sighted(network, peers, domain, node)
    heard = {peer: presence for peer, presence in first.items() if presence is not None}
    if not heard:
        return Sighting(len(first), 0, None)
    await trio.sleep(PAUSE_INTERVALS * interval)
    second = await sighted(network, heard, domain, node)
    alive = [
        later
        for peer, earlier in heard.items()
        if (later := second.get(peer)) is not None
        and (later.boot, later.counter) > (earlier.boot, earlier.counter)
        and not ours(later)
    ]
    newest = max(alive or heard.values(), key=lambda presence: (presence.boot, presence.counter))
    return Sighting(len(first), len(alive), newest)


async def refuse_copy(node: Node, presences: Presences) -> None:
    """Raise ``UserError`` where this very node runs elsewhere already (a copied data directory)."""
    # On its first start a node has a key that nobody else can have.
    if presences.boot > 1 and node.network.known_addresses():
        connected = trio.Event()
        node.network.on_connect(lambda _: connected.set())
        if not node.network.peers:
            with trio.move_on_after(PEER_PATIENCE):
                await connected.wait()
        await _refuse_elsewhere(node, presences)


async def refuse_twin(node: Node, presences: Presences) -> None:
    """Two copies that started at once found nobody: now their presences are out, and neither has a role yet.

    It is asked more than once: while the two push each other off the same peer's connection, that peer hears little.
    """
    for intervals in LOOKS:
        await trio.sleep(intervals * node.domain.timings.presence_ms / 1000)
        await _refuse_elsewhere(node, presences)


async def _refuse_elsewhere(node: Node, presences: Presences) -> None:
    interval, ours = node.domain.timings.presence_ms / 1000, presences.ours
    sighting = await sight(node.network, node.network.peers, node.domain.id, node.id, interval, ours)
    if sighting.elsewhere and sighting.presence is not None:
        at = ", ".join(sighting.presence.addresses) or "an unknown address"
        raise UserError(
            f"{node.directory.key_file}: the node of this key runs elsewhere already ({at}), and two of them would "
            "fork its feed",
            "stop that one, or use a new data directory",
        )
