"""Trackers: what they are sent, and what their failures do. The children are stand-ins; ``workers/test_tracker`` has
the real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.config import TrackingConfig
from node.context import Node
from node.telemetry import tracking
from node.workers import frames
from node.workers.child_messages import (
    FinishTracker,
    LogRows,
    OpenTracker,
    TensorBoardFolder,
    TrackerRow,
    WandBRun,
)
from node.workers.child_process import WorkerError
from node.workers.frames import ChildRequest
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster

Calls = list[Any]
"""The environment of a child that was started, and the requests that it was sent."""


class Child:
    """Notes its calls; ``failures`` are raised by its next calls of that name."""

    def __init__(self, calls: Calls, failures: dict[str, list[WorkerError]]) -> None:
        self.calls = calls
        self.failures = failures
        self.alive = True

    async def call(self, request: ChildRequest[None], *, timeout: float) -> None:
        await trio.sleep(0.01)
        op = frames.operation_of(type(request))
        if self.failures.get(op):
            error = self.failures[op].pop(0)
            self.alive = not error.gone
            raise error
        self.calls.append(request)


@pytest.fixture
def failures() -> dict[str, list[WorkerError]]:
    return {}


@pytest.fixture
def calls() -> Calls:
    return []


def opener(calls: Calls, failures: dict[str, list[WorkerError]]) -> Any:
    """Starts children that note their calls."""

    @asynccontextmanager
    async def open_worker(module: str, *, name: str, environment: dict[str, str]) -> AsyncIterator[Child]:
        assert (module, name) == ("node.workers.tracker_child", "tensorboard")
        calls.append(dict(environment))
        yield Child(calls, failures)

    return open_worker


def configured(node: Node, trackers: TrackingConfig) -> Node:
    return replace(node, config=replace(node.config, tracking=trackers))


def rows(calls: Calls) -> list[TrackerRow]:
    return [row for call in calls if isinstance(call, LogRows) for row in call.rows]


def versions(calls: Calls) -> list[int]:
    return [row.version for row in rows(calls) if row.kind == "step"]


async def test_what_the_configuration_asks_for(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        node = (await cluster.node("elector")).node
        assert tracking.trackers(node) == []
        environment = {
            "HOME": "/home/me",
            "WANDB_MODE": "offline",
            "HTTPS_PROXY": "http://proxy",
            "no_proxy": "localhost",
            "FARFLUNG_KEY": "secret",
            "PATH": "/bin",
        }
        both = configured(node, TrackingConfig(tensorboard=True, wandb="far flung"))
        board, wandb = tracking.trackers(both, environment)
        assert (board.name, board.environment) == ("tensorboard", {})
        assert board.wanted == TensorBoardFolder(str(node.directory.path / "tensorboard"))
        assert set(wandb.environment) == {"HOME", "WANDB_MODE", "HTTPS_PROXY", "no_proxy"}
        assert isinstance(wandb.wanted, WandBRun)
        assert wandb.wanted.project == "far flung"
        assert wandb.wanted.run == f"{node.domain.id.hex()[:12]}-{node.id.hex()[:12]}"
        elsewhere = configured(node, TrackingConfig(tensorboard="/elsewhere/runs"))
        assert tracking.trackers(elsewhere)[0].wanted == TensorBoardFolder("/elsewhere/runs")


def test_a_rows_numbers_are_scalars() -> None:
    row = {"time": 1000.5, "kind": "step", "version": 1, "loss": 0.5, "reward": 0.25, "word": "x", "nothing": None}
    assert tracking.tracked(row) == TrackerRow("step", 1000.5, 1, {"step/loss": 0.5, "step/reward": 0.25})
    row = {"time": 1003.0, "kind": "eval", "task": "sums", "pass_rate": 0.75, "greedy": 0, "flag": True}
    scalars = {"eval/sums/pass_rate": 0.75, "eval/sums/greedy": 0.0}
    assert tracking.tracked(row) == TrackerRow("eval", 1003.0, 0, scalars)


@asynccontextmanager
async def fed(
    tmp_path: Path, faults: Faults, calls: Calls, failures: dict[str, list[WorkerError]]
) -> AsyncIterator[Running]:
    """A node whose metrics go to TensorBoard."""
    async with open_cluster(tmp_path, faults) as cluster, trio.open_nursery() as nursery:
        running = await cluster.node("elector")
        parts, node = running.parts, configured(running.node, TrackingConfig(tensorboard=True))
        run = partial(tracking.run, open_worker=opener(calls, failures))
        nursery.start_soon(run, node, parts.own, parts.metrics, parts.weights)
        yield running
        nursery.cancel_scope.cancel()


async def test_a_tracker_gets_every_row_and_is_closed(
    tmp_path: Path, faults: Faults, calls: Calls, autojump_clock: trio.testing.MockClock
) -> None:
    async with fed(tmp_path, faults, calls, {}) as running:
        await trio.sleep(1)
        running.parts.metrics.record("step", version=1)
        await trio.sleep(tracking.SAMPLE_EVERY)
        running.parts.metrics.record("step", version=2)
        await trio.sleep(1)
    assert versions(calls) == [1, 2]
    assert calls[0] == {}
    assert isinstance(calls[1], OpenTracker)
    assert calls[-1] == FinishTracker()
    samples = [row for row in rows(calls) if row.kind == "node"]
    assert len(samples) == 2
    assert {f"node/{name}" for name in ("peers", "bytes_sent", "credit", "warnings")} <= samples[0].scalars.keys()


async def test_what_is_not_installed_is_one_clear_line_and_loses_nothing(
    tmp_path: Path,
    faults: Faults,
    calls: Calls,
    failures: dict[str, list[WorkerError]],
    autojump_clock: trio.testing.MockClock,
) -> None:
    missing = "tensorboard: open: tensorboard cannot be used (No module named 'tensorboard'): pip install …"
    failures["open"] = [WorkerError(missing, "user")]
    async with fed(tmp_path, faults, calls, failures) as running:
        health = running.node.health
        await trio.sleep(0.001)
        running.parts.metrics.record("step", version=1)
        await trio.sleep(1)
        (line,) = health.warnings.values()
        assert line == (
            "tensorboard gets no metrics, metrics.jsonl has them: tensorboard cannot be used "
            "(No module named 'tensorboard'): pip install …"
        )
        running.parts.metrics.record("step", version=2)
        await trio.sleep(tracking.POLICY.pause)  # somebody installed it
        assert versions(calls) == [1, 2]
        assert health.warnings == {}


async def test_a_child_that_dies_is_started_again_and_gets_what_it_had(
    tmp_path: Path,
    faults: Faults,
    calls: Calls,
    failures: dict[str, list[WorkerError]],
    autojump_clock: trio.testing.MockClock,
) -> None:
    failures["log"] = [WorkerError("tensorboard: log: the child was ended by signal SIGKILL", "died")]
    async with fed(tmp_path, faults, calls, failures) as running:
        await trio.sleep(0.001)
        running.parts.metrics.record("step", version=7)
        await trio.sleep(1)
        assert versions(calls) == []
        assert "SIGKILL" in running.node.health.warnings["tracking tensorboard"]
        await trio.sleep(tracking.POLICY.pause)
        assert versions(calls) == [7]
        assert calls.count({}) == 2  # starts
        # Of a dead child nothing is asked at the end.
        assert FinishTracker() not in calls
