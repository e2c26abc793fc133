from __future__ import annotations

import json
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from node.errors import UserError
from node.tasks import sandbox, task_service
from node.tasks.task_service import TaskService
from node.workers.child_process import Worker, WorkerError, open_worker
from protocol.taskset import TaskSet
from tests.node.tasks.test_catalogue import row
from tests.node.workers.test_child_process import gone, wait_gone

SUM = row("chain_sum", parameters='{"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "seed": 7}')
needs_sandbox = pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available()))


def poisoned(limit: float = task_service.LIMIT_SECONDS) -> TaskService:
    """A service whose one task does what its responses say."""
    return TaskService([SUM], limit=limit, sandboxed=False, open_child=open_poison)


def open_poison(module: str, **options: Any) -> AbstractAsyncContextManager[Worker]:
    assert module == task_service.CHILD
    return open_worker("tests.node.tasks.poison", **options)


async def test_questions_and_rewards_without_a_sandbox() -> None:
    async with TaskService([SUM], sandboxed=False) as tasks:
        assert not tasks.sandboxed
        pid = tasks.pid
        assert pid is not None
        questions = await tasks.questions([(0, 0), (0, 2**31 - 1)])
        assert [question.split(": ")[1] for question in questions] == ["60 + 93 =", "59 - 68 ="]
        # A response with half a character from a tokenizer is text like any other.
        responses = ["153", "154", "153 apples", "\ud800", "", "x" * 1_000_000, "9**9**9"]
        rewards = await tasks.score([(0, 0, response) for response in responses])
        assert rewards == [1_000_000, 0, 300_000, 0, 0, 0, 0]
        assert await tasks.score([]) == []
    assert gone(pid)
    assert tasks.pid is None


@needs_sandbox
async def test_hostile_answers_in_the_sandbox(tmp_path: Path) -> None:
    path, mark = tmp_path / "maths.jsonl", tmp_path / "mark"
    path.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    rows = [SUM, row("countdown"), row("spiral_matrix"), row("maths", "jsonl", data=str(path))]
    hostile = [
        "9**9**9",
        f"__import__('os').system('touch {mark}')",
        "(" * 3000 + ")" * 3000,
        "1 " * 500_000,
        "1\0",
        "9^{9^{9^9}}",
        "[__import__('os').fork() for _ in iter(int, 1)]",
    ]
    async with TaskService(rows) as tasks:
        assert tasks.sandboxed
        for index in range(len(rows)):
            assert await tasks.score([(index, 3, response) for response in hostile]) == [0] * len(hostile)
        assert await tasks.score([(3, 0, "2.0"), (0, 0, "153")]) == [1_000_000, 1_000_000]
        assert tasks.deaths == 0
    assert not mark.exists()


@needs_sandbox
async def test_programs_beside_other_tasks(tmp_path: Path) -> None:
    code, words = tmp_path / "code.jsonl", tmp_path / "words.jsonl"
    code.write_text(
        json.dumps({"question": "Double.", "tests": [{"stdin": "2", "stdout": "4"}, {"call": "f(3)", "returns": 6}]})
    )
    words.write_text(json.dumps({"question": "Who?", "answer": "me"}))
    right = "```\ndef f(x): return 2 * x\nif __name__ == '__main__': print(f(int(input())))\n```"
    wrong, hang = "```\nprint(5)\n```", "```\nwhile True: pass\n```"
    rows = [
        row("double", "code", data=str(code), parameters='{"seconds": 1}'),
        row("who", "jsonl", data=str(words), parameters='{"check": "exact"}', version="exact==1"),
        row("again", "code", data=str(code), parameters='{"reward": "fraction", "seconds": 1}'),
        row("set", "code", data=str(code), items=TaskSet.of([0]).encode()),
    ]
    async with TaskService(rows) as tasks:
        assert await tasks.questions([(1, 0), (0, 5), (3, 0)]) == ["Who?", "Double.", "Double."]
        items = [(0, 0, right), (1, 0, "me"), (2, 0, wrong), (0, 0, wrong), (1, 0, "you"), (3, 7, right), (0, 0, hang)]
        assert await tasks.score(items) == [1_000_000, 1_000_000, 0, 0, 0, 1_000_000, 0]
        # A claim of a program that is wrong is false.
        assert await tasks.confirm([(0, 0, wrong), (0, 0, right)], [1_000_000, 1_000_000]) == [0, 1_000_000]
        assert tasks.deaths == 0


@needs_sandbox
async def test_a_child_of_programs_that_dies_is_started_again(tmp_path: Path) -> None:
    code = tmp_path / "code.jsonl"
    code.write_text(json.dumps({"question": "One.", "tests": [{"stdin": "", "stdout": "1"}]}))
    async with TaskService([row("one", "code", data=str(code))]) as tasks:
        pid = tasks.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_gone(pid)
        assert await tasks.score([(0, 0, "```\nprint(1)\n```")]) == [1_000_000]


@needs_sandbox
async def test_check_names_what_is_wrong_with_problems(tmp_path: Path) -> None:
    code = tmp_path / "code.jsonl"
    code.write_text(json.dumps({"question": "One.", "tests": []}))
    with pytest.raises(UserError, match='line 1 of one needs "tests", a list of 1 to 200'):
        await task_service.check([SUM, row("one", "code", data=str(code))])
    with pytest.raises(UserError, match='line 1 of one needs "tests", a list of 1 to 200'):
        async with TaskService([row("one", "code", data=str(code))]):
            pytest.fail("it started")


async def test_one_poisonous_response_costs_only_itself() -> None:
    async with poisoned(0.05) as tasks:
        first = tasks.pid
        items = [(0, 1, ""), (0, 2, "die"), (0, 3, ""), (0, 4, "hang"), (0, 5, "")]
        assert await tasks.score(items) == [1, None, 3, None, 5]
        assert tasks.deaths == 3
        assert first is not None
        assert gone(first)
        assert await tasks.questions([(0, 7)]) == ["question 7"]


async def test_what_a_machine_cannot_decide_is_undecidable() -> None:
    responses = ["loop", "swallow", "memory", "deep", "raise", ""]
    async with poisoned(0.05) as tasks:
        rewards = await tasks.score([(0, 9, response) for response in responses])
        assert rewards == [None, None, None, None, 0, 9]
        assert tasks.deaths == 0
        assert await tasks.score([(0, 9, "sleep"), (0, 9, "")]) == [None, 9]


async def test_code_in_a_scorer_starts_no_process_and_no_connection() -> None:
    # Also as root, whom no process limit binds, and where there is no sandbox.
    async with poisoned() as tasks:
        assert await tasks.score([(0, 9, "fork"), (0, 9, "connect"), (0, 9, "")]) == [0, 0, 9]


async def test_deaths_are_bounded() -> None:
    items = [(0, 1, ""), *[(0, 2, "die")] * task_service.MAX_DEATHS, (0, 4, ""), (0, 5, "")]
    async with poisoned() as tasks:
        # The batch dies first, then each by itself; who comes after the last death is not looked at any more.
        assert await tasks.score(items) == [1] + [None] * (len(items) - 1)
        assert tasks.deaths == task_service.MAX_DEATHS
        assert await tasks.score(items[-2:]) == [4, 5]


async def test_a_claim_is_false_only_after_three_more_scorings() -> None:
    async with poisoned(0.1) as tasks:
        items = [(0, 5, ""), (0, 5, ""), (0, 5, "slow at first"), (0, 5, "loop"), (0, 5, "count")]
        assert await tasks.score(items[2:3]) == [None]
        # Right as claimed; wrong three times more; right in more time; never decided; not the same twice.
        assert await tasks.confirm(items, [5, 6, 5, 6, 1000]) == [5, 5, 5, None, None]


async def test_a_question_that_fails_is_an_error_and_no_death() -> None:
    async with poisoned() as tasks:
        pid = tasks.pid
        with pytest.raises(WorkerError, match="no such puzzle") as error:
            await tasks.questions([(0, 666)])
        assert error.value.kind == "internal"
        with pytest.raises(WorkerError, match="there is no task 1"):
            await tasks.score([(1, 0, "")])
        assert tasks.pid == pid


async def test_cancellation_ends_the_child_and_the_service_recovers() -> None:
    async with poisoned(30) as tasks:
        pid = tasks.pid
        assert pid is not None
        with trio.move_on_after(0.1) as scope:
            await tasks.score([(0, 1, "sleep")])
        assert scope.cancelled_caught
        await wait_gone(pid)
        assert await tasks.score([(0, 1, "")]) == [1]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([row("chain_sum", parameters='{"max_term": 1}')], "^chain_sum has no parameter 'max_term'"),
        ([row("chain_sum", version="0.0.1")], r"^the domain pins reasoning-gym 0\.0\.1, this Farflung knows"),
        ([row("chainsum")], r"^unknown reasoning-gym data set 'chainsum' \(did you mean chain_sum"),
        (
            [row("countdown")],
            "countdown evaluates a sum with sympy, and so needs a sandbox, and the sandbox is switched off",
        ),
        (
            [row("adds", "code", data="x")],
            "the code task adds runs programs, and so needs a sandbox, and the sandbox is",
        ),
        ([row("maths", "jsonl", data="x")], "maths is scored with sympy, and so needs a sandbox, and the sandbox is"),
    ],
)
async def test_users_mistakes_at_start(tasks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        async with TaskService(tasks, sandboxed=False):
            pytest.fail("it started")


@needs_sandbox
async def test_check_finds_what_a_start_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "maths.jsonl"
    path.write_text(json.dumps({"question": "1+1", "answer": "2"}))
    monkeypatch.chdir(tmp_path)
    await task_service.check([SUM, row("maths", "jsonl", data=path.name)])
    path.write_text("no JSON")
    with pytest.raises(UserError, match="line 1 of maths is not JSON"):
        await task_service.check([SUM, row("maths", "jsonl", data=str(path))])
    with pytest.raises(UserError, match=r"cannot read maths \(.*/nothing\): No such file"):
        await task_service.check([row("maths", "jsonl", data=str(tmp_path / "nothing"))])
