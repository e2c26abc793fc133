"""The engine child as roles see it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from node.errors import UserError
from node.roles.engine_client import (
    AUTO_BYTES,
    LOAD_TIMEOUT,
    WORK_SPEED,
    Engine,
    Setup,
    chosen,
    claimed,
    load_timeout,
    open_child,
    vllm_environment,
)
from node.workers.child_messages import ConfigureEngine, EngineReady, ReplayedGroup, ReplayGroups
from node.workers.child_process import Worker, WorkerError, child_environment
from protocol.errors import LocalError
from protocol.work.rollout import Group, Response, pack
from tests.node.fake_children import (
    CONFIG,
    END,
    TASK_SET,
    TASKS_FILE,
    TOKENIZER,
    VOCABULARY,
    WHOLE_0,
    EngineChild,
    Faults,
)
from tests.node.fakes import open_cluster
from tests.protocol.builders import RECIPE, digest


async def test_files_of_the_domain_come_from_peers_and_the_child_gets_their_paths(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        running = await cluster.node("a")
        engines, children = running.bench.engines, running.own.children
        async with engines.open() as opened, engines.open_tasks():
            # The child itself compares the files' bytes: see ``EngineChild.configure``.
            assert (opened.end_token, opened.vocabulary) == (END, VOCABULARY)
            assert set(children) == {"bulk", "engine"}
        table = await engines.task_table()
        assert [row["name"] for row in table] == ["basic_arithmetic", "homework"]
        task = cluster.domain.tasks[1].data
        assert task is not None
        assert table[1]["data"] == str(running.blobs.path(task.hash))
        assert running.blobs.get(task.hash) == TASKS_FILE
        assert [row["items"] for row in table] == [TASK_SET, None]
        assert set(children) == {"bulk"}
        assert faults.running == {"engine": 0, "tasks": 0}


async def test_a_version_is_loaded_once_and_compared_with_its_manifest(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference")
        running = cluster.running["t"]
        async with running.bench.engines.open() as opened:
            manifest, whole = running.weights.held.paths(version.id)
            await opened.load(manifest, whole)
            await opened.load(manifest, whole)
            assert faults.count("engine", "load") == 1
            # A cheat's file is loaded unseen, and the real one anew after it.
            other = tmp_path / "other.bin"
            other.write_bytes(b"\0" * 64)
            await opened.load(manifest, other, other=True)
            await opened.load(manifest, whole)
            assert faults.count("engine", "load") == 3
            newest = await cluster.announce("t", b"\1" + WHOLE_0[1:], version)
            manifest, whole = running.weights.held.paths(newest.id)
            right = whole.read_bytes()
            whole.write_bytes(b"\2" + right[1:])  # the disk altered it
            with pytest.raises(LocalError, match="other tensors"):
                await opened.load(manifest, whole)
            # It is not taken for loaded afterwards.
            whole.write_bytes(right)
            await opened.load(manifest, whole)
            assert faults.count("engine", "load") == 5


def test_a_group_on_its_way_to_replay() -> None:
    group = Group(7, (1, 2), (Response((3, 4), (500_000, 0), 1_000_000, 1),), b"proofs")
    found = claimed(digest("seed"), group)
    assert (found.seed, found.prompt, found.proofs) == (digest("seed"), pack([1, 2]), b"proofs")
    assert found.responses == [(pack([3, 4]), pack([500_000, 0]))]


async def test_large_versions_and_long_responses_have_their_time() -> None:
    given: list[float] = []

    class Child:
        pid = 1

        async def call(self, request: ReplayGroups, *, timeout: float) -> list[ReplayedGroup]:
            given.append(timeout)
            return []

    response = Response((3,) * 5000, (0,) * 5000, 0, 0)
    judge = Engine("torch", cast("Worker", Child()), EngineReady(END, VOCABULARY), RECIPE)
    for responses in (1, 16):
        await judge.replay([(digest("seed"), Group(0, (1,), (response,) * responses, b""))], 1000)
    assert given[1] - given[0] == 15 * 5000 / WORK_SPEED
    assert load_timeout(62_000_000_000) > 1200 > load_timeout(0) == LOAD_TIMEOUT


@pytest.mark.parametrize(
    ("engine", "size", "installed", "found"),
    [
        ("auto", AUTO_BYTES, True, "vllm"),
        ("auto", AUTO_BYTES - 1, True, "torch"),
        ("auto", AUTO_BYTES, False, "torch"),
        ("torch", AUTO_BYTES, True, "torch"),
        ("vllm", 1, True, "vllm"),
    ],
)
def test_which_engine_generates(engine: str, size: int, installed: bool, found: str) -> None:
    assert chosen(engine, size, installed=installed) == found


def test_an_engine_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="vllm is not installed"):
        chosen("vllm", 1, installed=False)


@pytest.mark.parametrize("engine", ["auto", "torch"])
async def test_only_what_generates_is_vllm_and_auto_falls_back_on_torch(tmp_path: Path, engine: str) -> None:
    """Where vLLM is installed, and cannot compute this model."""
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    configured = ConfigureEngine(
        str(tmp_path / "config.json"), str(tmp_path / "tokenizer.json"), RECIPE, threads=3, tensor_parallel=2
    )
    started: list[tuple[str, Mapping[str, str]]] = []

    class Unable(EngineChild):
        def configure(self, request: ConfigureEngine) -> EngineReady:
            assert request == configured
            raise WorkerError("vllm engine: configure: no attention for heads of 16", "user")

    @asynccontextmanager
    async def open_worker(
        module: str, *, name: str, environment: Mapping[str, str] | None = None, **other: Any
    ) -> AsyncIterator[Any]:
        started.append((module, environment or {}))
        kind = Unable if module == "node.workers.vllm_child" else EngineChild
        yield kind(name, len(started), Faults())

    pids: list[int] = []
    setup = Setup(configured, engine, tmp_path)
    async with open_child(setup, AUTO_BYTES, pids.append, open_worker=open_worker, vllm=True) as opened:
        assert (opened.kind, opened.end_token) == ("torch", END)
    modules = (
        ["node.workers.engine_child"] if engine == "torch" else ["node.workers.vllm_child", "node.workers.engine_child"]
    )
    assert [module for module, _ in started] == modules
    assert pids == list(range(1, len(modules) + 1))
    if engine == "auto":
        assert started[0][1]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert started[0][1]["OMP_NUM_THREADS"] == "3"


def test_the_vllm_child_computes_in_as_many_threads_as_it_is_given(tmp_path: Path) -> None:
    threads = len(os.sched_getaffinity(0))  # MKL takes no more
    environment = child_environment(vllm_environment(threads, tmp_path))
    words = "import torch; print(torch.get_num_threads())"
    found = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) == threads
