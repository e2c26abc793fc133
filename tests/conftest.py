"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import trio
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

T = TypeVar("T")

# The same examples each time, however busy the machine is.
settings.register_profile("farflung", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("farflung")


# These run whole networks of real processes: one after the other, however many processes share the suite.
NETWORKS = (
    "tests/test_devnet.py",
    "tests/test_join.py",
    "tests/test_private.py",
    "tests/node/cli/test_domain.py",
)


def _path(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class _ByModule(LoadScopeScheduling):  # type: ignore[misc]  # xdist tells no types
    """Gives each module to one of the processes that share the suite, for its fixtures and its order."""

    def _split_scope(self, nodeid: str) -> str:
        path = _path(nodeid)
        return "networks" if path in NETWORKS else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByModule:
    assert all((config.rootpath / path).exists() for path in NETWORKS), "a module of NETWORKS is elsewhere"
    return _ByModule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # What takes longest begins first, so that it is not what all wait for in the end.
        items.sort(key=lambda item: _path(item.nodeid) not in NETWORKS)


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
