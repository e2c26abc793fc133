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

from node.config import BulkConfig
from node.weights.bulk import bearer_tokens, bulk_process
from node.weights.bulk.bulk_address import parse
from node.weights.bulk.holder_connection import Connection, Missing
from node.workers.child_process import child_environment
from protocol.identity import Identity
from protocol.weights.manifest import Manifest
from tests.node.weights.bulk.harness import CHUNKS, DOMAIN, PEER, make_object
from tests.node.weights.bulk.nodes import FREE, Some, until

NODE = Identity(b"n" * 32)


def open_files(pid: int) -> list[str]:
    return [os.readlink(item) for item in Path(f"/proc/{pid}/fd").iterdir()]


async def fetch(node: Some, manifest: Manifest) -> bytes:
    """All of an object from the node's child."""
    address = parse(node.bulk.addresses[0])
    token = bearer_tokens.mint(node.bulk.secret, PEER, [bearer_tokens.LOCAL], time.monotonic() + 60)
    connection = Connection(address, tls=None, peer=node.id, base_path=address.base_path(DOMAIN), token=token)
    buffers = [memoryview(bytearray(manifest.chunk_size(i))) for i in range(CHUNKS)]

    def work() -> None:
        try:
            connection.get(manifest.digest, 0, buffers, lambda _: None)
        finally:
            connection.close()

    await trio.to_thread.run_sync(work)
    return b"".join(buffers)


async def test_a_child_serves_and_is_replaced_when_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_process, "FIRST_PAUSE", 0.01)
    store, manifest, data = make_object(tmp_path / "versions")
    node = Some(tmp_path, NODE)
    changes: list[bool] = []
    node.bulk.on_change(changes.append)
    assert node.bulk.addresses == []
    assert not node.bulk.tell("stir")
    async with trio.open_nursery() as nursery:
        with node.bulk.open():
            nursery.start_soon(node.bulk.run)
            await until(lambda: node.bulk.up)
            (address,) = node.bulk.addresses
            assert await fetch(node, manifest) == data
            assert os.getpgid(node.bulk.pid) == node.bulk.pid == node.children["bulk"]
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
            assert node.announced == 3
            # What is deleted is closed there.
            store.retain(lambda present: ())
            assert await node.bulk.call("forget", digest=manifest.digest)
            # At once, but for the thread of a connection that has not noticed its end yet.
            await until(lambda: not any("whole.bin" in name for name in open_files(node.bulk.pid)))
            with pytest.raises(Missing):
                await fetch(node, manifest)
            last = node.bulk.pid
            nursery.cancel_scope.cancel()
    assert not os.path.exists(f"/proc/{last}")  # noqa: ASYNC240
    assert changes == [True, False, True, False]
    assert "bulk" not in node.children


async def test_rubbish_from_a_child_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_process, "FIRST_PAUSE", 0.01)
    node = Some(tmp_path, NODE)
    # What a child says at its start is given no known form.
    del node.bulk._handlers["ready"]
    async with trio.open_nursery() as nursery:
        with node.bulk.open():
            nursery.start_soon(node.bulk.run)
            await until(lambda: node.bulk.starts >= 2)
            assert not node.bulk.up
            assert "SIGKILL" in node.health.warnings["bulk"]
            nursery.cancel_scope.cancel()


async def test_a_child_that_does_not_start_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_process, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(bulk_process, "START_SECONDS", 0.05)
    node = Some(tmp_path, NODE)
    async with trio.open_nursery() as nursery:
        with node.bulk.open():
            nursery.start_soon(node.bulk.run)
            await until(lambda: node.bulk.starts >= 2)
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
                with node.bulk.open():
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


async def test_a_busy_port_of_the_operators_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_process, "BUSY_PAUSE", 0.05)
    holder = socket.create_server(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    node = Some(tmp_path, NODE, config=BulkConfig(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))
    async with trio.open_nursery() as nursery:
        with node.bulk.open():
            nursery.start_soon(node.bulk.run)
            assert f"port {port} on 127.0.0.1 is in use" in node.health.warnings["bulk"]
            assert node.bulk.addresses == []
            holder.close()
            await until(lambda: node.bulk.up)
            assert node.bulk.addresses == [f"/ip4/127.0.0.1/tcp/{port}/http"]
            assert node.health.warnings == {}
            nursery.cancel_scope.cancel()


def test_a_busy_port_that_nobody_chose_is_replaced(tmp_path: Path) -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    wanted = holder.getsockname()[1]
    node = Some(tmp_path, NODE)
    node.config = node.config.__class__(listen=(f"/ip4/127.0.0.1/tcp/{wanted - bulk_process.PORT_STEP}",))
    with holder, node.bulk.open():
        node.bulk.up = True
        (address,) = node.bulk.addresses
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert parse(address).port not in (0, wanted)
        assert node.health.warnings == {}


def test_what_is_announced(tmp_path: Path) -> None:
    announced = ("/dns4/weights.example.org/tcp/443/https/http-path/a%2Fb",)
    node = Some(tmp_path, NODE, config=BulkConfig(listen=FREE, announce=announced))
    with node.bulk.open():
        assert node.bulk.addresses == []  # until a child serves
        node.bulk.up = True
        assert node.bulk.addresses == list(announced)
    everywhere = Some(tmp_path, NODE, config=BulkConfig(listen=("/ip4/0.0.0.0/tcp/0",)))
    with everywhere.bulk.open():
        everywhere.bulk.up = True
        assert everywhere.bulk.addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
        assert all(parse(item).port for item in everywhere.bulk.addresses)


def test_the_child_loads_little() -> None:
    """A node has one all the time."""
    heavy = "{'trio', 'libp2p', 'torch', 'numpy', 'nacl'}"
    program = f"import sys, node.weights.bulk.bulk_child; print(*sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[4]
    environment = child_environment({}) | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == ""
