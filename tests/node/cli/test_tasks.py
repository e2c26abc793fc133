"""``farflung tasks``."""

from __future__ import annotations

import json

import pytest

from node.cli import main
from node.tasks import catalogue, sandbox
from node.tasks.code import program_runner


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: "there is no sandbox: install it")
    monkeypatch.setattr(program_runner, "available", lambda _version: "there is no sandbox: install it")


def test_kinds_with_what_a_new_domain_would_pin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: None)
    monkeypatch.setattr(program_runner, "available", lambda _version: None)
    assert main.main(["tasks", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kinds"]
    found = {(row["kind"], row["version"]) for row in rows}
    assert {(kind, catalogue.package_version(kind)) for kind in ("reasoning-gym", "jsonl", "code")} <= found
    assert ("jsonl", catalogue.package_version("jsonl", '{"check": "exact"}')) in found
    assert main.main(["tasks", "ls"]) == 0
    assert all(line.endswith("ready") for line in capsys.readouterr().out.splitlines()[1:])


@pytest.mark.usefixtures("no_sandbox")
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tasks", "ls"]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    lacking = [line for line in lines if "there is no sandbox: install it" in line]
    assert [line.split()[0] for line in lacking] == ["reasoning-gym", "jsonl", "code"]
