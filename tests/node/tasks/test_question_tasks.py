from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.errors import UserError
from node.tasks import question_tasks
from node.tasks.question_tasks import JsonlTask, final_text
from node.tasks.task_versions import EXACT
from node.tasks.task_versions import MATH as VERSION
from protocol.taskset import MAX_ITEM

ROWS = [
    ("What is 1+1?", "2"),
    ("What is half of one?", r"\frac{1}{2}"),
    ("Expand (x+1)^2.", "x^2+2*x+1"),
    ("Which interval?", "(1, 2]"),
    ("Which set?", r"\{1, 2\}"),
    ("How many degrees?", r"90^\circ"),
]


def write(path: Path, rows: list[tuple[str, str]] = ROWS) -> Path:
    path.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> JsonlTask:
    return JsonlTask("maths", "{}", VERSION, write(tmp_path_factory.mktemp("jsonl") / "maths.jsonl"), sandboxed=True)


def test_questions_go_round(task: JsonlTask) -> None:
    assert task.question(0) == task.question(6) == "What is 1+1?"
    assert task.question(MAX_ITEM) == ROWS[MAX_ITEM % 6][0]
    with pytest.raises(ValueError, match="no item"):
        task.question(MAX_ITEM + 1)


@pytest.mark.parametrize(
    ("item", "response", "right"),
    [
        (0, "2", True),
        (0, "2.0", True),
        (0, "4/2", True),
        (0, "It is $2$", True),
        (0, r"so it is \boxed{2}", True),
        (0, "first 3\nthen 2", True),
        (0, "<answer>2</answer> or 3", True),
        (0, "3", False),
        (0, "", False),
        (0, "first 2\nthen 3", False),
        (1, "0.5", True),
        (1, "1/2", True),
        (1, r"\frac{2}{4}", True),
        (2, "$(x+1)^2$", True),
        (2, "(x+2)^2", False),
        (3, "(1, 2]", True),
        (3, "(1, 2)", False),
        (4, r"\{2, 1\}", True),
        (5, "90", True),
    ],
)
def test_rewards(task: JsonlTask, item: int, response: str, right: bool) -> None:
    assert task.score(item, response) == (1_000_000 if right else 0)


@pytest.mark.parametrize(
    "response",
    [
        "9^{9^{9^9}}",
        "9**9**9",
        "(" * 3000 + ")" * 3000,
        "1" * 1_000_000,
        "2\0",
        "__import__('os').system('true')",
        r"\sum_{n=1}^{2} 1",
        "∫ 2 dx",
        r"\boxed{9^{9^{9^9}}}",
        "2" + "!" * 100,
    ],
)
def test_hostile_answers_never_reach_sympy(monkeypatch: pytest.MonkeyPatch, task: JsonlTask, response: str) -> None:
    monkeypatch.setattr(task, "_library", None)
    assert task.score(2, response) == 0


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\boxed{1", r"\boxed{1"),
        ("a\n\n b \n", "b"),
        ("", ""),
        ("\0", None),
    ],
)
def test_final_text(response: str, text: str | None) -> None:
    assert final_text(response) == text


def test_the_order_of_answers_does_not_matter(task: JsonlTask) -> None:
    answers = ["$(x+1)^2$", "x^2+2*x+1.0", "x^2", r"\sqrt{x^4}+2x+1", "x"]
    forward = [task.score(2, answer) for answer in answers]
    assert forward == [task.score(2, answer) for answer in reversed(answers)][::-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no line"),
        (b"{}\n", 'line 1 of maths needs the texts "question" and "answer"'),
        (b'{"question": "a", "answer": "1"}\nnope\n', "line 2 of maths is not JSON"),
        (b'{"question": "a", "answer": 1}\n', "line 1 of maths needs the texts"),
        (b'{"question": "a", "answer": " "}\n', "line 1 of maths needs the texts"),
        (b"[" * 100_000, "line 1 of maths is not JSON"),
        (b"\xff\n", "is not UTF-8 at byte 0"),
        (
            b'{"question": "a", "answer": "\\\\int x"}\n',
            r"the answer in line 1 of maths cannot be judged: '\\\\int x'; leave",
        ),
        (json.dumps({"question": "a" * 70_000, "answer": "1"}).encode(), "line 1 of maths has more than 65536"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "maths.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        question_tasks.read_lines("maths", path)


def test_missing_file_version_parameters_and_sandbox(tmp_path: Path) -> None:
    path = write(tmp_path / "maths.jsonl")
    with pytest.raises(UserError, match=r"cannot read maths \(.*nothing.jsonl\): No such file or directory"):
        JsonlTask("maths", "{}", VERSION, tmp_path / "nothing.jsonl", sandboxed=True)
    with pytest.raises(UserError, match="names no file"):
        JsonlTask("maths", "{}", VERSION, None, sandboxed=True)
    with pytest.raises(UserError, match="the question set maths has no parameter 'a'; it has check"):
        JsonlTask("maths", '{"a": 1}', VERSION, path, sandboxed=True)
    with pytest.raises(UserError, match="the parameter check of maths must be math or exact"):
        JsonlTask("maths", '{"check": "judge"}', VERSION, path, sandboxed=True)
    with pytest.raises(UserError, match=r"the domain pins sympy 1\.13\.0, this Farflung knows 1\.14\.0; use"):
        JsonlTask("maths", "{}", VERSION.replace("1.14.0", "1.13.0"), path, sandboxed=True)
    with pytest.raises(
        UserError, match=r"the domain pins exact==1, this Farflung scores such a task with math-verify==0\.9\.0 "
    ):
        JsonlTask("maths", "{}", "exact==1", path, sandboxed=True)
    with pytest.raises(UserError, match=r"the domain pins '0\.9\.0', which is no list of packages"):
        JsonlTask("maths", "{}", "0.9.0", path, sandboxed=True)
    with pytest.raises(UserError, match="so needs a sandbox"):
        JsonlTask("maths", "{}", VERSION, path, sandboxed=False)


def test_an_answer_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "maths.jsonl", [("Where?", "in the house")])
    with pytest.raises(UserError, match="math-verify cannot read the answer 'in the house' of maths"):
        JsonlTask("maths", "{}", VERSION, path, sandboxed=True)


EXACT_ROWS = [("Which colour?", "dark  green"), ("Which function?", r"\int x dx")]


def test_texts_are_compared_without_a_sandbox(tmp_path: Path) -> None:
    path = write(tmp_path / "words.jsonl", EXACT_ROWS)
    task = JsonlTask("words", '{"check": "exact"}', EXACT, path, sandboxed=False)
    responses = ["dark green", "<answer> dark\tgreen </answer>", "It is\ndark green", "Dark green", "darkgreen", ""]
    assert [task.score(0, response) for response in responses] == [1_000_000] * 3 + [0] * 3
    assert task.score(1, r"\boxed{\int x dx}") == 1_000_000
    with pytest.raises(
        UserError, match=r"the domain pins math-verify==0\.9\.0 .*, this Farflung scores such a task with exact==1"
    ):
        JsonlTask("words", '{"check": "exact"}', VERSION, path, sandboxed=False)
    path = write(tmp_path / "words.jsonl", [("Which?", "two\nlines")])
    with pytest.raises(UserError, match="the answer in line 1 of words is not one line of text"):
        JsonlTask("words", '{"check": "exact"}', EXACT, path, sandboxed=False)
