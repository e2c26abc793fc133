"""A founder may vanish once others joined: they hold what the genesis names."""

from __future__ import annotations

from pathlib import Path

import trio.testing

from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster

SERVICE = "fetching what the genesis names"


async def test_every_member_fetches_what_the_genesis_names_and_gives_it_to_others(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        early = await cluster.node("a")
        early.keep(SERVICE)
        wanted = cluster.domain.blobs
        assert len(wanted) == 5
        await cluster.until(lambda: all(early.blobs.has(blob.hash) for blob in wanted))
        await cluster.agree()
        cluster.crash("elector")
        late = await cluster.node("b", join=False)
        late.keep(SERVICE)
        await cluster.until(lambda: all(late.blobs.has(blob.hash) for blob in wanted))
        assert "founding files" not in late.node.health.warnings


async def test_what_nobody_gives_is_told_and_fetched_later(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        late = await cluster.node("b", join=False)
        late.keep(SERVICE)
        await cluster.until(lambda: "founding files" in late.node.health.warnings)
        await cluster.node("elector")
        await cluster.until(lambda: "founding files" not in late.node.health.warnings, 400)
