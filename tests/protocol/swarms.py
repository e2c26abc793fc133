"""A swarm by hand: what its tests share."""

from __future__ import annotations

import random
from collections.abc import Iterable

from protocol.constants import CHUNK_BYTES
from protocol.weights.holders import Run
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

LINK = 12.5e6
"""100 Mb/s."""
A, B, C = b"a", b"b", b"c"


def swarm(chunks: int, held: int = 0, seed: int = 0) -> Swarm:
    return Swarm(chunks, held, routes=Routes(), chance=random.Random(seed), now=0.0)


def take(one: Swarm, node: bytes, now: float = 0.0) -> Run:
    run = one.next(node, now)
    assert run is not None
    return run


def deliver(one: Swarm, run: Run, now: float) -> None:
    """All of a run arrives."""
    run.received = run.count * CHUNK_BYTES
    while one.arrived(run, now):
        pass
    one.finished(run, now)


def bits(chunks: Iterable[int]) -> int:
    """The set of these chunks."""
    found = 0
    for chunk in chunks:
        found |= 1 << chunk
    return found
