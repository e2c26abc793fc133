"""``farflung tasks``."""

from __future__ import annotations

import json

import pytest

from node.cli import main, tasks
from node.tasks import catalogue
from tests.node.cli.stand_ins import carry_out

MISSING = "there is no sandbox: install it"


def test_kinds_with_what_a_new_domain_would_pin(capsys: pytest.CaptureFixture[str]) -> None:
    code = main.main(["tasks", "ls", "--json"])
    rows = json.loads(capsys.readouterr().out)["kinds"]
    assert code == int(any(row["missing"] for row in rows))
    found = {(row["kind"], row["version"]) for row in rows}
    assert {(kind, catalogue.package_version(kind)) for kind in ("reasoning-gym", "jsonl", "code")} <= found
    assert ("jsonl", catalogue.package_version("jsonl", '{"check": "exact"}')) in found


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"kind": kind, "about": "questions", "version": "1", "missing": missing}
        for kind, missing in (("code", MISSING), ("jsonl", None))
    ]
    assert carry_out(tasks.ls, "tasks", "ls", kinds=lambda: rows) == 1
    code, jsonl = capsys.readouterr().out.splitlines()[1:]
    assert code.endswith(MISSING)
    assert jsonl.endswith("ready")
    assert carry_out(tasks.ls, "tasks", "ls", kinds=lambda: rows[1:]) == 0
