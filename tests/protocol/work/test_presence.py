"""``protocol.work.presence``: the advert's bytes, its signature, its order and its lapse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, identity
from protocol.constants import MAX_PRESENCE_BYTES
from protocol.errors import LocalError, PeerError
from protocol.work.presence import LAPSE_INTERVALS, Presence, PresenceTable
from tests.protocol.builders import digest, key

ALICE = key("alice")
DOMAIN = digest("domain")
INTERVAL = 5.0
PRESENCE = Presence(
    domain=DOMAIN,
    node=ALICE.node,
    boot=3,
    counter=14,
    name="alice",
    role="inference",
    willing=("trainer", "relay", "validator", "inference"),
    addresses=("/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"),
    bulk=("/ip4/127.0.0.1/tcp/4002/http",),
    versions=(digest("version 2"), digest("version 1")),
    arriving=(digest("version 3"),),
    cpus=2,
    memory_mb=4096,
    gpu_mb=0,
    tokens_per_second=800,
    bandwidth_kbps=0,
    load=1_500_000,
    paused=0,
)

numbers = st.integers(0, 2**40)
presences = st.builds(
    Presence,
    domain=st.binary(min_size=32, max_size=32),
    node=st.just(ALICE.node),
    boot=numbers,
    counter=numbers,
    name=st.text("abc -.", max_size=32),
    role=st.sampled_from(["trainer", "relay", "validator", "inference", "none"]),
    willing=st.lists(st.sampled_from(["trainer", "relay", "validator", "inference"]), unique=True).map(tuple),
    addresses=st.lists(st.text("/ip4.0", max_size=128), max_size=8, unique=True).map(tuple),
    bulk=st.lists(st.text("/ip4.0", max_size=128), max_size=4, unique=True).map(tuple),
    versions=st.lists(st.binary(min_size=32, max_size=32), max_size=8, unique=True).map(tuple),
    arriving=st.lists(st.binary(min_size=32, max_size=32), max_size=2, unique=True).map(tuple),
    cpus=st.integers(0, 2**20),
    memory_mb=numbers,
    gpu_mb=numbers,
    tokens_per_second=numbers,
    bandwidth_kbps=numbers,
    load=numbers,
    paused=st.integers(0, 1),
)


def signed(value: Any) -> bytes:
    """The wire form of any body value, signed by alice."""
    body = codec.encode(value)
    return codec.encode([body, ALICE.sign(identity.PRESENCE, body)])


def body_of(wire: bytes) -> Any:
    body, _ = codec.decode(wire, max_bytes=MAX_PRESENCE_BYTES)
    return codec.decode(body, max_bytes=MAX_PRESENCE_BYTES)


@settings(max_examples=50, deadline=None)
@given(presences)
def test_parsing_inverts_signing(sent: Presence) -> None:
    assert Presence.parse(sent.sign(ALICE)) == sent


def test_every_flipped_bit_is_refused() -> None:
    data = PRESENCE.sign(ALICE)
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        with pytest.raises(PeerError):
            Presence.parse(bytes(altered))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_a_peer_error(data: bytes) -> None:
    with pytest.raises(PeerError):
        Presence.parse(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 2),
        (1, b""),
        (5, "n" * 33),
        (6, "king"),
        (7, ["none"]),
        (7, ["relay", "relay"]),
        (8, ["/a"] * 2),
        (8, ["x" * 129]),
        (8, [f"/{index}" for index in range(9)]),
        (9, ["x" * 129]),
        (9, ["/ip4"] * 2),
        (10, [bytes(31)]),
        (10, [bytes(32)] * 2),
        (11, [bytes(32)] * 2),
        (18, 2),
    ],
)
def test_a_signed_body_is_still_checked(field: int, value: Any) -> None:
    body = body_of(PRESENCE.sign(ALICE))
    body[field] = value
    Presence.parse(signed(body_of(PRESENCE.sign(ALICE))))  # the control: unaltered, it passes
    with pytest.raises(PeerError):
        Presence.parse(signed(body))


def test_another_kinds_signature_does_not_pass() -> None:
    body, _ = codec.decode(PRESENCE.sign(ALICE), max_bytes=MAX_PRESENCE_BYTES)
    with pytest.raises(PeerError, match="signature"):
        Presence.parse(codec.encode([body, ALICE.sign(identity.ENTRY, body)]))


def test_a_node_signs_for_itself_only() -> None:
    with pytest.raises(LocalError):
        PRESENCE.sign(key("bob"))
    with pytest.raises(LocalError):
        replace(PRESENCE, name="n" * 33).sign(ALICE)


def test_only_newer_presences_count() -> None:
    table = PresenceTable(DOMAIN, INTERVAL)
    assert table.update(PRESENCE, 0.0)
    assert not table.update(PRESENCE, 1.0)
    assert not table.update(replace(PRESENCE, counter=13), 1.0)
    assert not table.update(replace(PRESENCE, boot=2, counter=99), 1.0)
    assert table.live(1.0) == {ALICE.node: PRESENCE}
    restarted = replace(PRESENCE, boot=4, counter=0)
    assert table.update(restarted, 2.0)
    assert table.live(2.0) == {ALICE.node: restarted}


def test_a_presence_lapses_after_three_intervals_and_no_copy_revives_it() -> None:
    table = PresenceTable(DOMAIN, INTERVAL)
    table.update(PRESENCE, 100.0)
    assert table.live(100.0 + LAPSE_INTERVALS * INTERVAL)
    late = 100.1 + LAPSE_INTERVALS * INTERVAL
    assert not table.live(late)
    assert not table.update(PRESENCE, late)
    assert not table.live(late)
    assert table.update(replace(PRESENCE, counter=15), late)
    assert table.live(late)


def test_another_domains_presence_is_refused() -> None:
    table = PresenceTable(digest("another domain"), INTERVAL)
    with pytest.raises(PeerError):
        table.update(PRESENCE, 0.0)


def test_a_full_table_forgets_who_was_not_heard_for_longest() -> None:
    table = PresenceTable(DOMAIN, INTERVAL, 3)
    nodes = [digest(f"node {index}") for index in range(4)]
    for node in nodes[:3]:
        table.update(replace(PRESENCE, node=node), 0.0)
    table.update(replace(PRESENCE, node=nodes[0], counter=15), 1.0)
    table.update(replace(PRESENCE, node=nodes[3]), 2.0)
    assert set(table.live(2.0)) == {nodes[0], nodes[2], nodes[3]}
