"""The serving side of the data plane: one thread a connection, whole ranges of files to the socket by ``sendfile``.

Threads that sleep in the kernel cost neither processor time nor the interpreter's lock, and a peer that is slow, or a
disk that is, holds up its own connection alone.

1. A request needs a token of this node, from a host that the token is good from, and over TLS of the very peer.
2. Times bound everything (``ServingPatience``): the first request, each head, an idle connection, and one that takes
   nothing.
3. Nothing that a client sends ends more than its own connection.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from node.store.bulk_object import BulkObject
from node.weights.bulk import bearer_tokens, http_messages
from node.weights.bulk.holder_connection import timeval
from node.weights.bulk.http_messages import Answer, Asked, HttpRequest
from node.weights.bulk.pinned_tls import Doorkeeper
from node.weights.bulk.serving_limits import Gate, ServingLimits, ServingPlace
from protocol.errors import Error, PeerError

log = logging.getLogger(__name__)

GATHER: Final = 0.01
"""Seconds that a waiting ``have`` goes on gathering once there is news: chunks come in swarms."""

_FULL: Final = b"HTTP/1.1 429 \r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_RECEIVE: Final = 16384
_SENDFILE: Final = 1 << 30
_TLS_PIECE: Final = 256 << 10
"""Bytes that a peer has to take within ``ServingPatience.stall``."""


@dataclass(frozen=True, slots=True)
class ServingPatience:
    """Seconds: until a ``stranger``'s first request is here, until a ``head`` is after its first byte, for which a kept
    connection may be ``idle``, and for which one may ``stall`` that takes no byte."""

    stranger: float = 5.0
    head: float = 10.0
    idle: float = 75.0
    stall: float = 30.0


PATIENCE: Final = ServingPatience()


class ChunkNews:
    """Wakes those who wait for chunks."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def notify(self) -> None:
        """Some object has more chunks. May be called from any thread."""
        with self._condition:
            self._condition.notify_all()

    def wait(self, until: float, reached: Callable[[], bool]) -> None:
        """Return once ``reached()``, or at monotonic time ``until``."""
        with self._condition:
            while not reached() and (left := until - time.monotonic()) > 0:
                self._condition.wait(left)


class _Plain:
    """A connection without TLS. The kernel keeps the times."""

    def __init__(self, connection: socket.socket, stall: float) -> None:
        self.socket = connection
        self.peer: bytes | None = None
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(stall))

    def receive(self, seconds: float) -> bytes:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))
        return self.socket.recv(_RECEIVE)

    def send(self, data: bytes, *, more: bool) -> None:
        self.socket.sendall(data, socket.MSG_MORE if more else 0)

    def send_file(self, file: int, offset: int, count: int) -> int:
        return os.sendfile(self.socket.fileno(), file, offset, min(count, _SENDFILE))


class _Secure:
    """A connection with TLS, of a peer that its certificate names."""

    def __init__(self, connection: ssl.SSLSocket, peer: bytes, stall: float) -> None:
        self.socket = connection
        self.peer: bytes | None = peer
        self._stall = stall
        self._buffer = bytearray()

    def receive(self, seconds: float) -> bytes:
        self.socket.settimeout(seconds)
        return self.socket.recv(_RECEIVE)

    def send(self, data: bytes, *, more: bool) -> None:
        del more
        self.socket.settimeout(self._stall)
        self.socket.sendall(data)

    def send_file(self, file: int, offset: int, count: int) -> int:
        if not self._buffer:
            self._buffer = bytearray(_TLS_PIECE)
        piece = memoryview(self._buffer)[: min(count, _TLS_PIECE)]
        read = os.preadv(file, [piece], offset)
        self.socket.settimeout(self._stall)
        self.socket.sendall(piece[:read])
        return read


class ChunkServer:
    """Serves the bulk objects of one domain.

    ``find(digest)`` gives an object that is held at least in part. ``doorkeeper``: who gets in, for a private domain.
    ``news`` wakes those who wait for chunks, ``coming(digest)`` gives the bitmap of the chunks that are on their way to
    us.
    """

    def __init__(
        self,
        *,
        domain: bytes,
        secret: bytes,
        find: Callable[[bytes], BulkObject | None],
        limits: ServingLimits,
        doorkeeper: Doorkeeper | None = None,
        news: ChunkNews | None = None,
        coming: Callable[[bytes], bytes] = lambda digest: b"",
        patience: ServingPatience = PATIENCE,
    ) -> None:
        self._domain = domain
        self._secret = secret
        self._find = find
        self._doorkeeper = doorkeeper
        self.gate = Gate(limits)
        self.news = news or ChunkNews()
        self._coming = coming
        self._patience = patience
        self.sent = 0
        """Bytes of objects that were sent."""

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections of ``listeners`` for ever, on threads of their own."""
        for listener in listeners:
            listener.setblocking(True)
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="bulk-accept").start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, remote = listener.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # it was shut down
                    return
                log.warning("bulk: cannot accept connections: %s", error)
                time.sleep(0.5)
                continue
            self.begin(connection, str(remote[0]))

    def begin(self, connection: socket.socket, remote: str) -> None:
        """Serve one accepted connection, on a thread of its own."""
        place = None
        try:
            own = str(connection.getsockname()[0])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = bearer_tokens.host_of(remote, [own.removeprefix("::ffff:")])
            if host != bearer_tokens.LOCAL:
                prefer_bbr(connection)
            place = self.gate.enter(host)
            if place is None:
                if self._doorkeeper is None:
                    connection.send(_FULL, socket.MSG_DONTWAIT)
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection, place), daemon=True, name="bulk-serve").start()
        except (OSError, ValueError, RuntimeError) as error:  # gone already, or no thread to be had
            log.debug("bulk: a connection failed: %s", error)
            connection.close()
            if place is not None:
                self.gate.leave(place)

    def _serve(self, connection: socket.socket, place: ServingPlace) -> None:
        try:
            if self._doorkeeper is None:
                self._converse(_Plain(connection, self._patience.stall), place)
            else:
                secured = self._handshake(connection, self._doorkeeper)
                if secured is not None:
                    connection = secured.socket
                    self._converse(secured, place)
        except (OSError, EOFError) as error:
            log.debug("bulk: a connection ended: %r", error)
        except Exception:
            log.exception("bulk: serving a connection failed")
        finally:
            with suppress(OSError):
                connection.close()
            self.gate.leave(place)

    def _handshake(self, connection: socket.socket, doorkeeper: Doorkeeper) -> _Secure | None:
        connection.settimeout(self._patience.stranger)
        try:
            secured = doorkeeper.context.wrap_socket(connection, server_side=True)
        except (OSError, ValueError) as error:  # ValueError: the connection was reset meanwhile
            log.debug("bulk: a TLS handshake failed: %s", error)
            connection.close()
            return None
        certificate = secured.getpeercert(binary_form=True)
        peer = None if certificate is None else doorkeeper.peer_of(certificate)
        if peer is None:
            secured.close()
            return None
        return _Secure(secured, peer, self._patience.stall)

    def _converse(self, stream: _Plain | _Secure, place: ServingPlace) -> None:
        wire = http_messages.Wire()
        first = time.monotonic() + self._patience.stranger
        while True:
            begun = time.monotonic()
            while (request := wire.next()) is None:
                now = time.monotonic()
                if not wire.begun:
                    begun = now
                until = begun + self._patience.head if wire.begun else now + self._patience.idle
                left = min(until, first if place.node is None else until) - now
                if left <= 0:
                    return
                wire.feed(stream.receive(left))
            if isinstance(request, Answer):
                stream.send(wire.head(request, method=b"GET"), more=False)
                _linger(stream)
                return
            held, answer = self._answer(request, stream.peer, place)
            body = answer.count if request.method != b"HEAD" and answer.status != 304 else 0
            stream.send(wire.head(answer, method=request.method), more=body > 0)
            if body:
                assert held is not None
                self._send(stream, held, answer.offset, body, place)
            if answer.last or not wire.again():
                _linger(stream)
                return

    def _answer(
        self, request: HttpRequest, peer: bytes | None, place: ServingPlace
    ) -> tuple[BulkObject | None, Answer]:
        asked = http_messages.parse_target(request.target)
        if request.method not in (b"GET", b"HEAD"):
            return None, http_messages.problem(405, "only GET and HEAD", (b"Allow", b"GET, HEAD"))
        try:
            grant = self._grant(request.token, place)
            if peer is not None and grant.node != peer:
                raise PeerError("the token is another peer's")
            if not grant.good_from(place.host):
                raise PeerError("the token is another host's")
        except PeerError as error:
            return None, http_messages.problem(401, str(error), (b"WWW-Authenticate", b"Bearer"))
        if not self.gate.claim(place, grant.node):
            return None, http_messages.problem(429, "over a limit", (b"Retry-After", b"2"))
        if asked is None:
            return None, http_messages.problem(404, "nothing is here", last=False)
        held = self._find(asked.digest) if asked.domain == self._domain else None
        if held is None:
            return None, http_messages.NOT_HELD
        if asked.chunks is not None:
            return held, http_messages.answer_chunks(asked.digest, asked.chunks, held, request.headers)
        headers = (http_messages.NO_STORE, (b"Content-Type", b"application/octet-stream"))
        return held, Answer(200, headers, self._bitmap(asked, held))

    def _grant(self, token: str, place: ServingPlace) -> bearer_tokens.TokenGrant:
        """What the token says; that of the request before is known."""
        now = time.monotonic()
        if place.seen is not None and place.seen[0] == token and now < place.seen[1].until:
            return place.seen[1]
        grant = bearer_tokens.check(self._secret, token, now)
        place.seen = (token, grant)
        return grant

    def _bitmap(self, asked: Asked, held: BulkObject) -> bytes:
        def more() -> bool:
            return held.verified() > asked.more_than

        if not more():
            until = time.monotonic() + asked.wait
            self.news.wait(until, more)
            time.sleep(max(0.0, min(GATHER, until - time.monotonic())))
        return held.bitmap() + self._coming(asked.digest)

    def _send(self, stream: _Plain | _Secure, held: BulkObject, offset: int, count: int, place: ServingPlace) -> None:
        piece = self.gate.piece
        while count:
            sent = stream.send_file(held.fd, offset, min(count, piece))
            if not sent:
                raise EOFError("the file is shorter than it was")
            self.sent += sent
            offset += sent
            count -= sent
            if (pause := self.gate.pause(place, sent)) > 0:
                time.sleep(pause)


def prefer_bbr(connection: socket.socket) -> None:
    """Use BBR where the kernel lets us: on long, lossy lines a flow of its fills the line, where others starve."""
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def _linger(stream: _Plain | _Secure) -> None:
    """Let the last answer arrive: closing with unread bytes would reset the connection under it."""
    with suppress(OSError, Error):
        if stream.peer is None:
            stream.socket.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 1.0
        while (left := until - time.monotonic()) > 0 and stream.receive(left):
            pass
