"""Exit codes and the one clear line that a user's mistake gets."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import node
from node.cli import main
from node.errors import UserError

ROOT = Path(node.__file__).resolve().parents[1]
NAMES = [command.__name__.rpartition(".")[2] for command in main.COMMANDS]


def outcome(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> int:
    """What ``main`` returns for a command that raises ``error``."""

    def command(arguments: argparse.Namespace) -> int:
        del arguments
        if error is not None:
            raise error
        return 0

    parser = argparse.ArgumentParser()
    parser.set_defaults(command=command)
    monkeypatch.setattr(main, "parser", lambda: parser)
    return main.main([])


def test_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, None) == 0


@pytest.mark.parametrize("wrap", [0, 1, 2])
def test_a_users_mistake_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrap: int
) -> None:
    error: Exception = UserError("port 4001 is\nbusy", "choose another")
    for _ in range(wrap):
        error = ExceptionGroup("nursery", [error])
    assert outcome(monkeypatch, error) == 2
    assert capsys.readouterr().err == "farflung: port 4001 is busy; choose another\n"


def test_of_two_mistakes_the_first_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(monkeypatch, ExceptionGroup("nursery", [UserError("one"), UserError("two")])) == 2
    assert capsys.readouterr().err == "farflung: one\n"


def test_a_bug_beside_a_mistake_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup):
        outcome(monkeypatch, ExceptionGroup("nursery", [UserError("one"), RuntimeError("bug")]))


@pytest.mark.parametrize("wrap", [False, True])
def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, wrap: bool) -> None:
    error: BaseException = KeyboardInterrupt()
    assert outcome(monkeypatch, BaseExceptionGroup("nursery", [error]) if wrap else error) == 130


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-m", "node.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_tells_its_version(tmp_path: Path) -> None:
    done = run("--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"farflung {node.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["join"], ["log"], ["devnet", "--cheat", "nonsense"]])
def test_a_wrong_command_line_is_exit_code_2(tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [[], *([name] for name in NAMES), ["log", "verify"]])
def test_every_command_has_help(name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main.main([*name, "--help"])
    assert exit_code.value.code == 0
    assert "usage: farflung" in capsys.readouterr().out
