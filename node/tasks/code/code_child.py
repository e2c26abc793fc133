"""The child process of code tasks: it reads problems, runs programs in sandboxes and compares what they say.

Run as ``python -P -m node.tasks.code.code_child FD``. Operations (``node.workers.frames``):

- ``configure{tasks}`` → ``{longest: seconds that one response takes at most, counts: [items of each task]}``;
- ``check{tasks}`` → ``{problems: [one line each]}``;
- ``prompts{items: [[task index, item]…]}`` → ``{questions: [str]}``;
- ``score{items: [[task index, item, response]…], patient}`` → ``{rewards: [millionths | None]}``.

1. It is not in a sandbox itself: it makes them, one for each program (``node.tasks.code.program_runner``). Of what
   strangers wrote it only finds the program in a response and compares outputs; no scorer and no expression runs in it.
2. As many programs run at once as the process may use processors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.tasks import catalogue
from node.tasks.code.code_tasks import CodeTask
from node.workers import child_loop
from protocol.taskset import TaskSet

MAX_AT_ONCE: Final = 16


def make(row: Mapping[str, Any]) -> CodeTask:
    """The task of a row as in ``node.tasks.catalogue``. Raises ``UserError``."""
    data = None if row["data"] is None else Path(row["data"])
    return CodeTask(row["name"], row["parameters"], row["version"], data)


class CodeChild:
    """The operations, over the tasks that ``configure`` named."""

    def __init__(self) -> None:
        self._tasks: list[CodeTask] = []
        self._sets: list[TaskSet | None] = []
        # Its threads live as long as the process: a sandbox ends with the thread that started it.
        self._pool = ThreadPoolExecutor(min(MAX_AT_ONCE, len(os.sched_getaffinity(0))))

    def operations(self) -> Mapping[str, child_loop.Operation]:
        """The table that ``child.run`` serves."""
        return {
            "configure": self.configure,
            "check": self.check,
            "prompts": self.prompts,
            "score": self.score,
        }

    def configure(self, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        """Read the tasks' problems, and try the sandbox."""
        try:
            self._tasks = [make(row) for row in tasks]
            self._sets = [catalogue.items(row, task.count) for row, task in zip(tasks, self._tasks, strict=True)]
        except UserError as error:
            raise child_loop.UserError(str(error)) from None
        counts = [
            task.count if chosen is None else len(chosen.items)
            for task, chosen in zip(self._tasks, self._sets, strict=True)
        ]
        return {"longest": max((task.longest for task in self._tasks), default=0.0), "counts": counts}

    def check(self, tasks: list[dict[str, Any]]) -> dict[str, Any]:
        """What is wrong with a table of tasks."""
        problems = []
        for row in tasks:
            try:
                catalogue.items(row, make(row).count)
            except UserError as error:
                problems.append(str(error))
        return {"problems": problems}

    def prompts(self, items: list[tuple[int, int]]) -> dict[str, Any]:
        """The questions of ``items``."""
        return {"questions": [self._tasks[index].question(self._item(index, item)) for index, item in items]}

    def _item(self, index: int, item: int) -> int:
        """The task's own number for ``item``, which counts within its set where it has one."""
        chosen = self._sets[index]
        return item if chosen is None else chosen.pick(item)

    def score(self, items: list[tuple[int, int, str]], patient: bool) -> dict[str, Any]:
        """The rewards of ``items``."""

        def reward(entry: tuple[int, int, str]) -> int | None:
            index, item, response = entry
            return self._tasks[index].score(self._item(index, item), response, patient=patient)

        return {"rewards": list(self._pool.map(reward, items))}


if __name__ == "__main__":
    child_loop.run(CodeChild().operations)
