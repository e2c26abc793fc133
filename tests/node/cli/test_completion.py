"""Shell completion: scripts that the shells take, with all commands in them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from node.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_knows_every_command_and_its_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for command in main.COMMANDS:
        assert command in text
    for option in ("--data-dir", "--json", "--config", "--no-run", "--keep-running"):
        assert option in text
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=text, text=True, check=True, timeout=30, capture_output=True)


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    code = """
    source ./script
    COMP_WORDS=(farflung sta) COMP_CWORD=1 COMP_LINE="farflung sta" COMP_POINT=12
    _shtab_farflung farflung sta farflung
    echo "${COMPREPLY[@]}"
    COMP_WORDS=(farflung status --da) COMP_CWORD=2 COMP_LINE="farflung status --da" COMP_POINT=20
    _shtab_farflung farflung --da status
    echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["status", "--data-dir"]
