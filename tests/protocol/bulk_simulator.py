"""Swarms over a simulated network, in virtual time: links with rates and round trips, peers that fail.

Bytes are a fluid: every ``STEP`` seconds each request gets its share of its sender's uplink, its receiver's downlink
and of what one flow carries. Chance is seeded, so every run of a test is the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from protocol.constants import CHUNK_BYTES
from protocol.weights.holders import Holding, Run
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

STEP: Final = 0.02
MIB: Final = 1 << 20
UNBOUND: Final = 1e15


@dataclass(eq=False)
class Flow:
    """One connection of ``peer`` to ``server``; ``run`` is its request."""

    server: bytes
    run: Run | None = None
    ready_at: float = 0.0
    in_chunk: float = 0.0


@dataclass(eq=False)
class Peer:
    """A node. ``up``, ``down`` and ``per_flow`` are bytes a second, ``rtt`` seconds, ``has`` a set of chunks."""

    node: bytes
    chunks: int
    has: int = 0
    up: float = UNBOUND
    down: float = UNBOUND
    per_flow: float = UNBOUND
    rtt: float = 0.001
    starts: float = 0.0
    lies: bool = False
    claims: int = 0
    """Chunks that it says it has besides."""
    refused: int = 0
    """How often it refused a request."""
    author: bool = False
    dead: bool = False
    hidden: bool = False
    """No direct connection to it can be made: libp2p carries its chunks."""
    most_served: int = 10_000
    """Connections that it takes before it says that it is busy."""
    holders: Callable[[], dict[bytes, Holding]] | None = None
    swarm: Swarm | None = None
    routes: Routes = field(default_factory=Routes)
    flows: list[Flow] = field(default_factory=list)
    finished_at: float | None = None
    served: int = 0
    most_at_once: int = 0
    served_to: Counter[bytes] = field(default_factory=Counter)
    refused_busy: int = 0
    wasted: float = 0.0
    told: dict[bytes, float] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether it has all chunks."""
        return self.has == (1 << self.chunks) - 1


class World:
    """All peers. Those that lack chunks fetch from all others, unless ``holders`` names some."""

    def __init__(self, seed: int = 0, *, haves_every: float = 0.1) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.peers: dict[bytes, Peer] = {}
        self.haves_every = haves_every

    def add(self, name: str, chunks: int, **options: object) -> Peer:
        """A peer; ``has`` may be given as a set of chunks."""
        peer = Peer(name.encode(), chunks, **options)  # type: ignore[arg-type]
        self.peers[peer.node] = peer
        return peer

    def holdings(self, peer: Peer) -> dict[bytes, Holding]:
        """What ``peer`` may know of all others."""
        others = [p for p in self.peers.values() if p is not peer and not p.dead and p.starts <= self.now]
        known = [p for p in others if p.has or p.claims or p.swarm is not None]
        return {p.node: Holding(not p.hidden, p.whole, spared=p.author and len(known) > 1) for p in known}

    def run(
        self, until: float = 600.0, *, at: Iterable[tuple[float, Callable[[], None]]] = (), stop: float = 0.0
    ) -> None:
        """Go on until all that fetch have everything, or to ``stop``. ``at`` are things that happen at given times.
        Fails at ``until``."""
        events = sorted(at, key=lambda event: event[0])
        next_tick = next_holders = 0.0
        while not self._all_done():
            assert self.now < until, {p.node: p.has.bit_count() for p in self.peers.values()}
            if stop and self.now >= stop:
                return
            while events and events[0][0] <= self.now:
                events.pop(0)[1]()
            tick, look = self.now >= next_tick, self.now >= next_holders
            next_tick = self.now + 0.1 if tick else next_tick
            next_holders = self.now + 0.5 if look else next_holders
            for peer in self.peers.values():
                if not peer.dead and peer.starts <= self.now and not peer.whole:
                    self._fetch(peer, tick, look)
            self._move()
            self.now += STEP

    def _all_done(self) -> bool:
        return all(p.whole or p.dead for p in self.peers.values())

    def _fetch(self, peer: Peer, tick: bool, look: bool) -> None:
        if peer.swarm is None:
            peer.swarm = Swarm(peer.chunks, peer.has, routes=peer.routes, chance=self.chance, now=self.now)
            look = True
        swarm = peer.swarm
        if look:
            swarm.set_holders(self.holdings(peer) if peer.holders is None else peer.holders(), self.now)
        for node in swarm.partial():
            if peer.told.get(node, -1.0) <= self.now and not self.peers[node].dead:
                peer.told[node] = self.now + self.haves_every
                other = self.peers[node]
                coming = 0 if other.swarm is None else other.swarm.coming
                swarm.learn(node, other.has | other.claims, coming, self.now)
        if tick:
            swarm.tick(self.now)
        self._break_off(peer)
        if tick or look:
            self._adjust(peer, swarm)
        for flow in list(peer.flows):
            if flow.run is None and flow.ready_at <= self.now:
                flow.run = swarm.next(flow.server, self.now)
                flow.in_chunk = 0.0
                if flow.run is not None:
                    flow.ready_at = self.now + self.peers[flow.server].rtt

    def _adjust(self, peer: Peer, swarm: Swarm) -> None:
        for node, server in self.peers.items():
            target = swarm.flows(node, self.now) if server is not peer else 0
            mine = [flow for flow in peer.flows if flow.server == node]
            for flow in mine[target:]:
                if flow.run is None:
                    peer.flows.remove(flow)
            for _ in range(target - len(mine)):
                if not self._connect(peer, server):
                    break

    def _connect(self, peer: Peer, server: Peer) -> bool:
        swarm = peer.swarm
        assert swarm is not None
        connections = sum(f.server == server.node for p in self.peers.values() for f in p.flows)
        if server.dead:
            swarm.failed(server.node, self.now)
        elif connections >= server.most_served:
            server.refused_busy += 1
            swarm.busy(server.node, 1.0, self.now)
        else:
            server.most_at_once = max(server.most_at_once, connections + 1)
            swarm.connected(server.node, server.rtt)
            peer.flows.append(Flow(server.node, ready_at=self.now + server.rtt))
            return True
        return False

    def _break_off(self, peer: Peer) -> None:
        assert peer.swarm is not None
        for run in peer.swarm.aborts:
            for flow in list(peer.flows):
                if flow.run is run:
                    self._end(peer, flow, keep=False)
        peer.swarm.aborts.clear()

    def _end(self, peer: Peer, flow: Flow, *, keep: bool) -> None:
        assert peer.swarm is not None
        assert flow.run is not None
        peer.swarm.finished(flow.run, self.now)
        peer.wasted += flow.in_chunk
        flow.run, flow.in_chunk = None, 0.0
        if not keep:
            peer.flows.remove(flow)

    def _move(self) -> None:
        moving = [(p, f) for p in self.peers.values() for f in p.flows if f.run and f.ready_at <= self.now]
        up = Counter(f.server for _, f in moving)
        down = Counter(p.node for p, _ in moving)
        for peer, flow in moving:
            server = self.peers[flow.server]
            if flow.run is None or peer.swarm is None:
                continue
            if server.dead or peer.dead:
                if not peer.dead:
                    peer.swarm.failed(server.node, self.now)
                    self._end(peer, flow, keep=False)
                continue
            rate = min(server.up / up[server.node], peer.down / down[peer.node], server.per_flow)
            self._receive(peer, server, flow, rate * STEP)

    def _receive(self, peer: Peer, server: Peer, flow: Flow, size: float) -> None:
        run, swarm = flow.run, peer.swarm
        assert run is not None
        assert swarm is not None
        while size > 0:
            if not server.has >> run.at & 1:
                swarm.refused(run, self.now)
                server.refused += 1
                self._end(peer, flow, keep=True)
                return
            part = min(size, CHUNK_BYTES - flow.in_chunk)
            flow.in_chunk += part
            size -= part
            run.received = (run.at - run.first) * CHUNK_BYTES + int(flow.in_chunk)
            if flow.in_chunk < CHUNK_BYTES:
                return
            if server.lies:
                swarm.lied(run, self.now)
                self._end(peer, flow, keep=False)
                return
            assert not peer.has >> run.at & 1, "a chunk was fetched twice"
            peer.has |= 1 << run.at
            server.served += 1
            server.served_to[peer.node] += 1
            flow.in_chunk = 0.0
            more = swarm.arrived(run, self.now)
            if peer.whole:
                peer.finished_at = self.now
                for other in list(peer.flows):
                    if other.run is not None:
                        self._end(peer, other, keep=False)
                return
            if not more:
                self._end(peer, flow, keep=True)
                return
