"""Weights over the control socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio
import trio.testing

from protocol.records import Weights
from tests.node.fake_children import WHOLE_0, Faults, manifest_of
from tests.node.fakes import Cluster, Running, open_cluster

PULLS = "fetching on demand"


async def stage(cluster: Cluster) -> Running:
    first = await cluster.stage(t="trainer", v="validator", i="inference")
    await cluster.announce("t", b"\7" + WHOLE_0[1:], first)
    running = cluster.running["i"]
    running.keep(PULLS)
    return running


async def pulled(running: Running, version: int | str) -> dict[str, Any]:
    with trio.fail_after(30):
        while True:
            found = await running.ask("weights-pull", version=version)
            if found.get("done") or "error" in found:
                return found
            assert {"part", "have", "total", "rate", "peers", "version", "size"} <= found.keys()
            await trio.sleep(0.1)


async def test_a_version_is_pulled_listed_and_cleaned_up(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await stage(cluster)
        assert (await running.ask("weights"))["objects"] == []
        assert (await pulled(running, 0))["version"] == 0
        assert (await pulled(running, -1))["version"] == 1
        assert len(running.weights.held.ids()) == 2
        found = await running.ask("weights")
        assert [row["numbers"] for row in found["objects"]] == [[1], [0]]
        ids = [entry.id.hex() for entry in running.node.log.ledger.lineage()]
        assert [row["ids"] for row in found["objects"]] == [[ids[1]], [ids[0]]]
        assert (await pulled(running, ids[0]))["version"] == (await pulled(running, ids[0][:8]))["version"] == 0
        assert all(row["here"] == row["size"] == 64 and row["kept"] for row in found["objects"])
        assert found["applied"] == 0
        # A quota that has no room for both: the older one may go, though not while it may be trained with.
        running.versions.quota = 64
        found = await running.ask("weights-gc", dry_run=False)
        assert found["gone"] == []
        assert found["shortage"] is not None
        # An object that belongs to nothing.
        file = running.node.directory.work / "file"
        file.write_bytes(b"\1" * 64)
        stray = running.versions.adopt(manifest_of(b"\1" * 64).encode(), file)
        assert (await running.ask("weights-gc", dry_run=True))["gone"][0]["digest"] == stray.hex()
        assert stray in running.versions.held()
        await running.ask("weights-gc", dry_run=False)
        assert stray not in running.versions.held()
        assert len(running.weights.held.ids()) == 2


async def test_what_cannot_be_pulled_is_an_error(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await stage(cluster)
        ids = [entry.id.hex() for entry in running.node.log.ledger.lineage()]
        assert await pulled(running, 5) == {"error": "there is no version 5"}
        for request in ({"version": True}, {"version": ids[0][:7]}, {"version": "0" * 64}, {}):
            assert "error" in await running.ask("weights-pull", **request)
        assert "error" in await running.ask("weights-gc", dry_run=1)


async def test_a_pull_that_fails_says_why(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await stage(cluster)
        newest = running.node.log.ledger.newest_weights()
        assert newest is not None
        assert isinstance(newest.payload, Weights)
        # A file stands where the version's folder belongs.
        (running.versions.folder / newest.payload.manifest.hex()).touch()
        found = await pulled(running, 1)
        assert found["error"].startswith("version 1 does not arrive: [Errno ")
        # Somebody gave up on one before it failed. Who asks later wants to know of now.
        assert "error" not in await running.ask("weights-pull", version=1)
        await trio.sleep(60)
        assert "error" not in await running.ask("weights-pull", version=1)
