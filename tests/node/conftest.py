"""Fixtures of the tests of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.node.fake_children import Faults


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Stand-ins for all children, and what they are to do wrong: see ``tests.node.fakes``."""
    # Imported here: most tests of this folder need no network stack.
    from tests.node import fake_children

    return fake_children.install(monkeypatch)
