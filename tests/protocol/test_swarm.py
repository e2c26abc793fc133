"""The swarm's decisions, alone and over a simulated network in virtual time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.constants import CHUNK_BYTES
from protocol.routes import Routes
from protocol.swarm import MAX_ACTIVE, MAX_FLOWS, MAX_RUN, Holding, Run, Swarm, bitmap_of, bits, bits_of
from tests.protocol.bulk_simulator import MIB, Peer, World

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


# --- sets and bitmaps ------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 199)), st.integers(200, 220))
def test_bitmaps(chunks: set[int], count: int) -> None:
    bitmap = bitmap_of(bits(chunks), count)
    assert len(bitmap) == -(-count // 8)
    assert {i for i in range(count) if bitmap[i // 8] >> (7 - i % 8) & 1} == chunks
    assert bits_of(bitmap, count) == bits(chunks)
    assert bits_of(b"\xff" * len(bitmap), count) == (1 << count) - 1  # spare bits are nobody's


# --- decisions -------------------------------------------------------------------------------------------------------


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
        one.heard(B, 0b00001111, 0b00110000, 0)
        one.heard(C, 0b00000011, 0, 0)
        assert take(one, A).first in (6, 7)
        assert take(one, C).first in (0, 1)
        assert take(one, B).first in (2, 3)


def test_a_holder_is_asked_for_what_it_has() -> None:
    one = swarm(4)
    one.set_holders({A: Holding(whole=False)}, 0)
    assert one.next(A, 0) is None
    assert one.partial(0) == [A]
    one.heard(A, 0b0100, 0, 0)
    run = take(one, A)
    assert (run.first, run.end) == (2, 3)
    deliver(one, run, 1)
    assert one.next(A, 1) is None
    one.heard(A, 0b1111, 0, 1)
    assert one.partial(1) == []  # there is nothing more to ask it
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


def test_libp2p_is_the_last_resort() -> None:
    one = swarm(4)
    one.set_holders({A: Holding(direct=False), B: Holding(whole=False)}, 0)
    one.heard(B, 0b0111, 0, 0)
    run = take(one, A)
    assert run.first == 3
    assert one.next(A, 0) is None
    one.failed(B, 0)
    assert take(one, A, 0.01).first != 3


def test_the_author_is_spared_where_others_can_deliver() -> None:
    one = swarm(64)
    one.set_holders({A: Holding(spared=True), B: Holding(whole=False)}, 0)
    one.heard(B, bits(range(32)), bits(range(32, 48)), 0)
    assert take(one, A).first >= 48  # what nobody else has or fetches
    one = swarm(64)
    one.set_holders({A: Holding(spared=True), B: Holding()}, 0)
    one.heard(B, bits(range(64)) & ~1, 1, 0)
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


# --- over a network --------------------------------------------------------------------------------------------------


def finish(world: World) -> float:
    return max(peer.finished_at for peer in world.peers.values() if peer.finished_at is not None)


def whole(chunks: int) -> int:
    return (1 << chunks) - 1


def test_two_relays_and_eight_nodes_take_less_than_twice_one_transfer() -> None:
    chunks = 64
    world = World(1)
    world.add("origin", chunks, has=whole(chunks), up=LINK, down=LINK, rtt=0.08, author=True)
    for name in ("relay0", "relay1", *(f"node{number}" for number in range(8))):
        world.add(name, chunks, up=LINK, down=LINK, rtt=0.08)
    world.run()
    ideal = chunks * MIB / LINK
    assert finish(world) < 2 * ideal
    origin = world.peers[b"origin"]
    assert origin.served < 1.6 * chunks  # every chunk leaves it about once
    assert all(peer.served > 0 for peer in world.peers.values())


def test_a_lossy_line_is_filled_by_many_flows() -> None:
    world = World(1)
    world.add("origin", 128, has=whole(128), up=LINK, rtt=0.08, per_flow=2.5e6 / 8)
    world.add("node", 128, down=LINK)
    world.run()
    assert finish(world) < 128 * MIB / LINK / 0.5


def test_twenty_joiners_spread_over_all_holders_and_none_queues() -> None:
    chunks = 32
    world = World(2)
    donors = [
        world.add(f"donor{number}", chunks, has=whole(chunks), up=LINK, down=LINK, rtt=0.02) for number in range(4)
    ]
    joiners = [world.add(f"joiner{number}", chunks, up=LINK, down=LINK, rtt=0.02) for number in range(20)]
    world.run()
    fair = sum(donor.served for donor in donors) / 4
    assert all(0.6 * fair < donor.served < 1.5 * fair for donor in donors)
    assert all(len(joiner_sources(world, joiner)) >= 4 for joiner in joiners)
    assert sum(joiner.served for joiner in joiners) > 0.4 * 20 * chunks  # they carry much of it themselves
    assert finish(world) < 3 * chunks * MIB / LINK


def joiner_sources(world: World, joiner: Peer) -> list[bytes]:
    return [peer.node for peer in world.peers.values() if peer.served_to[joiner.node]]


def test_a_donor_that_is_full_sends_them_elsewhere() -> None:
    chunks = 32
    world = World(3)
    small = world.add("small", chunks, has=whole(chunks), up=LINK, rtt=0.02, most_served=3)
    for number in range(2):
        world.add(f"large{number}", chunks, has=whole(chunks), up=LINK, rtt=0.02)
    for number in range(8):
        world.add(f"joiner{number}", chunks, up=LINK, down=LINK, rtt=0.02)
    world.run()
    assert small.most_at_once <= 3
    assert small.served > 0
    assert finish(world) < 3 * chunks * MIB / LINK


def undisturbed(chunks: int, seed: int) -> tuple[World, list[Peer]]:
    world = World(seed)
    for number in range(3):
        world.add(f"holder{number}", chunks, has=whole(chunks), up=LINK, rtt=0.01)
    return world, [world.add(f"node{number}", chunks, up=LINK, down=LINK, rtt=0.01) for number in range(5)]


def test_one_killed_one_throttled_one_lying_and_the_healthy_are_hardly_later() -> None:
    chunks = 48
    world, nodes = undisturbed(chunks, 4)
    world.run()
    plain = finish(world)
    world, nodes = undisturbed(chunks, 4)
    world.add("liar", chunks, has=whole(chunks), up=LINK, rtt=0.01, lies=True)
    killed, throttled = nodes[0], nodes[1]

    def kill() -> None:
        killed.dead = True

    def throttle() -> None:
        throttled.up = throttled.down = LINK / 100

    world.run(at=[(plain / 4, kill), (plain / 3, throttle)], stop=1.5 * plain)
    healthy = nodes[2:]
    assert all(node.finished_at is not None and node.finished_at <= 1.5 * plain for node in healthy)
    assert all(not node.swarm.flows(b"liar", world.now) for node in healthy if node.swarm is not None)


def test_a_peer_that_degrades_in_the_midst_loses_its_share() -> None:
    chunks = 96
    world = World(5)
    good = world.add("good", chunks, has=whole(chunks), up=LINK, rtt=0.01)
    fading = world.add("fading", chunks, has=whole(chunks), up=LINK, rtt=0.01)
    node = world.add("node", chunks, down=2 * LINK)
    ideal = chunks * MIB / (2 * LINK)
    before: list[int] = []

    def fade() -> None:
        before.append(fading.served)
        fading.up = LINK / 100

    world.run(at=[(ideal / 2, fade)])
    assert before[0] > chunks / 8
    assert fading.served - before[0] <= 4
    assert good.served > chunks / 2
    assert node.finished_at is not None
    assert node.finished_at < 2.2 * ideal


def test_all_holders_but_one_vanish() -> None:
    chunks = 32
    world = World(6)
    holders = [world.add(f"holder{number}", chunks, has=whole(chunks), up=LINK, rtt=0.01) for number in range(4)]
    node = world.add("node", chunks, down=4 * LINK)

    def vanish() -> None:
        for holder in holders[1:]:
            holder.dead = True

    world.run(at=[(0.3, vanish)])
    assert node.whole
    assert holders[0].served > chunks / 3


def test_only_what_is_missing_is_fetched_after_a_restart() -> None:
    chunks = 64
    world = World(7)
    holder = world.add("holder", chunks, has=whole(chunks), up=LINK)
    half = bits(range(0, chunks, 2))
    node = world.add("node", chunks, has=half)
    world.run()
    assert node.whole
    assert holder.served == chunks // 2


def test_a_chain_cuts_through() -> None:
    """A node that reaches only the relay is done soon after the relay itself."""
    chunks = 48
    world = World(8)
    origin = world.add("origin", chunks, has=whole(chunks), up=LINK, rtt=0.02)
    relay = world.add("relay", chunks, up=LINK, down=LINK, rtt=0.02)
    relay.holders = lambda: {origin.node: Holding()}
    node = world.add("node", chunks, down=LINK)
    node.holders = lambda: {relay.node: Holding(whole=relay.whole)}
    world.run()
    assert relay.finished_at is not None
    assert node.finished_at is not None
    assert node.finished_at < relay.finished_at + 0.5


def test_a_hidden_holder_serves_what_no_other_has() -> None:
    chunks = 16
    world = World(9)
    hidden = world.add("hidden", chunks, has=whole(chunks), up=LINK / 4, rtt=0.02, hidden=True)
    plain = world.add("plain", chunks, has=bits(range(12)), up=LINK, rtt=0.02)
    plain.dead = False
    node = world.add("node", chunks, down=LINK)
    node.holders = lambda: {hidden.node: Holding(direct=False), plain.node: Holding(whole=False)}
    plain.holders = lambda: {}
    world.run(until=30, stop=20)
    assert node.whole
    assert hidden.served <= 6


@pytest.mark.parametrize("seed", range(3))
def test_chance_does_not_matter(seed: int) -> None:
    world, _ = undisturbed(24, seed)
    world.run(until=30)
    assert finish(world) < 3 * 24 * MIB / LINK
