"""Fetching, keeping and forgetting versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from node.net.rpc import Unreachable
from node.weights import Weights as Versions
from protocol.constants import KEPT_VERSIONS
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.records import Weights
from tests.node.fakes import WHOLE_0, Cluster, Faults, manifest_of, open_cluster


def raw(number: int) -> bytes:
    return bytes([number]) + WHOLE_0[1:]


async def stage(cluster: Cluster) -> Entry:
    return await cluster.stage(t="trainer", v="validator", i="inference", j="inference")


async def test_the_newest_version_is_followed_and_five_are_kept(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        versions = [await stage(cluster)]
        running = cluster.running["i"]
        weights = running.node.weights
        assert weights.newest_held() is None
        assert weights.newest_number() == 0
        running.nursery.start_soon(weights.run)
        await weights.wait_changed(10)
        assert weights.held() == [versions[0].id]
        for number in range(1, KEPT_VERSIONS + 2):
            versions.append(await cluster.announce("t", raw(number), versions[-1]))
            await cluster.until(lambda: weights.newest_held() == versions[-1], 10)
            assert weights.paths(versions[-1].id)[1].read_bytes() == raw(number)
        assert weights.held() == [version.id for version in reversed(versions[-KEPT_VERSIONS:])]
        assert weights.outdated(versions[1].id)
        assert not weights.outdated(versions[2].id)
        with pytest.raises(Unreachable, match="not held any more"):
            weights.paths(versions[1].id)
        # Version 0 stays for those who join later; nothing else does.
        kept = {manifest_of(raw(number)).digest for number in range(2, KEPT_VERSIONS + 2)}
        assert set(running.node.versions.held()) == kept | {manifest_of(WHOLE_0).digest}
        assert running.node.health.warnings == {}


async def test_a_version_that_nobody_has_is_waited_for(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        others = [r.id for name, r in cluster.running.items() if name in ("t", "elector")]
        cluster.network.partition([running.id], others)
        running.nursery.start_soon(running.node.weights.run)
        await trio.sleep(10)
        assert running.node.health.warnings["weights"].startswith("version 0 has not arrived: ")
        cluster.network.heal()
        await cluster.until(lambda: running.node.weights.newest_held() == version)
        assert "weights" not in running.node.health.warnings


async def test_a_version_that_everybody_dropped_meanwhile_is_given_up_for_the_newest(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        versions = [await stage(cluster)]
        running = cluster.running["i"]
        weights = running.node.weights
        fetch = weights._fetch

        async def slow(entry: Entry, wanted: Weights) -> None:
            if entry.id == versions[0].id:
                await trio.sleep_forever()
            await fetch(entry, wanted)

        monkeypatch.setattr(Versions, "_fetch", lambda self, entry, wanted: slow(entry, wanted))
        running.nursery.start_soon(weights.run)
        await trio.sleep(1)
        for number in range(1, KEPT_VERSIONS):
            versions.append(await cluster.announce("t", raw(number), versions[-1]))
        await trio.sleep(10)
        assert weights.held() == []  # the trainer still has it, so it may still come
        versions.append(await cluster.announce("t", raw(KEPT_VERSIONS), versions[-1]))
        await cluster.until(lambda: weights.newest_held() == versions[-1], 10)


async def test_a_full_disk_is_waited_out(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        begin = running.node.versions.begin
        monkeypatch.setattr(running.node.versions, "begin", full)
        running.nursery.start_soon(running.node.weights.run)
        await trio.sleep(5)
        assert "No space left" in running.node.health.warnings["weights"]
        monkeypatch.setattr(running.node.versions, "begin", begin)
        await cluster.until(lambda: running.node.weights.newest_held() == version)
        assert running.node.health.warnings == {}


async def test_a_manifest_that_is_not_what_its_entry_says_is_refused(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await stage(cluster)
        trainer, running = cluster.running["t"].node, cluster.running["i"]
        described, other = manifest_of(raw(1)), manifest_of(raw(2))
        trainer.blobs.put(described.encode())
        size = len(described.encode())
        (entry,) = await trainer.log.append(
            Weights(1, 1, version.id, described.digest, size, other.whole, other.size, None)
        )
        await cluster.agree()
        with pytest.raises(PeerError, match="not the one that the weights entry describes"):
            await running.node.weights.hold(entry, timeout=10)
        assert running.node.weights.held() == []
        assert running.node.versions.held() == []


async def test_wrong_chunks_are_their_senders_fault(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await stage(cluster)
        running, relay = cluster.running["i"], cluster.running["j"]
        await relay.node.weights.hold(version, timeout=10)
        await trio.sleep(1)
        relay.port.tamper = lambda data: data[:-1] + b"?" if len(data) == 64 else data
        await running.node.weights.hold(version, timeout=60)
        assert running.node.weights.paths(version.id)[1].read_bytes() == WHOLE_0
        assert {peer for peer, _ in running.port.blamed} <= {relay.id}


async def test_what_arrived_before_a_restart_is_not_fetched_again(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await stage(cluster)
        await cluster.running["i"].node.weights.hold(version, timeout=10)
        gone = cluster.crash("i")
        again = await cluster.node("i", disk=gone.disk)
        cluster.network.partition([again.id], [r.id for n, r in cluster.running.items() if n != "i"])
        await again.node.weights.hold(version, timeout=1)
        assert again.node.weights.held() == [version.id]


async def test_others_leave_the_trainer_to_the_relays_for_a_moment(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference", j="inference")
        await trio.sleep(1)
        began = trio.current_time()
        await cluster.running["r"].node.weights.hold(version, timeout=10)
        assert trio.current_time() - began < 0.2
        cluster.crash("j")
        began = trio.current_time()
        await cluster.running["i"].node.weights.hold(version, timeout=10)
        assert trio.current_time() - began < 0.4  # the relay said that it has it


async def test_holders_best_first(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        for name in ("r", "v"):
            await cluster.running[name].node.weights.hold(version, timeout=10)
        await trio.sleep(1)
        holders = cluster.running["i"].node.weights._holders(version)
        relay, *others, founder = holders
        assert relay == cluster.running["r"].id
        assert set(others) == {cluster.running["v"].id, cluster.running["t"].id}
        assert founder == cluster.running["elector"].id
        cluster.crash("r")
        assert cluster.running["r" if "r" in cluster.running else "i"].node.weights._holders(version)[0] in others
