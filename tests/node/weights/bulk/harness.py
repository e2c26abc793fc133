"""A store with one bulk object, a server of it on a real socket, and a client that says what it is told."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.store.version_store import VersionStore
from node.weights.bulk import bearer_tokens
from node.weights.bulk.bulk_address import BulkAddress
from node.weights.bulk.chunk_server import ChunkServer
from node.weights.bulk.holder_connection import HolderConnection
from node.weights.bulk.serving_limits import ServingLimits
from protocol.constants import CHUNK_BYTES
from protocol.weights.manifest import Manifest
from tests.protocol.builders import key

DOMAIN = bytes(range(32))
SECRET = b"s" * 32
PEER = key("peer").node
OTHER = key("other").node
CHUNKS = 5
SIZE = (CHUNKS - 1) * CHUNK_BYTES + 1000
"""Four whole chunks and a short one."""


def make_object(folder: Path, *, missing: tuple[int, ...] = (), seed: int = 1) -> tuple[VersionStore, Manifest, bytes]:
    """A store that holds an object but for its chunks ``missing``; its manifest and its bytes."""
    data = random.Random(seed).randbytes(SIZE)
    manifest = Manifest.of_file([("weights", "F16", (SIZE // 2,))], data, 1)
    store = VersionStore(folder)
    store.begin(manifest)
    for index in range(CHUNKS):
        if index not in missing:
            store.write_chunk(manifest.digest, index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
    return store, manifest, data


def token(node: bytes = PEER, *, hosts: tuple[bytes, ...] = (bearer_tokens.LOCAL,), seconds: float = 600) -> str:
    """A token of the server's."""
    return bearer_tokens.mint(SECRET, node, hosts, time.monotonic() + seconds)


class Origin:
    """A server of one object, whole but for ``missing``."""

    def __init__(
        self, folder: Path, *, missing: tuple[int, ...] = (), limits: ServingLimits | None = None, **more: Any
    ) -> None:
        self.store, self.manifest, self.data = make_object(folder, missing=missing)
        self.server = ChunkServer(
            domain=DOMAIN, secret=SECRET, find=self.store.open, limits=limits or ServingLimits(), **more
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.server.listen([self.listener])

    @property
    def base(self) -> str:
        """What the path of each chunk request begins with."""
        return f"/farflung/1/{DOMAIN.hex()}/{self.manifest.digest.hex()}"

    def chunk(self, index: int) -> bytes:
        """The bytes of a chunk."""
        return self.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def buffers(self, first: int = 0, count: int = CHUNKS) -> list[memoryview]:
        """Room for chunks."""
        return [memoryview(bytearray(self.manifest.chunk_size(i))) for i in range(first, first + count)]

    def connection(self, **more: Any) -> HolderConnection:
        """A connection of ``PEER``'s."""
        return connect(self.port, **({"token": token()} | more))


def connect(port: int, **more: Any) -> HolderConnection:
    """A connection to a port of this machine."""
    address = BulkAddress("ip4", "127.0.0.1", port, more.get("tls") is not None)
    values = {"tls": None, "peer": b"", "base_path": address.base_path(DOMAIN), "token": "t"} | more
    return HolderConnection(address, **values)


@contextmanager
def origin(folder: Path, **more: Any) -> Iterator[Origin]:
    """An ``Origin`` while the block runs."""
    made = Origin(folder, **more)
    try:
        yield made
    finally:
        # A thread that waits in accept() does not notice a close, but a shutdown.
        made.listener.shutdown(socket.SHUT_RDWR)
        made.listener.close()


class Answer:
    """A raw answer: status, headers in lower case, body."""

    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        self.body = body


class Raw:
    """A plain socket that speaks HTTP as badly as it is told."""

    def __init__(self, port: int, timeout: float = 10) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self.buffer = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def get(self, target: str, *headers: str, method: str = "GET", bearer: str | None = None) -> Answer:
        """One request and its answer."""
        lines = [f"{method} {target} HTTP/1.1", "Host: x", *headers]
        if bearer is not None:
            lines.append(f"Authorization: Bearer {bearer}")
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode())
        return self.answer(method=method)

    def answer(self, *, method: str = "GET") -> Answer:
        """The next answer."""
        while b"\r\n\r\n" not in self.buffer:
            part = self.socket.recv(65536)
            if not part:
                raise EOFError
            self.buffer += part
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        found = re.search(rb"(?i)content-length: (\d+)", head)
        size = 0 if found is None or method == "HEAD" else int(found[1])
        while len(self.buffer) < size:
            part = self.socket.recv(1 << 20)
            if not part:
                raise EOFError
            self.buffer += part
        body, self.buffer = self.buffer[:size], self.buffer[size:]
        return Answer(head, body)

    def rest(self) -> bytes:
        """All that still comes until the other side closes."""
        data, self.buffer = self.buffer, b""
        try:
            while part := self.socket.recv(65536):
                data += part
        except ConnectionResetError:
            pass
        return data
