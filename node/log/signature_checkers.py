"""Signatures checked in child processes: whoever fetches a long log has Python to run meanwhile.

1. A check is (key, message, signature), and its answer whether the signature is right: the rule of
   ``protocol.identity.verify``, which the child calls, and nothing else decides.
2. A child is started when there is work for it and ends after a while without any. It runs at low priority:
   the loop, which brings the next work, goes first.
3. A check always gets an answer. What a child does not answer is checked in a thread, and no child is started for
   ``PAUSE_SECONDS``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from node.log.signature_check import Check, CheckSignatures, check
from node.workers.child_process import OpenWorker, WorkerError, open_worker

logger = logging.getLogger(__name__)

Checking = Callable[[Sequence[Check]], Awaitable[list[bool]]]
"""Answers checks, each in its place."""


AT_ONCE: Final = 512
"""Checks that one child, or one thread, makes in one go: some 40 ms of work."""

LEAST: Final = 64
"""Checks that are not worth dividing further."""

IDLE_SECONDS: Final = 20.0
PAUSE_SECONDS: Final = 60.0
CALL_SECONDS: Final = 30.0

THREADS: Final = trio.CapacityLimiter(os.cpu_count() or 1)


async def check_in_threads(checks: Sequence[Check]) -> list[bool]:
    """Make the checks in threads, on all cores: libsodium works outside the interpreter's lock."""
    parts: list[list[bool]] = [[] for _ in range(0, len(checks), AT_ONCE)]

    async def run(place: int) -> None:
        some = checks[place * AT_ONCE : (place + 1) * AT_ONCE]
        parts[place] = await trio.to_thread.run_sync(check, some, limiter=THREADS)

    async with trio.open_nursery() as nursery:
        for place in range(len(parts)):
            nursery.start_soon(run, place)
    return [right for part in parts for right in part]


@dataclass(slots=True)
class _Checks:
    checks: Sequence[Check]
    answer: list[bool] | None = None
    done: trio.Event = field(default_factory=trio.Event)


class Checkers:
    """At most ``count`` children. Make it with ``open_checkers``."""

    def __init__(self, nursery: trio.Nursery, count: int, idle: float, open_child: OpenWorker) -> None:
        self._nursery = nursery
        self._count = count
        self._idle = idle
        self._open_child = open_child
        self._running = 0
        self._waiting = 0
        self._paused_until = -math.inf
        self._jobs, self._taken = trio.open_memory_channel[_Checks](math.inf)

    @property
    def children(self) -> int:
        """How many children run."""
        return self._running

    async def check(self, checks: Sequence[Check]) -> list[bool]:
        """Answer the checks, each in its place."""
        if trio.current_time() < self._paused_until:
            return await check_in_threads(checks)
        size = min(AT_ONCE, max(-(-len(checks) // self._count), LEAST))
        jobs = [_Checks(checks[start : start + size]) for start in range(0, len(checks), size)]
        for job in jobs:
            self._jobs.send_nowait(job)
        for _ in range(min(len(jobs) - self._waiting, self._count - self._running)):
            self._running += 1
            self._nursery.start_soon(self._run)
        found: list[bool] = []
        for job in jobs:
            await job.done.wait()
            found += await check_in_threads(job.checks) if job.answer is None else job.answer
        return found

    async def _run(self) -> None:
        """One child's life."""
        job: _Checks | None = None
        try:
            async with self._open_child("node.log.signature_child", name="signatures") as worker:
                while (job := await self._next()) is not None:
                    right = await worker.call(CheckSignatures(list(job.checks)), timeout=CALL_SECONDS)
                    if len(right) != len(job.checks):
                        raise WorkerError("signatures: an answer of no known form", "internal")
                    job.answer = right
                    job.done.set()
        except (WorkerError, OSError) as error:
            logger.warning("signatures are checked in this process for a while: %s", error)
            self._paused_until = trio.current_time() + PAUSE_SECONDS
        finally:
            self._running -= 1
            if job is not None:
                job.done.set()
            if not self._running:
                # Nobody is left to take them; where there are others, they do.
                while self._taken.statistics().current_buffer_used:
                    self._taken.receive_nowait().done.set()

    async def _next(self) -> _Checks | None:
        job: _Checks | None = None
        self._waiting += 1
        try:
            with trio.move_on_after(self._idle):
                job = await self._taken.receive()
        finally:
            self._waiting -= 1
        return job


@asynccontextmanager
async def open_checkers(
    count: int | None = None, *, idle: float = IDLE_SECONDS, open_child: OpenWorker = open_worker
) -> AsyncIterator[Checkers]:
    """Children that check signatures, as many as there are cores; one that had no work for ``idle`` seconds ends. Call
    it from the main thread. The block's own exceptions come out as they are."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield Checkers(nursery, count or os.cpu_count() or 1, idle, open_child)
        except Exception as error:
            failure = error  # raised below: the nursery would wrap it in a group
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
