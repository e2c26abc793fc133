"""Multiaddr texts, and which addresses a node can give to others before it runs."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net.address_text import AddressError, address_problem, own_addresses, parse_address, split
from protocol.identity import Identity, peer_id

NODE = Identity(bytes(32)).node
PEER = peer_id(NODE)


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",
        "/ip4/10.0.0.1/tcp/1",
        f"/ip6/::1/tcp/65535/p2p/{PEER}",
        f"/dns4/node.example.org/tcp/4001/p2p/{PEER}",
        "/dns/localhost/tcp/1",
        "/dns6/x/tcp/1",
    ],
)
def test_addresses_survive_a_round_trip(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/ip4/300.0.0.1/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/127.0.0.1/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/",
        "/ip4/1.2.3.4/udp/1/quic",
        "/ip4/1.2.3.4/tcp/1/p2p/",
        "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/x",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}11",
        "/ip4/1.2.3.4/tcp/1\n",
        "/ip4/1.2.3.4/tcp/١",
        "/dns4/" + "x" * 120 + "/tcp/1",
    ],
)
def test_other_texts_are_one_clear_line(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)
    assert address_problem(text, peer=True) == address_problem(text, peer=False) == str(caught.value)


@given(st.text(max_size=200))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(AddressError):
        parse_address(text)


@pytest.mark.parametrize(
    ("address", "peer", "problem"),
    [
        (f"/dns4/node.example.org/tcp/4001/p2p/{PEER}", True, None),
        ("/ip6/::/tcp/0", False, None),
        (7, True, "is not an address"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", True, "no valid port"),
        ("/ip4/127.0.0.1/tcp/4001", True, "lacks the peer's id"),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}", False, "must not carry a peer id"),
        ("/dns/localhost/tcp/4001", False, "listens on an IP address"),
        ("/ip4/::1/tcp/4001", False, "no valid IPv4 address"),
    ],
)
def test_what_is_wrong_with_an_address(address: object, peer: bool, problem: str | None) -> None:
    found = address_problem(address, peer=peer)
    assert found is None if problem is None else problem in (found or "")


def test_wildcards_stand_for_the_way_out() -> None:
    ways = {"ip4": "198.51.100.7", "ip6": None}
    listen = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001", "/ip4/127.0.0.1/tcp/4002", "/ip4/127.0.0.1/tcp/0")
    assert own_addresses(listen, NODE, ways.__getitem__) == [
        f"/ip4/198.51.100.7/tcp/4001/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/4002/p2p/{PEER}",
    ]


def test_split() -> None:
    assert split(f"/dns4/example.org/tcp/4001/p2p/{PEER}") == ("dns4", "example.org", 4001)
    assert split("/ip4/127.0.0.1/tcp/14001/https") == ("ip4", "127.0.0.1", 14001)
