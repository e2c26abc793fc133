"""The child process that makes questions and judges responses. Run as ``python -P -m node.tasks.task_child FD``.

What it answers: ``node.tasks.task_messages``.

1. A reward is None, undecidable, where scoring took more than ``limit`` seconds of processor time, more memory or a
   deeper stack than there is. What any other exception ends scores 0.
2. Scoring that cannot be interrupted ends the process (``node.tasks.process_limits``); so do questions that take too
   long. The daemon's side starts another one.
3. The process has no torch and only the task libraries that its tasks need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from node.tasks import catalogue, process_limits, seccomp
from node.tasks.task_messages import AskQuestions, CheckTasks, ConfigureTasks, ScoreResponses, TasksReady
from node.workers import child_loop

QUESTION_SECONDS: Final = 20.0
MEMORY_BYTES: Final = 2 << 30
FILE_BYTES: Final = 16 << 20
PROCESSES: Final = 64


class TasksChild:
    """The operations, over the tasks that ``configure`` names and ``make`` makes of their rows."""

    def __init__(self, make: Callable[..., catalogue.LoadedTask] = catalogue.make) -> None:
        self._make = make
        self._tasks: list[catalogue.LoadedTask] = []

    def operations(self) -> list[child_loop.Operation]:
        """What the child answers."""
        return [self.configure, self.check, self.prompts, self.score]

    def configure(self, request: ConfigureTasks) -> TasksReady:
        """Make the tasks, then confine the process."""
        self._tasks = [self._make(row, sandboxed=request.sandboxed) for row in request.tasks]
        if request.sandboxed:  # outside, the limit would count all processes of this user
            process_limits.bound_processes(PROCESSES)
        seccomp.install()
        return TasksReady([task.count for task in self._tasks])

    def check(self, request: CheckTasks) -> list[str]:
        """What is wrong with a table of tasks."""
        return catalogue.problems(request.tasks, partial(catalogue.tried, sandboxed=request.sandboxed))

    def prompts(self, request: AskQuestions) -> list[str]:
        """The questions of items."""
        return [self._question(index, item) for index, item in request.items]

    def _question(self, index: int, item: int) -> str:
        try:
            with process_limits.time_limit(QUESTION_SECONDS):
                return self._tasks[index].question(item)
        except process_limits.OutOfTime:
            raise TimeoutError(f"task {index} took more than {QUESTION_SECONDS:g} s for item {item}") from None

    def score(self, request: ScoreResponses) -> list[int | None]:
        """The rewards of responses."""
        rewards = []
        for index, item, response in request.items:
            self._question(index, item)  # making the question is not the response's fault, so it is not on its clock
            rewards.append(self._reward(self._tasks[index], item, response, request.limit))
        return rewards

    def _reward(self, task: catalogue.LoadedTask, item: int, response: str, limit: float) -> int | None:
        try:
            with process_limits.time_limit(limit) as clock:
                reward = task.score(item, response)
        except (process_limits.OutOfTime, MemoryError, RecursionError):
            return None
        except Exception:
            return None if clock.expired else 0
        # A scorer that swallowed the exception went on with half a result.
        return None if clock.expired else reward


def main(child: TasksChild) -> None:
    """Bound the process and serve until the socket closes."""
    process_limits.bound_process(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    child_loop.run(child.operations)


if __name__ == "__main__":
    main(TasksChild())
