"""Signatures checked in child processes: right answers, and answers whatever becomes of a child."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from node.log.replicated_log import LogService
from node.log.signature_check import Check, check
from node.log.signature_checkers import check_in_threads, open_checkers
from node.workers.child_process import Worker, WorkerError, open_worker
from protocol.identity import ENTRY
from protocol.log.replica import Replica
from protocol.records import Role
from tests.protocol.builders import Writer, key, small_domain
from tests.simulator import Disk

DOMAIN = small_domain()
COUNT = 300


def some_checks() -> tuple[list[Check], list[bool]]:
    """Checks of which every seventh is wrong in one way or another, and what is right about them."""
    author, other = key("a"), key("b")
    checks: list[Check] = []
    for number in range(COUNT):
        message = number.to_bytes(2, "big")
        signature = author.sign(ENTRY, message)
        match number % 28:
            case 6:
                signature = bytes([signature[0] ^ 1]) + signature[1:]
            case 13:
                message += b"\0"
            case 20:
                signature = signature[:-1]
            case 27:
                checks.append((other.node, ENTRY, message, signature))
                continue
        checks.append((author.node, ENTRY, message, signature))
    return checks, [number % 7 != 6 for number in range(COUNT)]


async def test_children_and_threads_say_the_same() -> None:
    checks, right = some_checks()
    assert check(checks) == right
    assert await check_in_threads(checks) == right
    async with open_checkers(2) as checkers:
        assert await checkers.check([]) == []
        assert checkers.children == 0
        assert await checkers.check(checks) == right
        assert checkers.children == 2
        found: dict[int, list[bool]] = {}

        async def ask(number: int) -> None:
            found[number] = await checkers.check(checks[number:])

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
        assert found == {number: right[number:] for number in range(5)}
        assert checkers.children == 2


async def test_a_child_without_work_ends() -> None:
    checks, right = some_checks()
    ended = trio.Event()

    @asynccontextmanager
    async def open_and_tell(module: str, *, name: str) -> AsyncIterator[Worker]:
        async with open_worker(module, name=name) as worker:
            yield worker
        ended.set()

    opener: Any = open_and_tell
    async with open_checkers(1, idle=0.05, open_child=opener) as checkers:
        assert await checkers.check(checks) == right
        with trio.fail_after(20):
            await ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert checkers.children == 0
        assert await checkers.check(checks) == right


async def test_what_a_dead_child_leaves_is_checked_here() -> None:
    checks, right = some_checks()
    killed: list[int] = []

    @asynccontextmanager
    async def open_and_kill(module: str, *, name: str) -> AsyncIterator[Worker]:
        async with open_worker(module, name=name) as worker:
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)
            yield worker

    opener: Any = open_and_kill
    async with open_checkers(2, open_child=opener) as checkers:
        assert await checkers.check(checks) == right
        assert len(killed) == 2


@pytest.mark.parametrize("error", [WorkerError("no such program", "died"), OSError(24, "too many open files")])
async def test_where_no_child_can_be_started(error: Exception) -> None:
    checks, right = some_checks()
    tried: list[str] = []

    def refuse(module: str, *, name: str) -> AbstractAsyncContextManager[Worker]:
        tried.append(name)
        raise error

    opener: Any = refuse
    async with open_checkers(1, open_child=opener) as checkers:
        assert await checkers.check(checks) == right
        # For a while it is not even tried.
        assert await checkers.check(checks) == right
        assert len(tried) == 1
        assert checkers.children == 0


async def fail_inside() -> None:
    async with open_checkers(1) as checkers:
        await checkers.check(some_checks()[0])
        raise KeyError("mine")


async def test_the_blocks_own_errors_come_out_as_they_are() -> None:
    with pytest.raises(KeyError, match="mine"):
        await fail_inside()


async def test_large_deliveries_go_to_the_children() -> None:
    async with open_checkers(1) as checkers:
        service = LogService(key("elector"), Replica(DOMAIN), Disk(), fresh=True, checking=checkers.check)
        writer = Writer("a", DOMAIN.id)
        for _ in range(60):
            writer.append(Role("relay"))
        wires = [entry.encode() for entry in writer.entries]
        wires[50] = wires[50][:-1] + bytes([wires[50][-1] ^ 1])
        received = await service.intake.receive(entries=wires)
        assert (received.added, [str(error) for error in received.errors]) == (50, ["entry: the signature is wrong"])
        assert checkers.children == 1
