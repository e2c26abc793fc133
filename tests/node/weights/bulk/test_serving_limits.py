"""The books of a server: places, requests and rates, without sockets."""

from __future__ import annotations

import pytest

from node.weights.bulk import serving_limits
from node.weights.bulk.bearer_tokens import LOCAL, host_of
from node.weights.bulk.serving_limits import Bucket, Gate, ServingLimits

A, B = b"a" * 32, b"b" * 32
HOST = host_of("192.0.2.1")


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_bucket_keeps_its_rate(clock: Clock) -> None:
    bucket = Bucket(1000, 500, clock)
    assert bucket.take(500) == 0
    assert bucket.take(1000) == 1.0
    clock.now += 1.0
    assert bucket.take(0) == 0
    clock.now += 100.0  # a long pause gives no more than the burst
    assert bucket.take(1500) == 1.0
    assert bucket.take(1, ahead=False) == bucket.take(1, ahead=False) > 1.0
    assert Bucket(0, 0).take(1 << 60) == 0


def test_strangers_of_one_host_are_few_but_for_this_machines() -> None:
    gate = Gate(ServingLimits(total=100, of_peer=2))
    tickets = [gate.enter(HOST) for _ in range(4)]
    assert all(tickets)
    assert gate.enter(HOST) is None
    assert all(gate.enter(LOCAL) for _ in range(20))
    # Whoever shows a token is no stranger any more.
    assert tickets[0] is not None
    assert gate.claim(tickets[0], A)
    assert gate.enter(HOST) is not None


def test_one_host_with_many_keys_leaves_half_to_others() -> None:
    gate = Gate(ServingLimits(total=20, of_peer=2))
    tickets = []
    for number in range(40):
        ticket = gate.enter(HOST)
        if ticket is not None and gate.claim(ticket, bytes([number]) * 32):
            tickets.append(ticket)
    assert len(tickets) == gate.count == 10
    others = [gate.enter(host_of(f"192.0.2.{number}")) for number in range(2, 12)]
    for number, other in enumerate(others, 100):
        assert other is not None
        assert gate.claim(other, bytes([number]) * 32)
    assert gate.count == 20
    for ticket in tickets:
        gate.leave(ticket)
    assert gate.enter(HOST) is not None
    proxied = Gate(ServingLimits(total=20, of_peer=2, proxied=True))
    assert all(proxied.enter(HOST) for _ in range(20))


def test_a_connection_that_ends_gives_its_place_back() -> None:
    gate = Gate(ServingLimits(total=2, of_peer=1))
    for _ in range(5):
        first = gate.enter(HOST)
        assert first is not None
        assert gate.claim(first, A)
        second = gate.enter(HOST)
        assert second is not None
        assert not gate.claim(second, A)
        assert gate.claim(second, B)
        assert gate.enter(HOST) is None
        gate.leave(first)
        gate.leave(second)
    assert gate.count == 0


def test_a_proxys_connection_carries_many_peers() -> None:
    gate = Gate(ServingLimits(total=2, of_peer=1, proxied=True))
    tickets = [gate.enter(HOST), gate.enter(HOST)]
    for ticket in tickets:
        assert ticket is not None
        assert gate.claim(ticket, A)
        assert gate.claim(ticket, B)
        assert gate.claim(ticket, A)


def test_a_peer_that_asks_too_often(clock: Clock) -> None:
    gate = Gate(ServingLimits(), clock=clock)
    ticket = gate.enter(HOST)
    assert ticket is not None
    assert all(gate.claim(ticket, A) for _ in range(serving_limits.REQUESTS * 10))
    assert not gate.claim(ticket, A)
    assert gate.claim(ticket, B)
    clock.now += 1
    assert gate.claim(ticket, A)


def test_peers_that_are_gone_are_forgotten() -> None:
    gate = Gate(ServingLimits(), max_peers=8)
    kept = gate.enter(HOST)
    assert kept is not None
    assert gate.claim(kept, A)
    for number in range(50):
        ticket = gate.enter(HOST)
        assert ticket is not None
        assert gate.claim(ticket, bytes([number]) * 32)
        gate.leave(ticket)
    assert len(gate.peers) <= 8
    assert A in gate.peers
    gate.leave(kept)


def test_rates_are_of_each_peer_and_of_all(clock: Clock) -> None:
    gate = Gate(ServingLimits(rate=1000_000, peer_rate=400_000), clock=clock)
    tickets = [gate.enter(LOCAL) for _ in range(4)]
    pauses = []
    for ticket, node in zip(tickets, (A, A, B, b"c" * 32), strict=True):
        assert ticket is not None
        gate.claim(ticket, node)
        pauses.append(gate.pause(ticket, 300_000))
    # 0.25 s of each rate are free: 100 000 of a peer, 250 000 of all.
    assert pauses == pytest.approx([0.5, 1.25, 0.65, 0.95])
    assert gate.piece <= 100_000
    assert Gate(ServingLimits()).piece == 1 << 30
