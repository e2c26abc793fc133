"""The trainer's evaluations: which versions, on what, and that training goes on whatever becomes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.config import TrainerConfig
from node.context import Node
from node.evaluation import held_out
from node.roles import trainer_evaluation
from node.workers.child_process import WorkerError
from protocol.log.entry import Entry
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import Cluster, open_cluster

QUESTIONS = 8


def configured(node: Node, every: int) -> Node:
    node.config = replace(node.config, trainer=TrainerConfig(eval_every=every, eval_questions=QUESTIONS))
    return node


@asynccontextmanager
async def evaluated(folder: Path, every: int, versions: int) -> AsyncIterator[tuple[Cluster, Node, Entry]]:
    """A trainer that holds version 0 and so many more, and evaluates; and the newest of them."""
    async with open_cluster(folder) as cluster:
        newest = await cluster.stage(t="trainer", v="validator", i="inference")
        for number in range(1, versions + 1):
            newest = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], newest)
        node = configured(cluster.running["t"].node, every)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer_evaluation.run, node)
            yield cluster, node, newest
            nursery.cancel_scope.cancel()


def asked(faults: Faults) -> list[list[bytes]]:
    """The seeds of every call to generate."""
    pairs = zip(faults.calls, faults.arguments, strict=True)
    return [arguments["seeds"] for call, arguments in pairs if call == ("engine", "generate")]


def rows_of(node: Node) -> list[dict[str, Any]]:
    rows = node.metrics._own.take()
    return [row for row in rows if row["kind"] == "eval"]


async def test_every_second_version_is_asked_the_same(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with evaluated(tmp_path, every=2, versions=0) as (cluster, node, newest):
        for number in range(1, 6):
            await trio.sleep(5)
            assert not node.evaluating
            newest = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], newest)
        await trio.sleep(5)
        assert [found["version"] for found in node.evaluations] == [0, 2, 4]
        assert set(node.children) == {"evaluation"}
        # One child for all of them.
        assert faults.count("engine", "start") == 1
        first, *others = asked(faults)
        assert others == [first, first]
        assert len(set(first)) == 2 * QUESTIONS
        for found in node.evaluations:
            assert [score["task"] for score in found["scores"]] == ["basic_arithmetic", "homework", "all"]
            assert all(score["pass_rate_low"] < score["pass_rate_high"] for score in found["scores"])
        rows = rows_of(node)
        assert [(row["version"], row["task"]) for row in rows[:3]] == [
            (0, "basic_arithmetic"),
            (0, "homework"),
            (0, "all"),
        ]
        assert rows[-1]["version"] == 4
        assert (rows[0]["questions"], rows[0]["samples"]) == (QUESTIONS, 1)
        assert rows[2]["pass_rate"] == node.evaluations[0]["scores"][2]["pass_rate"]
    assert faults.running["engine"] == faults.running["tasks"] == 0
    assert node.children == {}


async def test_versions_that_were_overtaken_are_left_out(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with evaluated(tmp_path, every=2, versions=5) as (_, node, _):
        await trio.sleep(0.1)
        assert node.evaluating
        await trio.sleep(10)
        assert [found["version"] for found in node.evaluations] == [4]
        assert not node.evaluating


async def test_a_child_that_dies_is_a_warning_and_the_version_is_evaluated_after_a_pause(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    faults.fail["generate"] = (WorkerError("engine: generate: the child was ended by signal SIGKILL", "died"), 1)
    async with evaluated(tmp_path, every=1, versions=0) as (_, node, _):
        await trio.sleep(2)
        assert "SIGKILL; again in" in node.health.warnings["evaluation"]
        assert not node.evaluating
        await trio.sleep(3 * trainer_evaluation.FIRST_PAUSE)
        assert [found["version"] for found in node.evaluations] == [0]
        assert node.health.warnings == {}


async def test_none_are_made_unless_somebody_asks(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", i="inference")
        await trainer_evaluation.run(configured(cluster.running["t"].node, 0))
        assert faults.count("engine", "start") == 0


@pytest.mark.parametrize("broken", [False, True])
async def test_training_goes_on_with_evaluations_and_without(
    tmp_path: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    broken: bool,
) -> None:
    async def draw(*_: object) -> None:
        raise RuntimeError("a bug")

    if broken:
        monkeypatch.setattr(held_out, "draw", draw)
    async with open_cluster(tmp_path, faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            willing = ("inference",) if name == "elector" else ("trainer", "relay", "validator", "inference")
            configured((await cluster.start(name, willing=willing, pause_at_step=4)).node, 2)
        await cluster.until(lambda: all(running.steps >= 4 for running in cluster.running.values()))
        node = cluster.running[cluster.role("trainer")].node
        if broken:
            assert "a bug" in node.health.warnings["evaluation"]
            assert not node.evaluations
        else:
            await cluster.until(lambda: bool(node.evaluations) and node.evaluations[-1]["version"] == 4)
            assert "evaluation" not in node.health.warnings
