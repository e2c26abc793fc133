"""Known peers on disk."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from node.peers import peers_file
from protocol.identity import peer_id
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster
from tests.protocol.builders import key


async def test_known_peers_are_kept_and_a_disk_that_refuses_is_told(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("a")
        directory, peer = running.node.directory, key("b").node
        running.port.learned[peer] = [f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_id(peer)}"]
        running.keep("remembering peers")
        await trio.sleep(peers_file.EVERY + 1)
        assert directory.known_peers() == {peer_id(peer): tuple(running.port.learned[peer])}
        # What has not changed is not written again.
        written = directory.peers_file.stat().st_mtime_ns
        await trio.sleep(3 * peers_file.EVERY)
        assert directory.peers_file.stat().st_mtime_ns == written
        directory.peers_file.unlink()
        directory.peers_file.mkdir()
        running.port.learned.clear()
        await trio.sleep(peers_file.EVERY)
        assert running.warnings == {"peers file": f"{directory.peers_file}: Is a directory"}
        directory.peers_file.rmdir()
        await trio.sleep(peers_file.EVERY)
        assert running.warnings == {}
        assert directory.known_peers() == {}
