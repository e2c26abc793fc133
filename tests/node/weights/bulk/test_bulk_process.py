"""The child's life as the daemon sees it: real processes and sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from node.config import BulkConfig
from node.weights.bulk import bearer_tokens, bulk_ports
from node.weights.bulk.bulk_address import parse
from node.weights.bulk.bulk_messages import (
    ChunksCame,
    DiskRefused,
    ForgetObject,
    FromChild,
    RouteFailed,
    StopTransfer,
    ToChild,
    TransferDone,
    WantFallback,
)
from node.weights.bulk.bulk_process import StartBulk
from node.weights.bulk.holder_connection import HolderConnection, Missing
from node.workers import frames
from node.workers.child_process import child_environment
from protocol.identity import Identity
from protocol.weights.manifest import Manifest
from tests.node.fake_bulk import FakeBulkChild
from tests.node.weights.bulk.harness import CHUNKS, DOMAIN, PEER, make_object
from tests.node.weights.bulk.nodes import FREE, Some, until

NODE = Identity(b"n" * 32)


def open_files(pid: int) -> list[str]:
    return [os.readlink(item) for item in Path(f"/proc/{pid}/fd").iterdir()]


async def fetch(node: Some, manifest: Manifest) -> bytes:
    """All of an object from the node's child."""
    address = parse(node.bulk.addresses[0])
    token = bearer_tokens.mint(node.bulk.secret, PEER, [bearer_tokens.LOCAL], time.monotonic() + 60)
    connection = HolderConnection(address, tls=None, peer=node.id, base_path=address.base_path(DOMAIN), token=token)
    buffers = [memoryview(bytearray(manifest.chunk_size(i))) for i in range(CHUNKS)]

    def work() -> None:
        try:
            connection.get(manifest.digest, 0, buffers, lambda _: None)
        finally:
            connection.close()

    await trio.to_thread.run_sync(work)
    return b"".join(buffers)


async def test_a_child_serves_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    store, manifest, data = make_object(tmp_path / "versions")
    node = Some(tmp_path, NODE, first_pause=0.01)
    assert node.bulk.addresses == []
    assert not node.bulk.send(ChunksCame())
    async with trio.open_nursery() as nursery:
        with node.bulk.ports.open():
            nursery.start_soon(node.bulk.run)
            await until(lambda: node.bulk.up)
            (address,) = node.bulk.addresses
            assert await fetch(node, manifest) == data
            assert os.getpgid(node.bulk.pid) == node.bulk.pid == node.own.children["bulk"]
            assert os.getpriority(os.PRIO_PROCESS, node.bulk.pid) > os.getpriority(os.PRIO_PROCESS, 0)
            first = node.bulk.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: not node.bulk.up and "bulk" in node.health.warnings)
            assert "ended by signal SIGKILL; it is started again" in node.health.warnings["bulk"]
            assert node.bulk.addresses == []
            await until(lambda: node.bulk.up)
            assert node.bulk.pid != first
            # Its port is what it was.
            assert node.bulk.addresses == [address]
            assert await fetch(node, manifest) == data
            assert node.health.warnings == {}
            assert node.own.times == 3
            assert node.own.bulk == (address,)
            # What is deleted is closed there.
            store.retain(lambda present: ())
            node.bulk.send(ForgetObject(manifest.digest))
            assert await node.bulk.synchronize()
            # At once, but for the thread of a connection that has not noticed its end yet.
            await until(lambda: not any("whole.bin" in name for name in open_files(node.bulk.pid)))
            with pytest.raises(Missing):
                await fetch(node, manifest)
            last = node.bulk.pid
            nursery.cancel_scope.cancel()
    assert not os.path.exists(f"/proc/{last}")  # noqa: ASYNC240
    assert "bulk" not in node.own.children


class Rubbish(FakeBulkChild):
    """A child whose first message has no known form."""

    async def read_frame(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return frames.encode({"op": "ready"})[frames.HEADER_BYTES :]


class Silent(FakeBulkChild):
    """A child that never gets ready."""

    async def read_frame(self) -> bytes:
        await trio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("child", [Rubbish, Silent])
async def test_one_that_says_rubbish_or_does_not_start_is_ended_and_another_is_started(
    tmp_path: Path, child: StartBulk, autojump_clock: trio.testing.MockClock
) -> None:
    node = Some(tmp_path, NODE, start=child)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.bulk.run)
        await until(lambda: node.bulk.starts >= 3, 100)
        assert not node.bulk.up
        assert "was ended; it is started again in" in node.health.warnings["bulk"]
        nursery.cancel_scope.cancel()


def test_it_dies_with_the_daemon(tmp_path: Path) -> None:
    """A daemon that is killed leaves no child behind."""
    program = textwrap.dedent(
        """
        import sys, trio
        from pathlib import Path
        from protocol.identity import Identity
        from tests.node.weights.bulk.nodes import Some, until

        async def main():
            node = Some(Path(sys.argv[1]), Identity(b"n" * 32))
            async with trio.open_nursery() as nursery:
                with node.bulk.ports.open():
                    nursery.start_soon(node.bulk.run)
                    await until(lambda: node.bulk.up)
                    print(node.bulk.pid, flush=True)
                    await trio.sleep_forever()

        trio.run(main)
        """
    )
    (tmp_path / "versions").mkdir()
    root = Path(__file__).resolve().parents[4]
    environment = child_environment({}) | {"PYTHONPATH": str(root)}
    daemon = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, env=environment, cwd=root
    )
    with daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        daemon.kill()
    until_ = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until_:
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
            break  # dead, and waits for whoever adopted it
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{pid}").exists()


async def test_a_busy_port_of_the_operators_is_a_warning_and_others_are_fetched_from_meanwhile(tmp_path: Path) -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    node = Some(tmp_path, NODE, config=BulkConfig(listen=(f"/ip4/127.0.0.1/tcp/{port}",)), busy_pause=0.05)
    async with trio.open_nursery() as nursery:
        with node.bulk.ports.open():
            nursery.start_soon(node.bulk.run)
            await until(lambda: node.bulk.up)
            assert f"port {port} on 127.0.0.1 is in use" in node.health.warnings["bulk port"]
            assert node.bulk.addresses == []
            holder.close()
            await until(lambda: node.bulk.addresses != [])
            assert node.bulk.addresses == [f"/ip4/127.0.0.1/tcp/{port}/http"]
            assert node.health.warnings == {}
            nursery.cancel_scope.cancel()


def test_a_busy_port_that_nobody_chose_is_replaced(tmp_path: Path) -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    wanted = holder.getsockname()[1]
    node = Some(tmp_path, NODE, listen=(f"/ip4/127.0.0.1/tcp/{wanted - bulk_ports.PORT_STEP}",))
    with holder, node.bulk.ports.open():
        (address,) = node.bulk.ports.addresses()
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert parse(address).port not in (0, wanted)
        assert node.health.warnings == {}


async def test_what_is_announced(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    announced = ("/dns4/weights.example.org/tcp/443/https/http-path/a%2Fb",)
    proxied = Some(tmp_path, NODE, config=BulkConfig(listen=FREE, announce=announced), start=FakeBulkChild)
    everywhere = Some(tmp_path, NODE, config=BulkConfig(listen=("/ip4/0.0.0.0/tcp/0",)), start=FakeBulkChild)
    async with trio.open_nursery() as nursery:
        with proxied.bulk.ports.open(), everywhere.bulk.ports.open():
            assert proxied.bulk.addresses == []  # until a child serves
            for node in (proxied, everywhere):
                nursery.start_soon(node.bulk.run)
                await node.bulk.wait_up()
            assert proxied.bulk.addresses == list(announced)
            assert everywhere.bulk.addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
            assert all(parse(item).port for item in everywhere.bulk.addresses)
            nursery.cancel_scope.cancel()


async def test_what_a_child_says_of_a_transfer_that_is_over_means_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A late message is no reason to end the process that carries everybody's weights."""
    said: list[FromChild] = []

    class Late(FakeBulkChild):
        async def send(self, frame: bytes) -> None:
            await super().send(frame)
            message = frames.decode(frame[frames.HEADER_BYTES :], ToChild)
            if isinstance(message, StopTransfer):
                for late in (
                    WantFallback(message.digest, PEER, 0),
                    WantFallback(message.digest, PEER, -1),
                    DiskRefused(message.digest, 28, "full"),
                    RouteFailed(message.digest, PEER, True),
                    TransferDone(message.digest),
                ):
                    self.say(late)
                    said.append(late)

    node = Some(tmp_path, NODE, start=Late)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.bulk.run)
        await node.bulk.wait_up()
        with node.bulk.open_transfer(bytes(32)):
            await trio.sleep(1)
        await trio.sleep(1)
        assert len(said) == 5
        assert await node.bulk.synchronize()
        assert node.bulk.starts == 1
        assert node.health.warnings == {}
        nursery.cancel_scope.cancel()


def test_the_child_loads_little() -> None:
    """A node has one all the time."""
    heavy = "{'trio', 'libp2p', 'torch', 'numpy', 'nacl'}"
    program = f"import sys, node.weights.bulk.bulk_child; print(*sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[4]
    environment = child_environment({}) | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == ""
