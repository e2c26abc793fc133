from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import UserError
from node.tasks import answer_bounds
from node.tasks.code import problems
from node.tasks.code.inside_sandbox import encode
from node.tasks.code.problems import Test as Check
from node.tasks.code.problems import program_of, right, same

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.sets(st.integers()),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("first\n```\na\n```\nthen\n```py\nb\n```\nend", "b\n"),
        ("```\na\n```\nand then\n```python\nb", "a\n"),  # the last one was cut off
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\n```", ""),
        ("no program", None),
        ("```python\nx = 1", None),
        ("```\n\0\n```", None),
        ("```\n" + "#" * (problems.MAX_PROGRAM + 1) + "\n```", None),
        ("x" * answer_bounds.MAX_RESPONSE + "```\na\n```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_whole_block(response: str, program: str | None) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("expected", "printed", "result"),
    [
        ("1 2\n3\n", b"1 2\n3\n", True),
        ("1 2\n3\n", b"1  2 \n3\n\n\n", True),
        ("1 2\n3\n", b"1 2 3\n", False),
        ("0.5\n", b"0.5000000001\n", True),
        ("0.5\n", b"5e-1\n", True),
        ("0.5\n", b"0.51\n", False),
        ("5\n", b"5.0\n", False),
        ("1e-9\n", b"0\n", True),
        ("yes 0.25\n", b"yes 0.2500001\n", True),
        ("yes 0.25\n", b"no 0.25\n", False),
        ("0.5\n", b"nan\n", False),
        ("0.5\n", b"\xff\n", False),
        ("0.5\n", b"9" * 1000, False),
        ("", b"", True),
        ("", b"\n \n", True),
        ("a", b"", False),
    ],
)
def test_printed_texts(expected: str, printed: bytes, result: bool) -> None:
    assert right(Check(("stdin", ""), expected), printed) is result


@pytest.mark.parametrize(
    ("expected", "found", "result"),
    [
        ([1, 2], (1, 2), True),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ({1, 2}, frozenset({2, 1}), True),
        ({1, 2}, [1, 2], False),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({1: "x"}, {"1": "x"}, False),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (1.0, 1, True),
        (1.0, "1", False),
        (float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("inf"), 10**400, False),
        (True, 1, True),
        (None, False, False),
        ("a", "a", True),
        (b"a", b"a", True),
        (b"a", "a", False),
        (1 + 2j, 1 + 2j, True),
    ],
)
def test_values(expected: object, found: object, result: bool) -> None:
    assert right(Check(("call", "f()"), encode(expected)), json.dumps(encode(found)).encode()) is result


@given(VALUES)
def test_a_value_equals_itself_after_its_way(value: object) -> None:
    assert same(encode(value), json.loads(json.dumps(encode(value))))


@given(st.binary())
def test_whatever_a_program_says_is_right_or_wrong(output: bytes) -> None:
    for test in (Check(("call", "f()"), [1.5]), Check(("stdin", ""), "1.5")):
        assert right(test, output) in (True, False)


def test_deep_output_is_wrong_and_no_crash() -> None:
    assert not right(Check(("call", "f()"), [1]), b"[" * 1_000_000)
    assert not right(Check(("call", "f()"), []), b"[" * 100_000 + b"]" * 100_000)


def test_what_is_no_plain_data_has_no_value() -> None:
    with pytest.raises(TypeError, match="object is no plain data"):
        encode([object()])


GOOD: dict[str, Any] = {"question": "Add.", "tests": [{"stdin": "1 2", "stdout": "3"}, {"call": "f(1)", "returns": 2}]}


def test_a_file_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD))
    first, second = problems.read("adds", path)
    assert first == second
    assert [(test.given, test.expected) for test in first.tests] == [(("stdin", "1 2"), "3"), (("call", "f(1)"), 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": " "}, 'line 1 of adds needs the text "question"'),
        ({"question": "x" * 70_000}, "the question in line 1 of adds has more than 65536 characters"),
        ({"tests": []}, r'line 1 of adds needs "tests", a list of 1 to 200'),
        ({"tests": [{"stdin": "", "stdout": ""}] * 201}, "a list of 1 to 200"),
        ({"tests": ["assert f(1) == 2"]}, "test 1 in line 1 of adds is neither"),
        ({"tests": [{"stdin": "", "stdout": ""}, {"stdin": "", "stdout": 3}]}, "test 2 in line 1 of adds is neither"),
        ({"tests": [{"stdin": "", "stdout": "", "call": ""}]}, "test 1 in line 1 of adds is neither"),
        ({"tests": [{"call": "import os", "returns": 1}]}, "test 1 in line 1 of adds is no Python expression: 'import"),
        ({"tests": [{"call": "f(" * 1000, "returns": 1}]}, "is no Python expression"),
        ({"tests": [{"stdin": "x" * (1 << 21), "stdout": ""}]}, "test 1 in line 1 of adds has more than 1048576"),
        ({"tests": [{"stdin": "x" * (1 << 19), "stdout": ""}] * 17}, "the tests in line 1 of adds have more than"),
    ],
)
def test_a_bad_problem_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(UserError, match=message):
        problems.read("adds", path)
