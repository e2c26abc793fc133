"""Requests and answers: one stream each, one length-prefixed frame each way.

Request: u32 length (big-endian), bytes. Answer: one status byte, u32 length, bytes. Statuses: 0 the answer, 1 the
request was refused (the bytes are a short reason), 2 the server failed, 3 the server is busy. The dialling side sends
the multistream lines of the protocol and its request in one go, so a request costs one round trip.

1. Sizes are bounded on both sides before memory is used; the server's slots are counted per peer and protocol.
2. A peer that stalls loses its stream after ``NetLimits.request_reading`` or ``PROGRESS_TIMEOUT`` seconds, never a
   shared resource.
3. What a handler raises stays here: ``PeerError`` scores the peer down and answers 1, anything else is logged and
   answers 2.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import trio
from libp2p.exceptions import BaseLibp2pError

from node.errors import Busy as Busy
from node.errors import Refused as Refused
from node.errors import Unreachable as Unreachable
from node.net.guard import MULTISTREAM, NetLimits, line, node_of
from node.net.yamux_stream import MuxerStream, Violation
from protocol.errors import PeerError

log = logging.getLogger(__name__)

RequestHandler = Callable[[bytes, bytes], Awaitable[bytes]]
"""``handler(peer's node id, request) -> answer``."""

OK, REFUSED, FAILED, BUSY = range(4)

PROGRESS_TIMEOUT: Final = 15.0
"""Seconds a peer may take to accept the next ``PIECE`` bytes of an answer."""

PIECE: Final = 256 << 10
MAX_REASON: Final = 200


@dataclass(slots=True)
class Count:
    """Bytes and requests (or messages) of one protocol."""

    sent: int = 0
    received: int = 0
    requests_sent: int = 0
    requests_received: int = 0


class RequestServer:
    """The serving side of one protocol."""

    def __init__(
        self,
        protocol: str,
        handler: RequestHandler,
        *,
        max_request: int,
        max_concurrent_per_peer: int,
        limits: NetLimits,
        count: Count,
        blame: Callable[[bytes, PeerError], None],
    ) -> None:
        self._protocol = protocol
        self._handler = handler
        self._max_request = max_request
        self._max_concurrent = max_concurrent_per_peer
        self._limits = limits
        self._count = count
        self._blame = blame
        self._slots: dict[bytes, trio.Semaphore] = {}

    async def __call__(self, net_stream: Any) -> None:
        """Serve one stream: libp2p's stream handler."""
        stream: MuxerStream = net_stream.muxed_stream
        peer = node_of(stream.muxed_conn.peer_id)
        status, answer = await self._serve(peer, stream)
        header = bytes([status]) + len(answer).to_bytes(4, "big")
        for offset in range(0, max(len(answer), 1), PIECE):
            piece = answer[offset : offset + PIECE]
            with trio.fail_after(PROGRESS_TIMEOUT):
                await stream.write(header + piece if offset == 0 else piece)
        self._count.sent += len(answer)
        await stream.finish(PROGRESS_TIMEOUT)

    async def _serve(self, peer: bytes, stream: MuxerStream) -> tuple[int, bytes]:
        slots = self._slots.setdefault(peer, trio.Semaphore(self._max_concurrent))
        held = False
        try:
            with trio.move_on_after(self._limits.request_slot):
                await slots.acquire()
                held = True
            if not held:
                return BUSY, b""
            return await self._answer(peer, stream)
        finally:
            if held:
                slots.release()
            if slots.value == self._max_concurrent:  # nobody holds one, nor waits for one
                self._slots.pop(peer, None)

    async def _answer(self, peer: bytes, stream: MuxerStream) -> tuple[int, bytes]:
        with trio.fail_after(self._limits.request_reading):
            size = int.from_bytes(await stream.read_exactly(4), "big")
            if size > self._max_request:
                raise Violation(f"{self._protocol}: a request of {size} bytes, at most {self._max_request} are allowed")
            request = await stream.read_exactly(size)
        self._count.received += size
        self._count.requests_received += 1
        try:
            return OK, await self._handler(peer, request)
        except (PeerError, Refused) as error:
            if isinstance(error, PeerError):
                self._blame(peer, error)
            return REFUSED, str(error).encode("ascii", "replace")[:MAX_REASON]
        except Exception:
            log.exception("%s: serving %s failed", self._protocol, peer.hex()[:8])
            return FAILED, b"internal error"


async def request(
    connection: Any, protocol: str, payload: bytes, *, timeout: float, max_response: int, count: Count
) -> bytes:
    """Ask the peer of a libp2p connection.

    Raises ``Unreachable`` (or ``Refused``) or, for an answer that breaks the rules, ``PeerError``.
    """
    what = f"{protocol} at {node_of(connection.muxed_conn.peer_id).hex()[:8]}"
    stream: MuxerStream | None = None
    try:
        with trio.fail_after(timeout):
            stream = await connection.muxed_conn.open_stream()
            hello = line(MULTISTREAM) + line(protocol) + len(payload).to_bytes(4, "big")
            await stream.write(hello + payload)
            await stream.close()
            count.sent += len(payload)
            count.requests_sent += 1
            if await stream.read_line() != MULTISTREAM:
                raise PeerError(f"{what}: not multistream-select")
            answer = await stream.read_line()
            if answer == "na":
                raise Unreachable(f"{what}: the peer does not speak it")
            if answer != protocol:
                raise PeerError(f"{what}: a protocol that nobody asked for")
            header = await stream.read_exactly(5)
            status, size = header[0], int.from_bytes(header[1:], "big")
            if status > BUSY:
                raise PeerError(f"{what}: unknown status {status}")
            if size > (max_response if status == OK else MAX_REASON):
                raise PeerError(f"{what}: an answer of {size} bytes, at most {max_response} are allowed")
            body = await stream.read_exactly(size)
            count.received += size
    except trio.TooSlowError:
        raise Unreachable(f"{what}: no answer in time") from None
    except (BaseLibp2pError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unreachable(f"{what}: the connection broke ({error or type(error).__name__})") from None
    finally:
        if stream is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 0.5):
                await stream.finish(0)
    if status == OK:
        return body
    if status == BUSY:
        raise Busy(f"{what}: busy")
    reason = body.decode("ascii", "replace")
    raise Refused(f"{what}: " + (f"refused ({reason})" if status == REFUSED else "failed there"))
