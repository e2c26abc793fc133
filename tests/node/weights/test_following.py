"""Fetching, keeping and forgetting versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.log.replicated_log import NotReady
from node.net.blob_exchange import CHUNK_PROTOCOL
from node.net.requests import Unreachable
from protocol.constants import KEPT_VERSIONS
from protocol.errors import PeerError
from protocol.log.entry import Entry, make
from protocol.records import Weights
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest
from tests.node.fake_children import WHOLE_0, Faults, manifest_of
from tests.node.fakes import Cluster, open_cluster


def raw(number: int) -> bytes:
    return bytes([number]) + WHOLE_0[1:]


async def stage(cluster: Cluster) -> Entry:
    return await cluster.stage(t="trainer", v="validator", i="inference", j="inference")


async def test_the_newest_version_is_followed_and_five_are_kept(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        versions = [await stage(cluster)]
        running = cluster.running["i"]
        weights = running.weights
        assert weights.held.newest_held() is None
        assert weights.held.newest_number() == 0
        running.nursery.start_soon(weights.run)
        await cluster.until(lambda: bool(weights.held.ids()), 10)
        assert weights.held.ids() == [versions[0].id]
        for number in range(1, KEPT_VERSIONS + 2):
            versions.append(await cluster.announce("t", raw(number), versions[-1]))
            await cluster.until(lambda: weights.held.newest_held() == versions[-1], 10)
            assert weights.held.paths(versions[-1].id)[1].read_bytes() == raw(number)
        assert weights.held.ids() == [version.id for version in reversed(versions[-KEPT_VERSIONS:])]
        assert weights.held.outdated(versions[1].id)
        assert not weights.held.outdated(versions[2].id)
        with pytest.raises(Unreachable, match="not held any more"):
            weights.held.paths(versions[1].id)
        # Version 0 stays for those who join later; nothing else does.
        kept = {manifest_of(raw(number)).digest for number in range(2, KEPT_VERSIONS + 2)}
        kept.add(manifest_of(WHOLE_0).digest)
        await cluster.until(lambda: set(running.versions.held()) == kept, 10)
        assert running.node.health.warnings == {}


async def test_a_version_that_nobody_has_is_waited_for(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        others = [r.id for name, r in cluster.running.items() if name in ("t", "elector")]
        cluster.network.partition([running.id], others)
        running.nursery.start_soon(running.weights.run)
        await trio.sleep(10)
        assert running.node.health.warnings["weights"].startswith("version 0 has not arrived: ")
        cluster.network.heal()
        await cluster.until(lambda: running.weights.held.newest_held() == version)
        assert "weights" not in running.node.health.warnings


def trickle(cluster: Cluster, raw: bytes) -> None:
    """Whoever is asked for a chunk of this version takes for ever."""

    async def wait(request: bytes) -> None:
        if manifest_of(raw).digest in request:
            await trio.sleep_forever()

    for running in cluster.running.values():
        running.before_answering(CHUNK_PROTOCOL, wait)


async def test_a_version_that_everybody_dropped_meanwhile_is_given_up_for_the_newest(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        versions = [await stage(cluster)]
        running = cluster.running["i"]
        weights = running.weights
        trickle(cluster, WHOLE_0)
        running.nursery.start_soon(weights.run)
        await trio.sleep(1)
        for number in range(1, KEPT_VERSIONS):
            versions.append(await cluster.announce("t", raw(number), versions[-1]))
        await trio.sleep(10)
        assert weights.held.ids() == []  # the trainer still has it, so it may still come
        versions.append(await cluster.announce("t", raw(KEPT_VERSIONS), versions[-1]))
        await cluster.until(lambda: weights.held.newest_held() == versions[-1], 10)


async def test_one_liar_that_holds_an_old_version_keeps_nobody_from_the_newest(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        versions = [await stage(cluster)]
        running, liar = cluster.running["i"], cluster.running["j"]
        weights = running.weights
        liar.own.versions = [versions[0].id]
        trickle(cluster, WHOLE_0)
        running.nursery.start_soon(weights.run)
        for number in range(1, KEPT_VERSIONS + 1):
            await trio.sleep(1)
            assert weights.held.newest_held() is None
            versions.append(await cluster.announce("t", raw(number), versions[-1]))
        assert not weights.holders_of.dropped(versions[0])
        await cluster.until(lambda: weights.held.newest_held() == versions[-1], 20)


async def test_a_disk_that_refuses_is_waited_out(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        folder = running.versions.folder
        folder.rename(tmp_path / "aside")
        running.nursery.start_soon(running.weights.run)
        await trio.sleep(5)
        assert "No such file" in running.node.health.warnings["weights"]
        (tmp_path / "aside").rename(folder)
        await cluster.until(lambda: running.weights.held.newest_held() == version)
        assert running.node.health.warnings == {}


async def test_a_manifest_that_is_not_what_its_entry_says_is_refused(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        trainer, running = cluster.running["t"], cluster.running["i"]
        described, other = manifest_of(raw(1)), manifest_of(raw(2))
        trainer.blobs.put(described.encode())
        size = len(described.encode())
        (entry,) = await trainer.node.log.append(
            Weights(1, 1, version.id, described.digest, size, other.whole, other.size, None)
        )
        await cluster.agree()
        with pytest.raises(PeerError, match="not the one that the weights entry describes"):
            await running.weights.hold(entry, timeout=10)
        assert running.weights.held.ids() == []
        assert running.versions.held() == []


async def test_wrong_chunks_are_their_senders_fault(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running, relay = cluster.running["i"], cluster.running["j"]
        await relay.weights.hold(version, timeout=10)
        await trio.sleep(1)
        relay.port.tamper = lambda data: data[:-1] + b"?" if len(data) == 64 else data
        await running.weights.hold(version, timeout=60)
        assert running.weights.held.paths(version.id)[1].read_bytes() == WHOLE_0
        assert {peer for peer, _ in running.port.blamed} <= {relay.id}


async def test_what_arrived_before_a_restart_is_not_fetched_again(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        await cluster.running["i"].weights.hold(version, timeout=10)
        gone = cluster.crash("i")
        again = await cluster.node("i", disk=gone.disk)
        cluster.network.partition([again.id], [r.id for n, r in cluster.running.items() if n != "i"])
        await again.weights.hold(version, timeout=1)
        assert again.weights.held.ids() == [version.id]


async def test_others_leave_the_trainer_to_the_relays_for_a_moment(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference", j="inference")
        await trio.sleep(1)
        began = trio.current_time()
        await cluster.running["r"].weights.hold(version, timeout=10)
        assert trio.current_time() - began < 0.2
        cluster.crash("j")
        began = trio.current_time()
        await cluster.running["i"].weights.hold(version, timeout=10)
        assert trio.current_time() - began < 0.4  # the relay said that it has it


async def test_holders_best_first(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        for name in ("r", "v"):
            await cluster.running[name].weights.hold(version, timeout=10)
        await trio.sleep(1)
        weights, ids = cluster.running["i"].weights, {n: r.id for n, r in cluster.running.items()}
        holders = weights.holders_of.version(version)
        assert list(holders)[:2] == [ids["r"], ids["v"]]
        assert set(list(holders)[2:]) == {ids["t"], ids["elector"]}  # the author, and the founder for version 0
        assert {node for node, holding in holders.items() if holding.spared} == {ids["t"], ids["elector"]}
        assert all(holding.whole for holding in holders.values())
        cluster.crash("r")
        cluster.crash("v")
        holders = weights.holders_of.version(version)
        assert set(holders) == {ids["t"], ids["elector"]}
        assert not any(holding.spared for holding in holders.values())  # nobody else is left


async def test_what_arrives_is_announced_and_served(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    """A relay that lacks a part is a holder of the rest, whatever became of the trainer."""
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        relay, running = cluster.running["r"], cluster.running["i"]
        manifest = manifest_of(WHOLE_0)
        relay.blobs.put(manifest.encode())
        with relay.weights.holders_of.arrives(version):
            relay.versions.begin(manifest)
            await trio.sleep(1)
            assert running.presences.live()[relay.id].arriving == (version.id,)
            assert running.weights.holders_of.version(version)[relay.id] == Holding(whole=False, preference=1.0)
            others = [r.id for name, r in cluster.running.items() if name in ("t", "elector")]
            cluster.network.partition([running.id], others)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: running.weights.hold(version, timeout=30))
                await trio.sleep(3)
                assert list(running.own.arriving) == [version.id]
                relay.versions.write_chunk(manifest.digest, 0, WHOLE_0)
        assert running.weights.held.ids() == [version.id]
        assert list(running.own.arriving) == []
        await trio.sleep(1)
        assert cluster.running["v"].presences.live()[running.id].arriving == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"size": 68}, "absurd size"),
        ({"manifest_size": 32 << 20}, "absurd size"),
        ({"whole": bytes(32)}, "not the one that the weights entry describes"),
    ],
)
async def test_an_entry_that_promises_something_else_is_refused(
    tmp_path: Path,
    faults: Faults,
    autojump_clock: trio.testing.MockClock,
    change: dict[str, Any],
    why: str,
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        trainer, running = cluster.running["t"], cluster.running["i"]
        manifest = manifest_of(raw(1))
        trainer.blobs.put(manifest.encode())
        honest = Weights(1, 1, version.id, manifest.digest, len(manifest.encode()), manifest.whole, manifest.size, None)
        (entry,) = await trainer.node.log.append(replace(honest, **change))
        await cluster.agree()
        with pytest.raises(PeerError, match=why):
            await running.weights.hold(entry, timeout=10)
        assert running.versions.held() == []
        assert list(running.own.arriving) == []


async def test_other_tensors_than_version_0s_are_refused_before_a_byte_is_fetched(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        trainer, running = cluster.running["t"], cluster.running["i"]
        data = raw(1)
        for tensors in ([("weights", "F32", (16,))], [("weights", "BF16", (4, 8))], [("others", "F32", (4, 4))]):
            manifest = Manifest.of_file(tensors, data, 5)
            file = trainer.node.directory.work / "made.bin"
            file.write_bytes(data)
            trainer.versions.adopt(manifest.encode(), file)
            trainer.blobs.put(manifest.encode())
            size = len(manifest.encode())
            made = Weights(1, 1, version.id, manifest.digest, size, manifest.whole, manifest.size, None)
            (entry,) = await trainer.node.log.append(made)
            await cluster.agree()
            if running.node.log.ledger.weights(entry.id) is not None:
                with pytest.raises(PeerError, match="other tensors than those of version 0"):
                    await running.weights.hold(entry, timeout=10)
            with pytest.raises(PeerError, match="other tensors than those of version 0"):
                await running.weights.keep_unpublished(manifest, None, trainer.id)
        assert running.versions.held() == []


async def test_a_version_of_no_trainer_in_office_is_refused(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running, usurper = cluster.running["i"], cluster.running["v"]
        manifest = manifest_of(raw(1))
        usurper.blobs.put(manifest.encode())
        size = len(manifest.encode())
        for term in (1, 2):
            made = Weights(term, 1, version.id, manifest.digest, size, manifest.whole, manifest.size, None)
            with pytest.raises(NotReady, match="the grant of a version is missing"):
                await usurper.node.log.append(made, timeout=5)
            head = running.node.log.replica.heads[usurper.id]
            anchor = running.node.log.replica.newest_cut_id
            entry = make(usurper.node.identity, cluster.domain.id, head.seq + 1, head.entry_id, anchor, made)
            with pytest.raises(PeerError, match="another than the trainer whose term counts"):
                await running.weights.hold(entry, timeout=10)
        assert running.node.log.ledger.newest_weights() == version
        assert running.versions.held() == []


async def test_two_versions_are_in_flight_at_once(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first = await stage(cluster)
        second = await cluster.announce("t", raw(1), first)
        running = cluster.running["i"]
        wanted = [manifest_of(WHOLE_0).digest, manifest_of(raw(1)).digest]
        gate = trio.Event()

        async def wait(request: bytes) -> None:
            if wanted[0] in request:
                await gate.wait()

        for holder in cluster.running.values():
            holder.before_answering(CHUNK_PROTOCOL, wait)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: running.weights.hold(first, timeout=60))
            await trio.sleep(1)
            await running.weights.hold(second, timeout=10)  # does not wait for the other
            assert running.weights.held.ids() == [second.id]
            assert set(running.versions.held()) == set(wanted)  # what is on its way is not forgotten
            assert list(running.own.arriving) == [first.id]
            gate.set()
        assert running.weights.held.ids() == [second.id, first.id]


async def test_one_version_is_fetched_once_however_many_want_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running, asked = cluster.running["i"], []

        async def count(request: bytes) -> None:
            await trio.lowlevel.checkpoint()
            asked.append(request)

        for holder in cluster.running.values():
            holder.before_answering(CHUNK_PROTOCOL, count)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(lambda: running.weights.hold(version, timeout=30))
        assert running.weights.held.ids() == [version.id]
        assert len(asked) == 1


async def test_the_quota_pauses_downloads_and_they_go_on_with_room(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        running.nursery.start_soon(running.weights.run)
        await cluster.until(lambda: running.weights.held.newest_held() == version, 10)
        running.versions.quota = 2 * 64 - 1
        newer = await cluster.announce("t", raw(1), version)
        await trio.sleep(5)
        assert "would exceed the quota" in running.node.health.warnings["weights"]
        assert running.weights.held.ids() == [version.id]  # and nothing was lost
        running.versions.quota = 2 * 64
        await cluster.until(lambda: running.weights.held.newest_held() == newer, 10)
        assert running.node.health.warnings == {}
