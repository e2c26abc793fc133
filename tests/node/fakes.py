"""Whole nodes on trio's mock clock: the daemon's parts as they are, over an in-memory network, disk and children.

Real are log, replication, elector, terms, presences, pool, weights, role manager and roles. In memory are the links
(``tests.simulator``), the log's disk and the children: a "model" of 16 numbers whose answers follow from a hash.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import trio

from node.config import WILLING, Config, DevnetConfig
from node.context import Node
from node.daemon import PRESENCE, ROLES, Parts
from node.health.warnings import Health
from node.log.elector import Elector
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.net.host import Peer
from node.net.requests import RequestHandler
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.roles.role_manager import Lives
from node.roles.rollout_pool import Pool
from node.roles.workbench import Workbench
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.telemetry.metrics import Queue
from node.weights.following import WeightsService
from node.workers import delta_child as delta_worker
from node.workers.child_messages import DescribeVersion
from protocol.domain import Domain, parse_genesis
from protocol.identity import Identity, peer_id
from protocol.log.entry import Entry
from protocol.records import Blob, Join, Role
from protocol.records import Weights as WeightsRecord
from protocol.weights.manifest import Manifest
from protocol.work.presence import Presence
from tests.node.fake_children import (
    CONFIG,
    TASK_SET,
    TASKS_FILE,
    TENSORS,
    TOKENIZER,
    WHOLE_0,
    Faults,
    checksum,
    genesis,
    manifest_of,
)
from tests.protocol.builders import key
from tests.simulator import Disk, Network, Port


class NodePort(Port):
    """A port with what the other parts of a daemon ask of ``node.net.host.Network``."""

    def __init__(self, network: Network, node: bytes, nursery: trio.Nursery) -> None:
        super().__init__(network, node, nursery)
        self.addresses = [f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id(node)}"]
        self.learned: dict[bytes, list[str]] = {}
        self.traffic = (10, 20)
        self._on_connect: list[Callable[[bytes], None]] = []

    @property
    def peers(self) -> dict[bytes, Peer]:  # type: ignore[override]  # whatever asks a plain port only looks at its keys
        """Of two nodes the one with the lower id dialled."""
        return {peer: Peer(peer, peer < self.node, 0.0, "127.0.0.1:4001") for peer in super().peers}

    def on_connect(self, callback: Callable[[bytes], None]) -> None:
        self._on_connect.append(callback)

    def prefer(self, preferred: Callable[[bytes], bool]) -> None:
        """Every peer has a place here."""

    def join(self) -> None:
        """Be there for others from now on, and they for it."""
        self.network.ports[self.node] = self
        for peer in super().peers:
            other = self.network.ports[peer]
            assert isinstance(other, NodePort)
            for port, appeared in ((self, peer), (other, self.node)):
                for callback in port._on_connect:
                    callback(appeared)

    def learn(self, node: bytes, addresses: Sequence[str]) -> None:
        self.learned[node] = list(addresses)

    def known_addresses(self) -> dict[bytes, list[str]]:
        return dict(self.learned)

    def serve(
        self, protocol: str, handler: RequestHandler, *, max_request: int, max_concurrent_per_peer: int = 0
    ) -> None:
        super().serve(protocol, handler, max_request=max_request)


BY_ITSELF: Final = (PRESENCE, "following weights", ROLES, "voting")
"""The services of a node that does something; the others serve and tell."""
CONTROL: Final = "serving the control socket"


@dataclass
class Running:
    """A node that runs, and what a test may do to it."""

    parts: Parts
    disk: Disk
    port: NodePort
    stopped: trio.Event
    measured: Queue
    """The rows that it measured."""
    nursery: trio.Nursery = field(init=False)

    @property
    def node(self) -> Node:
        return self.parts.node

    @property
    def id(self) -> bytes:
        return self.node.id

    @property
    def own(self) -> OwnState:
        return self.parts.own

    @property
    def presences(self) -> Presences:
        return self.parts.presences

    @property
    def weights(self) -> WeightsService:
        return self.parts.weights

    @property
    def versions(self) -> VersionStore:
        return self.parts.versions

    @property
    def blobs(self) -> BlobStore:
        return self.parts.blobs.store

    @property
    def pool(self) -> Pool:
        return self.parts.pool

    @property
    def bench(self) -> Workbench:
        return self.parts

    @property
    def elector(self) -> Elector:
        assert self.parts.elector.elector is not None
        return self.parts.elector.elector

    def before_answering(self, protocol: str, hook: Callable[[bytes], Awaitable[None]]) -> None:
        """Have ``hook(request)`` run before this node answers a request of a protocol."""
        answer = self.port.handlers[protocol]

        async def hooked(peer: bytes, request: bytes) -> bytes:
            await hook(request)
            return await answer(peer, request)

        self.port.serve(protocol, hooked, max_request=1 << 20)

    @property
    def steps(self) -> int:
        return len(self.node.log.ledger.steps())

    @property
    def warnings(self) -> dict[str, str]:
        return self.node.health.warnings

    def keep(self, *services: str) -> None:
        """Have services of the node run from now on, as the daemon keeps them."""
        found = self.parts.services()
        self.nursery.start_soon(self.parts.keep, {name: found[name] for name in services})

    async def open_control(self) -> None:
        """Serve the control socket from now on."""
        await self.parts.control.open()
        self.keep(CONTROL)

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """What the control socket answers to a request, by itself, as JSON has it."""
        answer = await self.parts.control.answer(json.dumps({"op": op, **arguments}).encode())
        found: dict[str, Any] = json.loads(json.dumps(answer))
        return found


class Cluster:
    """Nodes of one domain. "elector" is the founder and holds version 0 and the model's files.

    Nodes are wired as the daemon wires them; ``faults`` are what their children do, and ``lives`` what they do in their
    roles where that is not the real thing.
    """

    def __init__(
        self, folder: Path, nursery: trio.Nursery, network: Network, data: bytes, faults: Faults, lives: Lives | None
    ) -> None:
        self.folder = folder
        self.nursery = nursery
        self.network = network
        self.genesis = data
        self.domain: Domain = parse_genesis(data)
        self.faults = faults
        self.lives = lives
        self.running: dict[str, Running] = {}
        self.stack = ExitStack()
        self.boots: Counter[str] = Counter()

    async def node(
        self,
        name: str,
        *,
        disk: Disk | None = None,
        willing: Sequence[str] = WILLING,
        cheat: str = "",
        pause_at_step: int = 0,
        known: Iterable[bytes] = (),
        join: bool = True,
        **settings: Any,
    ) -> Running:
        """A node whose log is replicated and whose files are served; no part of it decides anything yet.

        ``settings`` are more of its configuration.
        """
        identity: Identity = key(name)
        directory = DataDirectory(self.folder / name)
        directory.create()
        directory.save_genesis(self.genesis)
        fresh, disk = disk is None, disk if disk is not None else Disk()
        log = LogService(identity, await load(disk, self.domain), disk, known=known, fresh=fresh, thread_from=1 << 30)
        port = NodePort(self.network, identity.node, self.nursery)
        logger = logging.getLogger(f"test.{name}")
        devnet = DevnetConfig(cheat=cheat, pause_at_step=pause_at_step)
        config = Config(name=name, willing=tuple(willing), devnet=devnet, **settings)
        network: Any = port
        node = Node(identity, self.domain, config, directory, network, log, Health(logger), logger)
        self.boots[name] += 1
        stopped = trio.Event()
        parts = Parts(node, self.boots[name], stopped.set, self.faults.machinery, lives=self.lives)
        running = Running(parts, disk, port, stopped, self.stack.enter_context(parts.metrics.follow()))
        if name == "elector":
            self._found(running)
        parts.serve()
        await parts.elector.open()
        await self.nursery.start(self._run, running)
        port.join()
        self.running[name] = running
        if fresh and join:
            await log.append(Join(identity.node, "farflung/test", name))
        return running

    async def start(self, name: str, **options: Any) -> Running:
        """A node with all that it does by itself, as ``node.daemon`` runs it."""
        running = await self.node(name, **options)
        running.keep(*BY_ITSELF)
        return running

    def crash(self, name: str) -> Running:
        """End a node at once; its disk and its folder stay."""
        gone = self.running.pop(name)
        gone.nursery.cancel_scope.cancel()
        del self.network.ports[gone.id]
        return gone

    async def agree(self, *names: str) -> None:
        """Wait until the logs of all nodes, or of those named, are equal."""
        chosen = [self.running[name].node.log.replica for name in names or self.running]
        await self.until(lambda: len({(r.heads_root(), r.newest_cut_id, r.side_digest()) for r in chosen}) == 1)

    async def cut(self) -> None:
        """Certify all there is, everywhere."""
        await self.agree()
        await self.running["elector"].elector.cut()
        await self.agree()

    async def stage(self, **roles: str) -> Entry:
        """Nodes that play the given roles by name, as far as others can see.

        Presences are published; nothing else happens by itself. Returns version 0, announced by the trainer.
        """
        for name in ("elector", *roles):
            if name not in self.running:
                await self.node(name)
        for name, role in roles.items():
            running = self.running[name]
            running.own.role = role
            await running.node.log.append(Role(role))
        for running in self.running.values():
            running.nursery.start_soon(running.presences.run)
        await self.cut()
        (trainer,) = (name for name, role in roles.items() if role == "trainer")
        await self.running["elector"].elector.grant_term(self.running[trainer].id)
        await self.agree()
        return await self.announce(trainer, WHOLE_0, None)

    async def announce(
        self, name: str, raw: bytes, predecessor: Entry | None, step: bytes | None = None, *, delta: bool | Blob = False
    ) -> Entry:
        """Node ``name`` announces a version that consists of ``raw``, and holds it; where ``delta``, with a delta, or
        with this one."""
        running = self.running[name]
        node, change = running.node, delta if isinstance(delta, Blob) else None
        if delta is True:
            assert predecessor is not None
            change = self.make_delta(running, raw, predecessor)
        manifest = self.adopt(running, raw)
        number = 0
        if predecessor is not None:
            assert isinstance(predecessor.payload, WeightsRecord)
            number = predecessor.payload.number + 1
        grant = node.log.ledger.grant()
        assert grant is not None
        (entry,) = await node.log.append(
            WeightsRecord(
                grant.term,
                number,
                None if predecessor is None else predecessor.id,
                manifest.digest,
                len(manifest.encode()),
                manifest.whole,
                manifest.size,
                step,
                *(() if change is None else (change.hash, change.size)),
            )
        )
        running.weights.held.note(entry)
        await self.agree()
        return entry

    def adopt(self, running: Running, raw: bytes) -> Manifest:
        """The node has a version that consists of ``raw`` in its stores, and says nothing of it."""
        manifest = manifest_of(raw)
        file = running.node.directory.work / "made.bin"
        file.write_bytes(raw)
        running.versions.adopt(manifest.encode(), file)
        running.blobs.put(manifest.encode())
        return manifest

    def make_delta(self, running: Running, raw: bytes, predecessor: Entry) -> Blob:
        """What changed since the predecessor, in the node's stores."""
        node = running.node
        file, delta = node.directory.work / "described.bin", node.directory.work / "described.delta"
        file.write_bytes(raw)
        base = running.weights.held.paths(predecessor.id)[0].parent
        made = delta_worker.describe(DescribeVersion(TENSORS, checksum(raw), str(file), str(base), str(delta)))
        assert made.delta_manifest is not None
        running.versions.adopt(made.delta_manifest, delta)
        return Blob(running.blobs.put(made.delta_manifest), len(made.delta_manifest))

    def role(self, role: str) -> str:
        """The name of the one running node with this role."""
        (name,) = (name for name, running in self.running.items() if running.own.role == role)
        return name

    async def _run(self, running: Running, *, task_status: Any) -> None:
        async with trio.open_nursery() as running.nursery:
            running.nursery.start_soon(running.parts.sync.run)
            running.nursery.start_soon(running.parts.bulk.run)
            task_status.started()

    def _found(self, running: Running) -> None:
        for data in (CONFIG, TOKENIZER, TASKS_FILE, TASK_SET):
            running.blobs.put(data)
        self.adopt(running, WHOLE_0)

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something holds; fails after ``seconds`` of the mock clock."""
        with trio.fail_after(seconds):
            while not condition():  # noqa: ASYNC110  several nodes change, each with an event of its own
                await trio.sleep(0.1)


@asynccontextmanager
async def open_cluster(
    folder: Path,
    faults: Faults,
    *,
    network: Network | None = None,
    data: bytes | None = None,
    lives: Lives | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster that ends with the block."""
    async with trio.open_nursery() as nursery:
        cluster = Cluster(folder, nursery, network or Network(), data or genesis(), faults, lives)
        with cluster.stack:
            yield cluster
        nursery.cancel_scope.cancel()


def presence(node: Node, **changes: Any) -> Presence:
    """A presence of ``node`` as it might publish."""
    plain = Presence(
        domain=node.domain.id,
        node=node.id,
        boot=1,
        counter=1,
        name=node.config.name,
        role="none",
        willing=node.config.willing,
        addresses=(),
        bulk=(),
        versions=(),
        arriving=(),
        cpus=1,
        memory_mb=1000,
        gpu_mb=0,
        tokens_per_second=0,
        bandwidth_kbps=0,
        load=0,
        paused=0,
    )
    return replace(plain, **changes)
