"""The network that the daemon uses: start, peers, death and shutdown."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
import trio

from node.net.address_text import AddressError
from node.net.guard import NetLimits
from node.net.host import Network, PortBusy, open_network
from node.net.requests import Unreachable
from protocol.errors import PeerError
from tests.node.net.helpers import ECHO, LISTEN, SYN, WINDOW, attacker, identity, line, network, never, until, usable


class Names(trio.abc.HostnameResolver):
    """Names as the tests need them, whatever this machine's resolver knows."""

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple[int, int, int, str, tuple[Any, ...]]]:
        await trio.lowlevel.checkpoint()
        if host != b"node.example":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        assert isinstance(port, int)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))]

    async def getnameinfo(self, sockaddr: tuple[str, int] | tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        raise NotImplementedError


async def test_a_busy_port_is_one_clear_line() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortBusy, match=rf"^port {port} on 127.0.0.1 is in use: [^\n]+$"):
            async with open_network(identity(1), listen=[f"/ip4/127.0.0.1/tcp/{port}"], domain_tag="t"):
                pass


async def test_a_second_network_does_not_share_the_first_ones_port() -> None:
    async with network(1) as first:
        port = first.addresses[0].split("/")[4]
        with pytest.raises(PortBusy):
            async with open_network(identity(2), listen=[f"/ip4/127.0.0.1/tcp/{port}"], domain_tag="t"):
                pass


@pytest.mark.parametrize("text", ["/ip4/192.0.2.77/tcp/0", "/ip4/127.0.0.1/tcp/99999", "/dns4/localhost/tcp/0", "x"])
async def test_an_impossible_address_to_listen_on(text: str) -> None:
    with pytest.raises((PortBusy, AddressError), match=r"^[^\n]+$"):
        async with open_network(identity(1), listen=[text], domain_tag="t"):
            pass


async def test_the_blocks_exception_comes_out_unwrapped() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with network(1):
            raise KeyError("mine")


async def test_cancellation_from_outside_ends_it() -> None:
    with trio.fail_after(2), trio.move_on_after(0.05) as scope:
        async with network(1), network(2):
            await trio.Event().wait()
    assert scope.cancelled_caught


async def test_addresses_name_the_node_and_real_interfaces() -> None:
    async with open_network(identity(1), listen=["/ip4/0.0.0.0/tcp/0"], domain_tag="t") as opened:
        suffix = "/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
        assert all(address.endswith(suffix) for address in opened.addresses)
        assert opened.addresses[0].startswith("/ip4/127.0.0.1/tcp/")


async def test_a_node_is_reached_over_ip6_beside_ip4() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    async with open_network(identity(1), listen=["/ip4/0.0.0.0/tcp/0", "/ip6/::1/tcp/0"], domain_tag="t") as opened:
        assert opened.addresses[0].startswith("/ip4/127.0.0.1/tcp/")
        assert opened.addresses[-1].startswith("/ip6/::1/tcp/")
        async with network(2) as other:
            assert await other.connect(opened.addresses[-1], 5) == opened.node
            assert other.peers[opened.node].address.startswith("::1:")
            await until(lambda: other.node in opened.peers)
            assert (opened.hosts(other.node), other.hosts(opened.node)) == (["::1"], ["::1"])


async def test_a_name_is_resolved_by_the_system() -> None:
    trio.socket.set_custom_hostname_resolver(Names())
    async with network(1) as first, network(2) as second:
        address = first.addresses[0].replace("/ip4/127.0.0.1/", "/dns4/node.example/")
        assert await second.connect(address, 5) == first.node


async def test_joining_where_nobody_answers_is_one_clear_line() -> None:
    trio.socket.set_custom_hostname_resolver(Names())
    async with network(1) as first, network(2) as second:
        dead = second.addresses[0]
        port = dead.split("/")[4]
        for text in (dead.replace(f"/{port}/", "/1/"), dead.replace("/ip4/127.0.0.1/", "/dns4/nowhere.invalid/")):
            with pytest.raises(Unreachable, match=r"^[^\n]+$") as caught:
                await first.connect(text, 5)
            assert str(caught.value).startswith(text)
        for text in ("/ip4/127.0.0.1/tcp/1", first.addresses[0], "rubbish"):
            with pytest.raises(AddressError, match=r"^[^\n]+$"):
                await first.connect(text, 5)


async def test_joining_where_somebody_accepts_and_says_nothing() -> None:
    async with network(1) as first:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            text = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{first.addresses[0].split('/')[-1]}"
            async with network(2) as second:
                with pytest.raises(Unreachable, match="no answer"):
                    await second.connect(text, 0.1)


async def test_callbacks_hear_of_peers_once() -> None:
    heard: list[tuple[str, bytes]] = []

    def broken(node: bytes) -> None:
        raise RuntimeError("a bug")

    async with network(1) as first:
        first.on_connect(broken)
        first.on_connect(lambda node: heard.append(("met", node)))
        async with network(2) as second:
            await second.connect(first.addresses[0], 5)
            await until(lambda: second.node in first.peers)
            peer = first.peers[second.node]
            assert peer.inbound
            assert peer.address.startswith("127.0.0.1:")
            assert not second.peers[first.node].inbound
        await until(lambda: not first.peers)
        assert heard == [("met", second.node)]


async def test_blame_bans_below_the_threshold() -> None:
    async with network(1) as first, network(2) as second:
        await second.connect(first.addresses[0], 5)
        await until(lambda: second.node in first.peers)
        for _ in range(10):
            first.blame(second.node, PeerError("rubbish"))
        await until(lambda: not first.peers)
        await until(lambda: not second.peers)
        second.learn(first.node, first.addresses)
        with pytest.raises(Unreachable):
            await second.request(first.node, ECHO, b"", timeout=1, max_response=1)
        first.learn(second.node, second.addresses)
        with pytest.raises(Unreachable, match="banned"):
            await first.connect(second.addresses[0], 5)
        await usable(first)


async def kill_host(victim: Network) -> None:
    """Let something inside libp2p die that no patch knows of."""

    async def bug() -> None:
        raise RuntimeError("a defect that nobody has found yet")

    assert victim.host is not None
    victim.host.get_network().manager.run_task(bug)


async def test_a_host_that_dies_is_restarted_on_the_same_port_with_everything() -> None:
    heard: list[bytes] = []
    async with network(1) as victim, network(2) as other:
        victim.subscribe("roles", lambda origin, data: heard.append(data))
        other.subscribe("roles", lambda origin, data: None)
        await other.add_peer(victim.addresses[0])
        await until(lambda: other.node in victim.peers)
        addresses = victim.addresses
        for restarts in (1, 2):
            await kill_host(victim)
            await until(lambda restarts=restarts: victim.restarts == restarts)  # type: ignore[misc]
            await until(lambda: other.is_connected(victim.node) and victim.is_connected(other.node))
            assert await other.request(victim.node, ECHO, b"x", timeout=5, max_response=8) == b"x"
        assert victim.addresses == addresses
        await until(lambda: victim.node in other.gossip.listeners("roles"))
        await until(lambda: other.node in victim.gossip.listeners("roles"))
        await other.publish("roles", b"after")
        await until(lambda: heard == [b"after"])


async def test_requests_while_the_host_is_down_are_unreachable() -> None:
    async with network(1) as victim, network(2) as other:
        await victim.connect(other.addresses[0], 5)
        await kill_host(victim)
        await until(lambda: victim.host is None)
        with pytest.raises(Unreachable):
            await victim.request(other.node, ECHO, b"", timeout=0.01, max_response=1)
        await victim.publish("roles", b"lost")
        assert victim.peers == {}


async def test_twenty_cycles_leave_no_descriptor_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with network(1) as first:
        for cycle in range(20):
            async with open_network(identity(2), listen=LISTEN, domain_tag="t") as second:
                await second.connect(first.addresses[0], 5)
            await until(lambda: not first.peers)
            if cycle == 0:
                before, threads = descriptors(), threading.active_count()
        await until(lambda: descriptors() <= before)
        assert threading.active_count() <= threads


async def test_shutdown_takes_less_than_two_seconds_with_hostile_peers() -> None:
    async with trio.open_nursery() as nursery:
        async with network(1, NetLimits(keepalive=60)) as victim:
            victim.serve("/test/slow/1", never, max_request=64)

            async def silent(number: int) -> None:
                async with attacker(victim, number):
                    await trio.sleep_forever()

            async def asking(number: int, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
                async with network(number) as other:
                    node = await other.connect(victim.addresses[0], 5)
                    task_status.started()
                    with pytest.raises(Unreachable):
                        await other.request(node, "/test/slow/1", b"", timeout=30, max_response=64)

            for number in range(10, 20):
                nursery.start_soon(silent, number)
            await nursery.start(asking, 30)
            await until(lambda: len(victim.peers) == 11)
            started = trio.current_time()
        assert trio.current_time() - started < 2
        nursery.cancel_scope.cancel()


async def test_shutdown_takes_less_than_two_seconds_while_a_peer_reads_nothing() -> None:
    async with network(1) as victim, attacker(victim) as bad:
        request = bytes(100 << 10)
        hello = line(b"/multistream/1.0.0") + line(ECHO.encode()) + len(request).to_bytes(4, "big")
        for number in range(80):  # 8 MB of answers are more than the socket's buffers take
            await bad.frame(WINDOW, SYN, 2 * number + 1, 1 << 20)
            await bad.data(2 * number + 1, hello + request[: 60 << 10])
            await bad.data(2 * number + 1, request[60 << 10 :])
        connection = victim._connection(bad.node)
        await until(lambda: connection.muxed_conn._write_lock._lock.statistics().tasks_waiting > 20)
        started = trio.current_time()
    assert trio.current_time() - started < 2


async def test_two_nodes_that_know_each_other_settle_on_few_connections() -> None:
    async with network(1) as first, network(2) as second:
        await first.add_peer(second.addresses[0])
        await second.add_peer(first.addresses[0])
        await until(lambda: bool(first.peers) and bool(second.peers))
        await trio.sleep(0.1)
        assert first.host is not None
        assert 1 <= len(first.host.get_network().get_connections()) <= 2


async def test_traffic_is_counted_by_protocol() -> None:
    async with network(1) as first, network(2) as second:
        node = await second.connect(first.addresses[0], 5)
        await second.request(node, ECHO, bytes(1000), timeout=5, max_response=1000)
        assert second.traffic == (1000, 1000)
        await until(lambda: first.traffic == (1000, 1000))
        count = first.counts[ECHO]
        assert (count.requests_received, count.requests_sent) == (1, 0)
