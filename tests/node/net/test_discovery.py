"""Addresses, the address book and the peer manager."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import trio
from trio.testing import MockClock

from node.net import discovery
from node.net.address_text import Address, AddressError, parse_address
from node.net.discovery import AddressBook, PeerManager
from node.net.host import open_network
from node.net.requests import Unreachable
from protocol.identity import peer_id
from tests.node.net.helpers import identity, network, until

PEER = peer_id(identity(1).node)


def address(port: int, host: str = "127.0.0.1") -> Address:
    return parse_address(f"/ip4/{host}/tcp/{port}")


def test_the_book_keeps_the_newest_addresses_first_and_few() -> None:
    book = AddressBook(own=bytes(32))
    node = b"n" * 32
    for port in range(1, 20):
        book.learn(node, [address(port)], 0.0)
    assert [one.port for one in book.entries[node].addresses] == list(range(19, 11, -1))
    book.learn(node, [address(13)], 0.0)
    assert [one.port for one in book.entries[node].addresses][:2] == [13, 19]


def test_the_book_skips_the_own_node_other_nodes_addresses_and_port_0() -> None:
    book = AddressBook(own=b"o" * 32)
    book.learn(b"o" * 32, [address(1)], 0.0)
    book.learn(b"n" * 32, [parse_address(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}"), address(0)], 0.0)
    assert book.entries.keys() == {b"n" * 32}
    assert book.entries[b"n" * 32].addresses == []


def test_failures_back_off_and_seeds_less() -> None:
    book = AddressBook(own=bytes(32))
    seed, other = b"s" * 32, b"t" * 32
    book.learn(seed, [address(1)], 0.0, seed=True)
    book.learn(other, [address(2)], 0.0)
    assert book.due(0.0) == [seed, other]
    for _ in range(12):
        book.failed(seed, 100.0)
        book.failed(other, 100.0)
    assert 100 < book.entries[seed].next_dial <= 100 + discovery.SEED_BACKOFF
    assert 110 < book.entries[other].next_dial <= 100 + discovery.MAX_BACKOFF
    book.learn(other, [address(3)], 101.0)  # a new address is worth a try at once
    assert book.due(101.0) == [other]


def test_a_peer_that_hangs_up_at_once_is_tried_less_and_less() -> None:
    book = AddressBook(own=bytes(32))
    node = b"n" * 32
    book.learn(node, [address(1)], 0.0)
    now = 0.0
    for _ in range(12):
        book.connected(node, now)
        book.disconnected(node, now + 0.1)
        now = book.entries[node].next_dial
    assert now > 100
    book.connected(node, now)
    book.disconnected(node, now + discovery.SHORT)
    assert book.entries[node].next_dial < now + discovery.SHORT + 1


def test_the_higher_id_waits_for_the_lower_to_dial() -> None:
    low, high = b"\x01" * 32, b"\xff" * 32
    books = AddressBook(own=low), AddressBook(own=high)
    books[0].learn(high, [address(1)], 0.0)
    books[1].learn(low, [address(2)], 0.0)
    assert books[0].due(0.0) == [high]
    assert books[1].due(0.0) == []
    assert books[1].due(1.0) == [low]


def test_the_book_is_bounded_and_forgets_strangers_first() -> None:
    book = AddressBook(own=bytes(32), most=3)
    seed, met, stranger, new = (bytes([number]) * 32 for number in range(1, 5))
    book.learn(seed, [address(1)], 0.0, seed=True)
    book.learn(met, [address(1)], 0.0)
    book.connected(met, 0.0)
    book.learn(stranger, [address(1)], 0.0)
    book.learn(new, [address(1)], 0.0)
    assert book.entries.keys() == {seed, met, new}
    book.connected(new, 0.0)
    book.learn(stranger, [address(1)], 0.0)
    assert book.entries.keys() == {seed, new, stranger}


def test_one_who_names_new_addresses_again_and_again_is_not_tried_at_once_each_time() -> None:
    book = AddressBook(own=bytes(32))
    node, dials, now = b"n" * 32, 0, 0.0
    for number in range(1, 601):
        book.learn(node, [address(number)], now)
        if book.due(now):
            dials += 1
            book.failed(node, now)
        now += 1
    assert dials <= 3 + 10 + 10  # new ones at once, one a minute of these, and what is due anyway
    now += 200
    book.learn(node, [address(1000)], now)
    assert book.due(now) == [node]


async def test_a_host_that_many_strangers_name_is_dialled_seldom(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    dialled: Counter[str] = Counter()
    up: set[bytes] = set()

    async def dial(host: str, port: int, node: bytes) -> None:
        await trio.sleep(0.1)
        dialled[host] += 1
        if host != "198.51.100.9":
            raise Unreachable("nobody answers there")
        up.add(node)

    book = AddressBook(own=bytes(32))
    manager = PeerManager(book, dial=dial, connected=up.__contains__, may_dial=lambda node: True)
    nursery.start_soon(manager.run)
    for number in range(40):
        node = b"\1" + bytes([number]) * 31
        book.learn(node, [address(port, "192.0.2.1") for port in range(1, 9)], 0.0)
    book.learn(b"s" * 32, [address(1, "192.0.2.7")], 0.0, seed=True)
    book.learn(b"t" * 32, [address(1, "127.0.0.1")], 0.0)
    await trio.sleep(300)
    victim = dialled["192.0.2.1"]
    assert discovery.VAIN_DIALS <= victim <= discovery.VAIN_DIALS + 300 / discovery.VAIN_SECONDS
    assert dialled["192.0.2.7"] > 25  # the operator's own choice
    assert dialled["127.0.0.1"] > 6
    # Others are reached meanwhile.
    book.learn(b"h" * 32, [address(1, "192.0.2.1"), address(1, "198.51.100.9")], trio.current_time())
    await trio.sleep(60)
    assert b"h" * 32 in up


async def test_a_host_where_a_dial_succeeds_is_in_order_again(autojump_clock: MockClock) -> None:
    works = False

    async def dial(host: str, port: int, node: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if not works:
            raise Unreachable("nobody answers there")

    book = AddressBook(own=bytes(32))
    manager = PeerManager(book, dial=dial, connected=lambda node: False, may_dial=lambda node: True)
    node = b"n" * 32
    book.learn(node, [address(1, "192.0.2.1")], 0.0)
    for _ in range(discovery.VAIN_DIALS):
        with pytest.raises(Unreachable, match="nobody answers"):
            await manager.reach(node)
    works = True
    with pytest.raises(Unreachable, match="in vain"):
        await manager.reach(node)
    await trio.sleep(discovery.VAIN_SECONDS + 1)
    for _ in range(5):
        await manager.reach(node)


async def test_a_seed_that_starts_late_is_found() -> None:
    async with network(1) as first:
        dead = first.addresses[0]
    port = dead.split("/")[4]
    async with network(2) as second:
        await second.add_peer(dead)
        await until(lambda: second.book.entries[identity(1).node].failures > 0)

        async with open_network(identity(1), listen=[f"/ip4/127.0.0.1/tcp/{port}"], domain_tag="test") as again:
            await until(lambda: again.node in second.peers, 10)
            assert second.known_addresses() == {again.node: [dead]}


async def test_all_addresses_of_a_peer_are_tried() -> None:
    async with network(1) as first, network(2) as second:
        second.learn(first.node, ["rubbish", "/ip4/127.0.0.1/tcp/1", *first.addresses, "/ip4/127.0.0.1/tcp/2"])
        await until(lambda: first.node in second.peers)


async def test_two_halves_that_share_a_seed_meet() -> None:
    """Seeds are dialled while other peers are connected, so a network that started in two parts becomes one."""
    async with network(1) as seed, network(2) as left, network(3) as right:
        await left.connect(right.addresses[0], 5)
        await left.add_peer(seed.addresses[0])
        await until(lambda: seed.node in left.peers and right.node in left.peers)


async def test_a_book_without_a_usable_address_dials_nobody() -> None:
    async with network(1) as first:
        first.learn(identity(2).node, ["rubbish"])
        await first.add_peer(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(identity(2).node)}")
        with pytest.raises(AddressError, match="must end in /p2p/PEER"):
            await first.add_peer("/ip4/127.0.0.1/tcp/1")
        assert len(first.book.entries) == 1


async def test_a_connected_peer_is_not_looked_at_until_it_is_lost(autojump_clock: MockClock) -> None:
    book = AddressBook(own=bytes(32))
    assert book.next_due() == math.inf
    book.learn(b"p" * 32, [parse_address("/ip4/192.0.2.1/tcp/1")], 0.0, seed=True)
    assert (book.due(0.0), book.next_due(), book.news.is_set()) == ([b"p" * 32], 0.0, True)
    book.news = trio.Event()
    book.connected(b"p" * 32, 0.0)
    book.postpone(b"p" * 32, 0.0)
    book.learn(b"p" * 32, [parse_address("/ip4/192.0.2.1/tcp/1")], 1.0)
    assert (book.due(9.0), book.next_due(), book.news.is_set()) == ([], 10.0, False)
    book.disconnected(b"p" * 32, 9.0)
    assert (book.due(9.6), book.news.is_set()) == ([b"p" * 32], True)


async def test_a_peer_is_dialled_as_soon_as_it_is_heard_of_and_again_once_it_is_lost(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    dialled: list[float] = []
    up: set[bytes] = set()

    async def dial(host: str, port: int, node: bytes) -> None:
        await trio.lowlevel.checkpoint()
        dialled.append(trio.current_time())
        up.add(node)

    peer = b"p" * 32
    book = AddressBook(own=bytes(32))
    manager = PeerManager(book, dial=dial, connected=up.__contains__, may_dial=lambda node: True)
    nursery.start_soon(manager.run)
    await trio.sleep(100)
    book.learn(peer, [parse_address("/ip4/192.0.2.1/tcp/1")], trio.current_time())
    heard = trio.current_time()
    await trio.sleep(1)
    (first,) = dialled
    assert first - heard < 0.2
    await trio.sleep(100)
    assert dialled == [first]
    up.clear()
    book.disconnected(peer, trio.current_time())
    lost = trio.current_time()
    await trio.sleep(2)
    assert len(dialled) == 2
    assert dialled[1] - lost < 1.2
