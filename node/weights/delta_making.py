"""Making and applying deltas in a child process (``node.workers.delta_child``), and what it is expected to take.

1. A child is started for one piece of work and ends with it: versions are minutes apart, and it takes a third of a
   second to start. Cancelling kills it, which leaves a sound store (see there).
2. Rates are measured: that of receiving by every transfer that is large enough to tell, that of applying by every
   delta. A node that measured nothing yet assumes a common link.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace as replace_fields

from node.workers.child_messages import ApplyDelta, DescribeVersion, TensorRow
from node.workers.child_process import OpenWorker, Worker, WorkerError
from protocol.weights.delta import DeltaManifest, Speed
from protocol.weights.manifest import Manifest

MODULE: Final = "node.workers.delta_child"
NAME: Final = "delta"
PATIENCE: Final = 60.0
SLOWEST: Final = 20 << 20
"""A child has ``PATIENCE`` seconds, and one for every so many bytes of the whole: a niced process on a busy machine."""
THREADS: Final = 4
"""At most so many threads: more do not read and write memory faster."""

MEASURABLE: Final = 4 << 20
"""Bytes from which on a transfer tells a rate: the start of a smaller one is most of it."""
WEIGHT: Final = 0.3
"""Part of a measured rate that a new measurement replaces."""
ASSUMED: Final = Speed(receive=12.5e6, hash=1e9, apply=0.5e9, start=0.5)
"""Before anything is measured: 100 Mb/s, and a common processor."""


@dataclass(frozen=True, slots=True)
class Described:
    """A new version's manifest, and that of its delta where one was made; seconds that it took."""

    manifest: Manifest
    delta: DeltaManifest | None
    seconds: float


class Rates:
    """The speeds of this node, as far as they are known."""

    def __init__(self) -> None:
        self.speed = ASSUMED

    def received(self, size: int, seconds: float) -> None:
        """``size`` bytes were received and verified in so many seconds."""
        if size >= MEASURABLE and seconds > 0:
            self.speed = replace(self.speed, receive=_smoothed(self.speed.receive, size / seconds))

    def applied(self, size: int, seconds: float, start: float) -> None:
        """A whole of ``size`` bytes was made in so many seconds by a child that took ``start`` seconds besides."""
        if size >= MEASURABLE and seconds > 0:
            rate = _smoothed(self.speed.apply, size / seconds)
            # Hashing is the largest part of it; it is measured nowhere else, and never slower.
            self.speed = replace(self.speed, apply=rate, hash=max(self.speed.hash, rate))
        self.speed = replace(self.speed, start=_smoothed(self.speed.start, start))


def _smoothed(old: float, new: float) -> float:
    return (1 - WEIGHT) * old + WEIGHT * new


def timeout(size: int) -> float:
    """Seconds that a child may take for a whole of ``size`` bytes."""
    return PATIENCE + size / SLOWEST


def threads() -> int:
    """Threads for a child: its priority is low, so it takes what is left over."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0))))


@asynccontextmanager
async def open_child(open_worker: OpenWorker) -> AsyncIterator[Worker]:
    """A child for one piece of work. Raises ``WorkerError``."""
    async with open_worker(MODULE, name=NAME) as worker:
        yield worker


async def describe(
    worker: Worker,
    tensors: list[TensorRow],
    checksum: int,
    whole: Path,
    size: int,
    base: Path | None,
    delta: Path,
) -> Described:
    """Hash the new version of ``size`` bytes in the file ``whole``, and write the ``delta`` from the one in the folder
    ``base``. Where the base cannot be used, there is no delta. Raises ``WorkerError``.
    """
    alone = DescribeVersion(tensors, checksum, str(whole), None, str(delta), threads())
    try:
        request = alone if base is None else replace_fields(alone, base=str(base))
        answer = await worker.call(request, timeout=timeout(size))
    except WorkerError as error:
        if error.kind != "user":
            raise
        answer = await worker.call(alone, timeout=timeout(size))
    found = answer.delta_manifest
    return Described(
        manifest=await trio.to_thread.run_sync(Manifest.parse, answer.manifest),
        delta=None if found is None else await trio.to_thread.run_sync(DeltaManifest.parse, found),
        seconds=answer.seconds,
    )


async def apply(open_worker: OpenWorker, rates: Rates, delta: Path, base: Path, target: Path, size: int) -> list[int]:
    """Make the version of ``size`` bytes in the folder ``target`` from those in the other two.

    Returns the chunks that came out wrong. Raises ``WorkerError``, of kind "user" where the delta is at fault.
    """
    begun = time.monotonic()
    async with open_child(open_worker) as worker:
        request = ApplyDelta(str(delta), str(base), str(target), threads())
        answer = await worker.call(request, timeout=timeout(size))
    rates.applied(size, answer.seconds, time.monotonic() - begun - answer.seconds)
    return answer.wrong
