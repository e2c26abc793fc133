"""Rewards of programs."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from node.errors import UserError
from node.tasks.code import program_runner
from node.tasks.code.code_tasks import PATIENCE, CodeSettings, CodeTask, Run
from node.tasks.code.program_runner import Lost, Status
from protocol.taskset import MAX_ITEM

VERSION = f"python=={program_runner.own_version()}"
ADD = {
    "question": "Read two numbers, print their sum.",
    "tests": [{"stdin": "1 2", "stdout": "3"}, {"stdin": "5 5", "stdout": "10"}],
}
SECRET = {"question": "Guess.", "tests": [{"stdin": "public-1234567", "stdout": "secret-1234567"}]}
needs_sandbox = pytest.mark.skipif(
    program_runner.available(program_runner.own_version()) is not None,
    reason=str(program_runner.available(program_runner.own_version())),
)


def made(
    folder: Path,
    parameters: str = '{"seconds": 1}',
    rows: tuple[dict[str, Any], ...] = (ADD, SECRET),
    *,
    patience: int = PATIENCE,
    run: Run = program_runner.run,
) -> CodeTask:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CodeTask("adds", parameters, VERSION, path, patience=patience, run=run)


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


@needs_sandbox
def test_rewards(tmp_path: Path) -> None:
    task = made(tmp_path)
    assert task.count == 2
    assert task.question(MAX_ITEM) == "Guess."
    right = block("print(sum(map(int, input().split())))")
    assert task.score(0, right) == task.score(4, right) == 1_000_000
    for response in (block("print(3)"), block("1/0"), "print(3)", ""):
        assert task.score(0, response) == 0
    assert task.score(0, block("print(3)"), patient=True) == 0
    with pytest.raises(ValueError, match="there is no item"):
        task.question(-1)


@needs_sandbox
def test_a_share_of_the_tests(tmp_path: Path) -> None:
    task = made(tmp_path, '{"reward": "fraction", "seconds": 1}')
    assert task.score(0, block("print(3)")) == 500_000
    assert task.score(0, block("print(4)")) == 0


@needs_sandbox
def test_what_a_test_expects_is_nowhere_to_be_found(tmp_path: Path) -> None:
    # The program prints each text of such a beginning that is anywhere in its process; its own input is there.
    search = """
import gc, re, sys
given = input()
word = {!r} + "-"
places = [str(sys._getframe(n).f_locals) for n in range(4)] + [str(thing) for thing in gc.get_objects()]
print(*sorted(set(re.findall(word + "[0-9]+", " ".join(places)))))
"""
    task = made(tmp_path)
    assert task.score(1, block(search.format("secret"))) == 0
    found = made(
        tmp_path, rows=({"question": "Find.", "tests": [{"stdin": "public-1234567", "stdout": "public-1234567"}]},)
    )
    assert found.score(0, block(search.format("public"))) == 1_000_000


@needs_sandbox
def test_no_claim_is_false_for_lack_of_time(tmp_path: Path) -> None:
    task = made(tmp_path, rows=({"question": "Wait.", "tests": [{"stdin": "", "stdout": "done"}]},), patience=2)
    # Too long at first and not with patience; what never ends is never wrong.
    slow = block("import time\nwhile time.process_time() < 1.3: pass\nprint('done')")
    assert (task.score(0, slow), task.score(0, slow, patient=True)) == (0, 1_000_000)
    assert task.score(0, block("while True: pass"), patient=True) is None


@needs_sandbox
def test_a_sandbox_that_ends_decides_nothing(tmp_path: Path) -> None:
    def lost(*_: object) -> Generator[tuple[Status, bytes], None, None]:
        yield from ()
        raise Lost("the sandbox ended")

    task = made(tmp_path, run=lost)
    assert task.score(0, block("print(3)")) is None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("[]", "the parameters of adds must be a JSON object"),
        ('{"second": 1}', "adds has no parameter 'second'; it has reward, seconds, memory"),
        ('{"seconds": 0}', "the parameter seconds of adds must be 1 to 60"),
        ('{"seconds": 1.5}', "the parameter seconds of adds must be 1 to 60"),
        ('{"seconds": true}', "the parameter seconds of adds must be 1 to 60"),
        ('{"memory": 5000}', "the parameter memory of adds must be 64 to 4096"),
        ('{"reward": "most"}', "the parameter reward of adds must be all or fraction"),
    ],
)
def test_bad_parameters(parameters: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CodeSettings.parse("adds", parameters)


def test_what_a_machine_lacks_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adds cannot run programs here: there is no Python 3\.1: install"):
        CodeTask("adds", "{}", "python==3.1", tmp_path / "x")
    with pytest.raises(UserError, match="adds pins 'sympy==1' instead of a version of Python"):
        CodeTask("adds", "{}", "sympy==1", tmp_path / "x")
    with pytest.raises(UserError, match="the code task adds names no file"):
        CodeTask("adds", "{}", VERSION, None)


@needs_sandbox
def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read adds"):
        CodeTask("adds", "{}", VERSION, tmp_path / "nothing")
