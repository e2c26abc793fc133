"""Who is asked, and who is left alone."""

from __future__ import annotations

from protocol.holders import Holding
from tests.protocol.swarms import A, B, deliver, swarm, take


def test_a_liar_is_out_and_its_other_requests_are_broken_off() -> None:
    one = swarm(8)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    one.connected(A, 0.2)
    first, second = take(one, A), take(one, A)
    one.lied(first, 0)
    assert one.aborts == [second]
    one.finished(first, 0)
    one.finished(second, 0)
    assert one.flows(A, 1) == 0
    assert one.next(A, 1000) is None
    assert one.routes.success(A, 0) == 0
    run = take(one, B)
    deliver(one, run, 1)
    assert one.delivered() == {B: 1}


def test_failures_pause_longer_each_time_and_busy_ones_as_long_as_they_say() -> None:
    one = swarm(8)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    pauses = []
    for _ in range(8):
        one.failed(A, 100)
        later = 100.0
        while not one.flows(A, later):
            later += 0.05
            one.tick(later)
        pauses.append(later - 100)
        one.tick(100)
    assert pauses[0] < 0.8
    assert pauses[3] > 2.5
    assert pauses[-1] < 21
    one.busy(B, 4.0, 200)
    one.tick(200.1)
    assert one.flows(B, 202) == 0
    one.tick(205.5)
    assert one.flows(B, 205.5) == 1


def test_holders_that_are_gone_are_broken_off_and_their_chunks_free() -> None:
    one = swarm(2)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    run = take(one, A)
    one.set_holders({B: Holding()}, 1)
    assert one.aborts == [run]
    assert one.next(A, 1) is None
    one.failed(A, 1)
    one.busy(A, 1, 1)
    one.heard(A, 1, 0, 1)
    one.finished(run, 1)
    assert one.coming == 0
    for _ in range(2):
        deliver(one, take(one, B, 2), 2)
    assert one.done
    assert one.flows(B, 2) == 0
