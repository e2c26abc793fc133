"""One yamux stream: flow control in both directions, whole writes, bounded lines. See ``node.net.yamux``."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, Final, Protocol

import trio
from libp2p.abc import IMuxedStream
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from protocol.errors import PeerError

HEADER = struct.Struct("!BBHII")  # version, type, flags, stream id, length
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

INITIAL_WINDOW: Final = 256 << 10
"""Credit of a new stream in each direction, fixed by the yamux specification."""

MAX_WINDOW: Final = 1 << 20
"""Window that a busy stream grows to."""

MAX_EXTRA_CREDIT: Final = 8 << 20
"""Growth of all windows of one connection together, so that its peer can never own more memory than this and
``INITIAL_WINDOW`` for each stream."""

MAX_FRAME: Final = 65519 - HEADER.size
"""Payload of a frame that with its header fits one Noise message."""

MAX_LINE: Final = 1024
"""Longest multistream-select line."""

MAX_PREFIX: Final = 5
"""Bytes of a length before what has it (an unsigned varint)."""


class Violation(PeerError):
    """A peer broke the rules of the connection: it is closed and the peer scored down."""


class MuxedConnection(Protocol):
    """What a stream asks of the connection that carries it (``node.net.yamux.Muxer``)."""

    budget: Budget
    peer_id: Any
    buffered: int

    @property
    def extra_credit(self) -> int:
        """Growth of its streams' windows."""

    def abort(self, reason: Violation | None = None) -> None:
        """End it, because the peer broke a rule."""

    async def write_frame(
        self, kind: int, flags: int, stream_id: int, length: int, payload: memoryview | bytes = b""
    ) -> None:
        """Send one frame whole; raises ``ConnectionClosedError`` if the connection has ended."""

    def forget(self, stream: MuxerStream) -> None:
        """The stream has ended."""

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the peer."""


class Budget:
    """Memory that the receive buffers of one host may hold together (bytes)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.connections: set[MuxedConnection] = set()

    def add(self, connection: MuxedConnection, size: int) -> None:
        """Account for ``size`` bytes; over the limit the connection that holds most is closed."""
        connection.buffered += size
        self.used += size
        if self.used > self.limit:
            worst = max(self.connections, key=lambda candidate: candidate.buffered)
            worst.abort(Violation("it fills this node's memory with unread data"))

    def remove(self, connection: MuxedConnection, size: int) -> None:
        """The reverse of ``add``."""
        connection.buffered -= size
        self.used -= size


class FairLock:
    """A fair lock. Taking it costs no round of the scheduler where it is free, as it nearly always is: trio's own lock
    costs one each time, and a frame passes several on its way out."""

    def __init__(self) -> None:
        self._lock = trio.Lock()

    def taken(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class MuxerStream(IMuxedStream):  # type: ignore[misc]  # libp2p is untyped here
    """One stream. ``read`` returns at least one byte or raises; whole ``write`` calls never interleave."""

    def __init__(self, connection: MuxedConnection, stream_id: int) -> None:
        self.muxed_conn = connection
        self.stream_id = stream_id
        self.buffer = bytearray()
        self.send_credit = INITIAL_WINDOW
        self.receive_credit = INITIAL_WINDOW
        self.window = INITIAL_WINDOW
        self.consumed = 0
        self.fin_sent = False
        self.fin_received = False
        self.dead = False
        self._changed = trio.Event()
        self._write_lock = FairLock()

    def wake(self) -> None:
        """Let readers and writers look again."""
        self._changed.set()
        self._changed = trio.Event()

    async def _wait_data(self) -> None:
        """Wait until more bytes than before are buffered; raises at the end of the stream."""
        if self.dead:
            raise MuxedStreamReset("the stream was reset")
        if self.fin_received:
            raise MuxedStreamEOF("the stream has ended")
        await self._changed.wait()

    async def _take(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        connection = self.muxed_conn
        connection.budget.remove(connection, len(data))
        self.consumed += len(data)
        if self.consumed >= self.window // 2 and not self.fin_received and not self.dead:
            credit, self.consumed = self.consumed, 0
            grown = min(self.window * 2, MAX_WINDOW) - self.window
            if connection.extra_credit + grown <= MAX_EXTRA_CREDIT:
                self.window += grown
                credit += grown
            self.receive_credit += credit
            with contextlib.suppress(ConnectionClosedError):  # the data is here all the same
                await connection.write_frame(WINDOW, 0, self.stream_id, credit)
        return data

    async def read(self, n: int | None = None) -> bytes:
        """At most ``n`` bytes (all that is buffered where ``n`` is None or negative), at least one."""
        if n == 0:
            return b""
        if self.buffer:
            await trio.lowlevel.checkpoint()
        while not self.buffer:
            await self._wait_data()
        return await self._take(len(self.buffer) if n is None or n < 0 else n)

    async def read_exactly(self, size: int) -> bytes:
        """``size`` bytes, or ``MuxedStreamEOF``."""
        if size <= len(self.buffer):
            return await self._take(size) if size else b""
        parts = []
        while size:
            parts.append(await self.read(size))
            size -= len(parts[-1])
        return b"".join(parts)

    def _prefix(self, limit: int) -> tuple[int, int] | None:
        """(its own size, the announced size) of a length prefix at the start of the buffer, None where it is not whole;
        raises ``Violation``."""
        size = 0
        for index, byte in enumerate(self.buffer[:MAX_PREFIX]):
            size |= (byte & 0x7F) << 7 * index
            if size > limit:
                raise Violation(f"{size} bytes are announced, at most {limit} are allowed")
            if byte < 0x80:
                return index + 1, size
        if len(self.buffer) >= MAX_PREFIX:
            raise Violation("a length prefix that never ends")
        return None

    async def read_prefixed(self, limit: int) -> bytes:
        """As many bytes, at most ``limit``, as the length before them says; raises ``Violation`` on rubbish."""
        while (found := self._prefix(limit)) is None:
            await self._wait_data()
        start, size = found
        if len(self.buffer) >= start + size:
            return (await self._take(start + size))[start:]
        await self._take(start)
        return await self.read_exactly(size)

    def has_line(self) -> bool:
        """Whether ``read_line`` would return at once."""
        found = self._prefix(MAX_LINE)
        return found is not None and len(self.buffer) >= sum(found)

    async def read_line(self) -> str:
        """One multistream-select line (length prefix and newline removed); raises ``Violation`` on rubbish."""
        line = await self.read_prefixed(MAX_LINE)
        if not line.endswith(b"\n") or not line.isascii():
            raise Violation("multistream line that is not ASCII text")
        return line[:-1].decode("ascii")

    async def write(self, data: bytes) -> None:
        """Write all of ``data``. A cancelled write must be followed by ``reset``: the peer has a part of it."""
        await self.put(data)
        await trio.lowlevel.checkpoint()

    async def put(self, data: bytes) -> None:
        """``write``, but others may not have run in between: for who waits for something else next anyway."""
        view = memoryview(data)
        await trio.lowlevel.checkpoint_if_cancelled()
        async with self._write_lock:
            while view:
                if self.dead:
                    raise MuxedStreamReset("the stream was reset")
                if self.fin_sent:
                    raise MuxedStreamClosed("the stream is closed for writing")
                size = min(self.send_credit, MAX_FRAME, len(view))
                if size == 0:
                    await self._changed.wait()
                    continue
                self.send_credit -= size
                await self.muxed_conn.write_frame(DATA, 0, self.stream_id, size, view[:size])
                view = view[size:]
                if view:
                    await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Close for writing (FIN); the stream is gone once the peer has done so too."""
        if not self.fin_sent and not self.dead:
            self.fin_sent = True
            with contextlib.suppress(ConnectionClosedError):
                await self.muxed_conn.write_frame(WINDOW, FIN, self.stream_id, 0)
            if self.fin_received:
                self.muxed_conn.forget(self)
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """End both directions at once; unread data is dropped."""
        if not self.dead and not (self.fin_sent and self.fin_received):
            self.muxed_conn.forget(self)
            self.kill()
            with contextlib.suppress(ConnectionClosedError):
                await self.muxed_conn.write_frame(WINDOW, RST, self.stream_id, 0)
        self.kill()
        await trio.lowlevel.checkpoint()

    async def finish(self, timeout: float) -> None:
        """Close, give the peer ``timeout`` seconds to close too (a reset would drop what it has not read), and go."""
        await self.close()
        with trio.move_on_after(timeout):
            while not self.fin_received and not self.dead:
                await self._changed.wait()
        if self.fin_received:
            self.kill()
        else:
            await self.reset()

    def kill(self) -> None:
        """Mark the stream as reset and drop what it holds, without telling the peer."""
        self.dead = True
        self.muxed_conn.budget.remove(self.muxed_conn, len(self.buffer))
        self.buffer.clear()
        self.wake()

    def set_deadline(self, ttl: int) -> bool:
        """Sets none: deadlines are trio cancel scopes."""
        return False

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's (host, port)."""
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> MuxerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
