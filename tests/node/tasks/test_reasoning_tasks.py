from __future__ import annotations

import json
import subprocess
import sys

import pytest

from node.errors import UserError
from node.tasks import reasoning_tasks, task_versions
from node.tasks.allowlist import REASONING_GYM_VERSION as VERSION
from node.tasks.reasoning_tasks import ReasoningTask
from node.workers.child_process import child_environment
from protocol.taskset import MAX_ITEM

SUMS = json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "seed": 7})


def task(name: str, parameters: str = "{}", *, sandboxed: bool = True) -> ReasoningTask:
    return ReasoningTask(name, parameters, VERSION, sandboxed=sandboxed)


@pytest.fixture(scope="module")
def sums() -> ReasoningTask:
    return task("chain_sum", SUMS, sandboxed=False)


def test_questions_are_these_ones(sums: ReasoningTask) -> None:
    # Fixed by reasoning-gym's version: another question here is another question on every node.
    assert sums.question(0) == "State the final answer to the following arithmetic problem: 60 + 93 ="
    assert sums.question(MAX_ITEM) == "State the final answer to the following arithmetic problem: 59 - 68 ="


@pytest.mark.parametrize("item", [-1, MAX_ITEM + 1])
def test_items_outside_the_range(sums: ReasoningTask, item: int) -> None:
    with pytest.raises(ValueError, match="there is no item"):
        sums.question(item)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("153", 1_000_000),
        (" 0153.0\n", 1_000_000),
        ("let me see <answer>153</answer>", 1_000_000),
        ("153 apples", 300_000),
        ("154", 0),
        ("", 0),
        ("9**9**9", 0),
        ("15\x003", 0),
        ("(" * 3000 + "153", 0),
        ("153" + " 1" * 500_000, 0),
        ("9^{9^{9^9}}", 0),
        ("1e999999999", 0),
        ("NaN", 0),
        ("\ud800", 0),
    ],
)
def test_rewards_of_a_sum(sums: ReasoningTask, response: str, reward: int) -> None:
    assert sums.score(0, response) == reward


def test_an_entry_is_made_once_a_group_and_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    own = task("chain_sum", SUMS)
    first = own._entry(0)
    first["answer"] = "0"
    monkeypatch.setattr(own, "_data", None)
    assert own._entry(0)["answer"] == "153"


def test_a_generator_that_gives_up_is_asked_for_the_next_item(monkeypatch: pytest.MonkeyPatch) -> None:
    class GivesUp:
        def __getitem__(self, index: int) -> dict[str, str]:
            if index < 5:
                raise ValueError("no puzzle")
            return {"question": str(index), "answer": ""}

    own = task("chain_sum", SUMS)
    monkeypatch.setattr(own, "_data", GivesUp())
    assert own.question(2) == "5"
    monkeypatch.setattr(reasoning_tasks, "_ATTEMPTS", 3)
    with pytest.raises(ValueError, match="no puzzle"):
        own.question(1)


@pytest.mark.parametrize(
    ("score", "reward"), [(0.5, 500_000), (-1.0, 0), (2.0, 1_000_000), (float("nan"), 0), (1 / 3, 333_333)]
)
def test_a_reward_is_an_integer_in_range(monkeypatch: pytest.MonkeyPatch, score: float, reward: int) -> None:
    own = task("chain_sum", SUMS)
    monkeypatch.setattr(own._data, "score_answer", lambda answer, entry: score)
    assert own.score(0, "x") == reward


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_what_depends_on_the_machine_is_not_called_wrong(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    own = task("chain_sum", SUMS)

    def fail(answer: str, entry: object) -> float:
        raise error

    monkeypatch.setattr(own._data, "score_answer", fail)
    with pytest.raises(error):
        own.score(0, "x")


def test_an_exception_scores_nothing() -> None:
    assert task("prime_factorization").score(0, "two times three") == 0


def test_a_scorer_that_takes_nan_for_a_pass_sees_none() -> None:
    complex_numbers = task("complex_arithmetic")
    assert complex_numbers.score(0, "nan") == 0
    assert complex_numbers.score(0, "NaN+1j") == 0
    assert complex_numbers._data.score_answer("nan", complex_numbers._entry(0)) == 1.0


def test_a_list_that_a_scorer_evaluates_is_a_literal() -> None:
    matrix = task("spiral_matrix")
    right = matrix._entry(0)["answer"]
    assert matrix.score(0, right) == 1_000_000
    assert matrix.score(0, f"[{right.replace(' ', ',')}]") == 100_000
    evaluated: list[str] = []
    matrix._data.score_answer = lambda answer, entry: evaluated.append(answer)
    for answer in ("__import__('os').system('true')", "9**9**9", f"[{right.replace(' ', ',')}]*1", "1 2 3"):
        assert matrix.score(0, answer) == 0
    assert evaluated == []


def test_a_sum_that_a_scorer_evaluates_is_arithmetic() -> None:
    puzzle = task("countdown", '{"min_numbers": 2, "max_numbers": 2}')
    entry = puzzle._entry(0)
    assert puzzle.score(0, entry["answer"]) == 1_000_000
    # The scorer itself gives a hundredth for anything.
    assert puzzle.score(0, "9**9**9") == 0
    assert puzzle.score(0, "1") == 50_000


def test_fractions_with_endless_digits_are_not_read() -> None:
    coins = task("coin_flip")
    assert coins.score(0, coins._entry(0)["answer"]) == 1_000_000
    assert coins.score(0, "1e999999999") == 0


def test_finite_data_sets_start_again() -> None:
    words = task("list_functions", '{"size": 10}')
    assert words.question(MAX_ITEM) == words.question(MAX_ITEM % 10)
    assert words.question(3) != words.question(4)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("chain_summ", "{}", r"unknown reasoning-gym data set 'chain_summ' \(did you mean chain_sum or"),
        ("zzz", "{}", "unknown reasoning-gym data set 'zzz'$"),
        ("composite", "{}", "composite cannot be used: it mixes data sets itself"),
        ("game_of_life_halting", "{}", "its scorer takes every answer for a right one"),
        ("chain_sum", "{", "parameters of chain_sum are not JSON"),
        ("chain_sum", "[" * 100_000, "parameters of chain_sum are not JSON"),
        ("chain_sum", "[]", "must be a JSON object"),
        ("chain_sum", '{"max_term": 2}', r"no parameter 'max_term' \(did you mean max_terms or min_terms\?\); it has"),
        ("chain_sum", '{"max_terms": 0}', "not valid: max_terms must be >= min_terms"),
        ("chain_sum", '{"max_terms": null}', "parameters of chain_sum are not valid"),
        ("chain_sum", '{"seed": -1}', "seed of chain_sum must be a whole number"),
        ("chain_sum", '{"seed": true}', "seed of chain_sum must be a whole number"),
        ("chain_sum", '{"size": 1000000}', "size of chain_sum must be a whole number from 1 to 100000"),
    ],
)
def test_users_mistakes(name: str, parameters: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task(name, parameters)


@pytest.mark.parametrize("name", ["countdown", "coin_flip"])
def test_some_need_a_sandbox(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} .*so needs a sandbox"):
        task(name, sandboxed=False)


def test_without_a_sandbox_texts_in_parameters_are_the_defaults() -> None:
    assert task("basic_arithmetic", '{"operators": ["+", "-"]}', sandboxed=False).question(0)
    with pytest.raises(UserError, match=r"the text '__import__\(1\)' .* needs a sandbox"):
        task("basic_arithmetic", '{"operators": ["+", "__import__(1)"]}', sandboxed=False)


def test_versions() -> None:
    with pytest.raises(UserError, match=rf"the domain pins reasoning-gym 0\.1\.24, this Farflung knows {VERSION}"):
        ReasoningTask("chain_sum", "{}", "0.1.24", sandboxed=True)


def test_algebra_needs_the_sympy_that_it_was_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_versions, "ALGEBRA", (("sympy", "1.13.0"),))
    assert task("chain_sum").question(0)
    with pytest.raises(UserError, match=r"sympy 1\.14\.0 is installed, the domain pins 1\.13\.0; install sympy==1\.13"):
        task("countdown")


def test_only_what_a_task_needs_is_imported() -> None:
    code = (
        "import sys\nimport node.tasks.task_service, node.tasks.catalogue\n"
        "print([m for m in ('reasoning_gym', 'sympy', 'math_verify', 'numpy', 'torch') if m in sys.modules])\n"
        "from node.tasks.reasoning_tasks import ReasoningTask\n"
        f"ReasoningTask('chain_sum', '', '{VERSION}', sandboxed=False)\n"
        "print([m for m in ('sympy', 'numpy', 'matplotlib', 'torch') if m in sys.modules])\n"
    )
    output = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, env=child_environment({})
    )
    assert output.stdout == "[]\n[]\n", output.stderr
