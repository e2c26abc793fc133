"""``farflung eval`` on a founder's folder, with real children."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from node.cli import main
from node.domain import founding
from node.store.data_directory import DataDirectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A domain of the starter model that was just founded."""
    directory = DataDirectory(tmp_path_factory.mktemp("founder"))
    directory.create()
    directory.identity()
    trio.run(founding.found, directory, founding.devnet(name="evaluated", nodes=4, tasks=None))
    return directory.path


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    code = main.main(["eval", "--data-dir", str(folder), *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_two_who_evaluate_a_version_get_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--questions", "24", "--samples", "3", "--json")
    code, out, _ = run(capsys, folder, *asked)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    (version,) = found["versions"]
    (score,) = version["scores"]
    assert (version["version"], score["task"], score["questions"], score["answers"]) == (0, "chain_sum", 24, 72)
    assert len({answer["item"] for answer in version["answers"]}) == 24
    # The starter model knows some sums and not all: both count, or nothing was scored at all.
    assert 0 < score["pass_rate_low"] < score["pass_rate"] < score["pass_rate_high"] < 1
    rewards = [answer["rewards"] for answer in version["answers"]]
    assert any(len(set(line)) > 1 for line in rewards)
    assert score["pass_rate"] == pytest.approx(sum(line.count(1.0) for line in rewards) / 72)
    # Other processes, the same number, to the last digit.
    assert run(capsys, folder, *asked, "--version", "0")[1] == out


def test_people_get_a_table_and_greedy_answers_are_better(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, folder, "--questions", "16", "--greedy")
    lines = out.splitlines()
    assert (code, lines[0].split()[:4]) == (0, ["version", "task", "questions", "answers"])
    assert lines[1].split()[:4] == ["0", "chain_sum", "16", "16"]
    assert float(lines[1].split()[4]) > 0.6
    assert "95 % intervals; the likeliest tokens, torch in float32" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--version", "7"],
            "version 7 is not here whole (whole are: 0), and no daemon runs to fetch one; farflung",
        ),
        (["--version", "abcdef0123"], "version abcdef0123 is not here whole"),
        (["--questions", "0"], "--questions 0: expected 1 to"),
        (["--samples", "257"], "--samples 257: expected 1 to 256"),
        (["--threads", "0"], "--threads 0: expected 1 or more"),
        (["--tasks", "chan_sum"], "did you mean chain_sum"),
        (["--tasks", "no/such.toml"], "no/such.toml: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, err = run(capsys, folder, *arguments)
    assert (code, out) == (2, "")
    assert line in err


def test_a_version_is_a_number_or_the_beginning_of_an_id(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("newest", "abcdef0", "ABCDEF0123", "-2", "12345678g"):
        with pytest.raises(SystemExit) as caught:
            run(capsys, folder, f"--version={text}")
        assert caught.value.code == 2
        assert "neither a number nor eight digits or more of an id" in capsys.readouterr().err


def test_a_folder_without_a_domain_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DataDirectory(tmp_path).identity()
    code, _, err = run(capsys, tmp_path)
    assert (code, err) == (2, f"farflung: {tmp_path}: this node joined no domain yet; farflung join ADDRESS\n")
