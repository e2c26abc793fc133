"""The daemon's side of tasks: a sandboxed child that makes questions and scores responses, kept alive.

1. No task library is imported here. The child starts inside ``node.tasks.sandbox`` where that works; elsewhere only
   data sets whose scorers run no code are allowed.
2. Responses are scored in batches. Where one kills the child or keeps it beyond its time, the batch is scored again
   response by response, so that only the culprit's reward is undecidable (None). After ``MAX_DEATHS`` deaths in one
   call what is left of it is undecidable as well: score the responses of one author in one call, so that an attacker
   pays for himself.
3. ``confirm`` is for calling a claim false: where a reward comes out lower than claimed, the response must fail three
   times at three times the limit, else it is undecidable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import trio

from node.errors import UserError
from node.tasks import catalogue, sandbox
from node.tasks.limits import WALL_FACTOR
from node.workers.client import Worker, WorkerError, open_worker

CHILD: Final = "node.tasks.child"
LIMIT_SECONDS: Final = 2.0
"""Processor time that scoring one response may take."""
START_SECONDS: Final = 120.0
QUESTION_SECONDS: Final = 120.0
BATCH: Final = 128
MAX_DEATHS: Final = 8
CONFIRMATIONS: Final = 3
CONFIRMATION_FACTOR: Final = 3

Row = Mapping[str, Any]
Item = tuple[int, int, str]
"""Task index, item, response."""


def _absolute(tasks: Sequence[Row]) -> list[dict[str, Any]]:
    """Copies of the rows whose data can be found from any working directory: the sandbox has its own."""
    return [{**row, "data": None if row["data"] is None else os.path.abspath(row["data"])} for row in tasks]


def _files(tasks: Sequence[Row]) -> list[Path]:
    # One that is missing is the child's to complain of: it names the task.
    return [Path(row["data"]) for row in tasks if row["data"] is not None and os.path.exists(row["data"])]


def _plain(item: Item) -> list[Any]:
    """``item`` with text that can be encoded, whatever a tokenizer made of a model's bytes."""
    index, number, response = item
    return [index, number, response.encode("utf-8", "replace").decode("utf-8")]


class TaskService:
    """Questions and rewards of a domain's tasks. An async context manager; start it from the main thread.

    ``tasks`` are rows as in ``node.tasks.catalogue``. ``limit`` is the processor time in seconds that one response may
    take to score. ``sandboxed`` None means: where it works. Entering raises ``UserError`` where the tasks or this
    machine do not serve, and ``WorkerError`` where the child does not start.
    """

    def __init__(self, tasks: Sequence[Row], *, limit: float = LIMIT_SECONDS, sandboxed: bool | None = None) -> None:
        self._tasks = _absolute(tasks)
        self._limit = limit
        self._sandboxed = sandboxed
        self._prefix: list[str] = []
        self._lock = trio.Lock()
        self._worker: Worker | None = None
        self._stack = AsyncExitStack()
        self.counts: tuple[int, ...] = ()
        """How many items each task has."""
        self.deaths = 0
        """Children that died or were killed since the service started."""

    async def __aenter__(self) -> Self:
        problem = await trio.to_thread.run_sync(sandbox.available) if self._sandboxed is None else None
        if self._sandboxed is None:
            self._sandboxed = problem is None
        elif not self._sandboxed:
            problem = "the sandbox is switched off"
        catalogue.names_checked(self._tasks, sandbox_problem=problem)
        if self._sandboxed:
            self._prefix = sandbox.command(_files(self._tasks))
        try:
            await self._running()
        except WorkerError as error:
            if error.kind == "user":
                raise UserError(str(error).split(": configure: ", 1)[-1]) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def sandboxed(self) -> bool:
        """Whether the child runs in a sandbox."""
        return bool(self._sandboxed)

    @property
    def pid(self) -> int | None:
        """The child's process (the sandbox around it), None where none runs."""
        return None if self._worker is None else self._worker.pid

    async def _running(self) -> Worker:
        """The child, started and configured where there is none."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        await self._stop()
        worker = await self._stack.enter_async_context(open_worker(CHILD, name="tasks", prefix=self._prefix))
        try:
            told = await worker.call("configure", timeout=START_SECONDS, tasks=self._tasks, sandboxed=self._sandboxed)
        except BaseException:
            await self._stop()
            raise
        self._worker = worker
        self.counts = tuple(told["counts"])
        return worker

    async def _call(self, op: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        worker = await self._running()
        return await worker.call(op, timeout=timeout, **arguments)

    async def _stop(self) -> None:
        self._worker = None
        with trio.CancelScope(shield=True):
            await self._stack.aclose()

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        """The questions of (task index, item) pairs. Raises ``WorkerError`` where a generator fails or hangs."""
        async with self._lock:
            answer = await self._call("prompts", QUESTION_SECONDS, items=[list(item) for item in items])
        questions = answer.get("questions")
        if (
            not isinstance(questions, list)
            or len(questions) != len(items)
            or not all(isinstance(q, str) for q in questions)
        ):
            raise WorkerError("tasks: prompts: an answer of no known form", "internal")
        return questions

    async def score(self, items: Sequence[Item], *, limit: float | None = None) -> list[int | None]:
        """The rewards of (task index, item, response) triples in millionths; None is undecidable (rule 2).

        Raises ``WorkerError`` where the child cannot be started any more or an operation fails inside it.
        """
        seconds = self._limit if limit is None else limit
        rewards: list[int | None] = []
        deaths = 0
        async with self._lock:
            for start in range(0, len(items), BATCH):
                batch = items[start : start + BATCH]
                scored = await self._attempt(batch, seconds) if deaths < MAX_DEATHS else None
                if scored is not None:
                    rewards += scored
                    continue
                deaths += 1
                for item in batch:
                    alone = await self._attempt([item], seconds) if deaths < MAX_DEATHS else None
                    if alone is None:
                        deaths += 1
                    rewards.append(alone[0] if alone else None)
        return rewards

    async def _attempt(self, batch: Sequence[Item], seconds: float) -> list[int | None] | None:
        """The rewards of ``batch``, or None where the child did not survive it."""
        # Every response may use its wall time; the slack is for questions that are made again.
        timeout = len(batch) * seconds * WALL_FACTOR + QUESTION_SECONDS
        try:
            answer = await self._call("score", timeout, items=[_plain(item) for item in batch], limit=seconds)
        except WorkerError as error:
            if not error.gone:
                raise
            self.deaths += 1
            return None
        rewards = answer.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != len(batch):
            raise WorkerError("tasks: score: an answer of no known form", "internal")
        return [reward if type(reward) is int else None for reward in rewards]

    async def confirm(self, items: Sequence[Item], claimed: Sequence[int]) -> list[int | None]:
        """The rewards of ``items`` whose author claims ``claimed``, lower than the claim only where that is certain.

        Each of three scorings at three times the limit must give the same lower reward; where one does not, the reward
        is the claim if any scoring gave it, else None. A reward at or above the claim is returned as it is.
        """
        rewards = await self.score(items)
        for position, (item, claim) in enumerate(zip(items, claimed, strict=True)):
            first = rewards[position]
            if first is not None and first >= claim:
                continue
            again = [
                reward
                for _ in range(CONFIRMATIONS)
                for reward in await self.score([item], limit=self._limit * CONFIRMATION_FACTOR)
            ]
            if claim in again:
                rewards[position] = claim
            elif len(set(again)) > 1:
                rewards[position] = None
            else:
                rewards[position] = again[0]
        return rewards


async def check(tasks: Sequence[Row]) -> None:
    """Raise ``UserError`` with one line for the first thing that is wrong with a table of tasks, before it is used.

    Also asks each task for a few questions, which entering ``TaskService`` does not. Raises ``WorkerError`` where the
    child does not start.
    """
    problem = await trio.to_thread.run_sync(sandbox.available)
    catalogue.names_checked(tasks, sandbox_problem=problem)
    rows = _absolute(tasks)
    prefix = [] if problem else sandbox.command(_files(rows))
    async with open_worker(CHILD, name="tasks", prefix=prefix) as worker:
        try:
            answer = await worker.call("check", timeout=START_SECONDS, tasks=rows, sandboxed=problem is None)
        except WorkerError as error:
            if not error.gone:
                raise
            raise UserError(f"a task cannot be tried with these parameters: {error}", "make it easier") from None
    for line in answer["problems"]:
        raise UserError(str(line))
