"""Whole nodes on trio's mock clock: the daemon's parts as they are, over an in-memory network, disk and children.

Real are log, replication, elector, terms, presences, pool, weights, role manager and roles. In memory are the links
(``tests.simulator``), the log's disk and the children: a "model" of 16 numbers whose answers follow from a hash.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio

from node.api.weight_requests import Pulls
from node.config import Config, DevnetConfig
from node.config_keys import WILLING
from node.context import Health, Node
from node.log.elector import Elector, open_elector
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.log.replication import LogSync
from node.net.blob_exchange import serve_blobs, serve_chunks, serve_haves
from node.net.host import Peer
from node.peers.presences import Presences
from node.roles import engine_client as engine_role
from node.roles import trainer as trainer_role
from node.roles.role_manager import RoleManager
from node.roles.rollout_pool import Pool
from node.roles.term_watch import TermWatch
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.hashing import hash_bytes
from node.store.version_store import VersionStore
from node.weights import delta_making, offers, second_holder
from node.weights.bulk.bulk_process import Bulk
from node.weights.bulk.token_exchange import Routes
from node.weights.following import Weights
from node.workers import delta_child as delta_worker
from node.workers.child_process import WorkerError
from protocol.constants import MILLION
from protocol.domain import Domain, Model, Policy, Recipe, Task, default_timings, make_genesis, parse_genesis
from protocol.identity import Identity, peer_id
from protocol.log.entry import Entry
from protocol.records import Blob, Join, Role
from protocol.records import Weights as WeightsRecord
from protocol.taskset import TaskSet
from protocol.weights.manifest import Manifest
from protocol.work.presence import Presence
from protocol.work.rollout import Submission, pack
from tests.protocol.builders import POLICY, RECIPE, THRESHOLDS, key
from tests.simulator import Disk, Network, Port

TENSORS = [("weights", "F32", (4, 4))]
CONFIG, TOKENIZER = b'{"model_type": "llama"}', b'{"model": "words"}'
VOCABULARY, END = 256, 1
TASK_SET = TaskSet.of(range(0, 2000, 7)).encode()
TASKS_FILE = b'{"question": "1 + 1", "answer": "2"}\n'


def checksum(raw: bytes) -> int:
    """What the engine measures of its tensors."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:7], "big") + 1


def manifest_of(raw: bytes) -> Manifest:
    """The manifest of the 64 bytes of a version."""
    return Manifest.of_file(TENSORS, raw, checksum(raw))


WHOLE_0 = np.linspace(-1, 1, 16, dtype="<f4").tobytes()
"""Version 0."""


def genesis(
    recipe: Recipe = RECIPE, policy: Policy = POLICY, *, devnet: bool = True, electors: tuple[str, ...] = ("elector",)
) -> bytes:
    """A signed genesis by "elector" whose model is version 0 above."""
    manifest = manifest_of(WHOLE_0)
    encoded = manifest.encode()
    return make_genesis(
        key("elector"),
        name="fakes",
        devnet=devnet,
        electors=tuple(key(elector).node for elector in electors),
        validators=(),
        model=Model(
            architecture="llama",
            config=Blob(hash_bytes(CONFIG), len(CONFIG)),
            tokenizer=Blob(hash_bytes(TOKENIZER), len(TOKENIZER)),
            manifest=Blob(manifest.digest, len(encoded)),
            whole=manifest.whole,
            compute_dtype="float32",
        ),
        tasks=(
            Task(
                "reasoning-gym",
                "basic_arithmetic",
                3,
                "{}",
                "0.1.25",
                None,
                Blob(hash_bytes(TASK_SET), len(TASK_SET)),
            ),
            Task("jsonl", "homework", 1, "{}", "0.9.0", Blob(hash_bytes(TASKS_FILE), len(TASKS_FILE))),
        ),
        recipe=recipe,
        timings=default_timings(devnet=True),
        policy=policy,
        thresholds=THRESHOLDS,
    )


class NodePort(Port):
    """A port with what the other parts of a daemon ask of ``node.net.host.Network``."""

    def __init__(self, network: Network, node: bytes, nursery: trio.Nursery) -> None:
        super().__init__(network, node, nursery)
        self.addresses = [f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id(node)}"]
        self.learned: dict[bytes, list[str]] = {}
        self.traffic = (10, 20)

    @property
    def peers(self) -> dict[bytes, Peer]:  # type: ignore[override]  # whatever asks a plain port only looks at its keys
        """Of two nodes the one with the lower id dialled."""
        return {peer: Peer(peer, peer < self.node, 0.0, "127.0.0.1:4001") for peer in super().peers}

    def learn(self, node: bytes, addresses: Sequence[str]) -> None:
        self.learned[node] = list(addresses)

    def known_addresses(self) -> dict[bytes, list[str]]:
        return dict(self.learned)


# --- children -------------------------------------------------------------------------------------------------------


@dataclass
class Faults:
    """What children do wrong: ``fail[op]`` is raised by the operation of that name, the given number of times."""

    fail: dict[str, tuple[Exception, int]] = field(default_factory=dict)
    diverge: int = 0
    """Steps of the trainer still to be stopped."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(child, operation) of every call."""
    arguments: list[dict[str, Any]] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that an operation takes; 0.05 where nothing else is said."""
    before: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Called while the operation runs."""

    async def note(self, child: str, op: str, arguments: dict[str, Any]) -> None:
        self.calls.append((child, op))
        self.arguments.append(arguments)
        await trio.sleep(self.seconds.get(op, 0.05))
        if op in self.before:
            self.before[op]()
        error, times = self.fail.get(op, (None, 0))
        if error is not None and times:
            self.fail[op] = (error, times - 1)
            raise error

    def count(self, child: str, op: str) -> int:
        return self.calls.count((child, op))


class Child:
    """What ``node.workers.child_process.Worker`` is for a role."""

    def __init__(self, name: str, pid: int, faults: Faults) -> None:
        self.name = name
        self.pid = pid
        self.faults = faults
        self.alive = True

    async def call(self, op: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        if not self.alive:
            raise WorkerError(f"{self.name}: {op}: the child ended with exit code 1", "died")
        try:
            await self.faults.note(self.name, op, arguments)
        except WorkerError as error:
            self.alive = not error.gone
            raise
        result: dict[str, Any] = getattr(self, op)(**arguments)
        return result


class EngineChild(Child):
    """Its "model" answers with the low bits of a hash over weights, seed and place."""

    raw = b""

    def configure(
        self, config: str, tokenizer: str, recipe: dict[str, Any], threads: int, dtype: str
    ) -> dict[str, Any]:
        assert dtype == "float32"
        assert Path(config).read_bytes() == CONFIG
        assert Path(tokenizer).read_bytes() == TOKENIZER
        self.recipe = Recipe(**recipe)
        return {"end_token": END, "vocabulary": VOCABULARY}

    def load(self, manifest: str, weights: str) -> dict[str, Any]:
        Manifest.parse(Path(manifest).read_bytes())
        self.raw = Path(weights).read_bytes()
        return {"checksum": checksum(self.raw), "parameters": 16, "hidden": 4, "seconds": 0.0}

    def encode(self, prompts: list[str]) -> dict[str, Any]:
        return {"tokens": [pack(self._prompt(prompt)) for prompt in prompts]}

    def _prompt(self, prompt: str) -> list[int]:
        return list(prompt.encode())[: self.recipe.max_prompt_tokens]

    def _answers(self, seed: bytes) -> list[int]:
        return [
            2 + hashlib.sha256(self.raw + seed + bytes([place])).digest()[0] % 8
            for place in range(self.recipe.group_size)
        ]

    def generate(self, prompts: list[str], seeds: list[bytes]) -> dict[str, Any]:
        groups = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            responses = [[pack([a, END]), pack([700, 0]), 1, str(a)] for a in self._answers(seed)]
            groups.append({"prompt": pack(self._prompt(prompt)), "responses": responses, "proofs": b"proof"})
        return {"groups": groups, "tokens": 2 * len(groups) * self.recipe.group_size, "seconds": 0.5}

    def replay(self, groups: list[dict[str, Any]], clip: int) -> dict[str, Any]:
        rows, texts = [], []
        for group in groups:
            claimed = [int.from_bytes(tokens[:4], "little") for tokens, _, _ in group["responses"]]
            wrong = sum(a != b for a, b in zip(claimed, self._answers(group["seed"]), strict=True))
            tokens = sum(len(tokens) // 4 for tokens, _, _ in group["responses"])
            rows.append([tokens, wrong, wrong * MILLION, wrong * MILLION, 0, 8, 0, 0, 0])
            texts.append([str(answer) for answer in claimed])
        return {"groups": rows, "texts": texts, "seconds": 0.1}


class TrainerChild(Child):
    """A step adds one to the last byte of every number; the checkpoint holds the number of steps made."""

    raw = b""
    steps = 0

    def configure(
        self, config: str, tokenizer: str, recipe: dict[str, Any], threads: int, dtype: str, recompute: str
    ) -> dict[str, Any]:
        self.recipe = Recipe(**recipe)
        return {}

    def load(self, manifest: str, weights: str, checkpoint: str | None, reference: list[str] | None) -> dict[str, Any]:
        assert (reference is None) == (self.recipe.kl == 0)
        if reference is not None:
            assert Path(reference[1]).read_bytes() == WHOLE_0
        self.raw = Path(weights).read_bytes()
        self.steps = 0 if checkpoint is None else int(Path(checkpoint).read_text())
        return {"checksum": checksum(self.raw)}

    def train(self, submissions: list[str], output: str, checkpoint: str) -> dict[str, Any]:
        if self.faults.diverge:
            self.faults.diverge -= 1
            return {"stopped": "the loss (nan) or the gradient norm (nan) is not finite"}
        parsed = [Submission.parse(Path(path).read_bytes(), self.recipe) for path in submissions]
        self.raw = b"".join(
            (int.from_bytes(self.raw[i : i + 4], "little") + 1).to_bytes(4, "little") for i in range(0, 64, 4)
        )
        self.steps += 1
        Path(output).write_bytes(self.raw)
        Path(checkpoint).write_text(str(self.steps))
        used = [group for one in parsed for group in one.groups if group.signal]
        trained = sum(len(group.responses) for group in used)
        tokens = sum(len(response.tokens) for group in used for response in group.responses)
        return {
            "metrics": {"trained": trained, "tokens": tokens},
            "tensors": [list(tensor) for tensor in TENSORS],
            "checksum": checksum(self.raw),
        }


class Tasks:
    """What ``node.tasks.task_service.TaskService`` is for a role: an even answer to an even item is right."""

    def __init__(self, table: Sequence[dict[str, Any]], faults: Faults) -> None:
        self.table = table
        self.faults = faults
        self.undecidable = False
        self.counts = (1 << 31,) * len(table)

    async def __aenter__(self) -> Tasks:
        self.faults.running["tasks"] += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        self.faults.running["tasks"] -= 1

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        await self.faults.note("tasks", "questions", {"items": items})
        return [f"{self.table[index]['name'][:8]} {item}" for index, item in items]

    async def score(self, items: Sequence[tuple[int, int, str]]) -> list[int | None]:
        await self.faults.note("tasks", "score", {"items": items})
        if "undecidable" in self.faults.before:
            return [None for _ in items]
        return [MILLION if (item + int(text)) % 2 == 0 else 0 for _, item, text in items]

    async def confirm(self, items: Sequence[tuple[int, int, str]], claimed: Sequence[int]) -> list[int | None]:
        await self.faults.note("tasks", "confirm", {"items": items})
        return await self.score(items)


class DeltaChild(Child):
    """The real work, in this process."""

    def describe(self, **arguments: Any) -> dict[str, Any]:
        return delta_worker.describe(**{**arguments, "threads": 1})

    def apply(self, **arguments: Any) -> dict[str, Any]:
        return delta_worker.apply(**{**arguments, "threads": 1})


CHILDREN = {
    "node.workers.engine_child": EngineChild,
    "node.workers.trainer_child": TrainerChild,
    "node.workers.delta_child": DeltaChild,
}


def install(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Every child is one of the above, and work for threads is done at once: no thread moves the mock clock."""
    shared = Faults()
    pids = iter(range(1000, 2000))

    @asynccontextmanager
    async def open_worker(module: str, *, name: str, **other: Any) -> AsyncIterator[Child]:
        kind = CHILDREN[module]
        shared.running[name] += 1
        shared.most[name] = max(shared.most[name], shared.running[name])
        child = kind(name, next(pids), shared)
        try:
            await shared.note(name, "start", {})
            yield child
        finally:
            # A child takes a moment to die, and its owner waits for that.
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
            shared.running[name] -= 1

    async def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    monkeypatch.setattr(engine_role, "open_worker", open_worker)
    monkeypatch.setattr(trainer_role, "open_worker", open_worker)
    monkeypatch.setattr(delta_making, "open_worker", open_worker)
    monkeypatch.setattr(engine_role, "TaskService", lambda table: Tasks(table, shared))
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    monkeypatch.setattr(trio.from_thread, "run_sync", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return shared


# --- nodes ----------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A node that runs, and what a test may do to it."""

    node: Node
    disk: Disk
    port: NodePort
    elector: Elector | None
    sync: LogSync
    stopped: trio.Event
    nursery: trio.Nursery = field(init=False)

    @property
    def id(self) -> bytes:
        return self.node.id

    @property
    def steps(self) -> int:
        return len(self.node.log.ledger.steps())


class Cluster:
    """Nodes of one domain. "elector" is the founder and holds version 0 and the model's files."""

    def __init__(self, folder: Path, nursery: trio.Nursery, network: Network, data: bytes) -> None:
        self.folder = folder
        self.nursery = nursery
        self.network = network
        self.genesis = data
        self.domain: Domain = parse_genesis(data)
        self.running: dict[str, Running] = {}
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
    ) -> Running:
        """A node whose log is replicated and whose files are served; no part of it decides anything yet."""
        identity: Identity = key(name)
        directory = DataDirectory(self.folder / name)
        directory.create()
        fresh, disk = disk is None, disk if disk is not None else Disk()
        log = LogService(identity, await load(disk, self.domain), disk, known=known, fresh=fresh, thread_from=1 << 30)
        port = NodePort(self.network, identity.node, self.nursery)
        sync = LogSync(log, port, interval=self.domain.timings.presence_ms / 1000)
        stopped = trio.Event()
        node = Node(
            identity=identity,
            domain=self.domain,
            config=Config(name=name, willing=tuple(willing), devnet=DevnetConfig(cheat=cheat)),
            directory=directory,
            network=cast("Any", port),
            log=log,
            blobs=BlobStore(directory.blobs),
            versions=VersionStore(directory.versions),
            health=Health(logging.getLogger(f"test.{name}")),
            logger=logging.getLogger(f"test.{name}"),
            stop=stopped.set,
            pause_at_step=pause_at_step,
        )
        self.boots[name] += 1
        node.bulk = Bulk(node)  # with no child: weights travel over the links
        node.routes = Routes(node, node.bulk)
        node.weights, node.pool = Weights(node), Pool(node)
        node.pulls = Pulls(node)
        node.presences = Presences(node, self.boots[name])
        if name == "elector":
            self._found(node)
        serve_blobs(node.network, node.blobs.get)
        serve_chunks(node.network, node.versions.read_chunk)
        serve_haves(node.network, node.versions.bitmap)
        second_holder.serve(node)
        offers.serve(node)
        node.presences.listen()
        elector = await open_elector(log, identity, sync) if identity.node in self.domain.electors else None
        node.elector = elector
        running = Running(node, disk, port, elector, sync, stopped)
        await self.nursery.start(self._run, running)
        self.network.ports[identity.node] = port
        self.running[name] = running
        if fresh and join:
            await log.append(Join(identity.node, "farflung/test", name))
        return running

    async def start(self, name: str, **options: Any) -> Running:
        """A node with all its parts, as ``node.daemon`` runs them."""
        running = await self.node(name, **options)
        node = running.node
        parts = [node.presences.run, node.weights.run, RoleManager(node).run]
        if running.elector is not None:
            parts += [running.elector.run, TermWatch(node, running.elector).run]
        for part in parts:
            running.nursery.start_soon(part)
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
        elector = self.running["elector"].elector
        assert elector is not None
        await elector.cut()
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
            running.node.role = role
            await running.node.log.append(Role(role))
        for running in self.running.values():
            running.nursery.start_soon(running.node.presences.run)
        await self.cut()
        (trainer,) = (name for name, role in roles.items() if role == "trainer")
        elector = self.running["elector"].elector
        assert elector is not None
        await elector.grant_term(self.running[trainer].id)
        await self.agree()
        return await self.announce(trainer, WHOLE_0, None)

    async def announce(
        self, name: str, raw: bytes, predecessor: Entry | None, step: bytes | None = None, *, delta: bool = False
    ) -> Entry:
        """Node ``name`` announces a version that consists of ``raw``, and holds it; where ``delta``, with a delta."""
        node = self.running[name].node
        change = None
        if delta:
            assert predecessor is not None
            change = self._delta(node, raw, predecessor)
        manifest = manifest_of(raw)
        file = node.directory.work / "announced.bin"
        file.write_bytes(raw)
        node.versions.adopt(manifest.encode(), file)
        node.blobs.put(manifest.encode())
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
        node.weights.adopt(entry)
        await self.agree()
        return entry

    def _delta(self, node: Node, raw: bytes, predecessor: Entry) -> Blob:
        """What changed since the predecessor, in the node's stores."""
        file, delta = node.directory.work / "described.bin", node.directory.work / "described.delta"
        file.write_bytes(raw)
        base = node.weights.paths(predecessor.id)[0].parent
        rows = [list(row) for row in TENSORS]
        found = delta_worker.describe(rows, checksum(raw), str(file), str(base), str(delta))
        assert found["delta_manifest"] is not None
        node.versions.adopt(found["delta_manifest"], delta)
        return Blob(node.blobs.put(found["delta_manifest"]), len(found["delta_manifest"]))

    def role(self, role: str) -> str:
        """The name of the one running node with this role."""
        (name,) = (name for name, running in self.running.items() if running.node.role == role)
        return name

    async def _run(self, running: Running, *, task_status: Any) -> None:
        async with trio.open_nursery() as running.nursery:
            await running.nursery.start(running.sync.run)
            task_status.started()

    def _found(self, node: Node) -> None:
        for data in (CONFIG, TOKENIZER, TASKS_FILE, TASK_SET, manifest_of(WHOLE_0).encode()):
            node.blobs.put(data)
        raw = node.directory.work / "version-0.bin"
        raw.write_bytes(WHOLE_0)
        node.versions.adopt(manifest_of(WHOLE_0).encode(), raw)

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something holds; fails after ``seconds`` of the mock clock."""
        with trio.fail_after(seconds):
            while not condition():  # noqa: ASYNC110  several nodes change, each with an event of its own
                await trio.sleep(0.1)


@asynccontextmanager
async def open_cluster(
    folder: Path, network: Network | None = None, data: bytes | None = None
) -> AsyncIterator[Cluster]:
    """A cluster that ends with the block."""
    async with trio.open_nursery() as nursery:
        yield Cluster(folder, nursery, network or Network(), data or genesis())
        nursery.cancel_scope.cancel()


def presence(node: Node, **changes: Any) -> Presence:
    """A presence of ``node`` as it might publish."""
    plain = Presence(
        domain=node.domain.id,
        node=node.id,
        boot=1,
        counter=1,
        name=node.config.name,
        role=node.role,
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
