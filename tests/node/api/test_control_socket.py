"""The control socket, over a real socket."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from node.api import control_socket
from node.api.control_client import Declined, Unavailable, request
from node.api.control_requests import Answer, Panel, Request
from node.api.control_socket import REQUESTS, ControlSocket
from protocol.constants import GATHER_FACTOR
from protocol.records import Rollout
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster
from tests.protocol.builders import digest


@asynccontextmanager
async def serving(tmp_path: Path, faults: Faults) -> AsyncIterator[Running]:
    """A node that serves its control socket, in a network of its own."""
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference")
        running = cluster.running["i"]
        await running.weights.hold(version, timeout=10)
        await running.node.log.append(Rollout(version.id, 0, 2, 8, 16, digest("file"), 10, 2))
        await cluster.agree()
        await running.open_control()
        yield running


async def ask(running: Running, op: str, **arguments: Any) -> dict[str, Any]:
    return await request(running.node.directory, op, timeout=5, **arguments)


async def raw(running: Running, data: bytes) -> bytes:
    with running.node.directory.socket_address() as address:
        async with await trio.open_unix_socket(address) as stream:
            await stream.send_all(data)
            await stream.send_eof()
            return b"".join([part async for part in stream])


async def test_status(tmp_path: Path, faults: Faults) -> None:
    async with serving(tmp_path, faults) as running:
        running.node.health.warn("weights", "version 7 has not arrived")
        running.node.log.disk_trouble = "no space"
        running.own.children["engine"] = 4711
        status = await ask(running, "status")
        replica = running.node.log.replica
        assert status["name"] == "i"
        assert status["node"] == running.id.hex()
        assert status["role"] == "inference"
        assert status["domain"] == running.node.domain.id.hex()
        assert (status["version"], status["newest_version"], status["step"]) == (0, 0, 0)
        assert status["heads_root"] == replica.heads_root().hex()
        assert status["cut_height"] == 1
        assert status["final"] is False
        assert status["generating"] is False
        assert status["pending_audits"] == 1
        assert (status["bytes_sent"], status["bytes_received"]) == (10, 20)
        assert status["health"] == ["the log is not stored: no space", "version 7 has not arrived"]
        assert {"name": "engine", "pid": 4711} in status["children"]
        assert status["credit"][running.id.hex()] == 0
        assert {row["name"]: row["role"] for row in status["nodes"]} == {
            "elector": "none",
            "t": "trainer",
            "v": "validator",
            "i": "inference",
        }
        assert status["steps"] == []
        assert status["peers"] == 3


async def test_steps_are_told_up_to_a_number(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            await cluster.start(name, pause_at_step=3)
        await cluster.until(lambda: all(running.steps == 3 for running in cluster.running.values()))
        running = cluster.running["elector"]
        status = await running.ask("status")
        assert status["step"] == 3
        assert [row["step"] for row in status["steps"]] == [1, 2, 3]
        row = status["steps"][-1]
        assert 0 <= row["reward"] <= 1
        # Whole submissions are taken until 16 responses stand in groups with a signal; the others are not trained on.
        assert 16 <= row["trained"] <= row["accepted"] <= 16 * GATHER_FACTOR
        assert row["rejected"] == 0


async def test_the_socket_is_its_owners_alone_and_replaces_what_a_crash_left(tmp_path: Path, faults: Faults) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        socket = running.node.directory.control_socket
        socket.touch()
        await running.open_control()
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_ISSOCK(socket.stat().st_mode)
        assert (await ask(running, "status"))["name"] == "elector"


async def test_pausing_and_going_on(tmp_path: Path, faults: Faults) -> None:
    async with serving(tmp_path, faults) as running:
        assert await ask(running, "pause_at", step=7) == {"pause_at_step": 7}
        assert running.own.pause_at_step == 7
        assert (await ask(running, "status"))["pause_at_step"] == 7
        assert await ask(running, "pause_at", step=0) == {"pause_at_step": 0}
        for wrong in (-1, "7", None, True, 1.5):
            with pytest.raises(Unavailable, match="unknown request"):
                await ask(running, "pause_at", step=wrong)
        assert running.own.pause_at_step == 0


async def test_stopping_is_answered_first(tmp_path: Path, faults: Faults) -> None:
    async with serving(tmp_path, faults) as running:
        assert await ask(running, "stop") == {"stopping": True}
        with trio.fail_after(5):
            await running.stopped.wait()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"nonsense", "the request is not JSON"),
        (b"\xff\xfe", "the request is not JSON"),
        (b"[" * 60_000, "unknown request: Expected `object`, got `array`"),
        (b"[]", "unknown request: Expected `object`, got `array`"),
        (b"{}", "unknown request: Object missing required field `op`"),
        (b'{"op": "launch"}', "unknown request: Invalid value 'launch' - at `$.op`"),
        (b'{"op": "pause_at"}', "unknown request: Object missing required field `step`"),
        (b"", "the request is not JSON"),
    ],
)
async def test_a_mistake_is_one_line_and_ends_nothing(line: bytes, error: str, tmp_path: Path, faults: Faults) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        await running.open_control()
        assert json.loads(await raw(running, line + b"\n")) == {"error": error}
        assert (await ask(running, "status"))["name"] == "elector"


async def test_a_conversation(tmp_path: Path, faults: Faults) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        await running.open_control()
        answers = (await raw(running, b'{"op": "pause_at", "step": 1}\n{"op": "x"}\n{"op": "pause')).splitlines()
        assert [json.loads(answer) for answer in answers] == [
            {"pause_at_step": 1},
            {"error": "unknown request: Invalid value 'x' - at `$.op`"},
        ]
        # A line without an end is not waited for beyond its bound.
        assert await raw(running, b"x" * (control_socket.MAX_LINE + 1)) == b""


# --- what fails inside an operation --------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "status": {},
    "peers": {},
    "roles": {},
    "credits": {},
    "leave": {},
    "pause_at": {"step": 1},
    "stop": {},
    "weights": {},
    "weights-gc": {"dry_run": True},
    "weights-pull": {"version": 0},
    "amend": {},
    "amend_sign": {"body": "00"},
    "amend_submit": {"body": "00", "votes": {}},
    "recovery": {"commitment": "00"},
    "close": {"target": "00", "recovery": "00", "signature": "00"},
    "rebind": {"target": "00", "recovery": "00", "signature": "00"},
    "invite": {"key": "00", "uses": 1, "cuts": 1},
}
"""Each operation, with arguments of its form."""


def failing(kind: type[Request], answer: Callable[[Request, Panel], Awaitable[Answer]]) -> type[Request]:
    """The same request with another answer."""
    tag = kind.__struct_config__.tag
    made = msgspec.defstruct(kind.__name__, [], bases=(kind,), tag=tag, namespace={"answer": answer})
    assert issubclass(made, Request)
    return made


@pytest.mark.parametrize("op", ARGUMENTS)
@pytest.mark.parametrize(
    ("error", "line", "is_bug"),
    [
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error", False),
        (sqlite3.OperationalError("disk I/O error"), "disk I/O error", True),
        (KeyError("entries"), "'entries'", True),
        (trio.TooSlowError(), "TooSlowError", False),
        (ExceptionGroup("all", [RuntimeError("two\nlines")]), "two lines", True),
    ],
)
async def test_an_operation_that_fails_is_told_in_one_line_and_ends_nothing(
    op: str,
    error: Exception,
    line: str,
    is_bug: bool,
    tmp_path: Path,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Request, panel: Panel) -> Answer:
        await trio.lowlevel.checkpoint()
        raise error

    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        socket = ControlSocket(running.parts, [failing(kind, fail) for kind in REQUESTS])
        await socket.open()
        running.nursery.start_soon(socket.run)
        for _ in range(2):
            with pytest.raises(Declined) as raised:
                await ask(running, op, **ARGUMENTS[op])
            assert str(raised.value) == f"{running.node.directory.path}: {line}"
        bugs = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(bugs) == 2 * is_bug
        assert all(record.exc_info for record in bugs)
        assert not running.stopped.is_set()


def test_every_operation_was_made_to_fail() -> None:
    assert {kind.__struct_config__.tag for kind in REQUESTS} == ARGUMENTS.keys()


async def test_a_version_that_cannot_be_opened_does_not_end_the_socket(tmp_path: Path, faults: Faults) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        await running.open_control()
        (running.versions.folder / ("ab" * 32) / "manifest").mkdir(parents=True)
        with pytest.raises(Declined, match="Is a directory"):
            await ask(running, "weights")
        assert (await ask(running, "status"))["name"] == "elector"
        assert running.warnings == {}
