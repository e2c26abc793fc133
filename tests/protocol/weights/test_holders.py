"""Who is asked, and who is left alone."""

from __future__ import annotations

from itertools import pairwise

from protocol.weights.holders import MAX_REFUSALS, Holding
from protocol.weights.swarm import Swarm
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


def ask_in_vain(one: Swarm, node: bytes, now: float) -> bool:
    """Ask a holder as often as the swarm lets one; whether it was asked at all."""
    asked = False
    while (run := one.next(node, now)) is not None:
        asked = True
        one.refused(run, now)
        one.finished(run, now)
    return asked


def test_who_refuses_what_it_said_it_has_is_asked_less_and_less_and_then_not_at_all() -> None:
    one = swarm(8)
    asked, now = [], 0.0
    while now < 120:
        one.set_holders({A: Holding(whole=False), B: Holding(direct=False)}, now)
        one.learn(A, 0b1111110, 0, now)
        if ask_in_vain(one, A, now):
            asked.append(now)
        now += 0.1
        one.tick(now)
    assert MAX_REFUSALS <= len(asked) <= MAX_REFUSALS + 2  # two within one moment count once
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[0] < 1.2
    assert pauses[-1] > 10
    # It is no use to go and come back.
    one.set_holders({B: Holding(direct=False)}, now)
    one.set_holders({A: Holding(), B: Holding(direct=False)}, now + 1)
    one.tick(now + 60)
    assert one.next(A, now + 60) is None
    assert one.routes.success(A, asked[-1]) < 0.5


def test_one_whose_object_was_deleted_meanwhile_is_not_punished() -> None:
    one = swarm(64)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    one.connected(A, 0.2)
    runs = [take(one, A) for _ in range(4)]
    for run in runs:  # what was under way counts once
        one.refused(run, 0.1)
        one.finished(run, 0.1)
    one.learn(A, 0, 0, 0.2)
    assert one.routes.success(A, 0.2) == 1
    one.learn(A, one.all, 0, 2)  # it has got it again
    deliver(one, take(one, A, 2), 2.1)
    assert ask_in_vain(one, A, 3)
    assert one.routes.success(A, 3) == 1  # what it delivered made up for the first time
    one.tick(4.5)
    assert one.next(A, 4.5) is not None


def test_what_our_own_disk_refuses_is_no_fault_of_a_holders() -> None:
    one = swarm(8)
    one.set_holders({A: Holding()}, 0)
    for second in range(0, 60, 2):
        run = take(one, A, second)
        one.unkept(run, second)
        one.finished(run, second)
        one.tick(second + 1)
    assert one.routes.success(A, 60) == 1


def test_holders_that_are_gone_are_broken_off_and_their_chunks_free() -> None:
    one = swarm(2)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    run = take(one, A)
    one.set_holders({B: Holding()}, 1)
    assert one.aborts == [run]
    assert one.next(A, 1) is None
    one.failed(A, 1)
    one.busy(A, 1, 1)
    one.learn(A, 1, 0, 1)
    one.finished(run, 1)
    assert one.coming == 0
    for _ in range(2):
        deliver(one, take(one, B, 2), 2)
    assert one.done
    assert one.flows(B, 2) == 0
