"""Tokens over real libp2p connections, and what they open: public and private domains."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from node.config import BulkConfig
from node.errors import Refused, Unreachable
from node.net.host import open_network
from node.store.version_store import VersionStore
from node.weights.bulk import bearer_tokens, node_certificate, token_exchange
from node.weights.bulk.bulk_address import parse
from node.weights.bulk.holder_connection import HolderConnection
from node.weights.bulk.pinned_tls import client_context
from node.weights.fetching import Fetching
from node.weights.held import Notice
from protocol import codec
from protocol.errors import PeerError
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest
from tests.node.net.helpers import LISTEN, identity
from tests.node.weights.bulk.harness import CHUNKS, DOMAIN, make_object
from tests.node.weights.bulk.nodes import Some, until
from tests.node.weights.bulk.swarms import Nothing


@dataclass
class Pair:
    """A holder whose child serves an object, and a node that is connected to it."""

    holder: Some
    asker: Some
    manifest: Manifest
    data: bytes


@asynccontextmanager
async def pair(folder: Path, *, private: int = 0, joined: bool = True, **config: Any) -> AsyncIterator[Pair]:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    _, manifest, data = make_object(folder / "a" / "versions")
    first, second = identity(1), identity(2)
    async with AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(open_network(who, listen=LISTEN, domain_tag="test"))
            for who in (first, second)
        ]
        members = [first.node, second.node] if joined else [first.node]
        nodes = [
            Some(folder / name, who, config=BulkConfig(**config), network=network, private=private, joined=members)
            for name, who, network in zip("ab", (first, second), networks, strict=True)
        ]
        nursery = await stack.enter_async_context(trio.open_nursery())
        for node in nodes:
            stack.enter_context(node.bulk.ports.open())
            node.tokens.serve()
            nursery.start_soon(node.bulk.run)
        await networks[1].connect(networks[0].addresses[0], 5)
        await until(lambda: all(node.bulk.up for node in nodes))
        yield Pair(nodes[0], nodes[1], manifest, data)
        nursery.cancel_scope.cancel()


async def fetch(pair: Pair, address: str, token: str, tls: ssl.SSLContext | None = None) -> bytes:
    place = parse(address)
    connection = HolderConnection(place, tls=tls, peer=b"", base_path=place.base_path(DOMAIN), token=token)
    buffers = [memoryview(bytearray(pair.manifest.chunk_size(i))) for i in range(CHUNKS)]

    def work() -> None:
        try:
            connection.get(pair.manifest.digest, 0, buffers, lambda _: None)
        finally:
            connection.close()

    await trio.to_thread.run_sync(work)
    return b"".join(buffers)


async def test_a_public_route_opens_the_weights(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        tokens = both.asker.tokens
        route = await tokens.route(both.holder.id)
        assert route.address == both.holder.bulk.addresses[0]
        assert await fetch(both, route.address, route.token) == both.data
        grant = bearer_tokens.check(both.holder.bulk.secret, route.token, time.monotonic())
        assert (grant.node, grant.hosts) == (both.asker.id, (bearer_tokens.LOCAL,))
        # It is kept, until it is said to be bad.
        assert await tokens.route(both.holder.id) is route
        tokens.spoil(both.holder.id)
        assert await tokens.route(both.holder.id) is not route
        with pytest.raises(Unreachable):
            await tokens.route(identity(9).node)
        # A request that carries something breaks the rules of a public domain.
        with pytest.raises(Refused):
            await both.asker.network.request(
                both.holder.id, token_exchange.PROTOCOL, b"x", timeout=5, max_response=4096
            )


async def test_behind_a_proxy_a_token_is_bound_to_no_host(tmp_path: Path) -> None:
    front = "/dns4/weights.example.org/tcp/80/http"
    async with pair(tmp_path, proxied=True, announce=(front,)) as both:
        route = await both.asker.tokens.route(both.holder.id)
        assert route.address == front
        assert bearer_tokens.check(both.holder.bulk.secret, route.token, time.monotonic()).hosts == ()
        assert await fetch(both, both.holder.bulk.ports.addresses()[0], route.token) == both.data


async def test_a_private_route_is_encrypted_and_for_members(tmp_path: Path) -> None:
    async with pair(tmp_path, private=1) as both:
        holder, asker = both.holder, both.asker
        route = await asker.tokens.route(holder.id)
        assert route.address.endswith("/https")
        context = client_context(asker.bulk.own_pem, asker.bulk.known[holder.id])
        assert await fetch(both, route.address, route.token, context) == both.data
        # In plain there is nothing.
        with pytest.raises(Unreachable):
            await fetch(both, route.address.removesuffix("s"), route.token)
        # Nor with a certificate that libp2p did not bring.
        other = Some(tmp_path, identity(3), network=asker.network, private=1)
        stranger = client_context(other.bulk.own_pem, asker.bulk.known[holder.id])
        with pytest.raises(Unreachable):
            await fetch(both, route.address, route.token, stranger)
        # A child that is started anew knows who was let in.
        before = holder.bulk.pid
        os.kill(before, 9)
        await until(lambda: holder.bulk.up and holder.bulk.pid != before)
        assert await fetch(both, route.address, route.token, context) == both.data
        # One whose feed has ended gets no other token.
        holder.ended.add(asker.id)
        asker.tokens.spoil(holder.id)
        with pytest.raises(Refused, match="only nodes that joined"):
            await asker.tokens.route(holder.id)


@pytest.mark.parametrize("private", [0, 1])
async def test_an_object_is_brought_from_peer_to_peer(tmp_path: Path, private: int) -> None:
    """Token, connection, swarm, store: all of the way, in plain and encrypted."""
    async with pair(tmp_path, private=private) as both:
        asker: Any = both.asker
        versions = VersionStore(asker.directory.versions)
        held: Any = Nothing()
        means: Any = SimpleNamespace(
            node=asker, versions=versions, bulk=asker.bulk, tokens=asker.tokens, notice=Notice()
        )
        fetching = Fetching(means, held)
        await fetching.bring(both.manifest, lambda: {both.holder.id: Holding()}, stall=20)
        assert versions.paths(both.manifest.digest)[1].read_bytes() == both.data
        assert "/farflung/chunk/1" not in both.asker.network.counts


async def test_a_private_domain_refuses_who_has_not_joined(tmp_path: Path) -> None:
    async with pair(tmp_path, private=1, joined=False) as both:
        with pytest.raises(Refused, match="only nodes that joined"):
            await both.asker.tokens.route(both.holder.id)
        assert both.holder.bulk.known == {}
        # Another's certificate, or none, is a fault.
        both.holder.joined.add(both.asker.id)
        _, theirs = node_certificate.make(identity(9))
        for request in (b"", b"rubbish", theirs):
            with pytest.raises(Refused):
                await both.asker.network.request(
                    both.holder.id, token_exchange.PROTOCOL, request, timeout=5, max_response=4096
                )
        assert both.holder.bulk.known == {}


async def test_a_member_has_one_certificate_for_a_while(tmp_path: Path) -> None:
    async with pair(tmp_path, private=1) as both:
        await both.asker.tokens.route(both.holder.id)
        known = both.holder.bulk.known[both.asker.id]
        _, other = node_certificate.make(both.asker.identity)
        for request, words in ((other, "another certificate so soon"), (known, None)):
            with pytest.raises(Refused, match=words) if words else nullcontext():
                await both.asker.network.request(
                    both.holder.id, token_exchange.PROTOCOL, request, timeout=5, max_response=4096
                )
        assert both.holder.bulk.known[both.asker.id] == known


class Answering:
    """A network of peers that hand out tokens: libp2p reaches all at 203.0.113.5."""

    def __init__(self) -> None:
        self.addresses = ["/ip4/192.0.2.1/tcp/4001/p2p/x"]
        self.places: dict[bytes, str] = {}

    def hosts(self, node: bytes) -> list[str]:
        return ["203.0.113.5"]

    async def request(self, peer: bytes, protocol: str, payload: bytes, **_: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        return codec.encode(["t", 1, b"", [f"/{self.places[peer]}/tcp/80/http"]])


async def test_a_foreign_address_that_has_no_weights_is_left_alone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    net = Answering()
    tokens = Some(tmp_path, identity(1), network=net).tokens
    liar, other, honest = (identity(n).node for n in (2, 3, 4))
    net.places = {liar: "ip4/8.8.8.8", other: "ip4/8.8.8.8", honest: "ip4/203.0.113.5"}
    tries, end = 0, trio.current_time() + 3600
    while trio.current_time() < end:
        for peer in (liar, other):
            with suppress(Refused):
                assert (await tokens.route(peer)).foreign
                tries += 1
                tokens.misled(peer)
        await trio.sleep(10)
    assert 4 <= tries <= 7  # a minute's pause, then two, and so on
    # Another name for it, or another host, is no better from the same peer; its own address is.
    net.places[liar] = "dns4/victim.example"
    for _ in range(2):
        with pytest.raises(Refused):
            await tokens.route(liar)
    net.places[liar] = "ip4/203.0.113.5"
    for peer in (liar, honest):
        route = await tokens.route(peer)
        assert not route.foreign
        tokens.misled(peer)
        assert await tokens.route(peer) is not route


async def test_one_who_names_one_address_after_the_other_is_left_alone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    net = Answering()
    tokens = Some(tmp_path, identity(1), network=net).tokens
    peer = identity(2).node
    dialled = 0
    for number in range(1, 200):
        net.places[peer] = f"ip4/8.8.4.{number}"
        with suppress(Refused):
            dialled += (await tokens.route(peer)).foreign
        await trio.sleep(11)
    assert dialled <= 2
    # One who stays where it is is found again.
    await trio.sleep(token_exchange.MAX_MISLED_SECONDS)
    with pytest.raises(Refused, match="one address after the other"):
        await tokens.route(peer)
    await trio.sleep(token_exchange.MAX_MISLED_SECONDS)
    assert (await tokens.route(peer)).foreign


async def test_nothing_is_handed_out_while_nothing_is_served(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        os.kill(both.holder.bulk.pid, 9)
        await until(lambda: not both.holder.bulk.up)
        with pytest.raises(Refused, match="nothing is served"):
            await both.asker.tokens.route(both.holder.id)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"rubbish",
        codec.encode(["t", 0, b"", []]),
        codec.encode(["t y", 5, b"", ["/ip4/127.0.0.1/tcp/1/http"]]),
        codec.encode(["t", 5, b"", ["/ip4/127.0.0.1/tcp/1"]]),
        codec.encode(["t", 5, b"", ["/ip4/127.0.0.1/tcp/1/http"] * 5]),
    ],
)
async def test_an_answer_that_breaks_the_rules(tmp_path: Path, answer: bytes) -> None:
    async def lie(peer: bytes, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return answer

    async with (
        open_network(identity(1), listen=LISTEN, domain_tag="test") as first,
        open_network(identity(2), listen=LISTEN, domain_tag="test") as second,
    ):
        first.serve(token_exchange.PROTOCOL, lie, max_request=4096)
        await second.connect(first.addresses[0], 5)
        tokens = Some(tmp_path, identity(2), network=second).tokens
        with pytest.raises(PeerError):
            await tokens.route(first.node)


@pytest.mark.parametrize("private", [0, 1])
async def test_strangers_read_what_the_genesis_names(tmp_path: Path, private: int) -> None:
    await trio.lowlevel.checkpoint()
    member, stranger = identity(2).node, identity(3).node
    some = Some(tmp_path, identity(1), network=SimpleNamespace(), private=private, joined=[member])
    named = [SimpleNamespace(hash=bytes([n]) * 32) for n in range(5)]
    some.domain.blobs = named
    tokens = some.tokens
    assert all(tokens.may_read(node, blob.hash) for blob in named for node in (member, stranger))
    assert tokens.may_read(member, b"?" * 32)
    assert tokens.may_read(stranger, b"?" * 32) is not bool(private)


async def test_which_of_many_addresses(tmp_path: Path) -> None:
    class Net:
        def __init__(self) -> None:
            self.addresses = ["/ip4/192.0.2.1/tcp/4001/p2p/x", "/ip4/127.0.0.1/tcp/4001/p2p/x"]
            self.remote: list[str] = []

        def hosts(self, node: bytes) -> list[str]:
            return self.remote

    await trio.lowlevel.checkpoint()
    net = Net()
    tokens = Some(tmp_path, identity(1), network=net).tokens

    def chosen(remote: list[str], *texts: str) -> str:
        net.remote = remote
        return str(tokens.choose(b"", [parse(text) for text in texts]))

    loop, near, far, six = (
        f"/{host}/tcp/80/http" for host in ("ip4/127.0.0.1", "ip4/192.0.2.1", "ip4/198.51.100.1", "ip6/2001:db8::1")
    )
    assert chosen(["198.51.100.1"], loop, near, far, six) == far
    assert chosen(["2001:db8::1"], loop, near, far, six) == six
    assert chosen(["127.0.0.1"], far, loop) == loop
    assert chosen(["192.0.2.1"], far, loop) == loop  # a neighbour on this machine
    assert chosen(["203.0.113.5"], six, far, loop) == far
    assert chosen(["203.0.113.5"], six) == six
    with pytest.raises(Refused):
        chosen(["203.0.113.5"], loop)
    # Nobody is sent where only this node can go.
    inside = ["ip4/127.0.0.1", "ip4/0.0.0.0", "ip4/10.0.0.1", "ip4/169.254.169.254", "ip4/100.100.100.200"]
    inside += ["ip6/::1", "ip6/::", "ip6/::ffff:7f00:1", "ip6/fd00:ec2::254", "ip6/fe80::1", "ip6/64:ff9b::a9fe:a9fe"]
    inside += ["ip6/2002:7f00:1::1", "ip4/224.0.0.1"]
    for host in inside:
        with pytest.raises(Refused):
            chosen(["9.9.9.9"], f"/{host}/tcp/80/http")
    good = "/ip4/8.8.8.8/tcp/80/http"
    assert chosen(["9.9.9.9"], *(f"/{host}/tcp/80/http" for host in inside[:3]), good) == good
    # A neighbour may name another, but nothing that is the dialling machine's own.
    assert chosen(["10.0.0.7"], "/ip4/10.0.0.8/tcp/80/http") == "/ip4/10.0.0.8/tcp/80/http"
    for host in ("ip4/127.0.0.1", "ip4/0.0.0.0", "ip4/169.254.169.254", "ip6/::ffff:7f00:1"):
        with pytest.raises(Refused):
            chosen(["10.0.0.7"], f"/{host}/tcp/80/http")
    assert chosen(["169.254.3.4"], "/ip4/169.254.3.4/tcp/80/http") == "/ip4/169.254.3.4/tcp/80/http"
