"""Transfers between real children over real sockets."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio

from node.errors import Unreachable
from node.net.blob_exchange import CHUNK_PROTOCOL, HAVE_PROTOCOL
from node.weights.bulk.bulk_messages import ChunksCame, TransferProgress
from protocol.constants import CHUNK_BYTES
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest
from tests.node.weights.bulk.nodes import until
from tests.node.weights.bulk.swarms import Member, members

COUNT = 24
DATA = random.Random(5).randbytes((COUNT - 1) * CHUNK_BYTES + 4096)
MANIFEST = Manifest.of_file([("weights", "F16", (len(DATA) // 2,))], DATA, 1)
DIGEST = MANIFEST.digest


def give(member: Member, *, without: tuple[int, ...] = ()) -> None:
    """Put the object into a member's store."""
    member.store.begin(MANIFEST)
    for index in range(COUNT):
        if index not in without:
            member.store.write_chunk(DIGEST, index, DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


def verified(member: Member) -> int:
    held = member.store.open(DIGEST)
    return 0 if held is None else held.verified()


def whole(member: Member) -> bool:
    return member.store.complete(DIGEST) and member.store.paths(DIGEST)[1].read_bytes() == DATA


def progress(member: Member) -> TransferProgress:
    found = member.fetching.progress(DIGEST)
    assert found is not None
    return found


async def bring(member: Member, holders: Callable[[], Mapping[bytes, Holding]] | None = None) -> None:
    with trio.fail_after(60):
        await member.fetching.bring(MANIFEST, holders or (lambda: member.holders(DIGEST)))


async def test_chunks_are_passed_on_before_the_relay_is_whole(tmp_path: Path) -> None:
    async with members(tmp_path, "origin", "relay", "one", "two") as (origin, relay, one, two):
        give(origin, without=(7,))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring, relay)
            nursery.start_soon(bring, one, lambda: {relay.id: Holding(whole=False), two.id: Holding(whole=False)})
            nursery.start_soon(bring, two, lambda: {relay.id: Holding(whole=False), one.id: Holding(whole=False)})
            await until(lambda: [verified(m) for m in (relay, one, two)] == [COUNT - 1] * 3)
            assert progress(relay).total == COUNT
            await until(lambda: progress(relay).have == COUNT - 1)
            origin.store.write_chunk(DIGEST, 7, DATA[7 * CHUNK_BYTES : 8 * CHUNK_BYTES])
            origin.bulk.send(ChunksCame())
        assert all(whole(member) for member in (relay, one, two))
        assert relay.fetching.progress(DIGEST) is None
        assert origin.links.requests[CHUNK_PROTOCOL] == 0  # libp2p carried none of it
        assert relay.network.blamed == []


async def test_what_is_on_the_disk_is_not_fetched_again(tmp_path: Path) -> None:
    async with members(tmp_path, "origin", "node") as (origin, node):
        give(origin, without=tuple(range(0, COUNT, 2)))
        give(node, without=tuple(range(1, COUNT, 2)))
        node.store.paths(DIGEST)[1].parent.joinpath("chunks").write_bytes(b"\2\0" * (COUNT // 2))  # an earlier run's
        await bring(node, lambda: {origin.id: Holding(whole=False)})
        assert whole(node)


async def test_wrong_bytes_are_blamed_and_fetched_elsewhere(tmp_path: Path) -> None:
    async with members(tmp_path, "liar", "honest", "node") as (liar, honest, node):
        give(liar)
        give(honest)
        with liar.store.paths(DIGEST)[1].open("r+b") as file:  # its child has no reason to look again
            for index in range(COUNT):
                file.seek(index * CHUNK_BYTES + 9)
                file.write(b"lies")
        await bring(node)
        assert whole(node)
        assert [peer for peer, _ in node.network.blamed] == [liar.id] * len(node.network.blamed)
        assert "has the wrong hash" in node.network.blamed[0][1]
        assert len(node.network.blamed) <= 2  # it was not asked again


async def test_a_holder_that_dies_and_one_that_never_was(tmp_path: Path) -> None:
    async with members(tmp_path, "dies", "stays", "node", first_pause=30.0) as (dies, stays, node):
        give(dies)
        give(stays, without=(3,))
        nobody = bytes(32)
        async with trio.open_nursery() as nursery:
            holders = {dies.id: Holding(), stays.id: Holding(whole=False), nobody: Holding()}
            nursery.start_soon(bring, node, lambda: holders)
            await until(lambda: verified(node) >= 2)
            os.kill(dies.bulk.pid, signal.SIGKILL)
            await until(lambda: verified(node) >= COUNT - 1)
            stays.store.write_chunk(DIGEST, 3, DATA[3 * CHUNK_BYTES : 4 * CHUNK_BYTES])
        assert whole(node)


async def test_a_child_that_dies_costs_only_what_was_on_its_way(tmp_path: Path) -> None:
    async with members(tmp_path, "origin", "node", first_pause=0.01) as (origin, node):
        give(origin, without=(5,))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring, node, lambda: {origin.id: Holding(whole=False)})
            await until(lambda: verified(node) == COUNT - 1)
            os.kill(node.bulk.pid, signal.SIGKILL)
            await until(lambda: node.bulk.starts == 2 and node.bulk.up)
            origin.store.write_chunk(DIGEST, 5, DATA[5 * CHUNK_BYTES : 6 * CHUNK_BYTES])
        assert whole(node)


async def test_where_no_direct_connection_can_be_made_libp2p_carries_it(tmp_path: Path) -> None:
    async with members(tmp_path, "hidden", "dead-end", "plain", "node") as (hidden, dead_end, plain, node):
        hidden.hidden = True
        dead_end.address = "/ip4/127.0.0.1/tcp/9/http"
        for member, has in ((hidden, (0, 1)), (dead_end, (2, 3)), (plain, range(4, COUNT))):
            give(member, without=tuple(set(range(COUNT)) - set(has)))
        await bring(node, lambda: dict.fromkeys((hidden.id, dead_end.id, plain.id), Holding(whole=False)))
        assert whole(node)
        requests = node.links.requests
        assert 4 <= requests[CHUNK_PROTOCOL] <= 6  # what the third has came directly
        assert requests[HAVE_PROTOCOL] >= 2
        assert node.network.blamed == []


class WebServer(ThreadingHTTPServer):
    """Somebody's, who knows nothing of all this."""

    daemon_threads = True
    connections = 0

    def get_request(self) -> tuple[socket.socket, Any]:
        self.connections += 1
        return super().get_request()


class Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"none")

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def test_a_node_that_names_anothers_address_sends_few_there(tmp_path: Path) -> None:
    async with members(tmp_path, "liar", "partial", "honest", "node") as (liar, partial, honest, node):
        with WebServer(("127.0.0.1", 0), Page) as web:
            threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
            for member in (liar, partial):
                member.address = f"/ip4/127.0.0.1/tcp/{web.server_address[1]}/http"
                member.foreign = True
            give(honest, without=(9,))
            async with trio.open_nursery() as nursery:
                holders = {liar.id: Holding(), partial.id: Holding(whole=False), honest.id: Holding(whole=False)}
                nursery.start_soon(bring, node, lambda: holders)
                await until(lambda: node.asked.vain.keys() == {liar.id, partial.id} and verified(node) == COUNT - 1)
                honest.store.write_chunk(DIGEST, 9, DATA[9 * CHUNK_BYTES : 10 * CHUNK_BYTES])
            assert whole(node)
            assert web.connections <= 2 * 3  # two tries each, one more that was on its way
            assert max(node.asked.vain.values()) <= 2
            web.shutdown()


async def test_a_proxys_address_is_as_good_as_any_once_weights_came_from_it(tmp_path: Path) -> None:
    async with members(tmp_path, "proxied", "node") as (proxied, node):
        proxied.foreign = True
        give(proxied)
        await bring(node, lambda: {proxied.id: Holding()})
        assert whole(node)
        assert node.asked.vain == {}
        assert node.links.requests == {}


async def test_a_liar_behind_libp2p_is_blamed_too(tmp_path: Path) -> None:
    async with members(tmp_path, "liar", "honest", "node") as (liar, honest, node):
        liar.hidden = True
        liar.tamper = lambda data: data[:-1] + b"!"
        give(liar)
        give(honest, without=(9,))
        async with trio.open_nursery() as nursery:
            holders = {liar.id: Holding(), honest.id: Holding(whole=False)}
            nursery.start_soon(bring, node, lambda: holders)
            await until(lambda: node.network.blamed != [])
            honest.store.write_chunk(DIGEST, 9, DATA[9 * CHUNK_BYTES : 10 * CHUNK_BYTES])
        assert whole(node)
        assert {peer for peer, _ in node.network.blamed} == {liar.id}


async def test_a_refused_token_is_replaced(tmp_path: Path) -> None:
    async with members(tmp_path, "origin", "node") as (origin, node):
        give(origin)
        origin.token_seconds = -1.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring, node)
            await until(lambda: node.asked.asked[origin.id] >= 1)
            origin.token_seconds = 600.0
        assert whole(node)
        assert node.asked.asked[origin.id] >= 2


async def test_a_disk_that_takes_no_more_ends_it_at_once_and_loses_nothing(tmp_path: Path) -> None:
    async with members(tmp_path, "origin", "node") as (origin, node):
        give(origin)
        limits = resource.prlimit(node.bulk.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(node.bulk.pid, resource.RLIMIT_FSIZE, (8 * CHUNK_BYTES, limits[1]))
        began = time.monotonic()
        with pytest.raises(OSError, match="File too large"):
            await bring(node)
        assert time.monotonic() - began < 30  # not only once nothing has arrived for a minute
        before = verified(node)
        resource.prlimit(node.bulk.pid, resource.RLIMIT_FSIZE, limits)
        await bring(node)
        assert whole(node)
        assert before <= 8
        assert node.network.blamed == []


async def test_nobody_has_it(tmp_path: Path) -> None:
    async with members(tmp_path, "origin", "node") as (origin, node):
        with pytest.raises(Unreachable, match="24 chunks of .* are missing"):  # noqa: RUF043
            await node.fetching.bring(MANIFEST, lambda: {origin.id: Holding()}, stall=1.0)
        assert node.fetching.progress(DIGEST) is None
        give(origin)
        with trio.move_on_after(0.05):  # a transfer that is cancelled leaves what arrived, and no threads
            await bring(node)
        await bring(node)
        assert whole(node)
        await until(lambda: len(os.listdir(f"/proc/{node.bulk.pid}/task")) <= 4)
