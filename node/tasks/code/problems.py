"""Problems that a program has to solve, each with its tests, and whether an output is the right one.

1. A set is a file of lines ``{"question": text, "tests": [test…]}``. A test is ``{"stdin": text, "stdout": text}``: the
   program reads the one and has to print the other; or ``{"call": expression, "returns": value}``: the expression,
   evaluated among the program's names, has to be the value (JSON as ``inside.encode`` writes it).
2. Printed texts are compared by line without white space at the ends, and without blank lines at the end; lines by
   words. Words are equal as texts or, where the expected one is written as a decimal fraction, as numbers up to
   ``TOLERANCE``, so that nothing rests on the last digit of another machine's arithmetic.
3. Values are equal as in Python, but that lists equal tuples, and floating-point numbers are equal up to ``TOLERANCE``.
4. The program is the last fenced block of a response (``program_of``). A response without one has no program.

Nothing here runs or imports anything of a program's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.tasks import answer_bounds
from node.tasks.code.program_runner import Input
from node.tasks.question_files import MAX_QUESTION, lines

TOLERANCE: Final = 1e-6
MAX_TESTS: Final = 200
MAX_TEST: Final = 1 << 20
"""Characters of one input or one expected output."""
MAX_TESTS_TEXT: Final = 8 << 20
"""Characters of a problem's tests."""
MAX_PROGRAM: Final = 1 << 16
"""Characters of a program."""
_FENCE: Final = re.compile(r"^[ \t]*```", re.MULTILINE)
_FRACTION: Final = re.compile(r"[+-]?[0-9]*\.[0-9]+(?:[eE][+-]?[0-9]+)?|[+-]?[0-9]+\.?[eE]-[0-9]+")


@dataclass(frozen=True, slots=True)
class Test:
    """What a program is given, and the text that it has to print, or the value that the expression has to be."""

    given: Input
    expected: Any


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its tests."""

    question: str
    tests: tuple[Test, ...]


def program_of(response: str) -> str | None:
    """The last fenced code block of ``response``, None without one or where it is too long."""
    if len(response) > answer_bounds.MAX_RESPONSE:
        return None
    fences = list(_FENCE.finditer(response))
    if len(fences) < 2:
        return None
    # Fences come in pairs; one that was never closed is cut off text.
    opening, closing = fences[: len(fences) // 2 * 2][-2:]
    start = response.find("\n", opening.end()) + 1
    program = response[start : closing.start()]
    return program if len(program) <= MAX_PROGRAM and "\0" not in program else None


def right(test: Test, output: bytes) -> bool:
    """Whether ``output`` is what ``test`` expects (rules 2 and 3)."""
    if test.given[0] == "stdin":
        return _same_text(test.expected, output.decode("utf-8", "replace"))
    try:
        return same(test.expected, json.loads(output))
    except (ValueError, RecursionError):
        return False


def _same_text(expected: str, printed: str) -> bool:
    wanted, found = (text.rstrip().split("\n") for text in (expected, printed))
    return len(wanted) == len(found) and all(map(_same_line, wanted, found))


def _same_line(wanted: str, found: str) -> bool:
    if wanted.strip() == found.strip():
        return True
    words, others = wanted.split(), found.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(wanted: str, found: str) -> bool:
    if wanted == found:
        return True
    if not _FRACTION.fullmatch(wanted) or len(found) > 400:
        return False
    try:
        return _near(float(wanted), float(found))
    except ValueError:
        return False


def _near(wanted: float, found: float) -> bool:
    return math.isclose(wanted, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same(expected: Any, found: Any) -> bool:
    """Whether two values out of JSON are equal (rule 3)."""
    if isinstance(expected, float) or (isinstance(found, float) and isinstance(expected, int)):
        if not isinstance(found, int | float):
            return False
        try:
            return _near(float(expected), float(found)) or (expected != expected and found != found)
        except OverflowError:  # an integer beyond the floating-point numbers
            return bool(expected == found)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(same(value, found[key]) for key, value in expected.items())
    return bool(expected == found)


def read(name: str, path: Path) -> list[Problem]:
    """The problems of a file. Raises ``UserError`` that names the first bad line."""
    return [problem(value, f"line {number} of {name}") for number, value in lines(name, path)]


def problem(value: Mapping[str, Any], where: str) -> Problem:
    """The problem that one line holds. Raises ``UserError`` that begins with ``where``."""
    question, tests = value.get("question"), value.get("tests")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f'{where} needs the text "question"')
    if len(question) > MAX_QUESTION:
        raise UserError(f"the question in {where} has more than {MAX_QUESTION} characters")
    if not isinstance(tests, list) or not 1 <= len(tests) <= MAX_TESTS:
        raise UserError(f'{where} needs "tests", a list of 1 to {MAX_TESTS}')
    if len(json.dumps(tests)) > MAX_TESTS_TEXT:
        raise UserError(f"the tests in {where} have more than {MAX_TESTS_TEXT} characters", "leave some out")
    return Problem(question, tuple(_test(test, f"test {number} in {where}") for number, test in enumerate(tests, 1)))


def _test(value: Any, where: str) -> Test:
    if not isinstance(value, dict):
        value = {}
    for kind, result in (("stdin", "stdout"), ("call", "returns")):
        if value.keys() != {kind, result}:
            continue
        given, expected = value[kind], value[result]
        if not isinstance(given, str) or (kind == "stdin" and not isinstance(expected, str)):
            break
        if len(given) > MAX_TEST or len(expected if isinstance(expected, str) else json.dumps(expected)) > MAX_TEST:
            raise UserError(f"{where} has more than {MAX_TEST} characters")
        if kind == "call" and answer_bounds.parsed(given) is None:
            raise UserError(f"{where} is no Python expression: {given[:60]!r}")
        return Test((kind, given), expected)  # type: ignore[arg-type]
    raise UserError(f'{where} is neither {{"stdin": text, "stdout": text}} nor {{"call": text, "returns": value}}')
