"""How questions go to a version and its answers to the scorers. The children are stand-ins; ``cli/test_eval`` has real
ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import trio

from node.evaluation.version_answers import Question, QuestionAnswers, answer, sampling
from node.roles.engine_client import Engine
from node.tasks.task_service import TaskService
from node.workers.child_messages import (
    EngineReady,
    GenerateGroups,
    LoadVersion,
    WrittenGroup,
    WrittenGroups,
    WrittenResponse,
)
from node.workers.child_process import Worker
from protocol.errors import LocalError
from protocol.work.rollout import FINISH_END, FINISH_LENGTH, pack
from tests.node.fake_children import END, VOCABULARY, WHOLE_0, checksum, manifest_of
from tests.protocol.builders import RECIPE, digest


class Child:
    """Writes its prompt back, one token more with each sample; the last sample of a group does not end by itself."""

    pid = 7

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.batches: list[list[str]] = []

    async def call(self, request: LoadVersion | GenerateGroups, *, timeout: float) -> int | WrittenGroups:
        await trio.lowlevel.checkpoint()
        if isinstance(request, LoadVersion):
            return checksum(await trio.Path(request.weights).read_bytes())
        self.batches.append(request.prompts)
        groups = [
            WrittenGroup(
                b"",
                [
                    WrittenResponse(
                        pack([1] * (number + 1)),
                        pack([0] * (number + 1)),
                        FINISH_LENGTH if number + 1 == self.samples else FINISH_END,
                        f"{prompt}/{number}",
                    )
                    for number in range(self.samples)
                ],
                b"",
            )
            for prompt in request.prompts
        ]
        return WrittenGroups(groups, 0, 0.0)


class Service:
    """Rewards a response by the number of its sample; that of task 1 is undecidable."""

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        await trio.lowlevel.checkpoint()
        return [f"{task}-{item}" for task, item in items]

    async def score(self, items: Sequence[tuple[int, int, str]]) -> list[int | None]:
        await trio.lowlevel.checkpoint()
        for task, item, text in items:
            assert text.startswith(f"{task}-{item}")
        return [None if task else int(text.rpartition("/")[2]) for task, _, text in items]


def opened(samples: int) -> tuple[Engine, Child]:
    child = Child(samples)
    ready = EngineReady(END, VOCABULARY)
    return Engine("torch", cast("Worker", child), ready, sampling(RECIPE, samples)), child


async def test_answers_come_in_the_questions_order_with_what_they_earned() -> None:
    sampler, _ = opened(3)
    questions = [Question(0, 5, digest("a")), Question(1, 6, digest("b"))]
    told: list[tuple[int, int]] = []
    found = await answer(sampler, cast("TaskService", Service()), questions, lambda *done: told.append(done))
    assert found == [
        QuestionAnswers(questions[0], (0, 1, 2), (1, 2, 3), 2),
        QuestionAnswers(questions[1], (None, None, None), (1, 2, 3), 2),
    ]
    assert told == [(2, 2)]


async def test_the_same_questions_meet_in_the_same_batches() -> None:
    for samples, at_once in ((32, 8), (100, 2), (200, 1)):
        sampler, child = opened(samples)
        questions = [Question(0, item, digest(str(item))) for item in range(9)]
        found = await answer(sampler, cast("TaskService", Service()), questions)
        assert [each.question for each in found] == questions
        sizes = [len(batch) for batch in child.batches]
        assert sizes == [at_once] * (9 // at_once) + ([9 % at_once] if 9 % at_once else [])


async def test_other_tensors_than_the_manifests_are_noticed(tmp_path: Path) -> None:
    sampler, _ = opened(1)
    manifest, whole = tmp_path / "manifest", tmp_path / "whole"
    manifest.write_bytes(manifest_of(WHOLE_0).encode())
    whole.write_bytes(WHOLE_0)
    await sampler.load(manifest, whole)
    altered = tmp_path / "altered"
    altered.write_bytes(b"\1" + WHOLE_0[1:])
    with pytest.raises(LocalError, match="other tensors"):
        await sampler.load(manifest, altered)


def test_a_greedy_recipe_leaves_noise_nothing_to_decide() -> None:
    assert sampling(RECIPE, 5).group_size == 5
    assert sampling(RECIPE, 5).temperature == RECIPE.temperature
    assert sampling(RECIPE, 1, greedy=True).temperature == 1
