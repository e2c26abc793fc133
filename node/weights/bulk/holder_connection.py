"""One HTTP connection to a holder of weights: blocking, for one thread.

1. Bodies are received straight into the caller's buffers, without a copy in between. h11 reads the heads but for those
   of a form so plain that there is nothing to understand.
2. Everything is bounded: connecting, each head and each chunk have a time, a body has exactly the length asked for.
3. ``Unreachable`` is nobody's fault (dead, slow, refused, full), ``PeerError`` is an answer that breaks the rules.
   After either but ``Missing`` the connection is closed.
"""

from __future__ import annotations

import errno
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import h11

from node.errors import Busy, Refused, Unreachable
from node.weights.bulk.bulk_address import BulkAddress, public
from protocol.errors import PeerError

CONNECT_SECONDS: Final = 5.0
HEAD_SECONDS: Final = 15.0
"""Seconds until an answer's head is there, beyond what it may wait by agreement."""
CHUNK_SECONDS: Final = 300.0
"""Seconds that each chunk of an answer may take. The swarm's rules give up a slow one, much earlier where somebody else
has it."""
MAX_RUN: Final = 64
"""Chunks of one request at most."""
MAX_BITMAP: Final = 1 << 17
MAX_HEAD: Final = 8192
MAX_RETRY: Final = 60.0
MAX_PLACES: Final = 4
"""Addresses of a name that are tried, one after the other."""
_HEAD_PIECE: Final = 1024
_PLAIN: Final = re.compile(rb"HTTP/1\.1 ([2-5][0-9][0-9]) [ -~]*\r\n((?:[A-Za-z-]+: [!-~][ -~]*\r\n)*)\r\n")
_RECEIVED_AT: Final = 128
"""Where the kernel's tcp_info has tcpi_bytes_received, since Linux 4.1."""


Resolve = Callable[..., Sequence[tuple[Any, ...]]]
"""``socket.getaddrinfo``, and what stands for it."""
Dial = Callable[[tuple[str, int], float], socket.socket]
"""``socket.create_connection``, of an address and of seconds."""


def timeval(seconds: float) -> bytes:
    """Seconds as the kernel has them, never none."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)


class Missing(Refused):
    """The holder does not have (all of) what was asked for (404). The connection is good."""


class Denied(Refused):
    """The token is not good (401): a new one is wanted."""


class HolderConnection:
    """A connection that is opened by the first request and again by one after it broke or idled out.

    ``base_path`` begins every path (``BulkAddress.base_path``), ``token`` may be replaced at any time. ``tls`` is the
    context of an https address; where it pins the peer's certificate (``node.weights.bulk.pinned_tls``) no name is
    checked.
    """

    def __init__(
        self,
        address: BulkAddress,
        *,
        tls: ssl.SSLContext | None,
        peer: bytes,
        base_path: str,
        token: str,
        head_timeout: float = HEAD_SECONDS,
        chunk_timeout: float = CHUNK_SECONDS,
        resolve: Resolve = socket.getaddrinfo,
        dial: Dial = socket.create_connection,
    ) -> None:
        self.address = address
        self.peer = peer
        self.token = token
        self._chunk_timeout = chunk_timeout
        self._head_timeout = head_timeout
        self._resolve = resolve
        self._dial_at = dial
        self._tls = tls
        self._base_path = base_path
        self._socket: socket.socket | None = None
        self._closed = False
        self._spare = b""
        self._idle = False  # it was kept after an answer, and no byte of another is here
        self._what = f"weights at {address.host}:{address.port}"

    def connect(self) -> float:
        """Connect unless it is connected; the seconds that it took. Raises ``Unreachable``."""
        began = time.monotonic()
        self._open()
        return time.monotonic() - began

    def received(self) -> int:
        """Bytes that the kernel received over this connection so far; may be asked from any thread."""
        connection = self._socket
        if connection is not None:
            with suppress(OSError, struct.error):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
                return int(struct.unpack_from("@Q", info, _RECEIVED_AT)[0])
        return 0

    def get(self, digest: bytes, first: int, buffers: Sequence[memoryview], arrived: Callable[[int], None]) -> None:
        """Fetch the chunks ``first``… of a bulk object into ``buffers``, one each, of the chunks' sizes.

        ``arrived(index of the chunk)`` is called after each. Raises ``Unreachable`` or ``PeerError``.
        """
        self._exchange(
            f"/{digest.hex()}/{first}-{first + len(buffers) - 1}", sum(map(len, buffers)), self._head_timeout
        )
        for index, buffer in enumerate(buffers, first):
            self._fill(buffer, self._chunk_timeout)
            arrived(index)

    def have(self, digest: bytes, more_than: int, wait: float) -> bytes:
        """Which chunks the holder has, the most significant bit first.

        It answers once it has more than ``more_than`` of them, after ``wait`` seconds (at most 2) in any case.
        """
        path = f"/{digest.hex()}/have?more-than={more_than}&wait={round(wait * 1000)}"
        bitmap = bytearray(self._exchange(path, None, self._head_timeout + wait))
        self._fill(memoryview(bitmap), self._head_timeout)
        return bytes(bitmap)

    def abort(self) -> None:
        """From another thread: a request under way, and every later one, ends with ``Unreachable``."""
        self._closed = True
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close for good. Only for the thread that uses the connection."""
        self._closed = True
        self._drop()

    # --- inside --------------------------------------------------------------------------------------------------

    def _exchange(self, path: str, length: int | None, seconds: float) -> int:
        """Send a request and receive the head of its answer: see ``_ask``. It is sent again, over a new connection,
        where one that was kept turns out to be closed."""
        try:
            return self._ask(path, length, seconds)
        except _IdledOut:
            return self._ask(path, length, seconds)
        finally:
            self._idle = self._socket is not None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Close the connection where the block fails, and say why."""
        try:
            yield
        except Missing:
            raise
        except (PeerError, Unreachable):
            self._drop()
            raise
        except h11.RemoteProtocolError as error:
            self._drop()
            raise PeerError(f"{self._what}: not HTTP ({error})") from None
        except OSError as error:
            late, idle = isinstance(error, BlockingIOError | TimeoutError), self._idle
            self._drop()
            if late:
                raise Unreachable(f"{self._what}: no answer in time") from None
            kind = _IdledOut if idle else Unreachable
            raise kind(f"{self._what}: the connection broke ({error.strerror or error})") from None

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        self._spare, self._idle = b"", False
        if connection is not None:
            connection.close()

    def _open(self) -> socket.socket:
        if self._closed:
            self._drop()
            raise Unreachable(f"{self._what}: closed")
        if self._socket is not None:
            return self._socket
        try:
            raw = self._dial()
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                # The kernel keeps the time: a socket with Python's own timeout costs a poll before every receive.
                raw.settimeout(None)
                self._patience, self._woken_at = 0.0, 1
                self._poll = select.poll()
                self._poll.register(raw, select.POLLIN)
                self._socket = raw
            else:
                name = self.address.host if self._tls.check_hostname else None
                self._socket = self._tls.wrap_socket(raw, server_hostname=name)
        except OSError as error:  # ssl.SSLError and TimeoutError are ones
            raise Unreachable(f"{self._what}: {error.strerror or error or 'no answer'}") from None
        return self._socket

    def _dial(self) -> socket.socket:
        """A connected socket. What a name stands for is looked at and dialled as it is: no other look-up follows, whose
        answer might be another."""
        address = self.address
        if address.kind in ("ip4", "ip6"):
            return self._dial_at((address.host, address.port), CONNECT_SECONDS)
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(address.kind, socket.AF_UNSPEC)
        why = OSError(errno.EACCES, "its name stands for no public address")
        for *_, place in self._resolve(address.host, address.port, family, socket.SOCK_STREAM)[:MAX_PLACES]:
            if public(str(place[0])):
                try:
                    return self._dial_at((str(place[0]), address.port), CONNECT_SECONDS)
                except OSError as error:
                    why = error
        raise why

    def _ask(self, path: str, length: int | None, seconds: float) -> int:
        """Send a request and receive a head; the length of the body that follows, ``length`` where that is not None."""
        connection, address = self._open(), self.address
        host = f"[{address.host}]" if ":" in address.host else address.host
        request = (
            f"GET {self._base_path}{path} HTTP/1.1\r\nHost: {host}:{address.port}\r\n"
            f"Authorization: Bearer {self.token}\r\n\r\n"
        )
        with self._guarded():
            connection.sendall(request.encode("ascii"))
            status, headers = self._head(connection, seconds)
            announced = headers.get(b"content-length", b"")
            size = int(announced[:20]) if announced.isdigit() else -1
            if status != 200:
                self._refused(status, headers, size)
            if b"transfer-encoding" in headers or b"content-encoding" in headers or size < 0:
                raise PeerError(f"{self._what}: an answer without a plain length")
            if size > MAX_BITMAP if length is None else size != length:
                raise PeerError(f"{self._what}: an answer of {size} bytes, not {length}")
        return size

    def _wait(self, connection: socket.socket, seconds: float) -> None:
        """Let the next receive wait for the first byte, so long or a little longer: what the kernel knows from the
        last time often serves."""
        if self._tls is not None:
            connection.settimeout(seconds)
            return
        self._wake_at(connection, 1)
        if not seconds <= self._patience <= seconds + 1:
            self._patience = seconds
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))

    def _receive(self, connection: socket.socket, buffer: memoryview, seconds: float) -> int:
        """Receive into ``buffer`` what is there once all of it is, or after ``seconds``; 0 at the end. Raises
        ``OSError``, ``BlockingIOError`` or ``TimeoutError`` where nothing is there.

        A thread that is woken for every few packets copies a chunk in pieces, each into memory that others have pushed
        out of the processor's cache meanwhile.
        """
        if self._tls is not None:
            connection.settimeout(max(seconds, 0.001))
            return connection.recv_into(buffer)
        self._wake_at(connection, len(buffer))
        self._poll.poll(1000 * seconds)
        return connection.recv_into(buffer, 0, socket.MSG_DONTWAIT)

    def _wake_at(self, connection: socket.socket, count: int) -> None:
        """Have the kernel wait for so many bytes, without TLS."""
        if count != self._woken_at:
            self._woken_at = count
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _head(self, connection: socket.socket, seconds: float) -> tuple[int, dict[bytes, bytes]]:
        """Receive a head: the status and the headers, their names in lower case."""
        deadline = time.monotonic() + seconds
        data, self._spare = self._spare, b""
        while True:
            head, mark, rest = data.partition(b"\r\n\r\n")
            if mark:
                found = _parse_head(head + mark)
                if found is not None:
                    self._spare = rest
                    return found
                data = rest
                continue
            if len(data) > MAX_HEAD:
                raise PeerError(f"{self._what}: an answer's head of more than {MAX_HEAD} bytes")
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unreachable(f"{self._what}: no answer in time")
            self._wait(connection, left)
            part = connection.recv(_HEAD_PIECE)
            if not part:
                kind = _IdledOut if self._idle else Unreachable
                raise kind(f"{self._what}: the connection was closed")
            self._idle = False
            data += part

    def _refused(self, status: int, headers: dict[bytes, bytes], size: int) -> NoReturn:
        what = self._what
        if status == 404 and 0 <= size <= MAX_HEAD:
            # What it says for people has to go before the next answer.
            self._fill(memoryview(bytearray(size)), self._head_timeout)
            raise Missing(f"{what}: not held")
        if status == 401:
            raise Denied(f"{what}: the token is not good")
        if status in (429, 503):
            after = headers.get(b"retry-after", b"")
            raise Busy(f"{what}: busy", min(float(after[:6]), MAX_RETRY) if after.isdigit() else 1.0)
        raise Unreachable(f"{what}: status {status}")

    def _fill(self, buffer: memoryview, seconds: float) -> None:
        """Receive until ``buffer`` is full, within ``seconds``."""
        connection = self._socket
        assert connection is not None
        filled = min(len(self._spare), len(buffer))
        if filled:
            buffer[:filled] = self._spare[:filled]
            self._spare = self._spare[filled:]
        deadline = time.monotonic() + seconds
        with self._guarded():
            while filled < len(buffer):
                count = self._receive(connection, buffer[filled:], max(0.0, deadline - time.monotonic()))
                if not count:
                    raise Unreachable(f"{self._what}: closed in the midst of a chunk")
                filled += count
                if filled < len(buffer) and time.monotonic() > deadline:
                    raise Unreachable(f"{self._what}: too slow")


class _IdledOut(Unreachable):
    """A connection that was kept turned out to be closed before it carried a byte of the answer."""


def _parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]] | None:
    """Status and headers of a final answer, None for an interim one (1xx). Where something stands twice or looks odd it
    is h11's business. Raises ``h11.RemoteProtocolError``."""
    match = _PLAIN.fullmatch(head)
    if match is not None:
        lines = match[2].split(b"\r\n")[:-1]
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        if len(headers) == len(lines):
            return int(match[1]), headers
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "-")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(head)
    event = parser.next_event()
    return (event.status_code, dict(event.headers)) if isinstance(event, h11.Response) else None
