"""``farflung tasks``."""

from __future__ import annotations

import json

import pytest

from node.cli import main
from node.tasks import catalogue, sandbox


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: "there is no sandbox: install it")


def test_kinds_with_what_a_new_domain_would_pin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: None)
    assert main.main(["tasks", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kinds"]
    assert [row["kind"] for row in rows] == list(catalogue.KINDS)
    assert all(row["version"] == catalogue.package_version(row["kind"]) for row in rows)
    assert main.main(["tasks", "ls"]) == 0
    assert all(line.endswith("ready") for line in capsys.readouterr().out.splitlines()[1:])


@pytest.mark.usefixtures("no_sandbox")
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tasks", "ls"]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines
    assert all("there is no sandbox: install it" in line for line in lines)
