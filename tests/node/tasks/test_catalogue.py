from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from node.errors import UserError
from node.tasks import catalogue
from node.tasks.question_tasks import JsonlTask
from node.tasks.reasoning_tasks import ReasoningTask
from node.tasks.task_messages import TaskRow
from protocol.taskset import TaskSet

TRIED = partial(catalogue.tried, sandboxed=True)


def row(name: str, kind: str = "reasoning-gym", **changes: Any) -> dict[str, Any]:
    version = catalogue.package_version(kind) if kind in ("reasoning-gym", "jsonl", "code") else "1"
    return {"kind": kind, "name": name, "weight": 1, "parameters": "{}", "version": version, "data": None, **changes}


def task(name: str, kind: str = "reasoning-gym", **changes: Any) -> TaskRow:
    return TaskRow.of(row(name, kind, **changes))


def test_names_that_serve() -> None:
    rows = [task("chain_sum"), task("countdown"), task("maths", "jsonl")]
    catalogue.names_checked(rows, sandbox_problem=None)
    catalogue.names_checked(rows[:1], sandbox_problem="there is no sandbox: install it")


@pytest.mark.parametrize(
    ("rows", "problem", "message"),
    [
        ([], None, "the domain has no tasks; name at least one"),
        (
            [task("x", "json")],
            None,
            r"unknown kind of task 'json' \(did you mean jsonl\?\); use reasoning-gym or jsonl or code or package",
        ),
        ([task("chain_sum"), task("countdwn")], None, r"unknown .* 'countdwn' \(did you mean countdown or"),
        (
            [task("countdown")],
            "there is none: install it",
            "countdown evaluates .* needs a sandbox, and there is none: inst",
        ),
        (
            [task("m", "jsonl")],
            "there is none: install it",
            "JSONL task m .* needs a sandbox, and there is none: install it",
        ),
    ],
)
def test_names_that_do_not(rows: list[TaskRow], problem: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.names_checked(rows, sandbox_problem=problem)


def test_every_kind_is_made(tmp_path: Path) -> None:
    path = tmp_path / "maths.jsonl"
    path.write_text(json.dumps({"question": "1+1", "answer": "2"}))
    assert isinstance(catalogue.make(task("chain_sum"), sandboxed=False), ReasoningTask)
    assert isinstance(catalogue.make(task("maths", "jsonl", data=str(path)), sandboxed=True), JsonlTask)
    with pytest.raises(UserError, match="unknown kind of task 'python'"):
        catalogue.make(task("maths", "python"), sandboxed=True)


def test_of_a_task_with_a_set_only_its_items_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "maths.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(4)))
    chosen = task("maths", "jsonl", data=str(path), items=TaskSet.of([1, 3]).encode())
    made = catalogue.make(chosen, sandboxed=True)
    assert [made.question(item) for item in range(4)] == ["1+1", "3+1", "1+1", "3+1"]
    assert [made.score(1, answer) for answer in ("2", "4")] == [0, 1_000_000]
    assert made.count == 2
    sums = catalogue.make(task("chain_sum"), sandboxed=False)
    some = catalogue.make(task("chain_sum", items=TaskSet.of([9, 2**31 - 1]).encode()), sandboxed=False)
    assert [some.question(item) for item in (0, 1)] == [sums.question(item) for item in (9, 2**31 - 1)]
    assert (sums.count, some.count) == (2**31, 2)
    bad = [replace(chosen, items=TaskSet.of([1, 4]).encode()), replace(chosen, items=b"\x90")]
    assert catalogue.problems(bad, TRIED)[0].startswith("the task set of maths names item 4, and the task has 4")
    assert catalogue.problems(bad, TRIED)[1].startswith("maths: task set")


def test_problems_name_every_bad_row() -> None:
    rows = [
        task("chain_sum"),
        task("chain_sum", parameters='{"max_terms": 0}'),
        task("maths", "jsonl", data="/nothing"),
    ]
    assert catalogue.problems(rows, TRIED) == [
        "the parameters of chain_sum are not valid: max_terms must be >= min_terms",
        "cannot read maths (/nothing): No such file or directory",
    ]


class Bad:
    count = 1

    def __init__(self, question: str | Exception | None) -> None:
        self._question = question

    def question(self, item: int) -> str:
        if isinstance(self._question, Exception):
            raise self._question
        while self._question is None:
            pass
        return self._question

    def score(self, item: int, response: str) -> int:
        return 0


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("  ", "odd makes an empty question"),
        (ValueError("too small"), "odd makes no question from its parameters: too small"),
        (KeyError(), "odd makes no question from its parameters: KeyError"),
        (None, "odd takes more than 0.05 s for a question; make it easier"),
    ],
)
def test_a_task_is_tried(question: str | Exception | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.probe("odd", Bad(question), 0.05)
