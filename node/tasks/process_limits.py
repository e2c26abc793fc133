"""Bounds on what one process and one piece of its work may use. For child processes only, in their main thread.

1. ``time_limit`` counts the processor time of this process, so that a busy machine does not turn right answers into
   undecidable ones. When it is used up, ``OutOfTime`` is raised and raised again until the block is left, because a
   scorer may swallow any exception; ``Clock.expired`` stays true in that case.
2. Code that never returns to the interpreter (``sum(range(10**12))``) cannot be interrupted by an exception: at twice
   the limit of processor time, and at ``WALL_FACTOR`` times of wall time, a signal whose default action is death ends
   the process. Its parent notices at once.
3. ``bound_process`` and ``bound_processes`` set resource limits that descendants inherit.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

WALL_FACTOR = 10
_AGAIN_SHARE = 0.25


class OutOfTime(BaseException):
    """A piece of work used up its time. Not an ``Exception``, so that fewer scorers swallow it."""


@dataclass(slots=True)
class Clock:
    """Whether a ``time_limit`` was used up, also where the exception was swallowed."""

    expired: bool = False


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[Clock]:
    """Let the block use ``seconds`` of processor time. Raises ``OutOfTime`` in it (rule 1). Not to be nested."""
    clock = Clock()
    armed = True

    def expire(_number: int, _frame: FrameType | None) -> None:
        if armed:
            clock.expired = True
            raise OutOfTime

    previous = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_FACTOR)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds * 2)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds * _AGAIN_SHARE)
    try:
        yield clock
    finally:
        try:
            armed = False
        finally:  # the signal may come just before it is disarmed
            for timer in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL, signal.ITIMER_REAL):
                signal.setitimer(timer, 0)
            signal.signal(signal.SIGPROF, previous)


def bound_process(*, memory_bytes: int, file_bytes: int) -> None:
    """Limit address space, file sizes and core dumps, and make the two deadly signals of ``time_limit`` deadly."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_FSIZE, file_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def bound_processes(count: int) -> None:
    """Limit the processes of this user, inside a user namespace those in it. Binds no real root user (getrlimit(2))."""
    _lower(resource.RLIMIT_NPROC, count)


def _lower(kind: int, value: int) -> None:
    soft, hard = resource.getrlimit(kind)
    new = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (new if soft == resource.RLIM_INFINITY else min(new, soft), new))
