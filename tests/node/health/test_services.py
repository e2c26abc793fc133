"""Each service of a daemon fails in turn, while a peer goes on being answered."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from node.health import supervisor
from node.health.supervisor import Service
from node.net.requests import Unreachable
from node.peers import twins
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster

SERVICES: Final = (
    "serving the control socket",
    "comparing logs",
    "writing metrics",
    "feeding trackers",
    "fetching what the genesis names",
    "looking at the hardware",
    "asking for admission",
    "keeping the own feed",
    "watching the log's past",
    "clearing out files",
    "following weights",
    "fetching on demand",
    "remembering peers",
    "voting",
    "sending and fetching weights",
    "publishing presences",
    "taking roles",
)


async def watch(witness: Running, watched: bytes, unanswered: list[float]) -> None:
    """Ask a node for something once a second, for ever."""
    while True:
        try:
            await witness.port.request(watched, twins.PROTOCOL, watched, timeout=1, max_response=10_000)
        except Unreachable:
            unanswered.append(trio.current_time())
        await trio.sleep(1)


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_that_fails_ends_nothing_and_runs_again(
    name: str,
    tmp_path: Path,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    caplog.set_level(logging.INFO)
    causes = [RuntimeError("a bug"), sqlite3.OperationalError("database is locked"), OSError(5, "Input/output error")]
    failing, unanswered, begun = list(causes), list[float](), list[float]()
    async with open_cluster(tmp_path, faults) as cluster:
        witness, running = await cluster.node("a"), await cluster.node("elector")
        services = {other: running.parts.services()[other] for other in SERVICES}
        service: Service = services[name]

        async def fail_first() -> None:
            begun.append(trio.current_time())
            if failing:
                raise failing.pop(0)
            await service()

        running.nursery.start_soon(running.parts.keep, {**services, name: fail_first})
        witness.nursery.start_soon(watch, witness, running.id, unanswered)
        for cause, pause in zip(causes, (1, 2, 4), strict=True):
            await trio.sleep(0.5)
            assert running.warnings[name] == f"{name} stopped: {cause}; it starts again in {pause} s"
            await trio.sleep(pause - 0.5)
        await trio.sleep(supervisor.POLICY.steady - 1)
        assert name in running.warnings
        assert f"{name}: in order again" not in caplog.messages
        await trio.sleep(2)
        assert running.warnings == {}
        assert len(begun) == len(causes) + 1  # and it runs still
        assert unanswered == []
        assert not running.stopped.is_set()
        assert len([record for record in caplog.records if record.getMessage() == f"{name}: a bug"]) == 2


async def test_all_services_were_made_to_fail(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        assert set((await cluster.node("a")).parts.services()) == {*SERVICES}
