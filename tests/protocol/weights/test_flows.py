"""How many flows are kept to each holder."""

from __future__ import annotations

import math
from collections.abc import Callable

from protocol.constants import CHUNK_BYTES
from protocol.weights.flows import MAX_FLOWS
from protocol.weights.holders import MAX_ACTIVE, Holding, Run
from tests.protocol.swarms import LINK, A, B, swarm


def test_more_flows_while_each_brings_as_much() -> None:
    def flows(rate_of: Callable[[int], float]) -> list[int]:
        one = swarm(20_000)
        one.set_holders({A: Holding()}, 0)
        one.connected(A, 0.08)
        running: list[Run] = []
        counts = []
        for step in range(1, 80):
            now = step / 10
            while (run := one.next(A, now)) is not None:
                running.append(run)
            for run in list(running):
                run.received += int(rate_of(len(running)) / 10)
                while run.received >= (run.at + 1 - run.first) * CHUNK_BYTES:
                    if not one.arrived(run, now):
                        one.finished(run, now)
                        running.remove(run)
                        break
            one.tick(now)
            counts.append(one.flows(A, now))
        return counts

    lossy = flows(lambda count: 300_000.0)
    assert lossy[0] == 2
    assert lossy[-1] == 32
    assert lossy.index(32) < 40  # within four seconds
    shared = flows(lambda count: LINK / count)
    assert max(shared) <= 4
    assert shared[-1] == 2
    # Each brings three quarters of what it brought when they were half as many: good enough while they are few.
    crowded = flows(lambda count: 300_000.0 * 0.75 ** math.log2(count))
    assert max(crowded[:60]) == 16
    assert crowded[60] == 8


def test_one_that_is_near_is_asked_over_few() -> None:
    one = swarm(20_000)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    for node in (A, B):
        one.connected(node, 0.0002)
    running: list[Run] = []
    for step in range(1, 80):
        now = step / 10
        for node in (A, B):
            while (run := one.next(node, now)) is not None:
                running.append(run)
        for run in running:
            run.received += 1000  # more of them would bring more
        one.tick(now)
        assert all(one.flows(node, now) <= 2 for node in (A, B))
    assert one.flows(A, now) == 2


def test_flows_are_bounded_and_few_holders_are_active() -> None:
    one = swarm(100)
    nodes = {bytes([number]): Holding() for number in range(40)}
    one.set_holders(nodes, 0)
    for node in nodes:
        one.connected(node, 1.0)
    active = [node for node in nodes if one.flows(node, 0)]
    assert len(active) == MAX_ACTIVE
    assert sum(one.flows(node, 0) for node in nodes) <= MAX_FLOWS
    for second in range(1, 120):
        one.tick(float(second))
    later = {node for node in nodes if one.flows(node, 120)}
    assert len(later) == MAX_ACTIVE
    assert later != set(active)  # others had their turn
