"""Questions with short answers from a file of JSON lines, compared by math-verify or as texts.

1. Each line is a JSON object with the texts ``question`` and ``answer`` and nothing else that counts. Item n is line n
   modulo the number of lines. ``parameters`` is a JSON object that may say ``check``: "math" (the default) or "exact".
   What compares must be installed in the versions that the domain's genesis pins (``node.tasks.task_versions``).
2. What is compared is the text in the response's last ``<answer>…</answer>``, else in its last ``\\boxed{…}``, else
   its last line that is not blank. A text equal to the answer is right.
3. "exact": texts are equal up to the amount of white space. That runs no code and needs no sandbox.
4. "math": any other text reaches math-verify only within the bounds of ``node.tasks.answer_bounds.is_latex`` and scores
   0 beyond them, and so must every answer in the file lie within them.
5. math-verify's own timeouts are off: they rest on signals, and say "wrong" where a machine was slow. The caller bounds
   the time, and a reward that took too long is undecidable. sympy's random generator is seeded before each comparison,
   and the sandbox has it compute with Python's integers, whatever faster ones are installed.

Importing this module imports neither sympy nor math-verify; making a task does.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.tasks import answer_bounds, question_files, task_versions
from protocol.constants import MILLION

CHECKS: Final = ("math", "exact")
_BOXED: Final = "\\boxed{"
_WORD: Final = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")


def final_text(response: str) -> str | None:
    """What of ``response`` is compared (rule 2), or None where it is out of the bounds of ``bounds.answer_of``."""
    answer = answer_bounds.answer_of(response)
    if not answer:
        return answer
    inner = boxed(answer)
    return answer.splitlines()[-1].strip() if inner is None else inner


def boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{…}`` of ``text``, None without one."""
    start = text.rfind(_BOXED)
    inner = None if start < 0 else _braced(text, start + len(_BOXED))
    return None if inner is None else inner.strip()


def _braced(text: str, start: int) -> str | None:
    """``text`` from ``start`` up to the brace that closes the one before ``start``."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return None


def check_of(name: str, parameters: str) -> str:
    """How the answers of a question set are compared: one of ``CHECKS``. Raises ``UserError``."""
    values = task_versions.parameters(name, parameters)
    if unknown := set(values) - {"check"}:
        raise UserError(f"the question set {name} has no parameter {min(unknown)!r}", "it has check")
    check = values.get("check", "math")
    if check not in CHECKS:
        raise UserError(f"the parameter check of {name} must be {' or '.join(CHECKS)}")
    return str(check)


def read_lines(name: str, path: Path, check: str = "math") -> list[tuple[str, str]]:
    """The (question, answer) pairs of a JSONL file. Raises ``UserError`` that names the first bad line."""
    return [pair(value, f"line {number} of {name}", check) for number, value in question_files.lines(name, path)]


def pair(value: Mapping[str, Any], where: str, check: str) -> tuple[str, str]:
    """The question and the answer that one line holds. Raises ``UserError``; ``where`` names the line."""
    question, answer = value.get("question"), value.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip() or not answer.strip():
        raise UserError(f'{where} needs the texts "question" and "answer"')
    if len(question) > question_files.MAX_QUESTION:
        raise UserError(f"the question in {where} has more than {question_files.MAX_QUESTION} characters")
    if check == "exact":
        if len(answer.strip().splitlines()) > 1 or answer_bounds.answer_of(answer) is None:
            raise UserError(f"the answer in {where} is not one line of text: {answer[:60]!r}")
    elif not answer_bounds.is_latex(answer):
        raise UserError(
            f"the answer in {where} cannot be judged: {answer[:60]!r}",
            "leave out lines whose answers hold integrals, sums, products, limits, text or large exponents",
        )
    return question, answer.strip()


def _as_latex(text: str) -> str:
    """math-verify reads LaTeX only where it is marked as such; a sentence is left for it to search."""
    sentence = any(word not in answer_bounds.FUNCTIONS for word in _WORD.findall(text))
    return text if sentence or "$" in text else f"${text}$"


class JsonlTask:
    """A file of questions and answers, with parameters as in rule 1.

    Raises ``UserError`` where the file, the parameters or what is installed does not serve, and where math-verify,
    which gives responses to sympy, would run without a sandbox.
    """

    def __init__(self, name: str, parameters: str, version: str, data: Path | None, *, sandboxed: bool) -> None:
        self.name = name
        self._check = check_of(name, parameters)
        if self._check == "math" and not sandboxed:
            raise UserError(f"the JSONL task {name} is scored with sympy, and so needs a sandbox")
        if data is None:
            raise UserError(f"the JSONL task {name} names no file", "give the path of a JSONL file")
        if self._check == "exact":
            task_versions.check_exact(version)
            self._lines = read_lines(name, data, self._check)
            return
        task_versions.check_math(version)
        self._lines = read_lines(name, data)
        math_verify = importlib.import_module("math_verify")

        # It says for every comparison that its timeouts are off, and would print the responses it cannot parse.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self._library: Any = math_verify
        self._seed = importlib.import_module("sympy.core.random").seed
        unreadable = [answer for _, answer in self._lines[:: max(1, len(self._lines) // 32)] if not self._parse(answer)]
        if unreadable:
            raise UserError(f"math-verify cannot read the answer {unreadable[0][:60]!r} of {name}", "write it as LaTeX")

    def _parse(self, text: str) -> list[Any]:
        parsed: list[Any] = self._library.parse(_as_latex(text), parsing_timeout=None, raise_on_error=False)
        return parsed

    @property
    def count(self) -> int:
        """The number of lines."""
        return len(self._lines)

    def question(self, item: int) -> str:
        """The question of item 0…2³¹−1."""
        return question_files.line_of(self._lines, item)[0]

    def score(self, item: int, response: str) -> int:
        """The reward of ``response``: one million where it says the answer, else 0."""
        expected = question_files.line_of(self._lines, item)[1]
        text = final_text(response)
        if not text:
            return 0
        if text == expected:
            return MILLION
        if self._check == "exact":
            return MILLION if text.split() == expected.split() else 0
        if not answer_bounds.is_latex(text):
            return 0
        self._seed(0)
        right = self._library.verify(self._parse(expected), self._parse(text), timeout_seconds=None)
        return MILLION if right else 0
