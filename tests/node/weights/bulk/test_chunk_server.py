"""The server over real sockets: what it serves to whom, what it refuses, and that nothing of a client's harms it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.weights.bulk import bearer_tokens
from node.weights.bulk.chunk_server import ServingPatience, prefer_bbr
from node.weights.bulk.serving_limits import ServingLimits
from protocol.constants import CHUNK_BYTES
from tests.node.weights.bulk.harness import CHUNKS, OTHER, SIZE, Origin, Raw, origin, token


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Origin]:
    with origin(tmp_path / "versions") as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    with origin(tmp_path_factory.mktemp("shared") / "versions") as made:
        yield made


def test_chunks_come_whole_with_what_caches_need(whole: Origin) -> None:
    with Raw(whole.port) as client:
        answer = client.get(f"{whole.base}/3-4", bearer=token())
        assert answer.status == 200
        assert answer.body == whole.chunk(3) + whole.chunk(4)
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.headers["etag"] == f'"{whole.manifest.digest.hex()}-3-4"'
        assert answer.headers["accept-ranges"] == "bytes"
        # The same connection goes on.
        assert client.get(f"{whole.base}/0-0", bearer=token()).body == whole.chunk(0)


def test_a_head_is_the_get_without_its_body(whole: Origin) -> None:
    with Raw(whole.port) as client:
        head = client.get(f"{whole.base}/0-1", method="HEAD", bearer=token())
        get = client.get(f"{whole.base}/0-1", bearer=token())
        assert {**head.headers, "date": ""} == {**get.headers, "date": ""}
        assert head.status == 200
        assert len(get.body) == 2 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        (f"bytes={CHUNK_BYTES - 1}-{CHUNK_BYTES}", CHUNK_BYTES - 1, CHUNK_BYTES),
        (f"bytes={CHUNK_BYTES}-", CHUNK_BYTES, CHUNK_BYTES + 999),
        ("bytes=-5", CHUNK_BYTES + 995, CHUNK_BYTES + 999),
        ("bytes=-99999999", 0, CHUNK_BYTES + 999),
        ("bytes=5-99999999", 5, CHUNK_BYTES + 999),
    ],
)
def test_a_cache_may_ask_for_a_part(shared: Origin, wanted: str, start: int, end: int) -> None:
    with Raw(shared.port) as client:
        answer = client.get(f"{shared.base}/3-4", f"Range: {wanted}", bearer=token())
        assert answer.status == 206
        assert answer.headers["content-range"] == f"bytes {start}-{end}/{CHUNK_BYTES + 1000}"
        assert answer.body == shared.data[3 * CHUNK_BYTES :][start : end + 1]


@pytest.mark.parametrize("wanted", ["bytes=0-1,5-6", "chunks=0-1", "bytes=7-3", "bytes=-", "bytes=x-"])
def test_other_forms_of_range_are_answered_whole(shared: Origin, wanted: str) -> None:
    with Raw(shared.port) as client:
        answer = client.get(f"{shared.base}/4-4", f"Range: {wanted}", bearer=token())
        assert (answer.status, answer.body) == (200, shared.chunk(4))


@pytest.mark.parametrize("wanted", [f"bytes={CHUNK_BYTES}-", "bytes=-0"])
def test_a_range_beyond_the_end_is_named(shared: Origin, wanted: str) -> None:
    with Raw(shared.port) as client:
        answer = client.get(f"{shared.base}/0-0", f"Range: {wanted}", bearer=token())
        assert (answer.status, answer.headers["content-range"]) == (416, f"bytes */{CHUNK_BYTES}")


def test_a_cache_that_has_it_is_told_so(shared: Origin) -> None:
    with Raw(shared.port) as client:
        tag = client.get(f"{shared.base}/4-4", method="HEAD", bearer=token()).headers["etag"]
        for condition in (tag, f'"x", W/{tag}', "*"):
            answer = client.get(f"{shared.base}/4-4", f"If-None-Match: {condition}", bearer=token())
            assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", tag)
        assert client.get(f"{shared.base}/4-4", 'If-None-Match: "x"', bearer=token()).status == 200
        # A range of something else is no range.
        assert client.get(f"{shared.base}/4-4", "Range: bytes=0-0", f"If-Range: {tag}", bearer=token()).status == 206
        assert client.get(f"{shared.base}/4-4", "Range: bytes=0-0", 'If-Range: "x"', bearer=token()).status == 200


def test_what_is_not_held_is_not_cached(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", missing=(2,)) as partial, Raw(partial.port) as client:
        for path in ("1-2", "2-2", "4-5", "9-9"):
            answer = client.get(f"{partial.base}/{path}", bearer=token())
            assert (answer.status, answer.headers["cache-control"]) == (404, "no-store")
        assert client.get(f"{partial.base}/0-1", bearer=token()).status == 200
        unknown = partial.base.replace(partial.manifest.digest.hex(), bytes(32).hex())
        assert client.get(f"{unknown}/0-0", bearer=token()).status == 404
        assert client.get(f"{unknown}/have?more-than=0&wait=0", bearer=token()).status == 404
        elsewhere = partial.base.replace("/farflung/1/00", "/farflung/1/ff")
        assert client.get(f"{elsewhere}/0-0", bearer=token()).status == 404
        # As soon as it is held it is served.
        partial.store.write_chunk(partial.manifest.digest, 2, partial.chunk(2))
        assert client.get(f"{partial.base}/1-2", bearer=token()).body == partial.chunk(1) + partial.chunk(2)


def test_have_answers_when_there_is_more(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", missing=(1, 4)) as partial, Raw(partial.port) as client:
        answer = client.get(f"{partial.base}/have?more-than=2&wait=2000", bearer=token())
        assert (answer.status, answer.body, answer.headers["cache-control"]) == (200, b"\xb0", "no-store")
        client.send(
            f"GET {partial.base}/have?more-than=3&wait=2000 HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {token()}\r\n\r\n".encode()
        )
        partial.store.write_chunk(partial.manifest.digest, 4, partial.chunk(4))
        partial.server.news.notify()
        assert client.answer().body == b"\xb8"
        before = time.monotonic()
        assert client.get(f"{partial.base}/have?more-than=4&wait=30", bearer=token()).body == b"\xb8"
        assert time.monotonic() - before < 2


# Who is served


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "rubbish",
        "é",
        "A" * 500,
        token(seconds=-1),
        token(hosts=(bearer_tokens.host_of("192.0.2.7"),)),
        bearer_tokens.mint(b"x" * 32, OTHER, (), time.monotonic() + 600),
        token()[:-4] + "AAAA",
        token()[1:],
    ],
    # Named: the tokens are new in each process, and two that share the suite must name its tests alike.
    ids=["none", "empty", "rubbish", "accent", "long", "expired", "elsewhere", "unknown-key", "forged", "cut"],
)
def test_nothing_without_a_good_token(shared: Origin, bad: str | None) -> None:
    with Raw(shared.port) as client:
        lines = "" if bad is None else f"Authorization: Bearer {bad}\r\n"
        client.send(f"GET {shared.base}/0-0 HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        answer = client.answer()
        # A header that is no ASCII is no HTTP either.
        assert answer.status in (401, 400)
        assert shared.chunk(0)[:64] not in answer.body
        assert client.rest() == b""


def test_a_token_is_good_from_its_host_only(whole: Origin) -> None:
    """The token of a peer that another replays, whose address is another."""
    theirs = token(OTHER, hosts=(bearer_tokens.host_of("192.0.2.7"), bearer_tokens.host_of("2001:db8::7")))
    with Raw(whole.port) as client:
        assert client.get(f"{whole.base}/0-0", bearer=theirs).status == 401
    with Raw(whole.port) as client:
        assert client.get(f"{whole.base}/0-0", bearer=token(OTHER, hosts=())).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"])
def test_only_get_and_head(shared: Origin, method: str) -> None:
    with Raw(shared.port) as client:
        answer = client.get(f"{shared.base}/0-0", method=method, bearer=token())
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
        assert client.rest() == b""


ELSEWHERE = (
    *("/../etc/passwd", "{base}/9999999999-9999999999", "{base}/have", "http://x{base}/0-0", "{base}/../../0-0"),
    *("{base}/%30-0", "{base}/have?more-than=0&wait=0&x", "{base}/have?wait=0&more-than=0"),
)


@pytest.mark.parametrize(
    "target",
    ["/", "*", "/farflung/1/x", "{base}/0-64", "{base}/1-0", "{base}/a-b", "{base}/0-0/", "{base}/0-0?x=1", *ELSEWHERE],
)
def test_other_paths_are_nothing(shared: Origin, target: str) -> None:
    with Raw(shared.port) as client:
        assert client.get(target.format(base=shared.base), bearer=token()).status == 404
        assert client.get(f"{shared.base}/4-4", bearer=token()).status == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(200), 400),  # a TLS hello
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 401),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", 401),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20000 + b"\r\n\r\n", 431),
        (b"G" * 20000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"\r\n\r\nrubbish\r\n\r\n", 400),
    ],
)
def test_rubbish_is_refused_and_the_connection_closed(shared: Origin, data: bytes, status: int) -> None:
    with Raw(shared.port) as client:
        client.send(data)
        assert client.answer().status == status
        assert client.rest() == b""


PIECES = (
    *(b"GET ", b"HEAD", b"POST", b" ", b"/", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r", b":", b"Host: x", b"\0"),
    *(b"Content-Length: ", b"3", b"Transfer-Encoding: chunked", b"Authorization: Bearer ", b"\xff", b"/farflung/1/"),
    *(b"0" * 64, b"0-0", b"have?more-than=0&wait=0", b"Range: bytes=", b"0\r\n\r\n", b"Expect: "),
)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300) | st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join))
@example(b"GET / HTTP/1.0\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
def test_whatever_is_sent_ends_with_a_4xx_and_a_closed_connection(shared: Origin, data: bytes) -> None:
    with Raw(shared.port) as client:
        client.send(data)
        client.socket.shutdown(socket.SHUT_WR)
        answer = client.rest()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert answer.count(b"HTTP/1.1") <= 1
    assert shared.server.gate.count < 50


def test_it_serves_after_all_that(shared: Origin) -> None:
    with Raw(shared.port) as client:
        assert client.get(f"{shared.base}/0-{CHUNKS - 1}", bearer=token()).body == shared.data
    until = time.monotonic() + 5
    while shared.server.gate.count and time.monotonic() < until:
        time.sleep(0.01)
    assert shared.server.gate.count == 0


def test_requests_sent_ahead_are_answered_in_order(whole: Origin) -> None:
    with Raw(whole.port) as client:
        one = f"GET {whole.base}/%d-%d HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n\r\n"
        client.send("".join(one % (i, i) for i in range(CHUNKS)).encode())
        assert b"".join(client.answer().body for _ in range(CHUNKS)) == whole.data


# ServingLimits


def test_a_peer_has_so_many_connections(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", limits=ServingLimits(of_peer=2)) as few:
        clients = [Raw(few.port) for _ in range(4)]
        try:
            assert [c.get(f"{few.base}/4-4", bearer=token()).status for c in clients[:2]] == [200, 200]
            third = clients[2].get(f"{few.base}/4-4", bearer=token())
            assert (third.status, third.headers["retry-after"]) == (429, "2")
            # Another peer's are its own.
            assert clients[3].get(f"{few.base}/4-4", bearer=token(OTHER)).status == 200
            # One that is closed makes room.
            clients[0].socket.close()
            until = time.monotonic() + 5
            while few.server.gate.count > 2 and time.monotonic() < until:
                time.sleep(0.01)
            with Raw(few.port) as again:
                assert again.get(f"{few.base}/4-4", bearer=token()).status == 200
        finally:
            for client in clients:
                client.socket.close()


def test_there_are_so_many_connections_in_all(tmp_path: Path) -> None:
    few = Origin(tmp_path / "versions", limits=ServingLimits(total=2, proxied=True))
    with few.listener, Raw(few.port) as first, Raw(few.port) as second:
        assert first.get(f"{few.base}/4-4", bearer=token()).status == 200
        assert second.get(f"{few.base}/4-4", bearer=token()).status == 200
        with Raw(few.port) as third:
            assert third.answer().status == 429
            assert third.rest() == b""
        few.listener.shutdown(socket.SHUT_RDWR)


def test_strangers_take_no_place_from_peers(tmp_path: Path) -> None:
    """Half of all connections are the most that nobody's may be."""
    few = Origin(tmp_path / "versions", limits=ServingLimits(total=4))
    with few.listener, Raw(few.port), Raw(few.port), Raw(few.port) as third:
        assert third.answer().status == 429
        few.listener.shutdown(socket.SHUT_RDWR)


def test_a_stranger_who_says_nothing_is_shown_out(tmp_path: Path) -> None:
    with (
        origin(tmp_path / "versions", patience=ServingPatience(stranger=0.05)) as made,
        Raw(made.port) as silent,
        Raw(made.port) as slow,
    ):
        slow.send(b"GET / HTTP/1.1\r\n")
        assert silent.rest() == b""
        assert slow.rest() == b""


def test_a_head_that_drips_is_not_waited_for(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", patience=ServingPatience(head=0.2)) as made, Raw(made.port) as client:
        assert client.get(f"{made.base}/4-4", bearer=token()).status == 200
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.02):
                try:
                    client.send(b"G")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert client.rest() == b""
        finally:
            stop.set()
            dripping.join()


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", patience=ServingPatience(idle=0.05)) as made, Raw(made.port) as client:
        assert client.get(f"{made.base}/4-4", bearer=token()).status == 200
        assert client.rest() == b""


def test_a_reader_that_stalls_is_left(tmp_path: Path) -> None:
    with origin(tmp_path / "versions", patience=ServingPatience(stall=0.1)) as made, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", made.port))
        line = f"GET {made.base}/0-4 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n\r\n".encode()
        client.sendall(line)
        client.recv(10)
        until = time.monotonic() + 10
        while made.server.gate.count and time.monotonic() < until:
            time.sleep(0.01)
        assert made.server.gate.count == 0
        assert made.server.sent < SIZE


def test_the_congestion_control_for_long_lines_is_asked_for() -> None:
    settings_ = Path("/proc/sys/net/ipv4")
    listed = "available" if os.geteuid() == 0 else "allowed"  # root needs no leave
    has_it = "bbr" in (settings_ / f"tcp_{listed}_congestion_control").read_text().split()
    usual = (settings_ / "tcp_congestion_control").read_text().strip()
    with socket.socket() as connection:
        prefer_bbr(connection)
        used = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    assert used == ("bbr" if has_it else usual)


def test_rates_hold(tmp_path: Path) -> None:
    limits = ServingLimits(peer_rate=8 << 20)
    with origin(tmp_path / "versions", limits=limits) as made:
        started = time.monotonic()
        with Raw(made.port) as client:
            assert client.get(f"{made.base}/0-4", bearer=token()).body == made.data
        # What a quarter of a second allows goes out at once.
        assert time.monotonic() - started > (SIZE - (2 << 20)) / (8 << 20) * 0.8
