"""Bearer tokens: what is signed, and that nothing else passes."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.weights.bulk import bearer_tokens
from protocol.errors import PeerError

SECRET, NODE = b"s" * 32, b"n" * 32
HOSTS = [bearer_tokens.host_of(text) for text in ("192.0.2.1", "2001:db8::1", "198.51.100.7", "203.0.113.9")]


def test_a_token_says_whose_it_is_from_where_and_until_when() -> None:
    token = bearer_tokens.mint(SECRET, NODE, HOSTS, 1000.5)
    assert len(token) <= bearer_tokens.MAX_TOKEN
    assert bearer_tokens.check(SECRET, token, 1000.0) == bearer_tokens.TokenGrant(NODE, tuple(HOSTS), 1000.5)
    with pytest.raises(PeerError, match="expired"):
        bearer_tokens.check(SECRET, token, 1000.5)
    with pytest.raises(PeerError, match="not one of this node's"):
        bearer_tokens.check(b"x" * 32, token, 0.0)


def test_from_where_it_is_good() -> None:
    grant = bearer_tokens.check(SECRET, bearer_tokens.mint(SECRET, NODE, HOSTS[:1], 9.0), 0.0)
    assert grant.good_from(bearer_tokens.host_of("::ffff:192.0.2.1"))
    assert not grant.good_from(HOSTS[1])
    assert not grant.good_from(bearer_tokens.LOCAL)
    assert bearer_tokens.check(SECRET, bearer_tokens.mint(SECRET, NODE, [], 9.0), 0.0).good_from(HOSTS[3])


def test_all_addresses_of_the_machine_are_one_host() -> None:
    for text in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "192.0.2.1"):
        assert bearer_tokens.host_of(text, ["192.0.2.1"]) == bearer_tokens.LOCAL
    assert bearer_tokens.host_of("192.0.2.2", ["192.0.2.1"]) != bearer_tokens.LOCAL
    assert bearer_tokens.host_of("fe80::1%eth0") == bearer_tokens.host_of("fe80::1")
    with pytest.raises(ValueError, match="does not appear"):
        bearer_tokens.host_of("weights.example.org")


@given(data=st.data(), hosts=st.integers(0, 4))
def test_no_other_bytes_pass(data: st.DataObject, hosts: int) -> None:
    token = bearer_tokens.mint(SECRET, NODE, HOSTS[:hosts], 1000.0)
    raw = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    where = data.draw(st.integers(0, len(raw) - 1))
    raw[where] ^= data.draw(st.integers(1, 255))
    forged = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    for text in (forged, token[:-5], token + "AAAA"):
        with pytest.raises(PeerError):
            bearer_tokens.check(SECRET, text, 0.0)


@given(st.text(max_size=300))
def test_rubbish_is_a_peers_error(text: str) -> None:
    with pytest.raises(PeerError):
        bearer_tokens.check(SECRET, text, 0.0)
