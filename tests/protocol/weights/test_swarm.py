"""The decisions of a swarm."""

from __future__ import annotations

import time

from protocol.constants import CHUNK_BYTES
from protocol.weights.chunk_set import lowest
from protocol.weights.holders import Holding
from protocol.weights.swarm import MAX_RUN
from tests.protocol.swarms import A, B, C, bits, deliver, swarm, take


def test_each_chunk_is_asked_of_one_holder_at_a_time() -> None:
    one = swarm(6)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    first, second = take(one, A), take(one, B)
    assert (first.count, second.count) == (1, 1)  # nothing is known of either yet
    assert first.first != second.first
    assert one.next(A, 0) is None  # one flow, one request
    assert one.coming == 1 << first.first | 1 << second.first
    deliver(one, first, 0.1)
    assert one.missing == 0b111111 & ~(1 << first.first)
    assert one.delivered() == {A: 1}


def test_the_rarest_come_first_and_what_others_fetch_counts() -> None:
    for seed in range(20):
        one = swarm(8, seed=seed)
        one.set_holders({A: Holding(), B: Holding(whole=False), C: Holding(whole=False)}, 0)
        one.learn(B, 0b00001111, 0b00110000, 0)
        one.learn(C, 0b00000011, 0, 0)
        assert take(one, A).first in (6, 7)
        assert take(one, C).first in (0, 1)
        assert take(one, B).first in (2, 3)


def test_a_holder_is_asked_for_what_it_has() -> None:
    one = swarm(4)
    one.set_holders({A: Holding(whole=False)}, 0)
    assert one.next(A, 0) is None
    assert one.partial() == [A]
    one.learn(A, 0b0100, 0, 0)
    run = take(one, A)
    assert (run.first, run.end) == (2, 3)
    deliver(one, run, 1)
    assert one.next(A, 1) is None
    one.learn(A, 0b1111, 0, 1)
    assert one.partial() == []  # there is nothing more to ask it
    assert take(one, A, 1).first in (0, 1, 3)


def test_runs_grow_with_the_rate_and_shrink_towards_the_end() -> None:
    one = swarm(1000)
    one.set_holders({A: Holding()}, 0)
    now, lengths = 0.0, []
    while not one.done:
        run = take(one, A, now)
        lengths.append(run.count)
        now += run.count * 0.002  # 500 MiB a second
        deliver(one, run, now)
        one.tick(now)
    assert lengths[0] == 1
    assert max(lengths) == MAX_RUN
    assert lengths[-1] == 1
    assert len(lengths) < 150


def test_a_run_begins_with_a_rare_chunk_and_leaves_no_odd_pieces() -> None:
    one = swarm(512)
    one.set_holders({A: Holding(), B: Holding(whole=False)}, 0)
    now = 0.0
    for _ in range(30):
        run = take(one, A, now)
        now += 0.002 * run.count
        deliver(one, run, now)
        one.tick(now)
    rare = lowest(one.missing)
    one.learn(B, one.all & ~(1 << rare), 0, now)
    run = take(one, A, now)
    assert run.first == rare
    for _ in range(6):
        assert run.end % (1 << (run.count - 1).bit_length()) == 0 or not one.missing >> run.end & 1
        now += 0.002 * run.count
        deliver(one, run, now)
        run = take(one, A, now)
    assert run.count > 1


def test_a_refused_chunk_is_asked_of_another() -> None:
    one = swarm(1)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    run = take(one, A)
    one.refused(run, 0)
    one.finished(run, 0)
    assert one.next(A, 0.1) is None
    again = take(one, B, 0.1)
    one.finished(again, 0.2)
    assert take(one, A, 2.0).first == 0  # it may have it by now


def test_libp2p_is_the_last_resort() -> None:
    one = swarm(4)
    one.set_holders({A: Holding(direct=False), B: Holding(whole=False)}, 0)
    one.learn(B, 0b0111, 0, 0)
    run = take(one, A)
    assert run.first == 3
    assert one.next(A, 0) is None
    one.failed(B, 0)
    assert take(one, A, 0.01).first != 3


def test_the_author_is_spared_where_others_can_deliver() -> None:
    one = swarm(64)
    one.set_holders({A: Holding(spared=True), B: Holding(whole=False)}, 0)
    one.learn(B, bits(range(32)), bits(range(32, 48)), 0)
    assert take(one, A).first >= 48  # what nobody else has or fetches
    one = swarm(64)
    one.set_holders({A: Holding(spared=True), B: Holding()}, 0)
    one.learn(B, bits(range(64)) & ~1, 1, 0)
    other = take(one, B)
    for tenth in range(1, 30):
        other.received += 100_000
        one.tick(tenth / 10)
    assert one.next(A, 3) is None  # the other delivers
    one.set_holders({A: Holding(spared=True)}, 3)
    one.finished(other, 3)
    assert one.next(A, 3) is not None  # nobody else is left


def test_a_late_run_gives_up_what_it_has_not_begun_and_a_still_one_is_broken_off() -> None:
    one = swarm(400)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    now = 0.0
    for _ in range(8):
        run = take(one, A, now)
        now += 0.002 * run.count
        deliver(one, run, now)
        one.tick(now)
    run = take(one, A, now)
    assert run.count > 4
    planned, began = run.end, now
    run.received = CHUNK_BYTES // 2
    one.tick(began + 0.5)
    assert run.end == planned
    one.tick(began + 1.2)
    assert run.end == run.at + 1
    assert one.coming == 1 << run.at
    run.received += 1
    one.tick(began + 4)
    one.tick(began + 8)
    assert one.aborts == []
    one.tick(began + 9.5)
    assert one.aborts == [run]
    one.finished(run, began + 9.5)
    assert one.flows(A, began + 9.6) == 0


def test_the_end_game_takes_over_from_the_slowest() -> None:
    one = swarm(2)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    slow, fast = take(one, A), take(one, B)
    deliver(one, fast, 0.01)
    for tenth in range(1, 15):
        slow.received += 1000
        one.tick(tenth / 10)
    assert one.next(B, 1.5) is None
    assert one.aborts == [slow]
    one.finished(slow, 1.5)
    assert one.next(A, 1.5) is None  # not back to the one that it was taken from
    again = take(one, B, 1.5)
    assert again.first == slow.first
    deliver(one, again, 1.51)
    assert one.done


def test_one_that_is_nearly_done_is_left_to_it() -> None:
    one = swarm(2)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    first, second = take(one, A), take(one, B)
    for tenth in range(1, 10):
        first.received = second.received = tenth * CHUNK_BYTES // 10
        one.tick(tenth / 10)
    deliver(one, second, 0.95)
    assert one.next(B, 1.1) is None
    assert one.aborts == []


def test_the_end_game_halves_a_long_run() -> None:
    one = swarm(200)
    one.set_holders({A: Holding(), B: Holding()}, 0)
    now = 0.0
    for _ in range(6):
        for node in (A, B):
            run = take(one, node, now)
            now += 0.002 * run.count
            deliver(one, run, now)
        one.tick(now)
    long = take(one, A, now)
    planned = long.end
    assert long.count >= 4
    while True:
        long.received += 10_000  # it has become slow
        now += 0.05
        one.tick(now)
        run = take(one, B, now)
        if run.first in range(long.first, planned):
            break
        deliver(one, run, now)
    assert (run.first, run.end) == (long.end, planned)
    assert one.aborts == []


def test_a_decision_costs_microseconds() -> None:
    one = swarm(4096)
    one.set_holders({bytes([number]): Holding() for number in range(8)}, 0)
    began, runs = time.process_time(), 0
    now = 0.0
    while not one.done:
        for number in range(8):
            run = one.next(bytes([number]), now)
            if run is not None:
                runs += 1
                now += 0.001
                deliver(one, run, now)
        one.tick(now)
    # About 5 us a chunk; a machine that is ten times slower passes as well.
    assert (time.process_time() - began) / 4096 < 100e-6
    assert runs < 2500
