"""An in-memory network of ``LogService`` nodes with lossy, slow and partitioned links, for trio's mock clock.

A node's disk outlives it: ``crash`` throws away everything but what its store made durable, and a copy of the disk is a
backup. Time is the mock clock's, chance comes from a seeded generator, so every run of a test is the same.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from node.log.elector import Elector, open_elector
from node.log.log_opening import SNAPSHOT_ENTRIES, load
from node.log.replicated_log import LogService
from node.log.replication import LogSync
from node.log.replication_round import Handler
from node.net.requests import Refused, Unreachable
from node.store.log_rows import Item
from node.store.log_store import LogStore
from protocol.domain import Domain
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.log.entry import Entry
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import RangeRequest
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.records import Join

Listener = Callable[[bytes, bytes], Awaitable[None]]


@dataclass
class Disk(LogStore):
    """A store in memory. ``full`` makes it refuse writes and ``broken`` reads; ``before`` and ``after`` run around each
    durable write."""

    items: list[Item] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)
    places: set[tuple[bytes, int]] = field(default_factory=set)
    pruned: set[bytes] = field(default_factory=set)
    summary: tuple[int, bytes] | None = None
    full: bool = False
    broken: bool = False
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None

    unreadable: str | None = None

    async def _reading(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.broken:
            self.unreadable = "the simulated device cannot be read"
            raise OSError(self.unreadable)

    async def read(self, after: int) -> tuple[list[Item], int]:
        await self._reading()
        held = [item for item in self.items[after:] if not (isinstance(item, Entry) and item.id in self.pruned)]
        return held, len(self.items)

    async def append(
        self, items: Sequence[Item], meta: Mapping[str, bytes] | None = None, *, exclusive: Collection[bytes] = ()
    ) -> None:
        await trio.lowlevel.checkpoint()
        if self.full:
            raise OSError("no space left on the simulated device")
        for item in items:
            if isinstance(item, Entry) and item.id in exclusive and (item.author, item.seq) in self.places:
                raise LocalError("stored already")
        self.before()
        self.items += items
        self.places |= {(item.author, item.seq) for item in items if isinstance(item, Entry)}
        self.values.update(meta or {})
        self.after()

    async def meta(self, key: str) -> bytes | None:
        await self._reading()
        return self.values.get(key)

    async def snapshot(self) -> tuple[int, bytes] | None:
        await self._reading()
        return self.summary

    async def save_snapshot(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self.full:
            raise OSError("no space left on the simulated device")
        self.summary = (len(self.items), data)

    async def drop_snapshot(self) -> None:
        await trio.lowlevel.checkpoint()
        self.summary = None

    async def sides(self) -> list[CertifiedGrant | ForkProof]:
        await self._reading()
        return [item for item in self.items if isinstance(item, CertifiedGrant | ForkProof)]

    async def entries_by_id(self, ids: Sequence[bytes]) -> list[Entry]:
        await self._reading()
        wanted = set(ids) - self.pruned
        return [item for item in self.items if isinstance(item, Entry) and item.id in wanted]

    async def entries_at(self, places: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], list[Entry]]:
        await self._reading()
        found: dict[tuple[bytes, int], list[Entry]] = {}
        for item in self.items:
            if isinstance(item, Entry) and (item.author, item.seq) in places and item.id not in self.pruned:
                found.setdefault((item.author, item.seq), []).append(item)
        return found

    async def ids_at(self, places: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], bytes]:
        await self._reading()
        held = {(item.author, item.seq): item.id for item in reversed(self.items) if isinstance(item, Entry)}
        return {place: held[place] for place in places if place in held}

    async def ranges(self, wanted: Sequence[RangeRequest], most: int) -> list[list[bytes]]:
        await self._reading()
        found: list[list[bytes]] = []
        for one in wanted:
            found.append([])
            held = [item for item in self.items if isinstance(item, Entry) and item.author == one.author]
            for item in sorted(held, key=lambda item: item.seq):
                if one.first_seq <= item.seq <= one.last_seq and most > 0 and item.id not in self.pruned:
                    found[-1].append(item.encode())
                    most -= len(found[-1][-1])
        return found

    async def cuts(self, after: int, most: int, room: int) -> list[bytes]:
        await self._reading()
        cuts = {item.cut.height: item for item in self.items if isinstance(item, CertifiedCut)}
        return [cuts[height].encode() for height in sorted(cuts) if height > after][:most]

    async def prune(self, ranges: Sequence[RangeRequest]) -> int:
        await trio.lowlevel.checkpoint()
        before = len(self.pruned)
        for one in ranges:
            for item in self.items:
                if isinstance(item, Entry) and item.author == one.author and one.first_seq <= item.seq <= one.last_seq:
                    self.pruned.add(item.id)
        return len(self.pruned) - before

    def copy(self) -> Disk:
        """A backup of it as it is now."""
        return Disk(list(self.items), dict(self.values), set(self.places), set(self.pruned), self.summary)


class Network:
    """All links. ``loss`` is the share of messages lost; a delay is drawn up to ``delay`` seconds each way."""

    def __init__(self, seed: int = 0, *, loss: float = 0.0, delay: float = 0.01) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.delay = delay
        self.ports: dict[bytes, Port] = {}
        self.cut_off: set[frozenset[bytes]] = set()
        self.bytes = 0

    def partition(self, one: Iterable[bytes], other: Iterable[bytes]) -> None:
        """Cut every link between the two groups."""
        self.cut_off |= {frozenset((a, b)) for a in one for b in other}

    def heal(self) -> None:
        """Restore every link."""
        self.cut_off.clear()

    def linked(self, a: bytes, b: bytes) -> bool:
        """Whether messages can pass."""
        return a != b and a in self.ports and b in self.ports and frozenset((a, b)) not in self.cut_off

    async def pass_through(self, a: bytes, b: bytes, data: bytes) -> bool:
        """Carry ``data`` from a to b; whether it arrived."""
        await trio.sleep(self.random.random() * self.delay)
        self.bytes += len(data)
        return self.linked(a, b) and self.random.random() >= self.loss


class Port:
    """One node's end of the network: what ``LogSync`` needs of a transport."""

    def __init__(self, network: Network, node: bytes, nursery: trio.Nursery) -> None:
        self.network = network
        self.node = node
        self.nursery = nursery
        self.handlers: dict[str, Handler] = {}
        self.topics: dict[str, Listener] = {}
        self.blamed: list[tuple[bytes, PeerError]] = []
        self.sent: list[bytes] = []
        self.tamper: Callable[[bytes], bytes] = lambda data: data

    @property
    def peers(self) -> list[bytes]:
        return [peer for peer in self.network.ports if self.network.linked(self.node, peer)]

    async def request(self, peer: bytes, protocol: str, payload: bytes, *, timeout: float, max_response: int) -> bytes:
        with trio.move_on_after(timeout):
            if await self.network.pass_through(self.node, peer, payload):
                port = self.network.ports[peer]
                if protocol in port.handlers:
                    try:
                        answer = port.tamper(await port.handlers[protocol](self.node, payload))
                    except PeerError as error:
                        port.blame(self.node, error)
                        raise Refused(str(error)) from None
                    if len(answer) > max_response:
                        raise PeerError("an answer of too many bytes")
                    if await self.network.pass_through(peer, self.node, answer):
                        return answer
                    await trio.sleep_forever()
            else:
                await trio.sleep_forever()
        raise Unreachable("no answer")

    def serve(self, protocol: str, handler: Handler, *, max_request: int) -> None:
        self.handlers[protocol] = handler

    async def publish(self, topic: str, data: bytes) -> None:
        self.sent.append(data)
        for peer in self.peers:
            self.nursery.start_soon(self._deliver, peer, topic, self.tamper(data))
        await trio.lowlevel.checkpoint()

    async def _deliver(self, peer: bytes, topic: str, data: bytes) -> None:
        if await self.network.pass_through(self.node, peer, data):
            port = self.network.ports[peer]
            if topic in port.topics:
                try:
                    await port.topics[topic](self.node, data)
                except PeerError as error:
                    port.blame(self.node, error)

    def subscribe(self, topic: str, handler: Listener, *, delay: float = 0.0) -> None:
        self.topics[topic] = handler

    def blame(self, peer: bytes, error: PeerError) -> None:
        self.blamed.append((peer, error))


@dataclass(slots=True)
class SimNode:
    """A running node: its disk, service, replication, port and (the elector's) elector."""

    identity: Identity
    disk: Disk
    service: LogService
    sync: LogSync
    port: Port
    scope: trio.CancelScope
    elector: Elector | None = None

    @property
    def id(self) -> bytes:
        return self.identity.node


class World:
    """Starts and crashes nodes of one domain."""

    def __init__(self, domain: Domain, network: Network, nursery: trio.Nursery, snapshot_entries: int) -> None:
        self.domain = domain
        self.network = network
        self.nursery = nursery
        self.snapshot_entries = snapshot_entries

    async def start(
        self,
        identity: Identity,
        disk: Disk | None = None,
        *,
        known: Iterable[bytes] = (),
        elects: bool | None = None,
        join: bool = True,
        archive: bool = True,
    ) -> SimNode:
        """Run a node on ``disk``; on a new one its key counts as new, and it joins."""
        fresh = disk is None
        disk = disk if disk is not None else Disk()
        log = await load(disk, self.domain, self.snapshot_entries)
        service = LogService(
            identity,
            log,
            disk,
            known=known,
            fresh=fresh,
            thread_from=1 << 30,
            archive=archive,
            snapshot_entries=self.snapshot_entries,
        )
        scope = trio.CancelScope()
        port = Port(self.network, identity.node, self.nursery)
        sync = LogSync(service, port, interval=1.0)
        node = SimNode(identity, disk, service, sync, port, scope)
        if elects if elects is not None else identity.node in self.domain.electors:
            node.elector = await open_elector(service, identity, sync)
        await self.nursery.start(self._run, node)
        self.network.ports[identity.node] = port
        if fresh and join:
            await service.append(Join(identity.node, "farflung/test", identity.node.hex()[:8]))
        return node

    async def _run(self, node: SimNode, *, task_status: Any) -> None:
        with node.scope:
            async with trio.open_nursery() as nursery:
                node.sync.serve()
                nursery.start_soon(node.sync.run)
                if node.elector is not None:
                    nursery.start_soon(node.elector.run)
                task_status.started()

    def crash(self, node: SimNode) -> Disk:
        """End a node between two steps; returns its disk."""
        node.scope.cancel()
        if self.network.ports.get(node.id) is node.port:
            del self.network.ports[node.id]
        return node.disk


@asynccontextmanager
async def open_world(
    domain: Domain, network: Network, snapshot_entries: int = SNAPSHOT_ENTRIES
) -> AsyncIterator[World]:
    """A world that ends with the block; its nodes take snapshots for so many entries."""
    async with trio.open_nursery() as nursery:
        yield World(domain, network, nursery, snapshot_entries)
        nursery.cancel_scope.cancel()


async def converge(nodes: Iterable[SimNode], *, within: float = 60.0) -> None:
    """Wait until all nodes show one heads root, newest cut and set of grants and forks; fails after ``within``."""
    nodes = list(nodes)

    def states() -> set[tuple[bytes, bytes, bytes]]:
        replicas = [node.service.replica for node in nodes]
        return {(r.heads_root(), r.newest_cut_id, r.side_digest()) for r in replicas}

    with trio.fail_after(within):
        while len(states()) > 1:  # noqa: ASYNC110  several services change, each with an event of its own
            await trio.sleep(0.1)
