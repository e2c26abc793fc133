"""Trackers: what they are told, and what their failures do. The children are stand-ins; ``workers/test_tracker`` has
the real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.config import TrackingConfig
from node.telemetry import tracking
from node.workers.child_process import WorkerError
from tests.node.fake_children import Faults
from tests.node.fakes import Cluster, Running, open_cluster

Calls = list[tuple[str, dict[str, Any]]]


class Child:
    """Notes its calls; ``failures`` are raised by its next calls of that name."""

    def __init__(self, calls: Calls, failures: dict[str, list[WorkerError]]) -> None:
        self.calls = calls
        self.failures = failures
        self.alive = True

    async def call(self, op: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        await trio.sleep(0.01)
        if self.failures.get(op):
            error = self.failures[op].pop(0)
            self.alive = not error.gone
            raise error
        self.calls.append((op, arguments))
        return {}


@pytest.fixture
def failures() -> dict[str, list[WorkerError]]:
    return {}


@pytest.fixture
def calls(faults: Faults, failures: dict[str, list[WorkerError]]) -> Calls:
    found: Calls = []

    @asynccontextmanager
    async def open_worker(module: str, *, name: str, environment: dict[str, str]) -> AsyncIterator[Child]:
        assert (module, name) == ("node.workers.tracker_child", "tensorboard")
        found.append(("start", dict(environment)))
        yield Child(found, failures)

    faults.machinery = replace(faults.machinery, open_worker=open_worker)  # type: ignore[arg-type]
    return found


async def configured(cluster: Cluster, tensorboard: bool | str = False, wandb: str = "") -> Running:
    return await cluster.node("elector", tracking=TrackingConfig(tensorboard, wandb))


def versions(calls: Calls) -> list[int]:
    rows = [row for op, told in calls if op == "log" for row in told["rows"]]
    return [row["version"] for row in rows if row["kind"] == "step"]


async def test_what_the_configuration_asks_for(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        node = (await configured(cluster)).node
        assert tracking.trackers(node) == []
        node = replace(node, config=replace(node.config, tracking=TrackingConfig(tensorboard=True, wandb="far flung")))
        environment = {
            "HOME": "/home/me",
            "WANDB_MODE": "offline",
            "HTTPS_PROXY": "http://proxy",
            "no_proxy": "localhost",
            "FARFLUNG_KEY": "secret",
            "PATH": "/bin",
        }
        board, wandb = tracking.trackers(node, environment)
        assert (board.name, board.environment) == ("tensorboard", {})
        assert board.options == {"folder": str(node.directory.path / "tensorboard")}
        assert set(wandb.environment) == {"HOME", "WANDB_MODE", "HTTPS_PROXY", "no_proxy"}
        assert wandb.options["project"] == "far flung"
        assert wandb.options["run"] == f"{node.domain.id.hex()[:12]}-{node.id.hex()[:12]}"
        node = replace(node, config=replace(node.config, tracking=TrackingConfig(tensorboard="/elsewhere/runs")))
        assert tracking.trackers(node)[0].options == {"folder": "/elsewhere/runs"}


async def test_a_tracker_gets_every_row_and_is_closed(
    tmp_path: Path, faults: Faults, calls: Calls, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await configured(cluster, tensorboard=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.parts.services()["feeding trackers"])
            await trio.sleep(1)
            running.parts.metrics.record("step", version=1)
            await trio.sleep(tracking.SAMPLE_EVERY)
            running.parts.metrics.record("step", version=2)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert versions(calls) == [1, 2]
    assert [op for op, _ in calls][:2] == ["start", "open"]
    assert calls[-1] == ("finish", {})
    samples = [row for op, told in calls if op == "log" for row in told["rows"] if row["kind"] == "node"]
    assert len(samples) == 2
    assert {"version", "role", "peers", "bytes_sent", "credit", "warnings"} <= samples[0].keys()


async def test_what_is_not_installed_is_one_clear_line_and_loses_nothing(
    tmp_path: Path,
    faults: Faults,
    calls: Calls,
    failures: dict[str, list[WorkerError]],
    autojump_clock: trio.testing.MockClock,
) -> None:
    missing = "tensorboard: open: tensorboard cannot be used (No module named 'tensorboard'): pip install …"
    failures["open"] = [WorkerError(missing, "user")]
    async with open_cluster(tmp_path, faults) as cluster:
        running = await configured(cluster, tensorboard=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.parts.services()["feeding trackers"])
            await trio.sleep(0.001)
            running.parts.metrics.record("step", version=1)
            await trio.sleep(1)
            (line,) = running.warnings.values()
            assert line == (
                "tensorboard gets no metrics, metrics.jsonl has them: tensorboard cannot be used "
                "(No module named 'tensorboard'): pip install …"
            )
            running.parts.metrics.record("step", version=2)
            await trio.sleep(tracking.FIRST_PAUSE)  # somebody installed it
            assert versions(calls) == [1, 2]
            assert running.warnings == {}
            nursery.cancel_scope.cancel()


async def test_a_child_that_dies_is_started_again_and_gets_what_it_had(
    tmp_path: Path,
    faults: Faults,
    calls: Calls,
    failures: dict[str, list[WorkerError]],
    autojump_clock: trio.testing.MockClock,
) -> None:
    failures["log"] = [WorkerError("tensorboard: log: the child was ended by signal SIGKILL", "died")]
    async with open_cluster(tmp_path, faults) as cluster:
        running = await configured(cluster, tensorboard=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.parts.services()["feeding trackers"])
            await trio.sleep(0.001)
            running.parts.metrics.record("step", version=7)
            await trio.sleep(1)
            assert versions(calls) == []
            assert "SIGKILL" in running.warnings["tracking tensorboard"]
            await trio.sleep(tracking.FIRST_PAUSE)
            assert versions(calls) == [7]
            assert [op for op, _ in calls].count("start") == 2
            # Of a dead child nothing is asked at the end.
            assert "finish" not in [op for op, _ in calls]
            nursery.cancel_scope.cancel()
