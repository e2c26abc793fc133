"""What the parts of a node share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio
import trio.testing

from node.context import Health, innermost
from node.net.requests import Unreachable
from protocol.log.entry import Entry
from protocol.records import Rollout
from tests.node.fake_children import CONFIG, Faults
from tests.node.fakes import open_cluster
from tests.protocol.builders import digest


def test_a_warning_stands_until_it_is_cleared_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    health = Health(logging.getLogger("test"))
    health.warn("disk", "the disk is full")
    health.warn("disk", "the disk is full")
    health.warn("weights", "version 3 has not arrived")
    assert health.warnings == {"disk": "the disk is full", "weights": "version 3 has not arrived"}
    health.warn("disk", "the disk fails")
    health.clear("disk")
    health.clear("disk")
    health.clear("nothing")
    assert health.warnings == {"weights": "version 3 has not arrived"}
    assert caplog.messages == [
        "the disk is full",
        "version 3 has not arrived",
        "the disk fails",
        "disk: in order again",
    ]


def test_the_error_in_groups_of_groups() -> None:
    error = ValueError("x")
    assert innermost(ExceptionGroup("a", [ExceptionGroup("b", [error]), KeyError()])) is error
    assert innermost(error) is error


async def test_a_file_of_the_domain_is_fetched_once_from_whoever_has_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        lacking = await cluster.node("a")
        node = (await cluster.node("b")).node
        blob = cluster.domain.model.config
        path = await node.blob_path(blob.hash, blob.size)
        assert path.read_bytes() == CONFIG
        for name in ("elector", "a"):
            cluster.crash(name)
        assert await node.blob_path(blob.hash, blob.size) == path
        assert await node.fetch_blob(blob.hash, blob.size, [], timeout=1) == CONFIG
        with pytest.raises(Unreachable, match="nobody to ask"):
            await lacking.node.fetch_blob(blob.hash, blob.size, [], timeout=1)


async def test_a_pause_counts_steps(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator", i="inference")
        node = cluster.running["i"].node
        assert not node.paused()
        node.pause_at_step = 1
        assert not node.paused()
        for name in ("v", "i", "t", "elector"):
            cluster.crash(name)
    async with open_cluster(tmp_path / "trained", faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            await cluster.start(name, pause_at_step=1)
        await cluster.until(lambda: all(running.own.paused() for running in cluster.running.values()))
        assert {running.steps for running in cluster.running.values()} == {1}


async def test_a_majority_of_the_due_must_be_here_and_at_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", w="validator", i="inference")
        await trio.sleep(1)
        node = cluster.running["i"].node
        v, w = cluster.running["v"].id, cluster.running["w"].id
        assert node.will_judge([v])
        assert node.will_judge([v, w])
        assert not node.will_judge([])
        assert not node.will_judge([v, digest("gone")])
        assert node.will_judge([v, w, digest("gone")])
        # At most three are due, so two decide, however many there are.
        assert node.will_judge([v, w, *(digest(f"gone {i}") for i in range(5))])
        (entry,) = await node.log.append(Rollout(version.id, 0, 2, 8, 16, digest("file"), 10, 2))
        assert isinstance(entry, Entry)
        assert node.will_be_judged(entry)
        cluster.running["w"].own.role = "inference"
        await trio.sleep(1)
        assert not node.will_be_judged(entry)
