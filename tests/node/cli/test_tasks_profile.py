"""``farflung tasks profile`` with real children, and a domain that asks what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from node.cli import main
from node.domain import founding, task_tables
from node.store.data_directory import DataDirectory
from protocol.taskset import TaskSet


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.main(["tasks", "profile", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_starter_models_questions_end_up_in_a_genesis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    asked = ("-o", str(out), "--items", "24", "--responses", "8")
    code, text, err = run(capsys, *asked, "--json")
    assert code == 0
    (task,) = json.loads(text)["tasks"]
    assert (task["task"], task["questions"], task["undecided"]) == ("chain_sum", 24, 0)
    right = {int(number): count for number, count in task["right"].items()}
    # The starter model knows some sums and not all.
    assert 0 < sum(number * count for number, count in right.items()) < 8 * 24
    assert task["kept"] == sum(count for number, count in right.items() if 1 <= number <= 4) > 0
    assert "24 of 24 questions asked" in err
    assert sorted(path.name for path in out.iterdir()) == ["chain_sum.txt", "profile.jsonl"]
    table = tmp_path / "tasks.toml"
    table.write_text('[[task]]\nname = "chain_sum"\nset = "out/chain_sum.txt"\n')
    (row,) = task_tables.named(str(table))
    assert len(TaskSet.parse(row["items"]).items) == task["kept"]
    # A band that nothing lies in is no success; the questions are not asked again.
    code, text, err = run(capsys, *asked, "--low", "0.99", "--high", "0.999")
    assert code == 1
    assert text.splitlines()[1].split()[-2:] == ["0", "none"]
    assert "chain_sum: no question lies in the band" in err


def test_a_version_that_a_node_holds_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = DataDirectory(tmp_path / "founder")
    directory.create()
    directory.identity()
    trio.run(founding.found, directory, founding.devnet(name="profiled", nodes=4, tasks=None))
    asked = ("--data-dir", str(directory.path), "-o", str(tmp_path / "out"), "--items", "8", "--responses", "4")
    code, text, _ = run(capsys, *asked, "--version", "0", "--low", "0", "--high", "1", "--json")
    assert code == 0
    (task,) = json.loads(text)["tasks"]
    assert (task["task"], task["questions"], task["kept"]) == ("chain_sum", 8, 8)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--responses", "0"], "--responses 0: expected 1 to 256"),
        (["--low", "0.9"], "--low 0.9 --high 0.5: expected 0 to 1, the lower one first"),
        (["--tasks", "chan_sum"], "did you mean chain_sum"),
        (["--threads", "0"], "--threads 0: expected 1 or more"),
        (["--model", "/nothing"], "/nothing: there is no config.json in it; name a Hugging Face model's folder"),
        (["--domain", "/nothing.toml"], "/nothing.toml: cannot be read"),
        (["--version", "3", "--data-dir", "/nothing"], "/nothing: no node lives here"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, err = run(capsys, "-o", str(tmp_path / "out"), *arguments)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1
