"""The fetching side against holders that die, stall, lie about lengths or do not speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import Busy, Unreachable
from node.weights.bulk.bulk_address import parse
from node.weights.bulk.holder_connection import Denied, HolderConnection, Missing
from node.weights.bulk.serving_limits import ServingLimits
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from tests.node.weights.bulk.harness import CHUNKS, Raw, connect, origin, token

DIGEST = bytes(32)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@contextmanager
def holder(*scripts: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where the first connection is treated by the first script, and so on; each starts after one request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for script in scripts:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    read_request(connection)
                    script(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return data


def send(*parts: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(b"".join(parts))


def get(connection: HolderConnection, sizes: tuple[int, ...] = (CHUNK_BYTES,)) -> tuple[list[int], bytes]:
    """The chunks that arrived and all bytes."""
    arrived: list[int] = []
    buffers = [memoryview(bytearray(size)) for size in sizes]
    connection.get(DIGEST, 7, buffers, arrived.append)
    return arrived, b"".join(buffers)


def test_chunks_arrive_one_by_one_in_the_buffers(tmp_path: Path) -> None:
    with origin(tmp_path / "versions") as made:
        connection = made.connection()
        for first, count in ((0, CHUNKS), (3, 2), (1, 1)):
            arrived: list[int] = []
            buffers = made.buffers(first, count)
            connection.get(made.manifest.digest, first, buffers, arrived.append)
            assert arrived == list(range(first, first + count))
            assert b"".join(buffers) == b"".join(made.chunk(i) for i in arrived)
        assert connection.have(made.manifest.digest, 0, 0.0) == b"\xf8"
        assert made.server.gate.count == 1
        connection.close()
        with pytest.raises(Unreachable, match="closed"):
            connection.have(made.manifest.digest, 0, 0.0)


def test_a_chunk_is_waited_for_as_a_whole() -> None:
    """However many packets it comes in; a short answer after it is not waited for in vain."""

    class Counted(socket.socket):
        pieces = 0

        def recv_into(self, *arguments: Any) -> int:
            self.pieces += 1
            return super().recv_into(*arguments)

    def dial(place: tuple[str, int], seconds: float) -> socket.socket:
        made.connect(place)
        return made

    def drip(connection: socket.socket) -> None:
        connection.sendall(HEAD % CHUNK_BYTES)
        for _ in range(16):
            connection.sendall(bytes(CHUNK_BYTES // 16))
            time.sleep(0.005)
        read_request(connection)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        read_request(connection)

    with Counted() as made, holder(drip) as port:
        connection = connect(port, dial=dial)
        assert get(connection)[0] == [7]
        assert made.pieces <= 2
        with pytest.raises(Missing):
            get(connection)
        connection.close()


def test_what_is_missing_is_told_apart(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", missing=(2,), limits=ServingLimits(of_peer=1)) as made:
        connection = made.connection()
        for _ in range(3):  # the connection stays good
            with pytest.raises(Missing):
                connection.get(made.manifest.digest, 1, made.buffers(1, 2), lambda _: None)
        connection.get(made.manifest.digest, 0, made.buffers(0, 2), lambda _: None)
        other = made.connection()
        with pytest.raises(Busy) as caught:
            other.get(made.manifest.digest, 0, made.buffers(0, 1), lambda _: None)
        assert caught.value.retry_after == 2
        connection.close()
        expired = made.connection(token=token(seconds=-1))
        with pytest.raises(Denied):
            expired.get(made.manifest.digest, 0, made.buffers(0, 1), lambda _: None)
        expired.token = token()  # a new one is used from then on
        until = time.monotonic() + 5
        while made.server.gate.count and time.monotonic() < until:
            time.sleep(0.01)
        expired.get(made.manifest.digest, 0, made.buffers(0, 1), lambda _: None)
        expired.close()


def test_a_peer_that_stops_in_the_midst_of_a_chunk() -> None:
    arrived: list[int] = []
    with holder(send(HEAD % 3000, bytes(1500))) as port:
        connection = connect(port)
        with pytest.raises(Unreachable, match="in the midst of a chunk"):
            connection.get(DIGEST, 7, [memoryview(bytearray(1000)) for _ in range(3)], arrived.append)
    assert arrived == [7]


def test_a_peer_that_stalls_is_left() -> None:
    def stall(connection: socket.socket) -> None:
        connection.sendall(HEAD % 3000 + bytes(1500))
        connection.recv(1)

    with holder(stall) as port:
        connection = connect(port, chunk_timeout=0.1)
        with pytest.raises(Unreachable, match=r"no answer in time|too slow"):
            get(connection, (3000,))

    def keep_silent(connection: socket.socket) -> None:
        connection.recv(1)

    silent = holder(keep_silent)
    with silent as port, pytest.raises(Unreachable, match="no answer in time"):
        get(connect(port, head_timeout=0.1))


def test_a_peer_that_drips_is_too_slow() -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(HEAD % 3000)
        with suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)

    with holder(drip) as port:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            get(connect(port, chunk_timeout=0.2), (3000,))
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "answer",
    [
        HEAD % 2999 + bytes(2999),  # truncated
        HEAD % 3001 + bytes(3001),
        b"HTTP/1.1 200 OK\r\n\r\n" + bytes(3000),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nbb8\r\n" + bytes(3000) + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\nContent-Encoding: gzip\r\n\r\n" + bytes(3000),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 9000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 3000\r\n\r\n" + bytes(3000),
    ],
)
def test_an_answer_that_breaks_the_rules(answer: bytes) -> None:
    with holder(send(answer)) as port, pytest.raises(PeerError):
        get(connect(port), (3000,))


@settings(max_examples=60, deadline=None)
@given(answer=st.one_of(st.binary(max_size=200), st.binary(max_size=80).map(lambda tail: b"HTTP/1.1 " + tail)))
def test_whatever_answers_is_unreachable_or_to_blame(answer: bytes) -> None:
    with holder(send(answer)) as port, pytest.raises((PeerError, Unreachable)):
        get(connect(port), (3000,))


@pytest.mark.parametrize("status", [b"301 Moved", b"403 Forbidden", b"500 Oops", b"206 Partial", b"304 Not Modified"])
def test_other_statuses_send_elsewhere(status: bytes) -> None:
    answers = holder(send(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n"))
    with answers as port, pytest.raises(Unreachable, match="status"):
        get(connect(port))


def test_a_busy_proxy_is_busy() -> None:
    answers = holder(send(b"HTTP/1.1 503 x\r\nRetry-After: 900\r\nContent-Length: 0\r\n\r\n"))
    with answers as port, pytest.raises(Busy) as caught:
        get(connect(port))
    assert caught.value.retry_after == 60


@pytest.mark.parametrize("inside", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"])
def test_a_name_leads_to_public_addresses_only(inside: str) -> None:
    dialled: list[tuple[str, int]] = []
    answers = [inside, "8.8.8.8", "9.9.9.9"]

    def resolve(host: str, port: int, family: int, kind: int) -> list[tuple[object, ...]]:
        return [(family, kind, 6, "", (answer, port)) for answer in answers]

    def dial(place: tuple[str, int], seconds: float) -> socket.socket:
        dialled.append(place)
        raise ConnectionRefusedError("refused")

    def named() -> HolderConnection:
        place = parse("/dns4/weights.example.org/tcp/80/http")
        return HolderConnection(place, tls=None, peer=b"", base_path="", token="t", resolve=resolve, dial=dial)

    with pytest.raises(Unreachable, match="refused"):
        named().connect()
    assert dialled == [("8.8.8.8", 80), ("9.9.9.9", 80)]
    del answers[1:]
    with pytest.raises(Unreachable, match="no public address"):
        named().connect()
    assert len(dialled) == 2


def test_nobody_is_there() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(Unreachable, match="refused"):
        get(connect(port))


def test_a_kept_connection_that_was_closed_is_opened_again() -> None:
    with holder(send(HEAD % 3 + b"abc"), send(HEAD % 3 + b"def")) as port:
        connection = connect(port)
        assert get(connection, (3,)) == ([7], b"abc")
        assert get(connection, (3,)) == ([7], b"def")
        connection.close()


def test_one_that_closes_at_once_is_not_tried_for_ever() -> None:
    with holder(lambda _: None) as port, pytest.raises(Unreachable):
        get(connect(port))


def test_an_interim_answer_is_passed_over() -> None:
    with holder(send(b"HTTP/1.1 103 Early Hints\r\n\r\n" + HEAD % 3 + b"abc")) as port:
        connection = connect(port)
        assert get(connection, (3,))[1] == b"abc"
        connection.close()


def test_another_thread_may_abort() -> None:
    began, ended = threading.Event(), threading.Event()

    def stall(connection: socket.socket) -> None:
        began.set()
        connection.recv(1)
        ended.set()

    with holder(stall) as port:
        connection = connect(port)
        failures: list[Exception] = []

        def work() -> None:
            try:
                get(connection)
            except Unreachable as error:
                failures.append(error)
            connection.close()

        thread = threading.Thread(target=work)
        thread.start()
        began.wait(5)
        connection.abort()
        thread.join(5)
        assert failures
        assert ended.wait(5)


def test_a_bitmap_of_absurd_size() -> None:
    with holder(send(HEAD % (1 << 30))) as port, pytest.raises(PeerError):
        connect(port).have(DIGEST, 0, 0.0)


def test_the_server_closes_nothing_that_is_in_use(tmp_path: Path) -> None:
    """An object that retention deletes under a connection is served to its end, and is then gone."""
    with origin(tmp_path / "versions") as made:
        connection = made.connection()
        connection.get(made.manifest.digest, 0, made.buffers(0, 1), lambda _: None)
        made.store.retain(lambda present: ())
        with pytest.raises(Missing):
            connection.get(made.manifest.digest, 0, made.buffers(0, 1), lambda _: None)
        connection.close()
        with Raw(made.port) as client:
            assert client.get(f"{made.base}/0-0", bearer=token()).status == 404
