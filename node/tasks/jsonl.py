"""Questions with short mathematical answers from a JSONL file, compared by math-verify.

1. Each line is a JSON object with the texts ``question`` and ``answer`` and nothing else that counts. Item n is line n
   modulo the number of lines. The installed math-verify must have the version that the domain's genesis pins.
2. What is compared is the text in the response's last ``<answer>…</answer>``, else in its last ``\\boxed{…}``, else
   its last line that is not blank. A text equal to the answer is right.
3. Any other text reaches math-verify only within the bounds of ``node.tasks.bounds.is_latex`` and scores 0 beyond
   them, and so must every answer in the file lie within them.
4. math-verify's own timeouts are off: they say "wrong" where a machine was slow. The caller bounds the time, and a
   reward that took too long is undecidable. sympy's random generator is seeded before each comparison.

Importing this module imports neither sympy nor math-verify; making a task does.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.tasks import bounds
from node.tasks.reasoning import MAX_ITEM, check_version
from protocol.constants import MAX_BLOB_BYTES, MILLION

MATH_VERIFY_VERSION: Final = "0.9.0"
MAX_QUESTION: Final = 1 << 16
"""Characters of a question."""
MAX_LINES: Final = 1_000_000
_BOXED: Final = "\\boxed{"
_WORD: Final = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")


def final_text(response: str) -> str | None:
    """What of ``response`` is compared (rule 2), or None where it is out of the bounds of ``bounds.answer_of``."""
    answer = bounds.answer_of(response)
    if not answer:
        return answer
    start = answer.rfind(_BOXED)
    if start >= 0 and (inner := _braced(answer, start + len(_BOXED))) is not None:
        return inner.strip()
    return answer.splitlines()[-1].strip()


def _braced(text: str, start: int) -> str | None:
    """``text`` from ``start`` up to the brace that closes the one before ``start``."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return None


def read_lines(name: str, path: Path) -> list[tuple[str, str]]:
    """The (question, answer) pairs of a JSONL file. Raises ``UserError`` that names the first bad line."""
    try:
        if path.stat().st_size > MAX_BLOB_BYTES:
            raise UserError(f"{name} ({path}) is larger than {MAX_BLOB_BYTES >> 20} MiB", "split it")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {name} ({path}): {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} ({path}) is not UTF-8 at byte {error.start}") from None
    pairs = [_pair(name, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not pairs:
        raise UserError(f"{name} ({path}) has no line", 'write one {"question": …, "answer": …} a line')
    if len(pairs) > MAX_LINES:
        raise UserError(f"{name} ({path}) has more than {MAX_LINES} lines", "split it")
    return pairs


def _pair(name: str, number: int, line: str) -> tuple[str, str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"line {number} of {name} is not JSON: {error}") from None
    question = value.get("question") if isinstance(value, dict) else None
    answer = value.get("answer") if isinstance(value, dict) else None
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip() or not answer.strip():
        raise UserError(f'line {number} of {name} needs the texts "question" and "answer"')
    if len(question) > MAX_QUESTION:
        raise UserError(f"the question in line {number} of {name} has more than {MAX_QUESTION} characters")
    if not bounds.is_latex(answer):
        raise UserError(
            f"the answer in line {number} of {name} cannot be judged: {answer[:60]!r}",
            "leave out lines whose answers hold integrals, sums, products, limits, text or large exponents",
        )
    return question, answer.strip()


def _as_latex(text: str) -> str:
    """math-verify reads LaTeX only where it is marked as such; a sentence is left for it to search."""
    sentence = any(word not in bounds.FUNCTIONS for word in _WORD.findall(text))
    return text if sentence or "$" in text else f"${text}$"


class JsonlTask:
    """A JSONL file of questions and answers. ``parameters`` must be "" or "{}".

    Raises ``UserError`` where the file or the installed math-verify does not serve, and where there is no sandbox:
    math-verify gives the response to sympy.
    """

    def __init__(self, name: str, parameters: str, version: str, data: Path | None, *, sandboxed: bool) -> None:
        if not sandboxed:
            raise UserError(f"the JSONL task {name} is scored with sympy, and so needs a sandbox")
        if parameters.strip() not in ("", "{}"):
            raise UserError(f"the JSONL task {name} takes no parameters", "give {}")
        if data is None:
            raise UserError(f"the JSONL task {name} names no file", "give the path of a JSONL file")
        check_version("math-verify", MATH_VERIFY_VERSION, version)
        self.name = name
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
        return self._line(item)[0]

    def _line(self, item: int) -> tuple[str, str]:
        if not 0 <= item <= MAX_ITEM:
            raise ValueError(f"there is no item {item}")
        return self._lines[item % len(self._lines)]

    def score(self, item: int, response: str) -> int:
        """The reward of ``response``: one million where it says the answer, else 0."""
        expected = self._line(item)[1]
        text = final_text(response)
        if not text:
            return 0
        if text == expected:
            return MILLION
        if not bounds.is_latex(text):
            return 0
        self._seed(0)
        right = self._library.verify(self._parse(expected), self._parse(text), timeout_seconds=None)
        return MILLION if right else 0
