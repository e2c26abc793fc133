"""What the roles of a node work with: a view of its parts (``node.daemon.Parts``), the same for each of them.

Among it are the children that compute for them: what these are configured with, and how they are opened. What they are
and how they are spoken to: ``node.roles.engine_client`` and ``node.tasks.task_service``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import setitem
from typing import Any, Final, Protocol

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.roles.engine_client import Engine, Setup, open_child, vllm_installed
from node.roles.rollout_pool import Pool
from node.store.version_store import VersionStore
from node.tasks.task_service import TaskService
from node.telemetry.metrics import Metrics
from node.weights.following import WeightsService
from node.workers.child_messages import ConfigureEngine
from node.workers.child_process import OpenWorker, open_worker
from protocol.records import Blob
from protocol.weights.manifest import Manifest

OpenTasks = Callable[[Sequence[Mapping[str, Any]]], AbstractAsyncContextManager[TaskService]]
MAX_EVALUATIONS: Final = 1000
"""Evaluations that a running node remembers."""


@dataclass(slots=True)
class Evaluations:
    """What the trainer's evaluations found (rows as the control socket tells them), the newest last."""

    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVALUATIONS))
    under_way: bool = False
    """An evaluation of a version that is due is under way, or about to be."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Opens children; their processes are started by ``open_worker`` and ``tasks``."""

    node: Node
    own: OwnState
    blobs: BlobExchange
    open_worker: OpenWorker = open_worker
    tasks: OpenTasks = TaskService

    async def file(self, blob: Blob) -> str:
        """The path of one of the model's files, for a child."""
        return str(await self.blobs.path(blob.hash, blob.size))

    async def setup(self, dtype: str) -> Setup:
        """How this node's configuration wants an engine child."""
        domain, config = self.node.domain, self.node.config
        configured = ConfigureEngine(
            config=await self.file(domain.model.config),
            tokenizer=await self.file(domain.model.tokenizer),
            recipe=domain.recipe,
            dtype=dtype,
            threads=config.threads,
            tensor_parallel=config.tensor_parallel,
        )
        return Setup(configured, config.engine, self.node.directory.path / "vllm")

    async def model_bytes(self, engine: str) -> int:
        """Bytes of the domain's weights, where the choice of the engine depends on them; else 0."""
        if engine != "auto" or not vllm_installed():
            return 0
        blob = self.node.domain.model.manifest
        data = await trio.Path(await self.blobs.path(blob.hash, blob.size)).read_bytes()
        return (await trio.to_thread.run_sync(Manifest.parse, data)).size

    @asynccontextmanager
    async def open(self, dtype: str = "float32", *, generates: bool = False) -> AsyncIterator[Engine]:
        """An engine child, configured to compute in ``dtype``; it ends with the block. Audits are in float32 always.
        One that ``generates`` need not be able to replay."""
        setup = await self.setup(dtype)
        if not generates:
            setup = replace(setup, engine="torch")
        size, started = await self.model_bytes(setup.engine), partial(setitem, self.own.children, "engine")
        try:
            async with open_child(setup, size, started, open_worker=self.open_worker) as engine:
                yield engine
        finally:
            self.own.children.pop("engine", None)

    async def task_table(self) -> list[dict[str, Any]]:
        """The domain's tasks as the tasks child takes them, with the local paths of their data, and their sets."""
        table = []
        for task in self.node.domain.tasks:
            items = None
            if task.items is not None:
                items = await self.blobs.fetch(task.items.hash, task.items.size, timeout=60)
            path = None if task.data is None else await self.file(task.data)
            table.append({**asdict(task), "data": path, "items": items})
        return table

    @asynccontextmanager
    async def open_tasks(self, table: Sequence[Mapping[str, Any]] | None = None) -> AsyncIterator[TaskService]:
        """The sandboxed tasks child, configured with the domain's tasks, or with those of another ``table``."""
        async with self.tasks(await self.task_table() if table is None else table) as service:
            yield service


class Workbench(Protocol):
    """One node's."""

    node: Node
    own: OwnState
    presences: Presences
    blobs: BlobExchange
    versions: VersionStore
    weights: WeightsService
    pool: Pool
    engines: Engines
    metrics: Metrics
    evaluations: Evaluations
    failed_audits: Counter[bytes]
    """How often a child failed on a submission, by its ``rollout`` entry: the role may begin anew in between."""
