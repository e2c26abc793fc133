"""The child process of code tasks: it reads problems, runs programs in sandboxes and compares what they say.

Run as ``python -P -m node.tasks.code.code_child FD``. What it answers: ``node.tasks.task_messages``.

1. It is not in a sandbox itself: it makes them, one for each program (``node.tasks.code.program_runner``). Of what
   strangers wrote it only finds the program in a response and compares outputs; no scorer and no expression runs in it.
2. As many programs run at once as the process may use processors.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from node.tasks import catalogue
from node.tasks.catalogue import SubsetTask
from node.tasks.code.code_tasks import CodeTask
from node.tasks.task_messages import AskQuestions, CheckTasks, ConfigureTasks, ScoreResponses, TaskRow, TasksReady
from node.workers import child_loop

MAX_AT_ONCE: Final = 16


def make(row: TaskRow) -> CodeTask:
    """The task of a row, with all its items. Raises ``UserError``."""
    return CodeTask(row.name, row.parameters, row.version, None if row.data is None else Path(row.data))


class CodeChild:
    """The operations, over the tasks that ``configure`` named."""

    def __init__(self) -> None:
        self._tasks: list[CodeTask | SubsetTask[CodeTask]] = []
        # Its threads live as long as the process: a sandbox ends with the thread that started it.
        self._pool = ThreadPoolExecutor(min(MAX_AT_ONCE, len(os.sched_getaffinity(0))))

    def operations(self) -> list[child_loop.Operation]:
        """What the child answers."""
        return [self.configure, self.check, self.prompts, self.score]

    def configure(self, request: ConfigureTasks) -> TasksReady:
        """Read the tasks' problems, and try the sandbox."""
        tasks = list(map(make, request.tasks))
        self._tasks = list(map(catalogue.restricted, request.tasks, tasks))
        longest = max((task.longest for task in tasks), default=0.0)
        return TasksReady([task.count for task in self._tasks], longest)

    def check(self, request: CheckTasks) -> list[str]:
        """What is wrong with a table of tasks."""
        return catalogue.problems(request.tasks, lambda row: catalogue.restricted(row, make(row)))

    def prompts(self, request: AskQuestions) -> list[str]:
        """The questions of items."""
        return [self._tasks[index].question(item) for index, item in request.items]

    def score(self, request: ScoreResponses) -> list[int | None]:
        """The rewards of responses."""

        def reward(entry: tuple[int, int, str]) -> int | None:
            index, item, response = entry
            return self._tasks[index].score(item, response, patient=request.patient)

        return list(self._pool.map(reward, request.items))


if __name__ == "__main__":
    child_loop.run(CodeChild().operations)
