"""Has a version of the weights answer questions, and scores what it wrote: what evaluations and profiles share.

1. The engine child, the sampler and the sandboxed scoring are those of the inference role. An answer follows from the
   version, the question, the question's seed and the recipe.
2. Questions go to the engine in batches whose size follows from the number of samples alone, so the same questions meet
   in the same batches wherever they are asked.
3. Nothing here needs a running node: files are named by their paths.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace as replace_fields

from node.roles.engine_client import WORK_SPEED, WORK_TIMEOUT, Setup, load_timeout, open_child
from node.tasks.task_service import TaskService
from node.workers.child_messages import GenerateGroups, LoadVersion, WrittenGroup
from node.workers.child_process import OpenWorker, Worker, open_worker
from protocol.domain import Recipe
from protocol.errors import LocalError
from protocol.weights.manifest import Manifest
from protocol.work import schedule
from protocol.work.rollout import FINISH_END

SEQUENCES: Final = 256
"""Answers that are written together. A change alters batches, and so, where two tokens are all but tied, results."""
GREEDY_TEMPERATURE: Final = 1
"""In micro: noise then decides only between tokens whose logits differ by less than 2·10⁻⁵."""

Progress = Callable[[int, int], None]
"""Told how many questions are answered, and of how many."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question to ask: the ``task``'s index in the table of the task service, its ``item``, and the 32-byte ``seed``
    of the noise and of the target length."""

    task: int
    item: int
    seed: bytes


@dataclass(frozen=True, slots=True)
class QuestionAnswers:
    """What a version answered to one question, sample by sample: ``rewards`` in micro (None: undecidable), ``lengths``
    in tokens, and how many of them ``ended`` by themselves."""

    question: Question
    rewards: tuple[int | None, ...]
    lengths: tuple[int, ...]
    ended: int


def sampling(recipe: Recipe, samples: int, *, greedy: bool = False) -> Recipe:
    """``recipe`` with ``samples`` answers to a question; ``greedy`` takes the likeliest token at every step."""
    temperature = GREEDY_TEMPERATURE if greedy else recipe.temperature
    return replace(recipe, group_size=samples, temperature=temperature)


class Sampler:
    """A child that writes answers with the version loaded last. Made by ``open_sampler``.

    ``engine`` is "torch" or "vllm", ``pid`` the child's process id, ``at_once`` how many questions it answers together.
    """

    def __init__(self, engine: str, worker: Worker, recipe: Recipe) -> None:
        self.engine = engine
        self.recipe = recipe
        self.pid = worker.pid
        self.at_once = max(1, SEQUENCES // recipe.group_size)
        self._worker = worker

    async def load(self, manifest: Path, whole: Path) -> None:
        """Load the version of a manifest's file and a file of raw tensors. Raises ``WorkerError`` and ``OSError``."""
        described = await trio.to_thread.run_sync(Manifest.parse, await trio.Path(manifest).read_bytes())
        timeout = load_timeout(described.size)
        if await self._worker.call(LoadVersion(str(manifest), str(whole)), timeout=timeout) != described.checksum:
            raise LocalError("the engine loaded other tensors than the manifest describes")

    async def write(self, prompts: Sequence[str], seeds: Sequence[bytes]) -> list[WrittenGroup]:
        """One group of answers to each prompt. Raises ``WorkerError``."""
        tokens = len(prompts) * self.recipe.group_size * self.recipe.max_response_tokens
        timeout = WORK_TIMEOUT + tokens / WORK_SPEED
        return (await self._worker.call(GenerateGroups(list(prompts), list(seeds)), timeout=timeout)).groups


@asynccontextmanager
async def open_sampler(
    setup: Setup, recipe: Recipe, size: int, *, open_worker: OpenWorker = open_worker
) -> AsyncIterator[Sampler]:
    """A sampler that follows ``recipe`` (see ``sampling``) with a model of ``size`` bytes.

    ``setup`` is a running node's (``node.roles.engines.Engines.setup``) or made from files. Raises ``WorkerError``.
    """
    following = replace(setup, configured=replace_fields(setup.configured, recipe=recipe))
    async with open_child(following, size, open_worker=open_worker) as (engine, worker, _):
        yield Sampler(engine, worker, recipe)


async def answer(
    sampler: Sampler, tasks: TaskService, questions: Sequence[Question], progress: Progress = lambda *_: None
) -> list[QuestionAnswers]:
    """What the loaded version answers to ``questions``, in their order. Raises ``WorkerError``."""
    found: list[QuestionAnswers] = []
    for start in range(0, len(questions), sampler.at_once):
        found += await _answer(sampler, tasks, questions[start : start + sampler.at_once])
        progress(len(found), len(questions))
    return found


async def _answer(sampler: Sampler, tasks: TaskService, batch: Sequence[Question]) -> list[QuestionAnswers]:
    texts = await tasks.questions([(question.task, question.item) for question in batch])
    seeds = [question.seed for question in batch]
    prompts = [schedule.prompt(text, seed, sampler.recipe) for text, seed in zip(texts, seeds, strict=True)]
    groups = await sampler.write(prompts, seeds)
    flat = [
        (question.task, question.item, one.text)
        for question, group in zip(batch, groups, strict=True)
        for one in group.responses
    ]
    rewards = iter(await tasks.score(flat))
    return [
        QuestionAnswers(
            question=question,
            rewards=tuple(next(rewards) for _ in group.responses),
            lengths=tuple(len(one.tokens) // 4 for one in group.responses),
            ended=sum(one.finish == FINISH_END for one in group.responses),
        )
        for question, group in zip(batch, groups, strict=True)
    ]
