"""Exit codes and the one clear line that a user's mistake gets."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import node
from node.cli import main
from node.errors import UserError
from node.store.data_directory import DataDirectory
from protocol.identity import Identity, peer_id
from tests.node.cli.stand_ins import serving

PEER = peer_id(Identity(bytes(32)).node)
ROOT = Path(node.__file__).resolve().parents[1]


def outcome(error: BaseException | None) -> int:
    """The exit code of a command that raises ``error``."""

    def command() -> int:
        if error is not None:
            raise error
        return 0

    return main.exit_code(command)


def test_success() -> None:
    assert outcome(None) == 0


@pytest.mark.parametrize("wrap", [0, 1, 2])
def test_a_users_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], wrap: int) -> None:
    error: Exception = UserError("port 4001 is\nbusy", "choose another")
    for _ in range(wrap):
        error = ExceptionGroup("nursery", [error])
    assert outcome(error) == 2
    assert capsys.readouterr().err == "farflung: port 4001 is busy; choose another\n"


def test_of_two_mistakes_the_first_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(ExceptionGroup("nursery", [UserError("one"), UserError("two")])) == 2
    assert capsys.readouterr().err == "farflung: one\n"


def test_a_bug_beside_a_mistake_is_not_hidden() -> None:
    with pytest.raises(ExceptionGroup):
        outcome(ExceptionGroup("nursery", [UserError("one"), RuntimeError("bug")]))


@pytest.mark.parametrize("wrap", [False, True])
def test_an_interrupt_is_130(wrap: bool) -> None:
    error: BaseException = KeyboardInterrupt()
    assert outcome(BaseExceptionGroup("nursery", [error]) if wrap else error) == 130


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


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser with those of its commands and their actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def test_every_command_and_action_has_help() -> None:
    found = list(parsers(main.parser()))
    assert len(found) > 2 * len(main.COMMANDS)
    for parser in found:
        text = parser.format_help()
        assert text.startswith("usage: farflung")
        assert "%%" not in text
        assert "%(" not in text


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main.main(["log", "verify", "--help"])
    assert exit_code.value.code == 0
    assert "usage: farflung" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "peers", "roles", "credits", "weights ls", "leave", "weights gc"])
def test_what_a_daemon_declines_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.identity()
    with directory.open_locked(), serving(directory, lambda request: {"error": "its disk cannot be read"}):
        assert main.main([*command.split(), "--data-dir", str(directory.path)]) in (1, 2)
    told = capsys.readouterr()
    assert "its disk cannot be read" in told.out + told.err
    assert "Traceback" not in told.err


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
