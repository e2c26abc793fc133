"""Which addresses a node can give to others before it runs."""

from __future__ import annotations

import pytest

from node.net import listening
from protocol.identity import Identity, peer_id

NODE = Identity(bytes(32)).node


def test_wildcards_stand_for_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"ip4": "198.51.100.7", "ip6": None}
    monkeypatch.setattr(listening, "outbound", ways.__getitem__)
    listen = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001", "/ip4/127.0.0.1/tcp/4002", "/ip4/127.0.0.1/tcp/0")
    assert listening.own_addresses(listen, NODE) == [
        f"/ip4/198.51.100.7/tcp/4001/p2p/{peer_id(NODE)}",
        f"/ip4/127.0.0.1/tcp/4002/p2p/{peer_id(NODE)}",
    ]


def test_split() -> None:
    assert listening.split(f"/dns4/example.org/tcp/4001/p2p/{peer_id(NODE)}") == ("dns4", "example.org", 4001)
