"""What the daemon asks of the children that make questions and judge responses (``node.tasks.task_child``,
``node.tasks.code.code_child``), and what they answer. Imports no task library: both ends do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from node.workers.frames import ChildRequest

Place = tuple[int, int]
"""Index of a task among those of the child, and number of an item of it."""


class TaskRow(Struct, frozen=True):
    """A row of a task table (``node.tasks.catalogue``): ``items`` are the bytes of a task set, ``paths`` folders to
    import a package's code from."""

    kind: str
    name: str
    parameters: str
    version: str
    data: str | None = None
    items: bytes | None = None
    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TaskRow:
        """A row as configurations and domains have it, where what was left out is the default."""
        return cls(**{name: row[name] for name in cls.__struct_fields__ if name in row})


class TasksReady(Struct, frozen=True):
    """How many items each task has, and the seconds that scoring one response takes at the ``longest`` (0: as long as
    it may)."""

    counts: list[int]
    longest: float = 0.0


class ConfigureTasks(ChildRequest[TasksReady], frozen=True, tag="configure"):
    """Make the tasks, then confine the process: no new process, program or connection is possible in one that runs
    scorers."""

    tasks: list[TaskRow]
    sandboxed: bool


class CheckTasks(ChildRequest[list[str]], frozen=True, tag="check"):
    """What is wrong with a table of tasks: one line for each bad one."""

    tasks: list[TaskRow]
    sandboxed: bool


class AskQuestions(ChildRequest[list[str]], frozen=True, tag="prompts"):
    """The questions of items."""

    items: list[Place]


class ScoreResponses(ChildRequest[list[int | None]], frozen=True, tag="score"):
    """The rewards of responses to items in millionths; None where one cannot be decided.

    ``limit`` is the processor time in seconds that scoring one may take; programs have limits of their own, which are
    longer where scoring is ``patient``.
    """

    items: list[tuple[int, int, str]]
    limit: float
    patient: bool
