"""From a row of a domain's task table to a task, and what is wrong with a table.

A row is a map of ``kind`` ("reasoning-gym" or "jsonl"), ``name``, ``weight``, ``parameters`` (JSON text), ``version``
of the package that questions and scores come from, ``data``, the local path of a JSONL file or None, and ``items``, the
bytes of a task set (``protocol.taskset``), None or left out where all items are asked.

1. What a person got wrong becomes one line that names the task and the remedy.
2. With a set, an item's number stands for the item of the set at its place (``Chosen``), in questions and scores alike.
3. ``names_checked`` needs no task library and is all that a daemon uses of this module; ``make`` and ``problems``
   import what the tasks need, in a child.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from node.errors import UserError
from node.tasks import limits
from node.tasks.allowlist import REASONING_GYM_VERSION
from node.tasks.jsonl import MATH_VERIFY_VERSION, JsonlTask
from node.tasks.reasoning import MAX_ITEM, ReasoningTask, check_name, close_match
from protocol.errors import PeerError
from protocol.taskset import TaskSet

KINDS: Final = ("reasoning-gym", "jsonl")
PROBED_ITEMS: Final = (0, 1, 2, 1_000_003, MAX_ITEM)
PROBE_SECONDS: Final = 10.0

Row = Mapping[str, Any]


class Task(Protocol):
    """What every kind of task offers."""

    @property
    def count(self) -> int:
        """How many items it has: from there on they repeat. 2³¹ where they never do."""

    def question(self, item: int) -> str:
        """The question of item 0…2³¹−1."""

    def score(self, item: int, response: str) -> int:
        """The reward of ``response`` in millionths."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A task of which only the items of a set are asked (rule 2)."""

    task: Task
    chosen: TaskSet

    @property
    def count(self) -> int:
        """How many items the set has."""
        return len(self.chosen.items)

    def question(self, item: int) -> str:
        """The question of the item of the set at this place."""
        return self.task.question(self.chosen.pick(item))

    def score(self, item: int, response: str) -> int:
        """The reward of a response to it."""
        return self.task.score(self.chosen.pick(item), response)


def package_version(kind: str) -> str:
    """The version of the package behind ``kind`` that this Farflung knows, for a new domain to pin."""
    return {"reasoning-gym": REASONING_GYM_VERSION, "jsonl": MATH_VERIFY_VERSION}[kind]


def names_checked(rows: Sequence[Row], *, sandbox_problem: str | None) -> None:
    """Raise ``UserError`` for an unknown kind or data set, or for one that needs a sandbox where there is none.

    ``sandbox_problem`` is ``sandbox.available()``: None, or why there is no sandbox.
    """
    if not rows:
        raise UserError("the domain has no tasks", "name at least one")
    for row in rows:
        kind, name = row["kind"], row["name"]
        if kind not in KINDS:
            raise UserError(
                f"unknown kind of task {kind!r}{close_match(str(kind), KINDS)}", f"use {' or '.join(KINDS)}"
            )
        if kind == "reasoning-gym":
            check_name(name, sandboxed=True)
        if sandbox_problem is None:
            continue
        try:
            if kind == "jsonl":
                raise UserError(f"the JSONL task {name} is scored with sympy, and so needs a sandbox")
            check_name(name, sandboxed=False)
        except UserError as error:
            raise UserError(f"{error}, and {sandbox_problem}") from None


def make(row: Row, *, sandboxed: bool) -> Task:
    """The task of ``row``, restricted to its set where it has one. Raises ``UserError``."""
    task = _make(row, sandboxed=sandboxed)
    if row.get("items") is None:
        return task
    try:
        chosen = TaskSet.parse(row["items"])
    except PeerError as error:
        raise UserError(f"{row['name']}: {error}") from None
    if chosen.items[-1] >= task.count:
        raise UserError(
            f"the task set of {row['name']} names item {chosen.items[-1]}, and the task has {task.count}",
            "name items that are there",
        )
    return Chosen(task, chosen)


def _make(row: Row, *, sandboxed: bool) -> Task:
    if row["kind"] == "reasoning-gym":
        return ReasoningTask(row["name"], row["parameters"], row["version"], sandboxed=sandboxed)
    if row["kind"] == "jsonl":
        data = None if row["data"] is None else Path(row["data"])
        return JsonlTask(row["name"], row["parameters"], row["version"], data, sandboxed=sandboxed)
    raise UserError(f"unknown kind of task {row['kind']!r}{close_match(str(row['kind']), KINDS)}")


def problems(rows: Sequence[Row], *, sandboxed: bool) -> list[str]:
    """What is wrong with each bad row, in the rows' order: each is made and asked for a few questions."""
    found = []
    for row in rows:
        try:
            probe(row["name"], make(row, sandboxed=sandboxed))
        except UserError as error:
            found.append(str(error))
    return found


def probe(name: str, task: Task) -> None:
    """Ask ``task`` for a few questions. Raises ``UserError`` where it does not make them in bearable time."""
    for item in PROBED_ITEMS:
        try:
            with limits.time_limit(PROBE_SECONDS):
                question = task.question(item)
                task.score(item, "")
        except limits.OutOfTime:
            raise UserError(f"{name} takes more than {PROBE_SECONDS:g} s for a question", "make it easier") from None
        except Exception as error:
            raise UserError(
                f"{name} makes no question from its parameters: {str(error) or type(error).__name__}"
            ) from None
        if not question.strip():
            raise UserError(f"{name} makes an empty question from its parameters")
