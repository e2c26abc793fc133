"""The daemon's side of tasks: sandboxed children that make questions and score responses, kept alive.

1. No task library is imported here. One child (``node.tasks.task_child``) starts inside ``node.tasks.sandbox`` where
   that works; elsewhere only tasks whose scorers run no code are allowed. Code tasks have another child
   (``node.tasks.code.code_child``), which starts a sandbox for each program.
2. Responses are scored in batches. Where one kills the child or keeps it beyond its time, the batch is scored again
   response by response, so that only the culprit's reward is undecidable (None). After ``MAX_DEATHS`` deaths in one
   call what is left of it is undecidable as well: score the responses of one author in one call, so that an attacker
   pays for himself.
3. ``confirm`` is for calling a claim false: where a reward comes out lower than claimed, the response must fail three
   times at three times the limit, else it is undecidable.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import trio
from msgspec.structs import replace

from node.errors import UserError
from node.tasks import catalogue, package_tasks, sandbox
from node.tasks.process_limits import WALL_FACTOR
from node.tasks.task_messages import AskQuestions, CheckTasks, ConfigureTasks, ScoreResponses, TaskRow, TasksReady
from node.workers.child_process import OpenWorker, Worker, WorkerError, open_worker
from node.workers.frames import Answer, ChildRequest

CHILD: Final = "node.tasks.task_child"
CODE_CHILD: Final = "node.tasks.code.code_child"
LIMIT_SECONDS: Final = 2.0
"""Processor time that scoring one response may take, where it is no program."""
START_SECONDS: Final = 120.0
QUESTION_SECONDS: Final = 120.0
BATCH: Final = 128
MAX_DEATHS: Final = 8
CONFIRMATIONS: Final = 3
CONFIRMATION_FACTOR: Final = 3

NO_FORM: Final = "tasks: an answer of no known form"

Row = Mapping[str, Any]
"""A row as configurations and domains have it: see ``node.tasks.catalogue``."""
Item = tuple[int, int, str]
"""Task index, item, response."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A task table as children take it: absolute paths, and which files and folders they need to see."""

    rows: list[TaskRow]
    readable: list[Path]

    @classmethod
    def of(cls, tasks: Sequence[TaskRow]) -> Self:
        """Blocking: looks for the packages of tasks. Raises ``UserError`` where one is not installed as pinned."""
        rows: list[TaskRow] = []
        readable: list[Path] = []
        for row in tasks:
            # The sandbox has a working directory of its own.
            data = None if row.data is None else os.path.abspath(row.data)
            # A file that is missing is the child's to complain of: it names the task.
            readable += [] if data is None or not os.path.exists(data) else [Path(data)]
            paths: list[Path] = []
            if row.kind == "package":
                files, paths = package_tasks.locate(package_tasks.pinned(row.name, row.version))
                readable += files
            rows.append(replace(row, data=data, paths=tuple(map(str, paths))))
        return cls(rows, readable)

    def sides(self, open_child: OpenWorker, *, sandboxed: bool) -> dict[bool, _Side]:
        """The children that these tasks need: whether it runs programs → the child."""
        sides: dict[bool, _Side] = {}
        for programs in (False, True):
            rows = [row for row in self.rows if (row.kind == "code") == programs]
            if rows:
                prefix = sandbox.command(self.readable) if sandboxed and not programs else []
                module = CODE_CHILD if programs else CHILD
                sides[programs] = _Side(partial(open_child, module, name="tasks", prefix=prefix), rows, sandboxed)
        return sides


class _Side:
    """One of the children: the tasks it has, how it is started, and the running one."""

    def __init__(
        self, start: Callable[[], AbstractAsyncContextManager[Worker]], rows: list[TaskRow], sandboxed: bool
    ) -> None:
        self._start = start
        self._rows = rows
        self._sandboxed = sandboxed
        self._stack = AsyncExitStack()
        self._worker: Worker | None = None
        self.ready = TasksReady([])
        """What it answered when it was configured."""

    @property
    def pid(self) -> int | None:
        """The child's process (the sandbox around it), None where none runs."""
        return None if self._worker is None else self._worker.pid

    async def running(self) -> Worker:
        """The child, started and configured where there is none."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        await self.stop()
        worker = await self._stack.enter_async_context(self._start())
        try:
            self.ready = await worker.call(ConfigureTasks(self._rows, self._sandboxed), timeout=START_SECONDS)
            if len(self.ready.counts) != len(self._rows):
                raise WorkerError(f"{NO_FORM}: {len(self.ready.counts)} tasks", "internal")
        except BaseException:
            await self.stop()
            raise
        self._worker = worker
        return worker

    async def call(self, request: ChildRequest[list[Answer]], count: int, timeout: float) -> list[Answer]:
        """Ask the child for ``count`` things. Raises ``WorkerError``."""
        found = await (await self.running()).call(request, timeout=timeout)
        if len(found) != count:
            raise WorkerError(f"{NO_FORM}: {len(found)} answers to {count} questions", "internal")
        return found

    async def check(self) -> None:
        """Raise ``UserError`` for the first thing that is wrong with its tasks."""
        async with self._start() as worker:
            try:
                problems = await worker.call(CheckTasks(self._rows, self._sandboxed), timeout=START_SECONDS)
            except WorkerError as error:
                if not error.gone:
                    raise
                raise UserError(f"a task cannot be tried with these parameters: {error}", "make it easier") from None
        for line in problems:
            raise UserError(line)

    async def stop(self) -> None:
        """End the child, where one runs."""
        self._worker = None
        with trio.CancelScope(shield=True):
            await self._stack.aclose()


def _plain(item: Item) -> Item:
    """``item`` with text that can be encoded, whatever a tokenizer made of a model's bytes."""
    index, number, response = item
    return index, number, response.encode("utf-8", "replace").decode("utf-8")


class TaskService:
    """Questions and rewards of a domain's tasks. An async context manager; start it from the main thread.

    ``tasks`` are rows as in ``node.tasks.catalogue``. ``limit`` is the processor time in seconds that one response may
    take to score. ``sandboxed`` None means: where it works. Entering raises ``UserError`` where the tasks or this
    machine do not serve, and ``WorkerError`` where the child does not start.
    """

    def __init__(
        self,
        tasks: Sequence[Row],
        *,
        limit: float = LIMIT_SECONDS,
        sandboxed: bool | None = None,
        open_child: OpenWorker = open_worker,
    ) -> None:
        self._tasks = list(map(TaskRow.of, tasks))
        self._limit = limit
        self._sandboxed = sandboxed
        self._open_child = open_child
        self._lock = trio.Lock()
        self._sides: dict[bool, _Side] = {}
        self._places: list[tuple[_Side, int]] = []
        """Each task's child, and its index there."""
        self.deaths = 0
        """Children that died or were killed since the service started."""

    async def __aenter__(self) -> Self:
        problem = await trio.to_thread.run_sync(sandbox.available) if self._sandboxed is None else None
        if self._sandboxed is None:
            self._sandboxed = problem is None
        elif not self._sandboxed:
            problem = "the sandbox is switched off"
        catalogue.names_checked(self._tasks, sandbox_problem=problem)
        table = await trio.to_thread.run_sync(_Table.of, self._tasks)
        self._sides = table.sides(self._open_child, sandboxed=self._sandboxed)
        counts: Counter[_Side] = Counter()
        for row in table.rows:
            side = self._sides[row.kind == "code"]
            self._places.append((side, counts[side]))
            counts[side] += 1
        try:
            for side in self._sides.values():
                await side.running()
        except BaseException as error:
            await self._stop()
            if isinstance(error, WorkerError) and error.kind == "user":
                raise UserError(str(error).split(": configure: ", 1)[-1]) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def sandboxed(self) -> bool:
        """Whether the child that reads answers runs in a sandbox."""
        return bool(self._sandboxed)

    @property
    def pid(self) -> int | None:
        """The first child's process (the sandbox around it), None where none runs."""
        return next((side.pid for side in self._sides.values()), None)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many items each task has."""
        return tuple(side.ready.counts[local] for side, local in self._places)

    async def _stop(self) -> None:
        for side in self._sides.values():
            await side.stop()

    def _shares(self, indices: Sequence[int]) -> list[tuple[_Side, list[tuple[int, int]]]]:
        """For each child its items: their positions in ``indices``, and the tasks' indices there."""
        shares: dict[_Side, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            if not 0 <= index < len(self._places):
                raise WorkerError(f"tasks: there is no task {index}", "internal")
            side, local = self._places[index]
            shares.setdefault(side, []).append((position, local))
        return list(shares.items())

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        """The questions of (task index, item) pairs. Raises ``WorkerError`` where a generator fails or hangs."""
        found: list[str] = [""] * len(items)
        async with self._lock:
            for side, share in self._shares([index for index, _ in items]):
                asked = AskQuestions([(local, items[position][1]) for position, local in share])
                questions = await side.call(asked, len(share), QUESTION_SECONDS)
                for (position, _), question in zip(share, questions, strict=True):
                    found[position] = question
        return found

    async def score(self, items: Sequence[Item], *, patient: bool = False) -> list[int | None]:
        """The rewards of (task index, item, response) triples in millionths; None is undecidable (rule 2).

        ``patient`` is for ``confirm``: at three times the limit. Raises ``WorkerError`` where a child cannot be started
        any more or an operation fails inside it.
        """
        rewards: list[int | None] = [None] * len(items)
        async with self._lock:
            for side, share in self._shares([index for index, _, _ in items]):
                placed = [(local, items[position][1], items[position][2]) for position, local in share]
                scored = await self._in_batches(side, placed, patient)
                for (position, _), reward in zip(share, scored, strict=True):
                    rewards[position] = reward
        return rewards

    async def _in_batches(self, side: _Side, items: Sequence[Item], patient: bool) -> list[int | None]:
        rewards: list[int | None] = []
        deaths = 0
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            scored = await self._attempt(side, batch, patient) if deaths < MAX_DEATHS else None
            if scored is not None:
                rewards += scored
                continue
            deaths += 1
            for item in batch:
                alone = await self._attempt(side, [item], patient) if deaths < MAX_DEATHS else None
                if alone is None:
                    deaths += 1
                rewards.append(alone[0] if alone else None)
        return rewards

    async def _attempt(self, side: _Side, batch: Sequence[Item], patient: bool) -> list[int | None] | None:
        """The rewards of ``batch``, or None where the child did not survive it."""
        factor = CONFIRMATION_FACTOR if patient else 1
        await side.running()  # what it answered is known from here on
        each = (side.ready.longest or self._limit * WALL_FACTOR) * factor
        request = ScoreResponses([_plain(item) for item in batch], self._limit * factor, patient)
        try:
            # Every response may use its wall time; the slack is for questions that are made again.
            return await side.call(request, len(batch), len(batch) * each + QUESTION_SECONDS)
        except WorkerError as error:
            if not error.gone:
                raise
            self.deaths += 1
            return None

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
            again = [reward for _ in range(CONFIRMATIONS) for reward in await self.score([item], patient=True)]
            if claim in again:
                rewards[position] = claim
            elif len(set(again)) > 1:
                rewards[position] = None
            else:
                rewards[position] = again[0]
        return rewards


async def check(tasks: Sequence[Row], open_child: OpenWorker = open_worker) -> None:
    """Raise ``UserError`` with one line for the first thing that is wrong with a table of tasks, before it is used.

    Also asks each task for a few questions, which entering ``TaskService`` does not. Raises ``WorkerError`` where a
    child does not start.
    """
    problem = await trio.to_thread.run_sync(sandbox.available)
    rows = list(map(TaskRow.of, tasks))
    catalogue.names_checked(rows, sandbox_problem=problem)
    table = await trio.to_thread.run_sync(_Table.of, rows)
    for side in table.sides(open_child, sandboxed=problem is None).values():
        await side.check()
