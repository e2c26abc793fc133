"""The child process that makes questions and judges responses. Run as ``python -P -m node.tasks.task_child FD``.

Operations (``node.workers.frames``):

- ``configure{tasks, sandboxed}`` → ``{filter: None | why there is no system call filter, counts: [items a task]}``;
  after it no new process, program or connection is possible in it;
- ``check{tasks, sandboxed}`` → ``{problems: [one line each]}``;
- ``prompts{items: [[task index, item]…]}`` → ``{questions: [str]}``;
- ``score{items: [[task index, item, response]…], limit: seconds}`` → ``{rewards: [millionths | None]}``.

1. A reward is None, undecidable, where scoring took more than ``limit`` seconds of processor time, more memory or a
   deeper stack than there is. What any other exception ends scores 0.
2. Scoring that cannot be interrupted ends the process (``node.tasks.process_limits``); so do questions that take too
   long. The daemon's side starts another one.
3. The process has no torch and only the task libraries that its tasks need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from node.errors import UserError
from node.tasks import catalogue, process_limits, seccomp
from node.workers import child_loop

QUESTION_SECONDS: Final = 20.0
MEMORY_BYTES: Final = 2 << 30
FILE_BYTES: Final = 16 << 20
PROCESSES: Final = 64


class TasksChild:
    """The operations, over the tasks that ``configure`` named."""

    def __init__(self) -> None:
        self._tasks: list[catalogue.Task] = []

    def operations(self) -> Mapping[str, child_loop.Operation]:
        """The table that ``child.run`` serves."""
        return {
            "configure": self.configure,
            "check": self.check,
            "prompts": self.prompts,
            "score": self.score,
        }

    def configure(self, tasks: list[dict[str, Any]], sandboxed: bool) -> dict[str, Any]:
        """Make the tasks, then confine the process."""
        try:
            self._tasks = [catalogue.make(row, sandboxed=sandboxed) for row in tasks]
        except UserError as error:
            raise child_loop.UserError(str(error)) from None
        if sandboxed:  # outside, the limit would count all processes of this user
            process_limits.bound_processes(PROCESSES)
        return {"filter": seccomp.install(), "counts": [task.count for task in self._tasks]}

    def check(self, tasks: list[dict[str, Any]], sandboxed: bool) -> dict[str, Any]:
        """What is wrong with a table of tasks."""
        return {"problems": catalogue.problems(tasks, sandboxed=sandboxed)}

    def prompts(self, items: list[tuple[int, int]]) -> dict[str, Any]:
        """The questions of ``items``."""
        return {"questions": [self._question(index, item) for index, item in items]}

    def _question(self, index: int, item: int) -> str:
        try:
            with process_limits.time_limit(QUESTION_SECONDS):
                return self._tasks[index].question(item)
        except process_limits.OutOfTime:
            raise TimeoutError(f"task {index} took more than {QUESTION_SECONDS:g} s for item {item}") from None

    def score(self, items: list[tuple[int, int, str]], limit: float) -> dict[str, Any]:
        """The rewards of ``items``."""
        rewards = []
        for index, item, response in items:
            self._question(index, item)  # making the question is not the response's fault, so it is not on its clock
            rewards.append(self._reward(self._tasks[index], item, response, limit))
        return {"rewards": rewards}

    def _reward(self, task: catalogue.Task, item: int, response: str, limit: float) -> int | None:
        try:
            with process_limits.time_limit(limit) as clock:
                reward = task.score(item, response)
        except (process_limits.OutOfTime, MemoryError, RecursionError):
            return None
        except Exception:
            return None if clock.expired else 0
        # A scorer that swallowed the exception went on with half a result.
        return None if clock.expired else reward


def main() -> None:
    """Bound the process and serve until the socket closes."""
    process_limits.bound_process(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    child_loop.run(TasksChild().operations)


if __name__ == "__main__":
    main()
