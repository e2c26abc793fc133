"""One regression test for each defect of libp2p 0.8.1 that node/net/guard.py contains.

Each attacks a real host over real sockets and then lets a third party use that host.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import struct
from typing import Any

import pytest
import trio
from libp2p.crypto.secp256k1 import create_new_key_pair as secp256k1_key_pair
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_uvarint
from trio.testing import wait_all_tasks_blocked

from node.net import guard, yamux
from node.net.guard import NetLimits
from node.net.host import Network
from node.net.requests import Unreachable
from protocol.errors import LocalError, PeerError
from tests.node.net.helpers import (
    ACK,
    DATA,
    ECHO,
    MULTISTREAM,
    PING,
    RST,
    SYN,
    WINDOW,
    attacker,
    gossip_stream,
    hung_up,
    identity,
    line,
    network,
    never,
    select,
    send_rpc,
    tcp,
    until,
    usable,
)


def blamed(victim: Network, number: int = 66) -> dict[str, int]:
    return victim.scores.reasons(identity(number).node)


# --- 1 -----------------------------------------------------------------------------------------------------------


async def test_1_an_exception_in_a_handler_costs_one_request() -> None:
    async def broken(peer: bytes, request: bytes) -> bytes:
        raise RuntimeError("a bug")

    async with network(1) as victim, network(2) as other:
        victim.serve("/test/broken/1", broken, max_request=64)
        node = await other.connect(victim.addresses[0], 5)
        with pytest.raises(Unreachable, match="failed there"):
            await other.request(node, "/test/broken/1", b"", timeout=5, max_response=64)
        assert await other.request(node, ECHO, b"x", timeout=5, max_response=64) == b"x"
        await usable(victim)
        assert victim.restarts == 0


async def test_1_a_raw_stream_handler_that_raises_is_contained() -> None:
    async def broken(stream: Any) -> None:
        raise ExceptionGroup("two bugs", [ValueError("one"), KeyError("two")])

    async with network(1) as victim:
        assert victim.host is not None
        victim.host.set_stream_handler("/test/raw/1", broken)
        async with attacker(victim) as bad:
            await bad.frame(WINDOW, SYN, 1, 0)
            await bad.data(1, MULTISTREAM + line(b"/test/raw/1"))
            await usable(victim)
        assert victim.restarts == 0


# --- 2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x05\xff\xfe\xfd\xfc\n",  # the five bytes that kill a stock host
        MULTISTREAM + b"\x05\xff\xfe\xfd\xfc\n",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a line of 2**63 bytes
        b"\x00",
        line(b"/multistream/2.0.0"),
        (MULTISTREAM + line(b"no") * 9),
    ],
)
async def test_2_rubbish_in_multistream_costs_the_stream(rubbish: bytes) -> None:
    async with network(1) as victim, attacker(victim) as bad:
        await bad.frame(WINDOW, SYN, 1, 0)
        await bad.data(1, rubbish)
        await until(lambda: bool(blamed(victim)))
        await usable(victim)
        assert victim.restarts == 0


@pytest.mark.parametrize(
    "rubbish", [b"\x05\xff\xfe\xfd\xfc\n", b"\xff" * 64, b"\x80\x80\x80\x80\x80\x01", b"GET / HTTP/1.1\r\n"]
)
async def test_2_rubbish_before_noise_costs_the_connection(rubbish: bytes) -> None:
    async with network(1) as victim, tcp(victim) as stream:
        await stream.send_all(rubbish)
        with contextlib.suppress(trio.BrokenResourceError):  # most rubbish has ended the connection by now
            await stream.send_eof()  # some announces more: who then keeps silent is test_4's stalled handshake
        await hung_up(stream)
        await usable(victim)
        assert victim.restarts == 0


# --- 3 -----------------------------------------------------------------------------------------------------------


def bad_key_message() -> bytes:
    """A message whose origin is a hashed peer id, so that its bad key would be read."""
    message = rpc_pb2.Message(
        data=b"x", topicIDs=["farflung/test/roles"], from_id=b"\x12\x20" + bytes(32), key=b"\xff\xff", signature=b"s"
    )
    return bytes(rpc_pb2.RPC(publish=[message]).SerializeToString())


def forged_message() -> bytes:
    """A message in another node's name."""
    message = rpc_pb2.Message(
        data=b"x",
        topicIDs=["farflung/test/roles"],
        from_id=guard.peer_of(identity(9).node).to_bytes(),
        seqno=bytes(8),
        signature=bytes(64),
    )
    return bytes(rpc_pb2.RPC(publish=[message]).SerializeToString())


def long_seqno() -> bytes:
    message = rpc_pb2.Message(
        data=b"x",
        topicIDs=["farflung/test/roles"],
        from_id=guard.peer_of(identity(66).node).to_bytes(),
        seqno=bytes(200_000),
        signature=bytes(64),
    )
    return bytes(rpc_pb2.RPC(publish=[message]).SerializeToString())


def one_id_many_times() -> bytes:
    rpc = rpc_pb2.RPC()
    rpc.control.iwant.add().messageIDs.extend([bytes(20)] * 6000)
    return bytes(rpc.SerializeToString())


def many_subscriptions() -> bytes:
    """In number allowed, and again and again."""
    subscriptions = [rpc_pb2.RPC.SubOpts(subscribe=number % 2 == 0, topicid="t") for number in range(100)]
    return bytes(rpc_pb2.RPC(subscriptions=subscriptions).SerializeToString())


def long_topic() -> bytes:
    subscription = rpc_pb2.RPC.SubOpts(subscribe=True, topicid="t" * 200)
    return bytes(rpc_pb2.RPC(subscriptions=[subscription]).SerializeToString())


def many_items() -> bytes:
    subscriptions = [rpc_pb2.RPC.SubOpts(subscribe=True, topicid=str(number)) for number in range(300)]
    return bytes(rpc_pb2.RPC(subscriptions=subscriptions).SerializeToString())


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff",
        bad_key_message(),
        forged_message(),
        long_seqno(),
        one_id_many_times(),
        many_subscriptions(),
        long_topic(),
        many_items(),
    ],
    ids=range(8),
)
async def test_3_rubbish_in_gossip_is_blamed_on_its_sender(body: bytes) -> None:
    async with network(1) as victim:
        victim.subscribe("roles", lambda origin, data: None)
        await wait_all_tasks_blocked()
        async with attacker(victim) as bad:
            await gossip_stream(bad)
            await send_rpc(bad, body)
            await until(lambda: bool(blamed(victim)))
            await usable(victim)
        assert victim.restarts == 0


async def test_3_an_oversized_or_endless_length_is_refused() -> None:
    async with network(1) as victim:
        async with attacker(victim) as bad:
            await gossip_stream(bad)
            await bad.data(1, encode_uvarint(64 << 20))
            await until(lambda: len(blamed(victim)) == 1)
        async with attacker(victim) as bad:
            await gossip_stream(bad)
            await bad.data(1, b"\xff" * 12)
            await until(lambda: len(blamed(victim)) == 2)
        await usable(victim)


async def test_3_a_handler_that_raises_costs_one_message() -> None:
    heard: list[bytes] = []

    def handler(origin: bytes, data: bytes) -> None:
        heard.append(data)
        if data == b"bug":
            raise RuntimeError("a bug")
        if data == b"rubbish":
            raise PeerError("not a presence")

    async with network(1) as victim, network(2) as other:
        victim.subscribe("roles", handler)
        other.subscribe("roles", lambda origin, data: None)
        await other.connect(victim.addresses[0], 5)
        await until(
            lambda: victim.node in other.gossip.listeners("roles") and other.node in victim.gossip.listeners("roles")
        )
        for data in (b"bug", b"rubbish", b"fine"):
            await other.publish("roles", data)
        await until(lambda: heard == [b"bug", b"rubbish", b"fine"])
        assert victim.scores.reasons(other.node) == {"not a presence": 1}
        assert victim.restarts == 0


# --- 4 -----------------------------------------------------------------------------------------------------------


async def test_4_more_connections_over_a_lifetime_than_the_cap() -> None:
    async with network(1, NetLimits(inbound_connections=2, reserved_connections=0)) as victim:
        for number in range(10, 15):
            async with attacker(victim, number):
                await until(lambda number=number: identity(number).node in victim.peers)  # type: ignore[misc]
            await until(lambda: not victim.peers)
        await usable(victim)


async def test_4_the_cap_holds_for_living_connections() -> None:
    async with (
        network(1, NetLimits(inbound_connections=2, reserved_connections=0)) as victim,
        attacker(victim, 10),
        attacker(victim, 11),
    ):
        await until(lambda: len(victim.peers) == 2)
        with pytest.raises(Exception):  # noqa: B017, PT011, PT012  # however libp2p reports the closed socket
            async with attacker(victim, 12) as bad:
                await bad.session.read()
                raise EOFError
        assert len(victim.peers) == 2


async def test_4_half_open_handshakes_leave_room_for_others() -> None:
    limits = NetLimits(handshakes_per_address=4)
    async with network(1, limits) as victim, trio.open_nursery() as nursery:

        async def idle() -> None:
            async with tcp(victim, "127.0.0.2"):
                await trio.sleep_forever()

        for _ in range(12):
            nursery.start_soon(idle)
        assert victim.host is not None
        swarm = victim.host.get_network()
        await until(lambda: swarm.handshakes.counts["127.0.0.2"] == 4)
        await usable(victim)
        assert swarm.handshakes.counts["127.0.0.2"] == 4
        nursery.cancel_scope.cancel()


async def test_4_silent_connections_from_many_addresses_shut_nobody_out() -> None:
    async with network(1) as victim, trio.open_nursery() as nursery:
        assert victim.host is not None
        swarm = victim.host.get_network()

        async def idle(number: int) -> None:
            async with tcp(victim, f"127.0.0.{2 + number % 8}") as stream:
                await hung_up(stream)
            ended.append(number)

        ended: list[int] = []
        for number in range(NetLimits().handshakes):
            nursery.start_soon(idle, number)
        await until(lambda: len(swarm.handshakes) == NetLimits().handshakes)
        await usable(victim)
        assert len(ended) == 1
        nursery.cancel_scope.cancel()


async def test_4_a_node_full_of_strangers_dials_and_takes_in_whom_it_prefers() -> None:
    limits = NetLimits(inbound_connections=3, reserved_connections=1, newcomer_connections=1)
    async with network(1, limits) as victim, attacker(victim, 10), attacker(victim, 11), network(2) as member:
        await until(lambda: len(victim.peers) == 2)
        with pytest.raises(Unreachable):
            await refused(member, victim)
        async with network(3) as other:
            await victim.add_peer(other.addresses[0])
            await until(lambda: other.node in victim.peers)
        victim.prefer(lambda node: node == member.node)
        await member.connect(victim.addresses[0], 5)
        await until(lambda: member.node in victim.peers)


async def refused(dialler: Network, victim: Network) -> None:
    """Connect and find out that one was not let in: the dialling side is done before the other has decided."""
    node = await dialler.connect(victim.addresses[0], 5)
    await dialler.request(node, ECHO, b"", timeout=5, max_response=64)


async def test_4_a_stalled_handshake_ends() -> None:
    async with network(1, NetLimits(handshake_timeout=0.1)) as victim, tcp(victim) as stream:
        await hung_up(stream)
        assert victim.host is not None
        victim.host.get_network().limits = NetLimits()
        await usable(victim)


# --- 5 -----------------------------------------------------------------------------------------------------------


async def test_5_data_beyond_the_window_costs_the_connection() -> None:
    async with network(1) as victim:
        victim.serve("/test/slow/1", never, max_request=64)
        async with attacker(victim) as bad:
            await bad.frame(WINDOW, SYN, 1, 0)
            await bad.data(1, MULTISTREAM + line(b"/test/slow/1") + bytes(4))
            sent = 0
            with pytest.raises(Exception):  # noqa: B017, PT011, PT012
                while sent < 8 << 20:
                    await bad.data(1, bytes(32 << 10))
                    sent += 32 << 10
            await bad.closed()
            assert any("window" in reason for reason in blamed(victim))
        await usable(victim)


async def test_5_an_announced_frame_larger_than_any_window_costs_the_connection() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        await bad.frame(DATA, SYN, 1, 16 << 20)
        await bad.closed()
        await usable(victim)


async def test_5_a_flood_of_streams_costs_the_connection() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        for number in range(yamux.MAX_INBOUND_STREAMS + 1):
            await bad.frame(WINDOW, SYN, 2 * number + 1, 0)
        await bad.closed()
        assert any("streams" in reason for reason in blamed(victim))
        await usable(victim)


async def test_5_streams_may_be_opened_for_ever_one_after_the_other() -> None:
    async with network(1) as victim, network(2) as other:
        node = await other.connect(victim.addresses[0], 5)
        for _ in range(yamux.MAX_INBOUND_STREAMS + 20):
            await other.request(node, ECHO, b"x", timeout=5, max_response=64)
        assert not victim.scores.reasons(other.node)


@pytest.mark.parametrize(
    ("kind", "flags", "stream"),
    [(9, 0, 1), (WINDOW, SYN, 2), (WINDOW, SYN, 0)],
)
async def test_5_frames_against_the_rules_cost_the_connection(kind: int, flags: int, stream: int) -> None:
    async with network(1) as victim, attacker(victim) as bad:
        await bad.frame(kind, flags, stream, 0)
        await bad.closed()
        assert blamed(victim)
        await usable(victim)


async def test_5_a_flood_of_pings_costs_the_connection() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        with pytest.raises(Exception):  # noqa: B017, PT011, PT012
            for number in range(100):
                await bad.frame(PING, SYN, 0, number)
            await bad.closed()
            raise EOFError
        assert any("pings" in reason for reason in blamed(victim))
        await usable(victim)


@pytest.mark.parametrize(
    ("kind", "flags", "stream", "length"),
    [
        (WINDOW, 0, 7, 1 << 18),  # of a stream that was never opened
        (DATA, 0, 7, 0),
        (WINDOW, 0, 1, 0),
        (WINDOW, 0, 1, 1),
        (WINDOW, 0, 1, 1 << 20),  # more credit than anybody needs
        (DATA, 0, 1, 0),
        (PING, ACK, 0, 5),
    ],
)
async def test_5_a_flood_of_frames_of_no_use_costs_the_connection(
    kind: int, flags: int, stream: int, length: int
) -> None:
    frame = struct.pack("!BBHII", 0, kind, flags, stream, length)
    async with network(1) as victim, attacker(victim) as bad:
        await bad.frame(WINDOW, SYN, 1, 0)
        await bad.data(1, MULTISTREAM)
        for _ in range(3):  # fewer than are allowed
            await bad.session.write(frame * 1000)
        await usable(victim)
        assert bad.node in victim.peers
        with contextlib.suppress(Exception):
            for _ in range(10):
                await bad.session.write(frame * 1000)
        await bad.closed()
        assert blamed(victim) == {"a flood of frames of no use": 1}
        await usable(victim)


async def test_5_streams_that_are_opened_and_reset_for_ever_cost_the_connection() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        with contextlib.suppress(Exception):
            for number in range(1, 4000, 2):
                await bad.frame(WINDOW, SYN, number, 0)
                await bad.frame(WINDOW, RST, number, 0)
        await bad.closed()
        assert blamed(victim)
        await usable(victim)


async def test_5_requests_that_are_given_up_at_once_are_no_flood() -> None:
    async with network(1) as victim, network(2) as other:
        node = await other.connect(victim.addresses[0], 5)
        for _ in range(600):
            with trio.move_on_after(0):
                await other.request(node, ECHO, bytes(100), timeout=5, max_response=200)
        assert await other.request(node, ECHO, b"x", timeout=5, max_response=200) == b"x"
        assert not victim.scores.reasons(other.node)
        assert not other.scores.reasons(victim.node)


async def test_5_all_receive_buffers_share_one_budget() -> None:
    async with network(1, NetLimits(receive_buffers=256 << 10)) as victim:
        victim.serve("/test/slow/1", never, max_request=64, max_concurrent_per_peer=1)
        async with attacker(victim) as bad:
            with contextlib.suppress(Exception):
                for number in range(4):  # the first holds the slot, the others wait for it with their data unread
                    await bad.frame(WINDOW, SYN, 2 * number + 1, 0)
                    await bad.data(2 * number + 1, MULTISTREAM + line(b"/test/slow/1") + bytes(4))
                    for _ in range(4):
                        await bad.data(2 * number + 1, bytes(32 << 10))
            await bad.closed()
            assert any("memory" in reason for reason in blamed(victim))
        await usable(victim)


# --- 6 -----------------------------------------------------------------------------------------------------------


async def test_6_cancelled_writes_leave_the_connection_in_step() -> None:
    async with network(1) as victim, network(2) as other:
        node = await other.connect(victim.addresses[0], 5)
        large = bytes(4 << 20)
        for milliseconds in range(1, 12):
            with trio.move_on_after(milliseconds / 1000):
                await other.request(node, ECHO, large, timeout=5, max_response=8 << 20)
            answer = await other.request(node, ECHO, b"in step", timeout=5, max_response=64)
            assert answer == b"in step"
        assert not victim.scores.reasons(other.node)
        assert not other.scores.reasons(victim.node)
        await usable(victim)


async def test_6_a_peer_that_reads_nothing_holds_up_nobody() -> None:
    async with network(1, NetLimits(frame_timeout=0.1)) as victim, attacker(victim) as bad:
        request = bytes(200 << 10)
        hello = MULTISTREAM + line(ECHO.encode()) + len(request).to_bytes(4, "big")
        with contextlib.suppress(Exception):
            for number in range(60):
                stream = 2 * number + 1
                await bad.frame(WINDOW, SYN, stream, 1 << 20)
                body = hello + request
                for offset in range(0, len(body), 60 << 10):
                    await bad.data(stream, body[offset : offset + (60 << 10)])
        await until(lambda: bad.node not in victim.peers)
        await usable(victim)


# --- 7 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0"])
async def test_7_only_noise_is_spoken(protocol: str) -> None:
    async with network(1) as victim, tcp(victim) as stream:
        await stream.send_all(MULTISTREAM + line(protocol.encode()))
        received = b""
        with trio.fail_after(5):
            while not received.endswith(line(b"na")):
                part = await stream.receive_some(1024)
                assert part, "the connection ended without an answer"
                received += part
        assert received == MULTISTREAM + line(b"na")
        await usable(victim)


async def test_7_a_key_that_is_not_ed25519_is_not_admitted() -> None:
    async with network(1) as victim:
        with pytest.raises(Exception):  # noqa: B017, PT011, PT012
            async with attacker(victim, keys=secp256k1_key_pair()) as bad:
                await bad.closed()
                raise EOFError
        assert not victim.peers
        await usable(victim)


async def test_7_a_dialler_finds_out_that_another_node_answers() -> None:
    async with network(1) as victim, network(2) as other:
        wrong = victim.addresses[0].split("/p2p/")[0] + other.addresses[0][other.addresses[0].index("/p2p/") :]
        async with network(3) as third:
            with pytest.raises(Unreachable, match="another node answers there"):
                await third.connect(wrong, 5)
            assert not third.peers


# --- beyond the defects ------------------------------------------------------------------------------------------


async def test_identify_and_ping_are_not_served() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        await bad.frame(WINDOW, SYN, 1, 0)
        await bad.data(1, MULTISTREAM + line(b"/ipfs/id/1.0.0"))
        received = b""
        with trio.fail_after(5):
            while line(b"na") not in received:
                received += await bad.session.read()


async def test_a_peer_that_falls_silent_is_dropped() -> None:
    async with network(1, NetLimits(keepalive=0.05)) as victim, attacker(victim) as bad:
        await until(lambda: bad.node in victim.peers)
        await until(lambda: bad.node not in victim.peers)


async def test_a_peer_that_answers_pings_stays() -> None:
    async with network(1, NetLimits(keepalive=0.3)) as victim, network(2) as other:
        await other.connect(victim.addresses[0], 5)
        await until(lambda: other.node in victim.peers)
        since = victim.peers[other.node].since
        await trio.sleep(1.5)
        assert victim.peers[other.node].since == since


async def test_a_frame_with_syn_and_data_is_accepted() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        await bad.data(1, MULTISTREAM + line(ECHO.encode()) + b"\0\0\0\2hi", SYN)
        received = b""
        with trio.fail_after(5):
            while b"\0\0\0\0\2hi" not in received:
                received += await bad.session.read()
        assert bytes([0, WINDOW, 0, ACK]) in received


async def test_select_helper_speaks_the_stock_dialect() -> None:
    async with network(1) as victim, tcp(victim) as stream:
        from libp2p.io.trio import TrioTCPStream
        from libp2p.network.connection.raw_connection import RawConnection

        await select(RawConnection(TrioTCPStream(stream), True), "/noise")


def test_another_version_of_libp2p_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    spec = importlib.util.spec_from_file_location("guard_again", guard.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(LocalError, match=r"0\.9\.0 is installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
