"""Who may hold a connection, and who may be at the handshake for one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from node.net.net_limits import NetLimits
from node.net.places import HANDSHAKES, HANDSHAKES_PER_SECOND, HASTE, Handshakes, Places, neighbourhood

SIX = "2001:db8::/64"


@dataclass(eq=False)
class Line:
    """A connection."""

    is_closed: bool = False
    aborted: bool = False

    def abort(self) -> None:
        self.is_closed = self.aborted = True


def node(number: int) -> bytes:
    return number.to_bytes(32, "big")


def nobody(peer: bytes) -> bool:
    return False


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8::1", SIX),
        ("2001:db8::ffff:1:2:3", SIX),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1/128"),
    ],
)
def test_strangers_are_counted_by_ipv4_address_or_ipv6_network(address: str, where: str) -> None:
    assert neighbourhood(address) == where


# --- handshakes --------------------------------------------------------------------------------------------------


def test_silent_handshakes_make_room_and_those_of_the_fullest_neighbourhood_first() -> None:
    pending = Handshakes(NetLimits(handshakes=6, handshakes_per_address=4))
    given_up: list[str] = []

    def begin(name: str, where: str, now: float) -> bool:
        return pending.begin(where, now, lambda: given_up.append(name)) is not None

    assert all(begin(f"a{number}", "192.0.2.1", 0.0) for number in range(4))
    assert begin("b", "192.0.2.2", 0.0)
    assert begin("c", SIX, 0.0)
    assert begin("newcomer", "192.0.2.4", 0.0)
    assert given_up == ["a0"]
    assert begin("another", "192.0.2.5", 0.0)
    assert given_up == ["a0", "a1"]
    assert len(pending) == 6


def test_a_neighbourhood_waits_for_its_own_young_handshakes_but_not_for_long() -> None:
    pending = Handshakes(NetLimits(handshakes_per_address=2))
    given_up: list[int] = []
    for number in range(2):
        assert pending.begin("192.0.2.1", 0.0, lambda number=number: given_up.append(number))  # type: ignore[misc]
    assert pending.begin("192.0.2.1", HASTE / 2, lambda: None) is None
    assert pending.begin("192.0.2.1", HASTE, lambda: None) is not None
    assert (given_up, pending.counts) == ([0], {"192.0.2.1": 2})


def test_a_handshake_that_is_over_makes_room_and_ends_once() -> None:
    pending = Handshakes(NetLimits(handshakes_per_address=1))
    first = pending.begin("192.0.2.1", 0.0, lambda: None)
    assert first is not None
    pending.end(first)
    pending.end(first)
    assert (len(pending), pending.counts) == (0, {})
    assert pending.begin("192.0.2.1", 0.0, lambda: None) is not None


def test_a_neighbourhood_begins_so_many_handshakes_in_time_and_this_machine_as_many_as_it_likes() -> None:
    pending = Handshakes(NetLimits())

    def begun(where: str, now: float) -> bool:
        handshake = pending.begin(where, now, lambda: None)
        if handshake is not None:
            pending.end(handshake)
        return handshake is not None

    assert sum(begun(SIX, 0.0) for _ in range(1000)) == HANDSHAKES
    assert sum(begun(SIX, 10.0) for _ in range(1000)) == 10 * HANDSHAKES_PER_SECOND
    assert all(begun("127.0.0.1", 0.0) and begun("::1/128", 0.0) for _ in range(1000))


# --- connections -------------------------------------------------------------------------------------------------


def test_inbound_ones_do_not_take_the_places_of_outbound_ones_nor_the_reverse() -> None:
    places = Places(NetLimits(inbound_connections=4, outbound_connections=2, reserved_connections=1), nobody)
    taken = [places.take(Line(), node(number), True, f"192.0.2.{number}") for number in range(5)]
    assert taken == [None] * 3 + ["every place for strangers is taken"] * 2
    assert places.may_dial(node(9))
    assert [places.take(Line(), node(9), False, "192.0.2.9") for _ in range(2)] == [None, None]
    assert not places.may_dial(node(9))
    assert places.take(Line(), node(9), False, "192.0.2.9") is None  # what it has to ask
    assert places.take(Line(), node(9), False, "192.0.2.9") is not None
    assert (places.inbound, places.outbound) == (3, 3)


def test_a_neighbourhood_of_strangers_has_so_many_places_and_this_machine_all() -> None:
    places = Places(NetLimits(connections_per_address=2), nobody)
    assert [places.take(Line(), node(number), True, SIX) is None for number in range(3)] == [True, True, False]
    assert places.take(Line(), node(4), True, "192.0.2.1") is None
    assert all(places.take(Line(), node(number), True, "127.0.0.1") is None for number in range(10, 20))


def test_who_is_preferred_has_a_place_as_long_as_a_stranger_holds_one() -> None:
    members = {node(number) for number in range(100, 200)}
    limits = NetLimits(inbound_connections=5, reserved_connections=2, newcomer_connections=0)
    places = Places(limits, lambda peer: peer in members)
    lines = [Line() for _ in range(3)]
    where = ["192.0.2.1", "192.0.2.2", "192.0.2.1"]
    assert [places.take(line, node(number), True, where[number]) for number, line in enumerate(lines)] == [None] * 3
    assert [places.take(Line(), node(100 + number), True, SIX) for number in range(2)] == [None] * 2
    assert [line.aborted for line in lines] == [False] * 3
    for number, gone in ((2, [2]), (3, [1, 2]), (4, [0, 1, 2])):
        assert places.take(Line(), node(100 + number), True, SIX) is None
        assert [index for index, line in enumerate(lines) if line.aborted] == gone
        assert places.inbound == 5
    assert places.take(Line(), node(105), True, SIX) == "every place is taken"
    members.clear()  # whoever was a member is a stranger now
    members.add(node(105))
    assert places.take(Line(), node(105), True, SIX) is None


def test_the_last_places_are_for_newcomers() -> None:
    limits = NetLimits(inbound_connections=5, reserved_connections=2, newcomer_connections=2)
    places = Places(limits, lambda peer: peer != node(0))
    lines = [Line() for _ in range(3)]
    assert [places.take(line, node(0), True, "192.0.2.1") for line in lines] == [None] * 3
    assert [places.take(Line(), node(number), True, SIX) is None for number in range(1, 6)] == [True] * 3 + [False] * 2
    assert [line.aborted for line in lines] == [False, False, True]
    empty = Places(limits, lambda peer: True)
    assert [empty.take(Line(), node(number), True, SIX) is None for number in range(5)] == [True] * 3 + [False] * 2


def test_a_connection_that_ends_leaves_its_place() -> None:
    places = Places(NetLimits(inbound_connections=1, reserved_connections=0), nobody)
    line, other = Line(), Line()
    assert places.take(line, node(1), True, SIX) is None
    line.is_closed = True
    assert places.take(other, node(1), True, SIX) is None
    places.leave(other)
    places.leave(other)
    assert places.inbound == 0
