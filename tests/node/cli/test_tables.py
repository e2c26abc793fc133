"""Output for people, in terminals of any width."""

from __future__ import annotations

import pytest

from node.cli import tables


@pytest.mark.parametrize("width", [24, 80])
def test_names_are_whole_however_narrow_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "unknown")  # no escape codes
    monkeypatch.setenv("COLUMNS", str(width))
    tables.facts([("last rejection", "the reward is not what the scorer says"), ("id", "ab" * 32)], drawn=True)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("last rejection") for line in lines)
    assert "".join(line[14:].strip() for line in lines[[line[:2] for line in lines].index("id") :]) == "ab" * 32
