"""From a founder's own file, JSON lines or Parquet, to the form in which a question set is pinned and travels.

1. The form is lines of ``{"question", "answer"}`` or ``{"question", "tests"}`` (``node.tasks.question_tasks``,
   ``node.tasks.code.problems``) in the order of the rows, with nothing else in them: so nodes need no Parquet, and
   columns that are not used do not travel.
2. ``columns`` says which column holds the question, the answer or the tests; a dot leads into one ("reward_model.
   ground_truth"). Where it does not, the first of ``USUAL`` that the file has is meant.
3. A question is a text, or a list of messages of which none is the assistant's. An answer is a text or a number; what
   stands after the last ``####``, else in the last ``\\\\boxed{…}``, is taken for it where there is such a thing.
4. Tests are a list of tests as they are pinned; of ``assert`` statements that compare with a literal; of
   ``{input, output}``; or a map, or JSON text of one, of ``inputs`` and ``outputs`` (with ``fn_name``: calls of that
   function), or of ``test_cases`` with types "stdin_stdout" and "function_call".
5. The first row that does not serve is told in one line, or rows that do not are left out and counted where the
   founder says ``skip = true``.

For the founder's process alone; pyarrow is imported where a file is Parquet.
"""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from node.errors import UserError
from node.tasks import question_files, question_tasks
from node.tasks.code import problems
from node.tasks.code.inside_sandbox import encode
from protocol.constants import MAX_BLOB_BYTES

USUAL: Final[Mapping[str, tuple[str, ...]]] = {
    "question": ("question", "problem", "prompt"),
    "answer": ("answer", "ground_truth", "solution"),
    "tests": ("tests", "test_list", "test_cases", "input_output", "verification_info"),
}
PARTS: Final[Mapping[str, tuple[str, ...]]] = {"jsonl": ("question", "answer"), "code": ("question", "tests")}
PARQUET: Final = (".parquet", ".pq")
_ROWS_AT_ONCE: Final = 1024
_MAKERS: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, float)}


@dataclass(frozen=True, slots=True)
class ConversionSource:
    """A file as a founder names it, for a task of a kind in ``PARTS``."""

    name: str
    kind: str
    parameters: str
    path: Path
    columns: Mapping[str, str]
    skip: bool


def convert(source: ConversionSource) -> tuple[bytes, list[str]]:
    """The file in the form that is pinned, and why each row that was left out was. Raises ``UserError``."""
    parts = PARTS[source.kind]
    check = question_tasks.check_of(source.name, source.parameters) if source.kind == "jsonl" else ""
    if unknown := set(source.columns) - set(parts):
        raise UserError(f"{source.name}: columns has no key {min(unknown)!r}", f"it has {' and '.join(parts)}")
    made, left_out, size = [], [], 0
    columns: dict[str, str] = {}
    for where, row in _rows(source):
        columns = columns or {part: _column(source, part, row) for part in parts}
        try:
            value = _value(row, columns, where, check)
        except UserError as error:
            if not source.skip:
                raise
            left_out.append(str(error))
            continue
        line = _line(value, where)
        size += len(line)
        if size > MAX_BLOB_BYTES:
            raise UserError(f"{source.name} takes more than {MAX_BLOB_BYTES >> 20} MiB", "leave some rows out")
        made.append(line)
    if not made:
        raise UserError(f"no row of {source.name} ({source.path}) can be used; the first: {left_out[0]}")
    return b"".join(made), left_out


def _line(value: Mapping[str, Any], where: str) -> bytes:
    try:
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} holds half a character") from None


def _value(row: Mapping[str, Any], columns: Mapping[str, str], where: str, check: str) -> dict[str, Any]:
    """One row in the form that is pinned. Raises ``UserError``."""
    question = _question(_at(row, columns["question"]), where)
    if "answer" in columns:
        question, answer = question_tasks.pair(
            {"question": question, "answer": _answer(_at(row, columns["answer"]))}, where, check
        )
        return {"question": question, "answer": answer}
    try:
        value = {"question": question, "tests": _tests(_at(row, columns["tests"]), where)}
        problems.problem(value, where)
    except TypeError as error:  # what Parquet can hold and JSON cannot: bytes, dates, decimal fractions
        raise UserError(f"the tests in {where} are no plain data: {error}") from None
    except RecursionError:
        raise UserError(f"the tests in {where} are nested too deep") from None
    return value


# Rows and columns


def _rows(source: ConversionSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with the words that name it, at least one."""
    if source.path.suffix not in PARQUET:
        for number, value in question_files.lines(source.name, source.path):
            yield f"line {number} of {source.name}", value
        return
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(
            f"{source.path}: reading Parquet needs pyarrow", 'install it: pip install "farflung[parquet]"'
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(source.path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {source.name}", row
    except OSError as error:
        raise UserError(f"cannot read {source.name} ({source.path}): {error.strerror or error}") from None
    except ValueError as error:  # what pyarrow raises for a damaged file
        raise UserError(f"{source.name} ({source.path}) is not Parquet: {error}") from None
    if not number:
        raise UserError(f"{source.name} ({source.path}) has no row")


def _column(source: ConversionSource, part: str, row: Mapping[str, Any]) -> str:
    """The column for ``part``. Raises ``UserError`` where the file has none."""
    there = ", ".join(row) or "nothing"
    named = source.columns.get(part)
    if named is not None:
        if named in row or _at(row, named) is not None:
            return named
        raise UserError(f"{source.name} ({source.path}) has no column {named!r}; it has {there}")
    found = next((column for column in USUAL[part] if column in row), None)
    if found is None:
        raise UserError(
            f"{source.name} ({source.path}) has no column for the {part}; it has {there}",
            f'write columns = {{ {part} = "…" }}',
        )
    return found


def _at(row: Mapping[str, Any], column: str) -> Any:
    """What stands in a column, None where nothing does (rule 2)."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# Questions and answers


def _question(value: Any, where: str) -> Any:
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return value
    if any(message.get("role") not in ("system", "user") for message in value):
        raise UserError(f"{where}: the question is a conversation", "name a column with the question alone")
    contents = [message.get("content") for message in value]
    return "\n\n".join(contents) if all(isinstance(text, str) for text in contents) else None


def _answer(value: Any) -> Any:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _number(value)
    if not isinstance(value, str):
        return value
    if "####" in value:
        return value.rpartition("####")[2].strip()
    return question_tasks.boxed(value) or value


def _number(value: float | Decimal) -> str | None:
    """A number in digits alone, as 1e-05 would be read as a letter less five; None where it is none."""
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not exact.is_finite():
        return None
    return str(int(exact)) if exact == exact.to_integral_value() else f"{exact:f}"


# Tests


def _tests(value: Any, where: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(f"the tests in {where} are not JSON: {value[:60]!r}") from None
    if isinstance(value, dict):
        return _map_of_tests(value, where)
    if not isinstance(value, list):
        raise UserError(f"{where} needs tests")
    return [_test(test, f"test {number} in {where}") for number, test in enumerate(value, 1)]


def _map_of_tests(value: Mapping[str, Any], where: str) -> list[Any]:
    if isinstance(value.get("test_cases"), list):
        return _tests(value["test_cases"], where)
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(f'the tests in {where} are neither "test_cases" nor as many "inputs" as "outputs"')
    function = value.get("fn_name")
    if not function:
        return [
            {"stdin": _lines(given), "stdout": _lines(wanted)} for given, wanted in zip(inputs, outputs, strict=True)
        ]
    # These sets put each result into a list of its own.
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for wanted in outputs)
    return [
        _call(str(function), given, wanted[0] if wrapped else wanted, where)
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _lines(value: Any) -> Any:
    return "\n".join(value) if isinstance(value, list) and all(isinstance(line, str) for line in value) else value


def _call(function: str, arguments: Any, wanted: Any, where: str) -> dict[str, Any]:
    if not isinstance(arguments, list):
        raise UserError(f"the arguments of {function} in {where} are no list")
    return {"call": f"{function}({', '.join(map(repr, arguments))})", "returns": encode(wanted)}


def _test(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return _assertion(value, where)
    if not isinstance(value, dict):
        return value
    given, wanted = value.get("input"), value.get("output")
    if value.get("type") == "function_call" or (value.get("fn_name") and value.get("type") is None):
        return _call(str(value.get("fn_name")), given, wanted, where)
    if "input" in value and "output" in value and value.get("type") in (None, "stdin", "stdin_stdout"):
        return {"stdin": _lines(given), "stdout": _lines(wanted)}
    # Parquet gives every test all columns that any has.
    return {key: item for key, item in value.items() if item is not None} if {"stdin", "call"} & value.keys() else value


def _assertion(text: str, where: str) -> dict[str, Any]:
    """The test that an ``assert`` statement is: what it evaluates, and what that has to be."""
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UserError(f"{where} is no single statement: {text[:60]!r}") from None
    if not isinstance(statement, ast.Assert):
        raise UserError(f"{where} is no assert statement: {text[:60]!r}")
    condition, wanted = statement.test, True
    while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        condition, wanted = condition.operand, not wanted
    match condition:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]) if wanted:
            for call, literal in ((left, right), (right, left)):
                try:
                    return {"call": ast.unparse(call), "returns": encode(_literal(literal))}
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    continue
            raise UserError(f"{where} compares with what is no literal: {text[:60]!r}")
    # Operators, as the program could call something else "bool".
    return {"call": f"not not ({ast.unparse(condition)})", "returns": wanted}


def _literal(tree: ast.expr) -> Any:
    """The value of a literal, or of a built-in type called with one. Raises ``ValueError`` and others for more."""
    match tree:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _MAKERS:
            return _MAKERS[name](*map(_literal, arguments))
    return ast.literal_eval(tree)


# Files


def pinned(source: ConversionSource) -> tuple[Path, list[str]]:
    """A file in the form that is pinned, there until this process ends, and what was left out. Raises ``UserError``."""
    data, left_out = convert(source)
    descriptor, name = tempfile.mkstemp(".jsonl", dir=_folder())
    with open(descriptor, "wb") as file:
        file.write(data)
    if not left_out:
        return Path(name), []
    return Path(name), [f"{source.name}: left out {len(left_out)} of its rows; the first: {left_out[0]}"]


@functools.cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="farflung-tasks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
