"""Has a version of the weights answer questions, and scores what it wrote: what evaluations and profiles share.

1. The engine child, the sampler and the sandboxed scoring are those of the inference role. An answer follows from the
   version, the question, the question's seed and the recipe.
2. Questions go to the engine in batches whose size follows from the number of samples alone, so the same questions meet
   in the same batches wherever they are asked.
3. Nothing here needs a running node: files are named by their paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from msgspec.structs import replace as replace_fields

from node.errors import os_errors
from node.roles.engine_client import Engine, Setup, open_child
from node.store.hashing import hash_bytes
from node.tasks.task_service import Row, TaskService
from node.workers.child_process import OpenWorker, open_worker
from protocol.domain import Recipe
from protocol.records import Blob
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


def open_sampler(
    setup: Setup, recipe: Recipe, size: int, *, open_worker: OpenWorker = open_worker
) -> AbstractAsyncContextManager[Engine]:
    """An engine that follows ``recipe`` (see ``sampling``) with a model of ``size`` bytes.

    ``setup`` is a running node's (``node.roles.workbench.Engines.setup``) or made from files. Raises ``WorkerError``.
    """
    following = replace(setup, configured=replace_fields(setup.configured, recipe=recipe))
    return open_child(following, size, open_worker=open_worker)


def numbered(names: Iterable[str], mark: str) -> list[str]:
    """The tasks' ``names``; one that several have is followed by ``mark`` and a number, but for the first."""
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name}{mark}{seen[name]}")
    return labels


def data_blob(row: Row) -> Blob | None:
    """The data of a row of the task table, None where it has none. Raises ``UserError`` where it cannot be read."""
    if row["data"] is None:
        return None
    with os_errors(row["data"], "cannot be read", "name another file"):
        content = Path(row["data"]).read_bytes()
    return Blob(hash_bytes(content), len(content))


async def answer(
    engine: Engine,
    tasks: TaskService,
    questions: Sequence[Question],
    progress: Progress = lambda *_: None,
    keep: Callable[[Sequence[QuestionAnswers]], None] = lambda _: None,
) -> list[QuestionAnswers]:
    """What the loaded version answers to ``questions``, in their order; ``keep`` takes each batch when it is there.

    Raises ``WorkerError``.
    """
    found: list[QuestionAnswers] = []
    together = max(1, SEQUENCES // engine.recipe.group_size)
    for start in range(0, len(questions), together):
        batch = await _answer(engine, tasks, questions[start : start + together])
        keep(batch)
        found += batch
        progress(len(found), len(questions))
    return found


async def _answer(engine: Engine, tasks: TaskService, batch: Sequence[Question]) -> list[QuestionAnswers]:
    texts = await tasks.questions([(question.task, question.item) for question in batch])
    seeds = [question.seed for question in batch]
    prompts = [schedule.prompt(text, seed, engine.recipe) for text, seed in zip(texts, seeds, strict=True)]
    groups = (await engine.generate(prompts, seeds)).groups
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
