"""The trainer's evaluations: which versions, on what, and that training goes on whatever becomes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from node.config import TrainerConfig
from node.roles import trainer_evaluation
from node.workers.child_process import WorkerError
from protocol.log.entry import Entry
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import Cluster, Running, open_cluster

QUESTIONS = 8
BROKEN = TrainerConfig(eval_every=2, eval_questions=QUESTIONS, eval_samples=0)
"""What no configuration may say: evaluations fail of a bug."""


def configured(every: int) -> TrainerConfig:
    return TrainerConfig(eval_every=every, eval_questions=QUESTIONS)


@asynccontextmanager
async def evaluated(
    folder: Path, faults: Faults, every: int, versions: int
) -> AsyncIterator[tuple[Cluster, Running, Entry]]:
    """A trainer that holds version 0 and so many more, and evaluates; and the newest of them."""
    async with open_cluster(folder, faults) as cluster:
        await cluster.node("elector")
        await cluster.node("t", trainer=configured(every))
        newest = await cluster.stage(t="trainer", v="validator", i="inference")
        for number in range(1, versions + 1):
            newest = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], newest)
        running = cluster.running["t"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer_evaluation.run, running.bench)
            yield cluster, running, newest
            nursery.cancel_scope.cancel()


def asked(faults: Faults) -> list[list[bytes]]:
    """The seeds of every call to generate."""
    pairs = zip(faults.calls, faults.arguments, strict=True)
    return [arguments["seeds"] for call, arguments in pairs if call == ("engine", "generate")]


async def test_every_second_version_is_asked_the_same(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with evaluated(tmp_path, faults, every=2, versions=0) as (cluster, running, newest):
        evaluations = running.bench.evaluations
        for number in range(1, 6):
            await trio.sleep(5)
            assert not evaluations.under_way
            newest = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], newest)
        await trio.sleep(5)
        assert [found["version"] for found in evaluations.rows] == [0, 2, 4]
        assert set(running.own.children) == {"bulk", "evaluation"}
        # One child for all of them.
        assert faults.count("engine", "start") == 1
        first, *others = asked(faults)
        assert others == [first, first]
        assert len(set(first)) == 2 * QUESTIONS
        for found in evaluations.rows:
            assert [score["task"] for score in found["scores"]] == ["basic_arithmetic", "homework", "all"]
            assert all(score["pass_rate_low"] < score["pass_rate_high"] for score in found["scores"])
        rows = [row for row in running.measured.take() if row["kind"] == "eval"]
        assert [(row["version"], row["task"]) for row in rows[:3]] == [
            (0, "basic_arithmetic"),
            (0, "homework"),
            (0, "all"),
        ]
        assert rows[-1]["version"] == 4
        assert (rows[0]["questions"], rows[0]["samples"]) == (QUESTIONS, 1)
        assert rows[2]["pass_rate"] == evaluations.rows[0]["scores"][2]["pass_rate"]
    assert faults.running["engine"] == faults.running["tasks"] == 0
    assert "evaluation" not in running.own.children


async def test_versions_that_were_overtaken_are_left_out(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with evaluated(tmp_path, faults, every=2, versions=5) as (_, running, _):
        evaluations = running.bench.evaluations
        await trio.sleep(0.1)
        assert evaluations.under_way
        await trio.sleep(10)
        assert [found["version"] for found in evaluations.rows] == [4]
        assert not evaluations.under_way


async def test_a_child_that_dies_is_a_warning_and_the_version_is_evaluated_after_a_pause(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    faults.fail["generate"] = (WorkerError("engine: generate: the child was ended by signal SIGKILL", "died"), 1)
    async with evaluated(tmp_path, faults, every=1, versions=0) as (_, running, _):
        evaluations = running.bench.evaluations
        await trio.sleep(2)
        assert "SIGKILL; again in" in running.warnings["evaluation"]
        assert not evaluations.under_way
        await trio.sleep(3 * trainer_evaluation.POLICY.pause)
        assert [found["version"] for found in evaluations.rows] == [0]
        assert running.warnings == {}


async def test_none_are_made_unless_somebody_asks(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", i="inference")
        await trainer_evaluation.run(cluster.running["t"].bench)
        assert faults.count("engine", "start") == 0


@pytest.mark.parametrize("broken", [False, True])
async def test_training_goes_on_with_evaluations_and_without(
    tmp_path: Path,
    faults: Faults,
    autojump_clock: trio.testing.MockClock,
    broken: bool,
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            willing = ("inference",) if name == "elector" else ("trainer", "relay", "validator", "inference")
            await cluster.start(name, willing=willing, pause_at_step=4, trainer=BROKEN if broken else configured(2))
        await cluster.until(lambda: all(running.steps >= 4 for running in cluster.running.values()))
        running = cluster.running[cluster.role("trainer")]
        rows = running.bench.evaluations.rows
        if broken:
            assert running.warnings["evaluation"].startswith("a version was not evaluated: ")
            assert not rows
        else:
            await cluster.until(lambda: bool(rows) and rows[-1]["version"] == 4)
            assert "evaluation" not in running.warnings
