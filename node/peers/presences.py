"""The node's own presence, published by gossip, and the presences of others.

Whatever decides about others' work counts members, by what the log says of them (``Ledger.member``); the presence of
anybody else is an address to dial, and at most ``MAX_STRANGERS`` of them are kept. The decision what a presence means
is ``protocol.work.presence``'s and ``protocol.work.assignment``'; here it is sent, received, and its addresses are
handed to the network.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

import trio

from node.context import Node
from node.peers.own_state import OwnState
from protocol.constants import MAX_DUE_VALIDATORS
from protocol.errors import PeerError
from protocol.identity import peer_id
from protocol.work.presence import MAX_ARRIVING, Presence, PresenceTable

TOPIC = "presence"
MAX_STRANGERS: Final = 512
MAX_RECENT: Final = 64
"""Own presences that are remembered: of more intervals than a presence lives, at five an interval at most."""


class Presences:
    """Publishes ours every interval and at once when something worth telling changed."""

    def __init__(self, node: Node, own: OwnState, boot: int) -> None:
        self._node = node
        self._state = own
        self.boot = boot
        self._counter = 0
        self._interval = node.domain.timings.presence_ms / 1000
        self._table = PresenceTable(node.domain.id, self._interval)
        self._strangers = PresenceTable(node.domain.id, self._interval, MAX_STRANGERS)
        self._signed: dict[bytes, bytes] = {}
        self._room = 16
        """How many signed presences are kept before those of nodes that are gone are sorted out."""
        self._recent: deque[Presence] = deque(maxlen=MAX_RECENT)
        self._first_peer_at: float | None = None

    def live(self) -> Mapping[bytes, Presence]:
        """Presences that have not lapsed, our own among them, of nodes that can still append to their feeds: strangers'
        as well, so for dialling and for people only."""
        replica = self._node.log.replica
        return {node: presence for node, presence in self._heard().items() if not replica.frozen(node)}

    def members(self) -> Mapping[bytes, Presence]:
        """Those of members."""
        ledger = self._node.log.ledger
        return {node: presence for node, presence in self._heard().items() if ledger.member(node)}

    def _heard(self) -> dict[bytes, Presence]:
        now = trio.current_time()
        return {**self._strangers.live(now), **self._table.live(now)}

    def standing(self) -> dict[bytes, str]:
        """The roles in office of the members who are present, by the log."""
        ledger = self._node.log.ledger
        return {node: ledger.standing_role(node) for node in self.members()}

    def signed(self, node: bytes) -> bytes:
        """The newest presence of ``node`` as it was signed; empty where there is none that has not lapsed."""
        return self._signed.get(node, b"") if node in self.live() else b""

    def ours(self, presence: Presence) -> bool:
        """Whether ``presence``, in this node's name, was signed by this very process, lately."""
        return presence in self._recent

    def founded_for(self) -> float:
        """Seconds since the first other member was heard; negative before that."""
        return -1.0 if self._first_peer_at is None else trio.current_time() - self._first_peer_at

    def can_decide(self, validators: Collection[bytes]) -> bool:
        """Whether so many of these validators are here and at it that they can decide about a submission."""
        present, ledger = self.members(), self._node.log.ledger
        at_it = sum(validator in present and ledger.standing_role(validator) == "validator" for validator in validators)
        return at_it > min(len(validators), MAX_DUE_VALIDATORS) // 2

    def listen(self) -> None:
        """Take in what others publish. It reaches all within a fraction of the three intervals after which it lapses,
        so that the presences of many nodes can share a frame on their way."""
        self._node.network.subscribe(TOPIC, self._receive, delay=self._interval / 5)

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            # A pause between unscheduled ones bounds the traffic that a burst of changes makes.
            await trio.sleep(self._interval / 5)
            with trio.move_on_after(self._interval * 4 / 5):
                await self._state.changed.wait()
            self._state.changed = trio.Event()
            presence = self._own()
            self._recent.append(presence)
            data = presence.sign(self._node.identity)
            self._update(presence, data)
            await self._node.network.publish(TOPIC, data)

    def _own(self) -> Presence:
        node, own = self._node, self._state
        self._counter += 1
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        return Presence(
            domain=node.domain.id,
            node=node.id,
            boot=self.boot,
            counter=self._counter,
            name=node.config.name,
            role=own.role,
            willing=own.willing(),
            addresses=tuple(node.network.addresses[:8]),
            bulk=tuple(own.bulk),
            versions=tuple(own.versions[:8]),
            arriving=tuple(own.arriving[:MAX_ARRIVING]),
            cpus=os.cpu_count() or 1,
            memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
            gpu_mb=own.gpu_mb,
            tokens_per_second=own.tokens_per_second,
            bandwidth_kbps=0,
            load=int(load * 1_000_000),
            paused=int(own.paused()),
        )

    def _update(self, presence: Presence, data: bytes) -> bool:
        known = presence.node in (self._node.id, *self._node.domain.named) or self._node.log.ledger.member(
            presence.node
        )
        table, other = (self._table, self._strangers) if known else (self._strangers, self._table)
        other.drop(presence.node)
        fresh = table.update(presence, trio.current_time())
        if fresh:
            self._signed[presence.node] = data
            if len(self._signed) > self._room:
                live = self.live()
                self._signed = {node: kept for node, kept in self._signed.items() if node in live}
                self._room = 2 * len(live) + 16
        return fresh

    async def _receive(self, origin: bytes, data: bytes) -> None:
        presence = Presence.parse(data)
        if presence.domain != self._node.domain.id:
            raise PeerError("a presence of another domain")
        if presence.node != origin:
            raise PeerError("a presence under another node's name")
        if presence.node == self._node.id:
            return
        if self._update(presence, data):
            if self._first_peer_at is None and self._node.log.ledger.member(origin):
                self._first_peer_at = trio.current_time()
            named = [a if "/p2p/" in a else f"{a}/p2p/{peer_id(origin)}" for a in presence.addresses]
            self._node.network.learn(origin, named)
