"""The encrypted link on a bare socket, and what is taken without a round of the scheduler."""

from __future__ import annotations

import pytest
import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from trio.testing import wait_all_tasks_blocked

from node.net.noise import Link
from node.net.yamux_stream import FairLock


class Plain:
    """A cipher that adds a mark."""

    def encrypt(self, data: bytes) -> bytes:
        return b"#" + data

    def decrypt(self, data: bytes) -> bytes:
        assert data.startswith(b"#")
        return data[1:]


async def links() -> tuple[Link, Link, trio.SocketStream, trio.SocketStream]:
    """Two ends of a connection."""
    listener = trio.socket.socket()
    await listener.bind(("127.0.0.1", 0))
    listener.listen()
    dialling = trio.socket.socket()
    await dialling.connect(listener.getsockname())
    accepted, _ = await listener.accept()
    listener.close()
    left, right = trio.SocketStream(dialling), trio.SocketStream(accepted)
    ends = [Link(RawConnection(TrioTCPStream(one), True), Plain()) for one in (left, right)]
    return ends[0], ends[1], left, right


async def test_messages_arrive_one_by_one_however_they_were_cut() -> None:
    left, right, left_socket, right_socket = await links()
    async with left_socket, right_socket:
        assert left.send_now(b"one") == b""
        assert left.send_now(b"") == b""
        await left_socket.send_all(b"\x00")
        await left_socket.send_all(b"\x04#t")
        await left_socket.send_all(b"wo")
        await left.write(bytes(150_000))
        with trio.fail_after(5):
            assert [await right.read() for _ in range(3)] == [b"one", b"", b"two"]
            size = 0
            while size < 150_000:
                size += len(await right.read())
        await left_socket.aclose()
        with trio.fail_after(5):
            assert await right.read() == b""


async def test_what_a_full_socket_does_not_take_is_sent_after_it() -> None:
    left, right, left_socket, right_socket = await links()
    async with left_socket, right_socket:
        sent = 0
        while not (rest := left.send_now(bytes([sent % 256]) * 60_000)):
            sent += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(left.send, rest)
            with trio.fail_after(10):
                for number in range(sent + 1):
                    assert await right.read() == bytes([number % 256]) * 60_000


async def test_a_broken_connection_is_told_as_libp2p_tells_it() -> None:
    left, _, left_socket, right_socket = await links()
    await left_socket.aclose()
    with pytest.raises(OSError, match=r"."):
        left.send_now(b"x")
    for call in (left.read(), left.send(b"x"), left.write(b"x")):
        with pytest.raises(ConnectionClosedError):
            await call
    await right_socket.aclose()


async def test_turns_are_taken_at_once_and_in_order() -> None:
    turns = FairLock()
    order: list[int] = []

    async def take(number: int) -> None:
        async with turns:
            order.append(number)
            await trio.lowlevel.checkpoint()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery, turns:
            assert turns.taken()
            for number in range(3):
                nursery.start_soon(take, number)
                await wait_all_tasks_blocked()
            assert order == []
        assert order == [0, 1, 2]
    assert not turns.taken()
