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
from protocol.identity import Identity, peer_id

PEER = peer_id(Identity(bytes(32)).node)
ROOT = Path(node.__file__).resolve().parents[1]
NAMES = [command.__name__.rpartition(".")[2] for command in main.commands()]


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


def run(*arguments: str, folder: Path, shell: str = '"$@"', **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, started by a line of ``shell``; modules in ``folder`` shadow others."""
    return subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-P", "-W", "error", "-m", "node.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **environment},
        capture_output=True,
        text=True,
        errors="replace",
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


def test_an_interrupt_while_modules_load_is_130_too(tmp_path: Path) -> None:
    (tmp_path / "shtab.py").write_text("raise KeyboardInterrupt")
    done = run("status", folder=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_bug(tmp_path: Path, closed: str) -> None:
    done = run("completion", "bash", folder=tmp_path, shell=f'"$@" {closed}')
    assert (done.returncode, done.stderr) == (0, "")
    asked = run("join", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", folder=tmp_path, shell=f'"$@" {closed}')
    assert (asked.returncode, "Traceback" in asked.stderr) == (2, False)


def test_a_full_disk_behind_the_output_is_one_line(tmp_path: Path) -> None:
    done = run("completion", "bash", folder=tmp_path, shell='"$@" >/dev/full')
    assert (done.returncode, done.stderr) == (
        2,
        "farflung: the output: No space left on device; make room and try again\n",
    )


def test_any_locale_will_do(tmp_path: Path) -> None:
    done = run("init", "--data-dir", str(tmp_path / "größe…"), folder=tmp_path, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
