"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import trio

T = TypeVar("T")


async def _inline(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@pytest.fixture(autouse=True)
def threads_stand_still_with_the_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mock clock, run in the loop what belongs in a thread.

    The clock jumps while a thread works, so what a test sees in a virtual second would depend on the machine's load.
    """
    if "autojump_clock" in request.fixturenames or "mock_clock" in request.fixturenames:
        monkeypatch.setattr(trio.to_thread, "run_sync", _inline)
