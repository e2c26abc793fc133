"""Fixtures of the tests of commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and none of the tester's own variables."""
    for name in list(os.environ):
        if name.startswith("FARFLUNG_") and name != "FARFLUNG_VECTORS":
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder
