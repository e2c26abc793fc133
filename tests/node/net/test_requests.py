"""Requests and answers."""

from __future__ import annotations

import pytest
import trio

from node.net.guard import NetLimits
from node.net.requests import Refused, Unreachable
from protocol.errors import LocalError, PeerError
from tests.node.net.helpers import ECHO, SYN, WINDOW, attacker, identity, line, network, never, until, usable

HELLO = line(b"/multistream/1.0.0") + line(ECHO.encode())


async def test_a_large_answer_arrives_whole() -> None:
    async with network(1) as first, network(2) as second:
        node = await second.connect(first.addresses[0], 5)
        request = bytes(range(256)) * 10_200  # 2.6 MB
        assert await second.request(node, ECHO, request, timeout=10, max_response=len(request)) == request
        assert await second.request(node, ECHO, b"", timeout=5, max_response=0) == b""


async def test_many_requests_at_a_time_do_not_mix() -> None:
    async with network(1) as first, network(2) as second:
        node = await second.connect(first.addresses[0], 5)

        async def ask(number: int) -> None:
            request = number.to_bytes(2, "big") * 5000
            assert await second.request(node, ECHO, request, timeout=10, max_response=10_000) == request

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(ask, number)


async def test_a_refusal_says_why_and_costs_only_whom_it_should() -> None:
    async def parse(peer: bytes, request: bytes) -> bytes:
        raise PeerError("not canonical") if request == b"rubbish" else Refused("not held")

    async with network(1) as first, network(2) as second:
        first.serve("/test/parse/1", parse, max_request=64)
        node = await second.connect(first.addresses[0], 5)
        with pytest.raises(Refused, match=r"refused \(not held\)"):
            await second.request(node, "/test/parse/1", b"", timeout=5, max_response=1)
        assert first.scores.reasons(second.node) == {}
        with pytest.raises(Refused, match=r"refused \(not canonical\)"):
            await second.request(node, "/test/parse/1", b"rubbish", timeout=5, max_response=1)
        assert first.scores.reasons(second.node) == {"not canonical": 1}
        assert second.scores.reasons(first.node) == {}


async def test_an_unknown_protocol_is_no_fault() -> None:
    async with network(1) as first, network(2) as second:
        node = await second.connect(first.addresses[0], 5)
        with pytest.raises(Unreachable, match="does not speak it"):
            await second.request(node, "/test/none/1", bytes(100), timeout=5, max_response=1)
        assert first.scores.reasons(second.node) == {}


async def test_an_answer_beyond_the_limit_is_the_servers_fault() -> None:
    async with network(1) as first, network(2) as second:
        node = await second.connect(first.addresses[0], 5)
        with pytest.raises(PeerError, match="100 bytes, at most 99"):
            await second.request(node, ECHO, bytes(100), timeout=5, max_response=99)


async def test_a_request_beyond_the_limit_is_the_askers_fault() -> None:
    async with network(1) as first, network(2) as second:
        first.serve("/test/small/1", _nothing, max_request=10)
        node = await second.connect(first.addresses[0], 5)
        with pytest.raises(Unreachable):
            await second.request(node, "/test/small/1", bytes(11), timeout=5, max_response=1)
        await until(lambda: bool(first.scores.reasons(second.node)))


async def _nothing(peer: bytes, request: bytes) -> bytes:
    return b""


async def test_a_slow_handler_meets_the_askers_deadline() -> None:
    async with network(1) as first, network(2) as second:
        first.serve("/test/slow/1", never, max_request=64)
        node = await second.connect(first.addresses[0], 5)
        with pytest.raises(Unreachable, match="no answer in time"):
            await second.request(node, "/test/slow/1", b"", timeout=0.05, max_response=1)


async def test_one_peer_cannot_take_more_than_its_slots() -> None:
    running = 0
    release = trio.Event()

    async def slow(peer: bytes, request: bytes) -> bytes:
        nonlocal running
        running += 1
        await release.wait()
        return b"done"

    limits = NetLimits(request_slot=0.05)
    async with network(1, limits) as first, network(2) as second, network(3) as third, trio.open_nursery() as nursery:
        first.serve("/test/slow/1", slow, max_request=64, max_concurrent_per_peer=2)
        node = await second.connect(first.addresses[0], 5)
        await third.connect(first.addresses[0], 5)

        async def ask() -> None:
            assert await second.request(node, "/test/slow/1", b"", timeout=5, max_response=4) == b"done"

        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await until(lambda: running == 2)
        with pytest.raises(Refused, match="busy"):
            await second.request(node, "/test/slow/1", b"", timeout=5, max_response=4)
        nursery.start_soon(lambda: third.request(node, "/test/slow/1", b"", timeout=5, max_response=4))
        await until(lambda: running == 3)
        release.set()


async def test_a_peer_that_stalls_its_request_loses_the_stream() -> None:
    async with network(1, NetLimits(request_reading=0.05)) as victim, attacker(victim) as bad:
        await bad.frame(WINDOW, SYN, 1, 0)
        await bad.data(1, HELLO + (100).to_bytes(4, "big") + b"half")
        received = b""
        with trio.fail_after(5):
            while bytes([0, WINDOW, 0, 8]) not in received:  # a reset
                received += await bad.session.read()
        await usable(victim)


async def test_a_known_peer_is_dialled_for_a_request() -> None:
    async with network(1) as first, network(2) as second:
        with pytest.raises(Unreachable):
            await second.request(first.node, ECHO, b"", timeout=5, max_response=1)
        second.learn(first.node, first.addresses)
        assert await second.request(first.node, ECHO, b"x", timeout=5, max_response=1) == b"x"


async def test_a_peer_that_dies_in_mid_answer_is_unreachable() -> None:
    async with network(2) as second:
        async with network(1) as first, trio.open_nursery() as nursery:
            started = trio.Event()

            async def dying(peer: bytes, request: bytes) -> bytes:
                started.set()
                return await never(peer, request)

            first.serve("/test/dying/1", dying, max_request=64)
            node = await second.connect(first.addresses[0], 5)

            async def ask() -> None:
                with pytest.raises(Unreachable, match=r"broke|end"):
                    await second.request(node, "/test/dying/1", b"", timeout=30, max_response=1)

            nursery.start_soon(ask)
            await started.wait()
            await first.disconnect(second.node)
        assert second.scores.reasons(identity(1).node) == {}


async def test_a_protocol_has_one_handler() -> None:
    async with network(1) as first:
        with pytest.raises(LocalError):
            first.serve(ECHO, _nothing, max_request=1)


async def test_a_lying_server_raises_peer_errors_only() -> None:
    """A server that answers rubbish instead of a status, a protocol or multistream."""
    for answer in (
        line(b"/multistream/1.0.0") + line(ECHO.encode()) + b"\x09\0\0\0\0",
        line(b"/multistream/1.0.0") + line(b"/other/1"),
        line(b"/elsewhere/1.0.0"),
        b"\xff\xff\xff\xff",
    ):
        async with network(1) as first, network(2) as second:

            async def lie(stream: object, answer: bytes = answer) -> None:
                await stream.muxed_stream.write(answer)  # type: ignore[attr-defined]
                await stream.muxed_stream.finish(1)  # type: ignore[attr-defined]

            assert first.host is not None
            first.host.get_network().set_stream_handler(lie)
            node = await second.connect(first.addresses[0], 5)
            with pytest.raises(PeerError):
                await second.request(node, ECHO, b"", timeout=5, max_response=1)
