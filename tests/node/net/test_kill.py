"""A peer process that is killed with SIGKILL in the middle of gossip, and comes back."""

from __future__ import annotations

import subprocess
import sys

import trio

from node.net.guard import NetLimits
from tests.node.net.helpers import ECHO, identity, network, until

CHILD = """
import sys, trio
from node.net.host import open_network
from protocol.identity import Identity

async def main(port, seed):
    async with open_network(Identity(bytes([7]) * 32), listen=[f"/ip4/127.0.0.1/tcp/{port}"], domain_tag="test") as net:
        net.subscribe("roles", lambda origin, data: None)
        await net.add_peer(seed)
        print(net.addresses[0], flush=True)
        while True:
            await net.publish("roles", b"from the child")
            await trio.sleep(0.02)

trio.run(main, *sys.argv[1:])
"""


async def start(port: str, seed: str) -> tuple[subprocess.Popen[bytes], str]:
    """A child process with a network of its own; returns it and its address."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, port, seed], stdout=subprocess.PIPE)  # noqa: ASYNC220  # spawning takes a millisecond
    assert child.stdout is not None
    line = await trio.to_thread.run_sync(child.stdout.readline)
    return child, line.decode().strip()


async def test_a_killed_peer_disturbs_nobody_and_is_met_again() -> None:
    heard: list[bytes] = []
    async with network(1, NetLimits(keepalive=1)) as first, network(2) as second:
        first.subscribe("roles", lambda origin, data: heard.append(origin))
        second.subscribe("roles", lambda origin, data: None)
        await second.connect(first.addresses[0], 5)
        other = identity(7).node
        child, address = await start("0", first.addresses[0])
        try:
            first.learn(other, [address])
            await until(lambda: heard.count(other) >= 3, 60)
            child.kill()
            for _ in range(50):
                await first.publish("roles", b"x" * 50_000)
            await until(lambda: other not in first.peers)
            child.wait()
            assert await second.request(first.node, ECHO, b"x", timeout=5, max_response=1) == b"x"
            heard.clear()
            child.stdout.close()  # type: ignore[union-attr]
            child, _ = await start(address.split("/")[4], first.addresses[0])
            await until(lambda: heard.count(other) >= 3, 60)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]
        assert first.restarts == second.restarts == 0
