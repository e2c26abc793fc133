"""The engine child as roles see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from node.errors import UserError
from node.roles import engine_client as engine_role
from node.roles.engine_client import (
    AUTO_BYTES,
    LOAD_TIMEOUT,
    WORK_SPEED,
    Prefill,
    chosen,
    load_timeout,
    wire,
)
from node.workers import vllm_start
from node.workers.child_process import Worker, WorkerError
from protocol.errors import LocalError
from protocol.work.rollout import Group, Response, pack
from tests.node.fake_children import END, TASK_SET, TASKS_FILE, VOCABULARY, WHOLE_0, Faults
from tests.node.fakes import open_cluster
from tests.protocol.builders import digest


async def test_files_of_the_domain_come_from_peers_and_the_child_is_told_its_paths(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        running = await cluster.node("a")
        engines, blobs = running.bench.engines, running.blobs
        async with engines.open() as opened, engines.open_tasks() as tasks:
            # The child itself compares the files' bytes: see ``EngineChild.configure``.
            assert (opened.end_token, opened.vocabulary) == (END, VOCABULARY)
            assert set(running.own.children) == {"engine"}
            assert [row["name"] for row in tasks.table] == ["basic_arithmetic", "homework"]  # type: ignore[attr-defined]
            task = cluster.domain.tasks[1].data
            assert task is not None
            assert tasks.table[1]["data"] == str(blobs.path(task.hash))  # type: ignore[attr-defined]
            assert blobs.get(task.hash) == TASKS_FILE
            assert [row["items"] for row in tasks.table] == [TASK_SET, None]  # type: ignore[attr-defined]
        assert running.own.children == {}
        assert faults.running == {"engine": 0, "tasks": 0}


async def test_a_version_is_loaded_once_and_compared_with_its_manifest(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference")
        running = cluster.running["t"]
        async with running.bench.engines.open() as opened:
            await opened.load(version.id)
            await opened.load(version.id)
            assert faults.count("engine", "load") == 1
            # A cheat's file is loaded unseen, and the real one anew after it.
            other = tmp_path / "other.bin"
            other.write_bytes(b"\0" * 64)
            await opened.load(version.id, other)
            await opened.load(version.id)
            assert faults.count("engine", "load") == 3
            newest = await cluster.announce("t", b"\1" + WHOLE_0[1:], version)
            right = running.weights.paths(newest.id)[1].read_bytes()
            running.weights.paths(newest.id)[1].write_bytes(WHOLE_0)
            with pytest.raises(LocalError, match="other tensors"):
                await opened.load(newest.id)
            # It is not taken for loaded afterwards.
            running.weights.paths(newest.id)[1].write_bytes(right)
            await opened.load(newest.id)
            assert faults.count("engine", "load") == 5


async def test_speed_is_measured(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        running = cluster.running["elector"]
        own = running.own
        async with running.bench.engines.open() as opened:
            answer = await opened.generate(["1 + 1", "2 + 2"], [digest("a"), digest("b")])
            assert len(answer["groups"]) == 2
            assert (own.tokens_generated, own.tokens_per_second) == (16, 32)
            await opened.generate(["3"], [digest("c")])
            assert own.tokens_generated == 24
            assert await opened.encode(["ab"]) == [pack([97, 98])]


def test_a_group_on_its_way_to_replay() -> None:
    group = Group(7, (1, 2), (Response((3, 4), (500_000, 0), 1_000_000, 1),), b"proofs")
    assert wire(digest("seed"), group) == {
        "seed": digest("seed"),
        "prompt": pack([1, 2]),
        "responses": [[pack([3, 4]), pack([500_000, 0]), 1]],
        "proofs": b"proofs",
    }


async def test_large_versions_and_long_responses_have_their_time() -> None:
    given: list[float] = []

    class Child:
        async def call(self, op: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
            given.append(timeout)
            return {}

    response = Response((3,) * 5000, (0,) * 5000, 0, 0)
    judge = Prefill(cast("Worker", Child()), END, VOCABULARY)
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


@pytest.mark.parametrize("generates", [True, False])
async def test_only_what_generates_is_vllm_and_auto_falls_back_on_torch(
    tmp_path: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    generates: bool,
) -> None:
    started: list[tuple[str, dict[str, str]]] = []
    fake = faults.machinery.open_worker

    class Unable:
        pid = 1

        async def call(self, op: str, *, timeout: float, **arguments: object) -> dict[str, object]:
            assert arguments["dtype"] == "float32"
            assert arguments["tensor_parallel"] == 1
            assert timeout == engine_role.VLLM_START_TIMEOUT
            raise WorkerError("vllm engine: configure: no attention for heads of 16", "user")

    @asynccontextmanager
    async def open_worker(module: str, *, name: str, environment: dict[str, str] | None = None) -> AsyncIterator[Any]:
        started.append((module, environment or {}))
        if module == "node.workers.vllm_child":
            yield Unable()
        else:
            async with fake(module, name=name) as child:
                yield child

    faults.machinery = replace(faults.machinery, open_worker=open_worker)
    monkeypatch.setattr(engine_role, "AUTO_BYTES", 1)
    monkeypatch.setattr(vllm_start, "installed", lambda: True)
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        running = cluster.running["elector"]
        async with running.bench.engines.open(generates=generates) as opened:
            assert await opened.encode(["ab"]) == [pack([97, 98])]
    modules = [module for module, _ in started]
    assert modules == ["node.workers.vllm_child"] * generates + ["node.workers.engine_child"]
    if generates:
        assert started[0][1]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert started[0][1]["OMP_NUM_THREADS"] == str(running.node.config.threads)
