"""Golden files of our own formats, and the way to public vectors that the project does not contain."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def public(*parts: str) -> Path:
    """A file or folder of the public vectors (see README.md); skips the calling test where they are absent."""
    root = os.environ.get("FARFLUNG_VECTORS")
    base = Path(root) if root else HERE.parents[2] / "shared" / "vectors"
    path = base.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"public vectors {'/'.join(parts)} are absent: set FARFLUNG_VECTORS (tests/vectors/README.md)")
    return path


def golden(name: str) -> Any:
    """The content of our golden file ``<name>.json``."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="ascii"))
