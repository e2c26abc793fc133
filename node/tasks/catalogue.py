"""From a row of a domain's task table to a task, and what is wrong with a table.

A row (``node.tasks.task_messages.TaskRow``) has a ``kind`` (one of ``KINDS``), ``name``, ``parameters`` (JSON text),
``version`` (what questions and rewards rest on, see ``node.tasks.task_versions``), ``data``, the local path of the file
that a "jsonl" or "code" task has, and ``items``, the bytes of a task set (``protocol.taskset``), None where all items
are asked. ``paths`` are folders to import a package's code from.

1. What a person got wrong becomes one line that names the task and the remedy.
2. With a set, an item's number stands for the item of the set at its place (``SubsetTask``), in questions and scores
   alike.
3. ``names_checked`` needs no task library and is all that a daemon uses of this module; ``make`` and ``problems``
   import what the tasks need, in a child. Code tasks have a child of their own (``node.tasks.code.code_child``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from node.errors import UserError
from node.tasks import package_tasks, process_limits, question_tasks, task_versions
from node.tasks.allowlist import REASONING_GYM_VERSION
from node.tasks.code.program_runner import own_version
from node.tasks.package_tasks import PackageTask
from node.tasks.question_tasks import JsonlTask
from node.tasks.reasoning_tasks import ReasoningTask, check_name, close_match
from node.tasks.task_messages import TaskRow
from protocol.errors import PeerError
from protocol.taskset import MAX_ITEM, TaskSet

KINDS: Final = ("reasoning-gym", "jsonl", "code", "package")
WITH_DATA: Final = ("jsonl", "code")
"""Kinds whose tasks have a file."""
PROBED_ITEMS: Final = (0, 1, 2, 1_000_003, MAX_ITEM)
PROBE_SECONDS: Final = 10.0


class LoadedTask(Protocol):
    """What every kind of task offers."""

    @property
    def count(self) -> int:
        """How many items it has: from there on they repeat. 2³¹ where they never do."""

    def question(self, item: int) -> str:
        """The question of item 0…2³¹−1."""

    def score(self, item: int, response: str) -> int | None:
        """The reward of ``response`` in millionths; None where it cannot be decided."""


Loaded = TypeVar("Loaded", bound=LoadedTask)


@dataclass(frozen=True, slots=True)
class SubsetTask(Generic[Loaded]):
    """A task of which only the items of a set are asked (rule 2)."""

    task: Loaded
    chosen: TaskSet

    @property
    def count(self) -> int:
        """How many items the set has."""
        return len(self.chosen.items)

    def question(self, item: int) -> str:
        """The question of the item of the set at this place."""
        return self.task.question(self.chosen.pick(item))

    def score(self, item: int, response: str, **how: Any) -> int | None:
        """The reward of a response to it; ``how`` is passed on."""
        return self.task.score(self.chosen.pick(item), response, **how)


def package_version(kind: str, parameters: str = "{}", *, name: str = "", of: str | None = None) -> str:
    """What a new domain pins for a task of ``kind``. A package's task needs its ``name``, and ``of`` which package
    where several have it.

    Raises ``UserError`` where parameters or the package do not serve.
    """
    if kind == "jsonl":
        return task_versions.EXACT if question_tasks.check_of(name, parameters) == "exact" else task_versions.MATH
    if kind == "package":
        return package_tasks.choose(name, of).pin
    return {"reasoning-gym": REASONING_GYM_VERSION, "code": f"python=={own_version()}"}[kind]


def names_checked(rows: Sequence[TaskRow], *, sandbox_problem: str | None) -> None:
    """Raise ``UserError`` for an unknown kind or data set, or for one that needs a sandbox where there is none.

    ``sandbox_problem`` is ``sandbox.available()``: None, or why there is no sandbox.
    """
    if not rows:
        raise UserError("the domain has no tasks", "name at least one")
    for row in rows:
        kind, name = row.kind, row.name
        if kind not in KINDS:
            raise UserError(f"unknown kind of task {kind!r}{close_match(kind, KINDS)}", f"use {' or '.join(KINDS)}")
        if kind == "reasoning-gym":
            check_name(name, sandboxed=True)
        if sandbox_problem is None:
            continue
        try:
            _unsandboxed(row)
        except UserError as error:
            raise UserError(f"{error}, and {sandbox_problem}") from None


def _unsandboxed(row: TaskRow) -> None:
    """Raise ``UserError`` for a task that may not be loaded without a sandbox."""
    kind, name = row.kind, row.name
    if kind == "reasoning-gym":
        check_name(name, sandboxed=False)
    elif kind == "code":
        raise UserError(f"the code task {name} runs programs, and so needs a sandbox")
    elif kind == "package":
        raise UserError(f"the task {name} of a package runs its code, and so needs a sandbox")
    elif question_tasks.check_of(name, row.parameters) != "exact":
        raise UserError(f"the JSONL task {name} is scored with sympy, and so needs a sandbox")


def make(row: TaskRow, *, sandboxed: bool) -> LoadedTask:
    """The task of ``row``, of any kind but "code", restricted to its set where it has one. Raises ``UserError``."""
    return restricted(row, _make(row, sandboxed=sandboxed))


def restricted(row: TaskRow, task: Loaded) -> Loaded | SubsetTask[Loaded]:
    """The task of ``row``, restricted to its set where it has one. Raises ``UserError``."""
    if row.items is None:
        return task
    try:
        chosen = TaskSet.parse(row.items)
    except PeerError as error:
        raise UserError(f"{row.name}: {error}") from None
    if chosen.items[-1] >= task.count:
        raise UserError(
            f"the task set of {row.name} names item {chosen.items[-1]}, and the task has {task.count}",
            "name items that are there",
        )
    return SubsetTask(task, chosen)


def _make(row: TaskRow, *, sandboxed: bool) -> LoadedTask:
    name, parameters, version = row.name, row.parameters, row.version
    if row.kind == "reasoning-gym":
        return ReasoningTask(name, parameters, version, sandboxed=sandboxed)
    if row.kind == "jsonl":
        data = None if row.data is None else Path(row.data)
        return JsonlTask(name, parameters, version, data, sandboxed=sandboxed)
    if row.kind == "package":
        return PackageTask(name, parameters, version, paths=row.paths, sandboxed=sandboxed)
    raise UserError(f"unknown kind of task {row.kind!r}{close_match(row.kind, KINDS)}")


def problems(rows: Iterable[TaskRow], attempt: Callable[[TaskRow], object]) -> list[str]:
    """What is wrong with each row for which ``attempt`` raises ``UserError``, in the rows' order."""
    found = []
    for row in rows:
        try:
            attempt(row)
        except UserError as error:
            found.append(str(error))
    return found


def tried(row: TaskRow, *, sandboxed: bool) -> None:
    """Make the task of ``row`` and ask it for a few questions. Raises ``UserError``."""
    probe(row.name, make(row, sandboxed=sandboxed))


def probe(name: str, task: LoadedTask, seconds: float = PROBE_SECONDS) -> None:
    """Ask ``task`` for a few questions. Raises ``UserError`` where it does not make them in bearable time."""
    for item in PROBED_ITEMS:
        try:
            with process_limits.time_limit(seconds):
                question = task.question(item)
                task.score(item, "")
        except process_limits.OutOfTime:
            raise UserError(f"{name} takes more than {seconds:g} s for a question", "make it easier") from None
        except Exception as error:
            raise UserError(
                f"{name} makes no question from its parameters: {str(error) or type(error).__name__}"
            ) from None
        if not question.strip():
            raise UserError(f"{name} makes an empty question from its parameters")
