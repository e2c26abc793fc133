"""Founders' files: JSON lines and Parquet with the columns that published sets have."""

from __future__ import annotations

import importlib
import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from node.errors import UserError
from node.tasks import question_conversion
from node.tasks.code import problems
from node.tasks.question_conversion import ConversionSource
from node.tasks.question_tasks import read_lines


def source(path: Path, kind: str = "jsonl", **changes: Any) -> ConversionSource:
    columns, skip = changes.pop("columns", {}), changes.pop("skip", False)
    return ConversionSource("own", kind, json.dumps(changes), path, columns, skip)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: Any) -> Path:
    arrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table.write_table(arrow.Table.from_pylist(list(rows)), path)
    return path


def converted(made: ConversionSource) -> list[dict[str, Any]]:
    data, left_out = question_conversion.convert(made)
    assert left_out == []
    return [json.loads(line) for line in data.decode().splitlines()]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "Q", "answer": "2", "more": [1]}, "2"),
        ({"problem": "Q", "solution": r"Because \boxed{1} … \boxed{\frac{1}{2}}."}, r"\frac{1}{2}"),
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], "ground_truth": 12}, "12"),
        ({"question": "Q", "answer": "2 + 3 = 5\n#### 5"}, "5"),
        ({"question": "Q", "answer": 2.5}, "2.5"),
        ({"question": "Q", "answer": 3.0, "solution": "no"}, "3"),
        ({"question": "Q", "answer": 1e-05}, "0.00001"),
        ({"question": "Q", "answer": -1.5e16}, "-15000000000000000"),
    ],
)
@pytest.mark.parametrize("write", [lines, parquet])
def test_usual_columns(tmp_path: Path, write: Any, row: dict[str, Any], answer: str) -> None:
    path = write(tmp_path / f"set.{write.__name__}", row)
    (found,) = converted(source(path))
    assert found == {"question": "S\n\nQ" if "prompt" in row else "Q", "answer": answer}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_no_answer(tmp_path: Path, value: float) -> None:
    with pytest.raises(UserError, match='line 1 of own needs the texts "question" and "answer"'):
        converted(source(lines(tmp_path / "set.jsonl", {"question": "Q", "answer": value})))


def test_a_decimal_fraction_of_parquet_is_an_answer(tmp_path: Path) -> None:
    path = parquet(tmp_path / "set.parquet", {"question": "Q", "answer": Decimal("1.50")})
    assert converted(source(path)) == [{"question": "Q", "answer": "1.50"}]


@pytest.mark.parametrize(
    "test",
    [
        {"stdin": b"1", "stdout": b"2"},
        {"fn_name": "f", "input": [1], "output": Decimal("1.5")},
        {"call": "f()", "returns": date(2020, 1, 1)},
    ],
)
def test_what_json_cannot_hold_is_told_in_one_line(tmp_path: Path, test: dict[str, Any]) -> None:
    path = parquet(tmp_path / "set.parquet", {"question": "Q", "tests": [test]})
    with pytest.raises(UserError, match="the tests in row 1 of own are no plain data: "):
        question_conversion.convert(source(path, "code"))


def test_a_test_that_is_nested_too_deep_is_told_in_one_line(tmp_path: Path) -> None:
    test = f"assert f({'+'.join(['x'] * 900)})"
    with pytest.raises(UserError, match="the tests in line 1 of own are nested too deep"):
        question_conversion.convert(source(lines(tmp_path / "set.jsonl", {"question": "Q", "tests": [test]}), "code"))


def test_both_kinds_of_files_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [{"question": "Größe?", "answer": str(number), "level": number} for number in range(3000)]
    first, _ = question_conversion.convert(source(lines(tmp_path / "set.jsonl", *rows)))
    second, _ = question_conversion.convert(source(parquet(tmp_path / "set.parquet", *rows)))
    assert first == second
    path = tmp_path / "pinned.jsonl"
    path.write_bytes(first)
    assert read_lines("own", path)[2999] == ("Größe?", "2999")


def test_columns_by_name(tmp_path: Path) -> None:
    row = {"q": "Q", "reward_model": {"ground_truth": "7"}, "answer": "8"}
    columns = {"question": "q", "answer": "reward_model.ground_truth"}
    for path in (lines(tmp_path / "set.jsonl", row), parquet(tmp_path / "set.parquet", row)):
        assert converted(source(path, columns=columns)) == [{"question": "Q", "answer": "7"}]
        with pytest.raises(UserError, match=r"own \(.*\) has no column 'a.b'; it has q, reward_model, answer"):
            converted(source(path, columns={**columns, "answer": "a.b"}))
        with pytest.raises(UserError, match=r"has no column for the question; it has .*; write columns = { question ="):
            converted(source(path))
    with pytest.raises(UserError, match="columns has no key 'tests'; it has question and answer"):
        converted(source(path, columns={"tests": "q"}))


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        (
            [
                "assert f(1) == (2, 3)",
                "assert [4] == g('x')",
                "assert ok(1)",
                "assert not ok(2)",
                "assert f(3) is None",
            ],
            [("f(1)", [2, 3]), ("g('x')", [4]), ("not not (ok(1))", True), ("not not (ok(2))", False), ("f(3)", None)],
        ),
        (["assert set(f(1)) == set([2, 1])"], [("set(f(1))", {"set": [1, 2]})]),
        (["assert f(1) == g(1) or True"], [("not not (f(1) == g(1) or True)", True)]),
        ([{"input": "1\n", "output": "2\n"}], [("1\n", "2\n")]),
        ({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", "5"]}, [("1\n", "2\n"), ("2\n3", "5")]),
        (
            json.dumps({"fn_name": "f", "inputs": [[1, [2]], ["x"]], "outputs": [[3], [[4]]]}),
            [("f(1, [2])", 3), ("f('x')", [4])],
        ),
        (
            {
                "language": "python",
                "test_cases": [
                    {"type": "stdin_stdout", "input": "1", "output": "2"},
                    {"type": "function_call", "fn_name": "f", "input": [1], "output": {"a": 1}},
                ],
            },
            [("1", "2"), ("f(1)", {"map": [["a", 1]]})],
        ),
        ([{"stdin": "1", "stdout": "2", "call": None, "returns": None}], [("1", "2")]),
    ],
)
def test_tests_of_published_sets(tmp_path: Path, value: Any, tests: list[tuple[str, Any]]) -> None:
    path = lines(tmp_path / "set.jsonl", {"problem": "Q", "tests": value})
    data, _ = question_conversion.convert(source(path, "code"))
    pinned = tmp_path / "pinned.jsonl"
    pinned.write_bytes(data)
    (problem,) = problems.read("own", pinned)
    assert [(test.given[1], test.expected) for test in problem.tests] == tests


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nothing", "the tests in line 1 of own are not JSON: 'nothing'"),
        (3, "line 1 of own needs tests"),
        ({"inputs": ["1"], "outputs": []}, 'neither "test_cases" nor as many "inputs" as "outputs"'),
        (["f(1) == 2"], "test 1 in line 1 of own is no assert statement"),
        (["x = 1\nassert x == 1"], "test 1 in line 1 of own is no single statement"),
        (
            ["assert f(1) == g(1)"],
            r"test 1 in line 1 of own compares with what is no literal: 'assert f\(1\) == g\(1\)'",
        ),
        ({"fn_name": "f", "inputs": [3], "outputs": [3]}, "the arguments of f in line 1 of own are no list"),
        ([{"type": "judge", "input": "", "output": ""}], "test 1 in line 1 of own is neither"),
        ([], 'line 1 of own needs "tests", a list of 1 to 200'),
    ],
)
def test_tests_that_do_not_serve(tmp_path: Path, value: Any, message: str) -> None:
    path = lines(tmp_path / "set.jsonl", {"question": "Q", "tests": value})
    with pytest.raises(UserError, match=message):
        question_conversion.convert(source(path, "code"))


def test_rows_that_do_not_serve_are_named_or_left_out(tmp_path: Path) -> None:
    rows = [{"question": "Q", "answer": "1"}, {"question": "Q", "answer": r"\int x"}, {"question": "", "answer": "1"}]
    rows.append({"question": [{"role": "assistant", "content": "Q"}], "answer": "1"})  # type: ignore[dict-item]
    path = lines(tmp_path / "set.jsonl", *rows)
    with pytest.raises(UserError, match=r"the answer in line 2 of own cannot be judged"):
        question_conversion.convert(source(path))
    data, left_out = question_conversion.convert(source(path, skip=True))
    assert data == b'{"question": "Q", "answer": "1"}\n'
    assert [line.split(";")[0].split(":")[0] for line in left_out] == [
        "the answer in line 2 of own cannot be judged",
        'line 3 of own needs the texts "question" and "answer"',
        "line 4 of own",
    ]
    assert len(converted(source(path, check="exact", skip=False, columns={"question": "answer"}))) == 4
    path = lines(tmp_path / "set.jsonl", rows[1])
    with pytest.raises(UserError, match=r"no row of own .* can be used; the first: the answer in line 1"):
        question_conversion.convert(source(path, skip=True))


def test_files_that_are_no_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    path.write_bytes(b"no Parquet at all")
    with pytest.raises(UserError, match=r"own \(.*set\.parquet\) is not Parquet"):
        question_conversion.convert(source(path))
    with pytest.raises(UserError, match=r"cannot read own \(.*nothing\.parquet\)"):
        question_conversion.convert(source(tmp_path / "nothing.parquet"))
    monkeypatch.setattr(importlib, "import_module", _no_module)
    with pytest.raises(
        UserError, match=r'reading Parquet needs pyarrow; install it: pip install "farflung\[parquet\]"'
    ):
        question_conversion.convert(source(path))


def _no_module(name: str) -> Any:
    raise ModuleNotFoundError(name)


def test_the_form_that_is_pinned_is_a_file_with_notes(tmp_path: Path) -> None:
    path = lines(tmp_path / "set.jsonl", {"problem": "Q", "answer": 1}, {"problem": "Q", "answer": ""})
    file, notes = question_conversion.pinned(source(path, skip=True))
    assert file.read_text() == '{"question": "Q", "answer": "1"}\n'
    assert notes == ['own: left out 1 of its rows; the first: line 2 of own needs the texts "question" and "answer"']
    other, notes = question_conversion.pinned(source(lines(path, {"problem": "Q", "answer": 1})))
    assert (other.read_bytes(), notes, other != file) == (file.read_bytes(), [], True)
