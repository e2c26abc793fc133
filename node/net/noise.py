"""Noise on a bare TCP socket: what libp2p's layers come down to once the handshake is over.

A Noise message is a 2-byte big-endian length and a body. libp2p reads it with four ``recv`` and passes it through two
locks and half a dozen coroutines, at several times the price of deciphering it.

1. Ciphertext is read through a buffer: one ``recv`` for many messages.
2. ``send_now`` hands a message to the socket without letting anybody run in between, and says what did not fit.
3. Nothing here keeps two writers apart, nor two readers: the muxer does.
"""

from __future__ import annotations

import os
from typing import Any, Final

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.security.noise.transport import Transport

CHUNK: Final = 1 << 17
"""Bytes of one ``recv``."""


class Link:
    """The two ends of an encrypted connection: ``noise`` is libp2p's transport state, ``connection`` its socket."""

    def __init__(self, connection: RawConnection, noise: Any) -> None:
        assert isinstance(connection.stream, TrioTCPStream)
        self._socket: trio.SocketStream = connection.stream.stream
        self._noise = noise
        self._buffer = bytearray()

    def remote(self) -> tuple[str, int] | None:
        """Host and port of the other end; None where it is gone. (libp2p's own answer is None for all of IPv6.)"""
        try:
            host, port = self._socket.socket.getpeername()[:2]
        except OSError:
            return None
        return str(host), int(port)

    async def read(self) -> bytes:
        """The next message in plain; empty at the end of the connection, ``ConnectionClosedError`` where it broke."""
        buffer = self._buffer
        while len(buffer) < 2 or len(buffer) < 2 + int.from_bytes(buffer[:2], "big"):
            try:
                data = await self._socket.receive_some(CHUNK)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"the connection broke: {error}") from None
            if not data:
                return b""
            buffer += data
        end = 2 + int.from_bytes(buffer[:2], "big")
        message = bytes(buffer[2:end])
        del buffer[:end]
        plain: bytes = self._noise.decrypt(message)
        return plain

    def send_now(self, message: bytes) -> bytes:
        """Encrypt ``message`` and send what the socket takes at once; the ciphertext that is left must follow by
        ``send`` before anything else. ``OSError`` where the connection has ended."""
        secret: bytes = self._noise.encrypt(message)
        data = len(secret).to_bytes(2, "big") + secret
        try:
            sent = os.write(self._socket.socket.fileno(), data)
        except BlockingIOError:
            return data
        return data[sent:]

    async def send(self, rest: bytes) -> None:
        """Send ciphertext."""
        try:
            await self._socket.send_all(rest)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the connection broke: {error}") from None

    async def write(self, data: bytes, prefix_encoded: bool = False) -> None:
        """``data`` in as many messages as it needs: for libp2p, which negotiates the muxer with it."""
        for offset in range(0, len(data), MAX_PLAINTEXT_LENGTH):
            try:
                rest = self.send_now(data[offset : offset + MAX_PLAINTEXT_LENGTH])
            except OSError as error:
                raise ConnectionClosedError(f"the connection broke: {error}") from None
            if rest:
                await self.send(rest)
        await trio.lowlevel.checkpoint()


class Noise(Transport):  # type: ignore[misc]  # libp2p is untyped here
    """Noise XX whose sessions have a ``link`` once the handshake is over, and use it."""

    async def secure_inbound(self, conn: Any) -> Any:
        return _linked(await super().secure_inbound(conn), conn)

    async def secure_outbound(self, conn: Any, peer_id: Any) -> Any:
        return _linked(await super().secure_outbound(conn, peer_id), conn)


def _linked(session: Any, connection: RawConnection) -> Any:
    session.link = link = Link(connection, session.conn)
    session.conn.read_msg = link.read
    session.conn.write_msg = link.write
    return session
