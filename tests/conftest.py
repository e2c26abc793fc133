"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import trio
from hypothesis import HealthCheck, settings

T = TypeVar("T")

# The same examples each time, however busy the machine is.
settings.register_profile("farflung", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("farflung")


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
        monkeypatch.setattr(trio.from_thread, "run_sync", lambda function, *arguments: function(*arguments))
