"""Addresses of weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.weights.bulk.bulk_address import BulkAddress, parse
from protocol.errors import PeerError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("/ip4/192.0.2.1/tcp/14001/http", BulkAddress("ip4", "192.0.2.1", 14001, False)),
        ("/ip6/2001:db8::1/tcp/443/https", BulkAddress("ip6", "2001:db8::1", 443, True)),
        ("/dns4/weights.example.org/tcp/80/http", BulkAddress("dns4", "weights.example.org", 80, False)),
        ("/dns/a/tcp/443/https/http-path/b%2Fc", BulkAddress("dns", "a", 443, True, "/b/c")),
    ],
)
def test_what_is_one(text: str, parsed: BulkAddress) -> None:
    assert parse(text) == parsed
    assert str(parsed) == text
    assert parsed.base_path(bytes(32)) == f"{parsed.prefix}/farflung/1/{bytes(32).hex()}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/ip4/192.0.2.1/tcp/14001",
        "/ip4/192.0.2.1/tcp/0/http",
        "/ip4/192.0.2.1/tcp/70000/http",
        "/ip4/192.0.2.300/tcp/1/http",
        "/ip6/192.0.2.1/tcp/1/http",
        "/ip4/192.0.2.1/udp/1/http",
        "/ip4/192.0.2.1/tcp/1/http/",
        "/dns/a/tcp/1/http/http-path/..%2Fb",
        "/dns/a/tcp/1/http/http-path/a%0D%0Ab",
        "/dns/a b/tcp/1/http",
        "/dns/a\r\nX: y/tcp/1/http",
        f"/dns/{'a' * 120}/tcp/1/http",
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(PeerError):
        parse(text)


@given(st.text(max_size=140) | st.from_regex(r"/dns/[ -~]{0,40}/tcp/[0-9]{1,6}/https?(/http-path/[ -~]{0,40})?"))
def test_rubbish_is_a_peers_error(text: str) -> None:
    try:
        found = parse(text)
    except PeerError:
        return
    # What passes can stand in a request's head.
    assert all(33 <= ord(character) < 127 for character in f"{found.host}{found.base_path(bytes(32))}")
