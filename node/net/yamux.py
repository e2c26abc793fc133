"""A yamux endpoint that enforces what libp2p 0.8.1's own only logs.

Wire format: https://github.com/hashicorp/yamux/blob/master/spec.md. Differences from the stock class, all
invisible on the wire:

1. A peer that sends beyond its window, opens more than ``MAX_INBOUND_STREAMS`` at once, floods pings or frames of no
   use (``USELESS``) or speaks another version loses the connection, and nobody else notices.
2. All receive buffers of a host share one budget; the connection that fills most of it is closed first.
3. A frame reaches the socket whole, whatever is cancelled: half a frame would desynchronise Noise for every other
   stream of the connection. A peer that takes no bytes for ``frame_timeout`` seconds loses the connection.
4. A frame fits one Noise message, and credit goes back in halves of a window, not after every read.
5. A writer without credit waits for it; deadlines belong to the caller.
6. A peer that sent nothing for ``keepalive`` seconds is sent a ping (the stock class ignores a missing pong): who then
   sends nothing at all for ``PATIENCE`` times as long is dead. Who talks is alive, and costs no pings.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
from libp2p.abc import ConnectionType, IMuxedConn
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from node.net.noise import Link
from node.net.token_buckets import Buckets
from node.net.yamux_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW,
    MAX_WINDOW,
    PING,
    RST,
    SYN,
    WINDOW,
    Budget,
    FairLock,
    MuxerStream,
    Violation,
)

log = logging.getLogger(__name__)

MAX_INBOUND_STREAMS: Final = 128
"""Streams a peer may have open at once on one connection."""

MAX_CONTROL: Final = 512
"""Control frames that may wait to be written."""

MAX_PINGS: Final = 64
"""Pings answered in one keepalive interval."""

USELESS: Final = 4096
USELESS_PER_SECOND: Final = 512.0
"""Frames that move nothing, of which a peer may send so many at once and then so many a second: for streams
that are not open, with hardly any data or credit, answers to no ping. Some are on their way whenever this end resets a
stream."""

SLIGHT_DATA: Final = 16
SLIGHT_CREDIT: Final = 1 << 10
"""Bytes that are hardly any: credit goes back in halves of a window."""

ENOUGH_CREDIT: Final = 16 << 20
"""Credit beyond which more is of no use."""

EMPTY_STREAM: Final = 8
"""Useless frames that a stream counts for which is opened and reset without a byte on it."""

PATIENCE: Final = 2
"""Keepalive intervals that a peer may be silent after a ping (a busy machine is not a dead one)."""

GOODBYE_TIMEOUT: Final = 0.3
"""Seconds that saying goodbye may take."""


class Muxer(IMuxedConn):  # type: ignore[misc]  # libp2p is untyped here
    """One multiplexed connection.

    ``secured`` is libp2p's secure session, ``budget`` the host's, ``keepalive`` the seconds between pings,
    ``frame_timeout`` those that a peer may leave a frame unread in its socket; ``on_violation(error)`` is called with
    the reason why the connection is closed on its peer.
    """

    def __init__(
        self,
        secured: Any,
        peer_id: Any,
        *,
        budget: Budget,
        keepalive: float,
        frame_timeout: float,
        on_violation: Callable[[Violation], None],
    ) -> None:
        self.secured_conn = secured
        self.link: Link = secured.link
        self.peer_id = peer_id
        self.budget = budget
        self.keepalive = keepalive
        self._frame_timeout = frame_timeout
        self._on_violation = on_violation
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._dialled = bool(secured.is_initiator)
        self.event_started = trio.Event()
        self.event_shutting_down = trio.Event()
        self.event_closed = trio.Event()
        self.streams: dict[int, MuxerStream] = {}
        self.buffered = 0
        self.silent = False
        self._next_id = 1 if self._dialled else 2
        self._write_lock = FairLock()
        self._accept_send, self._accept_receive = trio.open_memory_channel[MuxerStream](MAX_INBOUND_STREAMS)
        self._control_send, self._control_receive = trio.open_memory_channel[tuple[int, ...]](MAX_CONTROL)
        self._scope = trio.CancelScope()
        self._pong = trio.Event()
        self._probe = trio.Event()
        self._pings = 0
        self._useless = Buckets(USELESS, USELESS_PER_SECOND, 1)
        self._received = False

    @property
    def extra_credit(self) -> int:
        """Growth of its streams' windows (bytes)."""
        return sum(stream.window - INITIAL_WINDOW for stream in self.streams.values())

    @property
    def is_initiator(self) -> bool:
        """Whether this end dialled."""
        return self._dialled

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.event_shutting_down.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self.event_closed.is_set()

    def get_transport_addresses(self) -> list[Any]:
        """libp2p's multiaddrs of the peer's socket."""
        addresses: list[Any] = self.secured_conn.get_transport_addresses()
        return addresses

    def get_connection_type(self) -> ConnectionType:
        """Always a direct connection here."""
        return ConnectionType.DIRECT

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's (host, port)."""
        return self.link.remote()

    async def start(self) -> None:
        """Run the connection until it ends. Raises nothing but cancellation: the swarm would not survive it."""
        self.event_started.set()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._ping_forever)
                    nursery.start_soon(self._write_control)
                    try:
                        await self._receive()
                    except Violation as error:
                        self.abort(error)
                    except Exception as error:  # undecryptable Noise, a broken socket: nothing else ends
                        log.debug("connection to %s ended: %r", self.peer_id, error)
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self._finish()

    def abort(self, reason: Violation | None = None) -> None:
        """End the connection now, from anywhere."""
        if reason is not None and not self.event_shutting_down.is_set():
            self._on_violation(reason)
        self.event_shutting_down.set()
        self._scope.cancel()

    async def close(self) -> None:
        """Say goodbye and end the connection."""
        if not self.event_shutting_down.is_set() and not self._write_lock.taken():
            # Not by write_frame, whose patience a peer that reads nothing could use to hold up the shutdown.
            with trio.move_on_after(GOODBYE_TIMEOUT), contextlib.suppress(Exception):
                async with self._write_lock:
                    await self.link.write(HEADER.pack(0, GO_AWAY, 0, 0, 0))
        await self._finish()

    async def _finish(self) -> None:
        """Idempotent end: every stream is reset, the socket closed, libp2p told."""
        self.event_shutting_down.set()
        self._scope.cancel()
        self._accept_send.close()
        for stream in list(self.streams.values()):
            stream.kill()
        self.streams.clear()
        self.budget.connections.discard(self)
        if self.event_closed.is_set():
            return
        self.event_closed.set()
        try:
            await self.secured_conn.close()
            if self.on_close is not None:
                await self.on_close()
        except Exception as error:
            log.debug("closing the connection to %s: %r", self.peer_id, error)

    async def write_frame(
        self, kind: int, flags: int, stream_id: int, length: int, payload: memoryview | bytes = b""
    ) -> None:
        """Send one frame whole; raises ``ConnectionClosedError`` if the connection has ended.

        It lets nobody run in between where the socket takes all of it: who sends in a loop must.
        """
        frame = HEADER.pack(0, kind, flags, stream_id, length) + payload
        async with self._write_lock:
            if self.event_shutting_down.is_set():
                raise ConnectionClosedError("the connection is closed")
            scope = trio.CancelScope(shield=True, deadline=trio.current_time() + self._frame_timeout)
            try:
                rest = self.link.send_now(frame)
                if rest:
                    with scope:
                        await self.link.send(rest)
            except Exception as error:
                self.abort()
                raise ConnectionClosedError(f"the connection broke: {error!r}") from None
            if scope.cancelled_caught:
                self.abort()
                raise ConnectionClosedError("the peer takes no more bytes")

    async def open_stream(self) -> MuxerStream:
        """Open a stream to the peer."""
        if not self.is_established:
            raise MuxedStreamError("the connection is shutting down")
        stream = MuxerStream(self, self._next_id)
        self._next_id += 2
        self.streams[stream.stream_id] = stream
        try:
            await self.write_frame(WINDOW, SYN, stream.stream_id, 0)
        except ConnectionClosedError as error:
            self.forget(stream)
            raise MuxedStreamError(str(error)) from None
        return stream

    async def accept_stream(self) -> MuxerStream:
        """The next stream that the peer opens; raises ``MuxedConnUnavailable`` at the end."""
        try:
            return await self._accept_receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise MuxedConnUnavailable("the connection is closed") from None

    def forget(self, stream: MuxerStream) -> None:
        """Drop a finished stream from the table."""
        self.streams.pop(stream.stream_id, None)

    def _is_inbound(self, stream_id: int) -> bool:
        return (stream_id & 1) != self._dialled

    async def _receive(self) -> None:
        """Read and handle frames until the connection ends."""
        self.budget.connections.add(self)
        buffer = bytearray()
        while True:
            try:
                data = await self.link.read()
            except ConnectionClosedError:
                return
            if not data:
                return
            buffer += data
            self._received = True
            offset = 0
            while len(buffer) - offset >= HEADER.size:
                version, kind, flags, stream_id, length = HEADER.unpack_from(buffer, offset)
                if version != 0 or kind > GO_AWAY:
                    raise Violation("not a yamux frame")
                end = offset + HEADER.size
                if kind == DATA:
                    stream = self.streams.get(stream_id)
                    if length > (stream.receive_credit if stream is not None else MAX_WINDOW):
                        raise Violation("data beyond the stream's window")
                    if len(buffer) < end + length:
                        break
                    end += length
                if kind in (DATA, WINDOW):
                    with memoryview(buffer) as view, view[offset + HEADER.size : end] as payload:
                        self._on_frame(kind, flags, stream_id, length, payload)
                elif kind == PING:
                    self._on_ping(flags, length)
                else:
                    return
                offset = end
            del buffer[:offset]

    def _on_frame(self, kind: int, flags: int, stream_id: int, length: int, payload: memoryview) -> None:
        if flags & SYN:
            self._on_syn(stream_id)
            self._answer(WINDOW, ACK, stream_id, 0)
        stream = self.streams.get(stream_id)
        if stream is None:
            self._on_useless()  # frames of a stream that this end has just reset are still on their way
            return
        if not flags and length < (SLIGHT_DATA if kind == DATA else SLIGHT_CREDIT):
            self._on_useless()
        if kind == WINDOW:
            if length and stream.send_credit >= ENOUGH_CREDIT:
                self._on_useless()
            stream.send_credit = min(stream.send_credit + length, 1 << 32)
        elif length:
            if length > stream.receive_credit:
                raise Violation("data beyond the stream's window")
            stream.receive_credit -= length
            stream.buffer += payload
            self.budget.add(self, length)
        if flags & FIN:
            stream.fin_received = True
        if flags & RST:
            if self._is_inbound(stream_id) and stream.receive_credit == INITIAL_WINDOW and not stream.consumed:
                self._on_useless(EMPTY_STREAM)
            stream.kill()
        if stream.dead or (stream.fin_received and stream.fin_sent):
            self.forget(stream)
        stream.wake()

    def _answer(self, *frame: int) -> None:
        """Queue a control frame. The receiving task itself never writes: two full sockets would wait for each other."""
        try:
            self._control_send.send_nowait(frame)
        except trio.WouldBlock:
            raise Violation("more control frames than it reads answers to") from None

    async def _write_control(self) -> None:
        async for kind, flags, stream_id, length in self._control_receive:
            try:
                await self.write_frame(kind, flags, stream_id, length)
            except ConnectionClosedError:
                return

    def _on_syn(self, stream_id: int) -> None:
        if not self._is_inbound(stream_id) or stream_id == 0 or stream_id in self.streams:
            raise Violation("a stream id that is not the peer's to open")
        if sum(map(self._is_inbound, self.streams)) >= MAX_INBOUND_STREAMS:
            raise Violation(f"more than {MAX_INBOUND_STREAMS} open streams")
        stream = MuxerStream(self, stream_id)
        try:
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            raise Violation("streams are opened faster than they can be accepted") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        self.streams[stream_id] = stream

    def _on_ping(self, flags: int, nonce: int) -> None:
        if flags & SYN:
            self._pings += 1
            if self._pings > MAX_PINGS:
                raise Violation("a flood of pings")
            self._answer(PING, ACK, 0, nonce)
        else:
            self._on_useless()
            if flags & ACK:
                self._pong.set()

    def _on_useless(self, frames: int = 1) -> None:
        if not self._useless.take("", frames, trio.current_time()):
            raise Violation("a flood of frames of no use")

    async def _ping_forever(self) -> None:
        """Close the connection of a peer that does not answer pings; ``silent`` then tells why."""
        nonce = 0
        while True:
            nonce += 1
            self._pong = trio.Event()
            try:
                await self.write_frame(PING, SYN, 0, nonce)
            except ConnectionClosedError:
                return
            self._received = False
            with trio.move_on_after(PATIENCE * self.keepalive) as waiting:
                await self._pong.wait()
            if waiting.cancelled_caught and not self._received:
                self.silent = True
                self.abort()
                return
            await self._silence()

    async def _silence(self) -> None:
        """Return once the peer sent nothing for ``keepalive`` seconds or nearly so, or is to be pinged at once."""
        self._probe = trio.Event()
        while True:
            self._received = False
            # At the same times for all connections of a node, so that one round of the scheduler does for all.
            turn = (trio.current_time() // self.keepalive + 1) * self.keepalive
            with trio.move_on_at(turn) as quiet:
                await self._probe.wait()
            self._pings = 0
            if not (quiet.cancelled_caught and self._received):
                return

    def probe(self) -> None:
        """Ping now: the peer has just opened another connection, so this one may be dead."""
        self._probe.set()
