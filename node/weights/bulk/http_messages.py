"""What the data plane says over HTTP/1.1, apart from sockets: requests in, heads and ranges of files out.

1. ``GET|HEAD /farflung/1/<domain>/<digest>/<first>-<last>`` (hex, chunk indices) is answered with those chunks of a
   bulk object: they never change, so caches may keep them for ever (strong ETag, ``immutable``).
2. ``GET …/<digest>/have?more-than=<n>&wait=<ms>`` is answered with the bitmap of the chunks that are here. One of as
  many bits may follow, of those that are on their way, so that others ask for different ones.
3. h11 parses; what it or a rule here refuses ends with a 4xx and a closed connection, whatever else was sent. Heads of
   exactly the form that our own client sends are taken as they are: h11 would take longer than a chunk to send.
4. Single byte ranges, If-None-Match and If-Range are honoured, as caches use them; several ranges are not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Final

import h11

from node.store.bulk_object import BulkObject
from node.weights.bulk.holder_connection import MAX_RUN
from protocol.constants import CHUNK_BYTES

MAX_HEAD: Final = 8192
"""Bytes of a request's head."""
MAX_WAIT: Final = 2000
"""Milliseconds that a ``have`` may wait."""

IMMUTABLE: Final = (b"Cache-Control", b"public, max-age=31536000, immutable")
NO_STORE: Final = (b"Cache-Control", b"no-store")

_TARGET: Final = re.compile(
    rb"/farflung/1/([0-9a-f]{64})/([0-9a-f]{64})/"
    rb"(?:([0-9]{1,9})-([0-9]{1,9})|have\?more-than=([0-9]{1,9})&wait=([0-9]{1,5}))"
)
_PLAIN: Final = re.compile(
    rb"(GET|HEAD) (/[!-~]{1,400}) HTTP/1\.1\r\nHost: [!-~]{1,200}\r\n"
    rb"Authorization: (Bearer [A-Za-z0-9_-]{1,400})\r\n\r\n"
)
"""What ``node.weights.bulk.holder_connection`` sends."""
_RANGE: Final = re.compile(rb"bytes=([0-9]{0,15})-([0-9]{0,15})")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for: ``chunks`` of an object, or (None) its bitmap, once more than ``more_than`` chunks are
    here or after ``wait`` seconds."""

    domain: bytes
    digest: bytes
    chunks: range | None
    more_than: int = 0
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its body is ``body``, else ``count`` bytes of a file from ``offset`` on. ``last``: close after it."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    offset: int = 0
    count: int = 0
    last: bool = False


def problem(status: int, text: str, *headers: tuple[bytes, bytes], last: bool = True) -> Answer:
    """An answer for people; without ``last`` the connection stays good."""
    return Answer(status, (NO_STORE, (b"Content-Type", b"text/plain"), *headers), text.encode() + b"\n", last=last)


NOT_HELD: Final = problem(404, "not held", last=False)


def parse_target(target: bytes) -> Asked | None:
    """What a request's target asks for; None for nothing that is here."""
    match = _TARGET.fullmatch(target)
    if match is None:
        return None
    domain, digest = bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode())
    if match[3] is None:
        return Asked(domain, digest, None, int(match[5]), min(int(match[6]), MAX_WAIT) / 1000)
    chunks = range(int(match[3]), int(match[4]) + 1)
    return Asked(domain, digest, chunks) if 0 < len(chunks) <= MAX_RUN else None


def answer_chunks(digest: bytes, asked: range, held: BulkObject, headers: Mapping[bytes, bytes]) -> Answer:
    """The answer to a request for chunks of an object that is held at least in part."""
    if not all(map(held.has, asked)):
        return NOT_HELD
    offset = asked.start * CHUNK_BYTES
    size = min(asked.stop * CHUNK_BYTES, held.listing.size) - offset
    tag = b'"%s-%d-%d"' % (digest.hex().encode(), asked.start, asked.stop - 1)
    common = (IMMUTABLE, (b"ETag", tag), (b"Accept-Ranges", b"bytes"), (b"Content-Type", b"application/octet-stream"))
    whole = Answer(200, common, offset=offset, count=size)
    known = [item.strip().removeprefix(b"W/") for item in headers.get(b"if-none-match", b"").split(b",")]
    if b"*" in known or tag in known:
        return Answer(304, common)
    match = _RANGE.fullmatch(headers.get(b"range", b"").strip())
    if match is None or match[1] == match[2] == b"" or headers.get(b"if-range", tag).strip() != tag:
        return whole  # also for a form that nobody has to know
    if match[1]:
        start, end = int(match[1]), min(int(match[2] or size - 1), size - 1)
        if match[2] and int(match[2]) < start:
            return whole
    else:
        start, end = max(0, size - int(match[2])), size - 1
    if start > end:
        return problem(416, "beyond the end", (b"Content-Range", b"bytes */%d" % size), last=False)
    place = (b"Content-Range", b"bytes %d-%d/%d" % (start, end, size))
    return Answer(206, (*common, place), offset=offset + start, count=end - start + 1)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request's method, target and headers (names in lower case)."""

    method: bytes
    target: bytes
    headers: Mapping[bytes, bytes]

    @property
    def token(self) -> str:
        """The bearer token; empty without one."""
        scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
        return token.strip().decode("ascii", "replace") if scheme.lower() == b"bearer" else ""


class Wire:
    """One connection's bytes to requests, and answers to bytes."""

    def __init__(self) -> None:
        self._data = b""
        self._ended = False
        self._last = False  # no request can follow

    @property
    def begun(self) -> bool:
        """Whether some of the next request is here."""
        return bool(self._data)

    def feed(self, data: bytes) -> None:
        """Take in what was received; ``b""`` where the other side will send no more."""
        self._data += data
        self._ended = not data

    def next(self) -> HttpRequest | Answer | None:
        """The next request, an answer to one that breaks the rules (the end), or None where more must be received.

        Raises ``EOFError`` where the other side is done.
        """
        match = _PLAIN.match(self._data)
        if match is not None:
            self._data = self._data[match.end() :]
            return HttpRequest(match[1], match[2], {b"authorization": match[3]})
        if not self._data and not self._ended:
            return None
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            parser.receive_data(self._data)
            if self._ended:
                parser.receive_data(b"")
            event = parser.next_event()
            if event is h11.NEED_DATA:
                return None
            if not isinstance(event, h11.Request):
                raise EOFError
            end = parser.next_event()
        except h11.RemoteProtocolError as error:
            return problem(431 if error.error_status_hint == 431 else 400, "not a request")
        if not isinstance(end, h11.EndOfMessage):
            return problem(400, "a request has no body here")
        self._data, _ = parser.trailing_data
        self._last = parser.their_state is h11.MUST_CLOSE
        return HttpRequest(bytes(event.method), bytes(event.target), dict(event.headers))

    def head(self, answer: Answer, *, method: bytes) -> bytes:
        """The bytes before a body, and all of it that does not come from a file; whether it is the last is decided."""
        headers = [(b"Date", _date(int(time.time()))), *answer.headers]
        if answer.status != 304:
            headers.append((b"Content-Length", b"%d" % (answer.count or len(answer.body))))
        if answer.last or self._last:
            headers.append((b"Connection", b"close"))
        lines = [b"HTTP/1.1 %d " % answer.status, *(b"%b: %b" % header for header in headers), b"", b""]
        return b"\r\n".join(lines) + (answer.body if answer.status != 304 and method != b"HEAD" else b"")

    def again(self) -> bool:
        """Whether another request may follow on the connection."""
        return not self._last and (not self._ended or bool(self._data))


@lru_cache(1)
def _date(now: int) -> bytes:
    """The time as HTTP has it, made once a second."""
    return formatdate(now, usegmt=True).encode()
