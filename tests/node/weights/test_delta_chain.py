"""Versions by deltas: chosen by cost, chained, handed on, and replaced by the whole where they do not serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from node.weights import fetching, second_holder
from node.weights.held import payload
from node.workers.child_process import Kind, WorkerError
from protocol.log.entry import Entry
from protocol.records import Blob
from protocol.weights.delta import MAX_CHAIN, DeltaManifest, Speed, largest_manifest
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import Cluster, Running, open_cluster

SLOW = Speed(receive=1.0, hash=1e9, apply=1e9, start=0.0)
"""A link on which every byte counts: the models here have 64."""


def raw(number: int) -> bytes:
    return bytes([number]) + WHOLE_0[1:]


async def stage(cluster: Cluster, speed: Speed | None = SLOW) -> tuple[Entry, Running]:
    """A trainer "t" that holds version 0, and a node "i" that holds it too."""
    first = await cluster.stage(t="trainer", v="validator", i="inference", j="inference")
    for running in cluster.running.values():
        if speed is not None:
            running.weights.fetching.rates.speed = speed
    receiver = cluster.running["i"]
    await receiver.weights.hold(first, timeout=10)
    return first, receiver


async def chain(cluster: Cluster, first: Entry, count: int, *, delta: bool = True) -> list[Entry]:
    versions = [first]
    for number in range(1, count + 1):
        versions.append(await cluster.announce("t", raw(number), versions[-1], delta=delta))
    return versions


def whole(running: Running, version: Entry) -> bytes:
    return running.weights.held.paths(version.id)[1].read_bytes()


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


async def test_a_version_comes_by_its_delta_where_that_is_quicker(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        version = (await chain(cluster, first, 1))[1]
        await receiver.weights.hold(version, timeout=10)
        assert whole(receiver, version) == raw(1)
        assert receiver.weights.deltas.applied == 1
        assert receiver.node.health.warnings == {}
        # It can give both to others now.
        made = payload(version)
        assert made.delta is not None
        assert receiver.versions.complete(made.delta)
        assert receiver.versions.complete(made.manifest)
        # Who was not there at the time takes the whole of the chain.
        cluster.crash("t")
        other = cluster.running["j"]
        await other.weights.hold(version, timeout=30)
        assert whole(other, version) == raw(1)


async def test_two_who_want_a_version_do_not_both_make_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        versions = await chain(cluster, first, 2)
        targets: list[str] = []
        faults.before["apply"] = lambda: targets.append(faults.arguments[-1]["target"])
        async with trio.open_nursery() as nursery:
            for version in (versions[1], versions[2], versions[1], versions[2]):
                nursery.start_soon(receiver.weights.hold, version)
        assert [whole(receiver, version) for version in versions[1:]] == [raw(1), raw(2)]
        assert len(targets) == len(set(targets))
        assert targets


async def test_the_whole_comes_where_it_is_quicker(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster, speed=None)
        version = (await chain(cluster, first, 1))[1]
        await receiver.weights.hold(version, timeout=10)
        assert whole(receiver, version) == raw(1)
        assert receiver.weights.deltas.applied == 0
        assert faults.running["delta"] == 0


@pytest.mark.parametrize("missed", [2, MAX_CHAIN, MAX_CHAIN + 1])
async def test_missed_versions_are_made_up_by_a_chain(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock, missed: int
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        receiver.weights.fetching.rates.speed = Speed(receive=1e-3, hash=1e9, apply=1e9, start=0.0)
        versions = await chain(cluster, first, missed)
        sizes = [payload(version).size for version in versions]
        await receiver.weights.hold(versions[-1], timeout=30)
        assert whole(receiver, versions[-1]) == raw(missed)
        # Three deltas of 20 bytes are less than the whole of 64; more are not.
        expected = missed if missed * delta_size(receiver, cluster, versions[1]) < sizes[0] and missed <= 4 else 0
        assert receiver.weights.deltas.applied == expected
        if expected:
            assert receiver.weights.held.ids()[: missed + 1] == [version.id for version in reversed(versions)]


def delta_size(receiver: Running, cluster: Cluster, version: Entry) -> int:
    """Bytes of a version's delta, as its maker tells."""
    delta = payload(version).delta
    assert delta is not None
    data = cluster.running["t"].blobs.get(delta)
    assert data is not None
    return DeltaManifest.parse(data).size


async def test_weights_announced_again_break_no_chain(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        again = await cluster.announce("t", WHOLE_0, first)
        version = await cluster.announce("t", raw(1), again, delta=True)
        await receiver.weights.hold(version, timeout=10)
        assert whole(receiver, version) == raw(1)
        assert receiver.weights.deltas.applied == 1


async def test_a_link_without_a_delta_means_the_whole(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        middle = await cluster.announce("t", raw(1), first)
        version = await cluster.announce("t", raw(2), middle, delta=True)
        await receiver.weights.hold(version, timeout=10)
        assert whole(receiver, version) == raw(2)
        assert receiver.weights.deltas.applied == 0


@pytest.mark.parametrize("how", ["damaged", "died", "wrong"])
async def test_a_delta_that_fails_is_told_and_the_whole_comes(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        versions = await chain(cluster, first, 2)

        if how == "wrong":
            base = receiver.weights.held.paths(first.id)[1]
            faults.before["apply"] = lambda: write(base, bytes(64))
        else:
            kind: Kind = "user" if how == "damaged" else "died"
            faults.fail["apply"] = (WorkerError("delta: apply: it did not go well", kind), 1)
        await receiver.weights.hold(versions[1], timeout=10)
        faults.before.clear()
        assert whole(receiver, versions[1]) == raw(1)
        warning = receiver.node.health.warnings["delta"]
        assert warning.startswith("a delta did not serve, the whole version is fetched instead: ")
        assert "1 of 1 chunks came out wrong" in warning if how == "wrong" else "did not go well" in warning
        # The next one that serves clears it.
        await receiver.weights.hold(versions[2], timeout=10)
        assert whole(receiver, versions[2]) == raw(2)


async def test_a_delta_to_another_version_is_refused(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        versions = await chain(cluster, first, 1)
        # The second version comes with the delta of the first.
        good = payload(versions[1])
        assert good.delta is not None
        entry = await cluster.announce("t", raw(2), versions[1], delta=Blob(good.delta, good.delta_size))
        await receiver.weights.hold(versions[1], timeout=10)
        await receiver.weights.hold(entry, timeout=10)
        assert whole(receiver, entry) == raw(2)
        assert "not one to the version that it came with" in receiver.node.health.warnings["delta"]
        assert receiver.weights.deltas.applied == 1


async def test_a_delta_with_an_absurd_manifest_is_refused_before_a_byte_of_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)

        bomb = bytes(largest_manifest(len(WHOLE_0)) + 1)
        delta = Blob(cluster.running["t"].blobs.put(bomb), len(bomb))
        version = await cluster.announce("t", raw(1), first, delta=delta)
        await receiver.weights.hold(version, timeout=10)
        assert whole(receiver, version) == raw(1)
        assert "absurd size" in receiver.node.health.warnings["delta"]
        assert not receiver.blobs.has(delta.hash)


async def test_the_second_holder_takes_a_delta_with_the_version(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster)
        trainer = cluster.running["t"]
        for name in ("v", "j"):  # so that the one that holds the base is asked
            cluster.crash(name)
        change, manifest = cluster.make_delta(trainer, raw(1), first), cluster.adopt(trainer, raw(1))
        await trio.sleep(2)
        version = Blob(manifest.digest, len(manifest.encode()))
        await second_holder.give(trainer.node, trainer.presences, version, change, manifest.size, 60.0)
        assert "entrusting" not in trainer.node.health.warnings
        assert receiver.versions.complete(manifest.digest)
        assert receiver.versions.complete(change.hash)
        assert receiver.weights.deltas.applied == 1


async def test_a_relay_has_the_delta_for_others_also_where_it_took_the_whole(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first, receiver = await stage(cluster, speed=None)
        receiver.own.role = "relay"
        receiver.nursery.start_soon(receiver.weights.run)
        version = (await chain(cluster, first, 1))[1]
        delta = payload(version).delta
        assert delta is not None
        await cluster.until(lambda: receiver.versions.complete(delta), 20)
        assert receiver.weights.deltas.applied == 0
        # It gives it to one that comes by it, when the trainer is gone.
        cluster.crash("t")
        other = cluster.running["j"]
        await other.weights.hold(first, timeout=30)
        other.weights.fetching.rates.speed = SLOW
        await cluster.until(lambda: receiver.id in other.weights.holders_of.version(version), 20)
        await other.weights.hold(version, timeout=30)
        assert other.weights.deltas.applied == 1


def test_rates_follow_what_is_measured() -> None:
    rates = fetching.Rates()
    assumed = rates.speed
    rates.received(1000, 1.0)  # too small to tell anything
    assert rates.speed == assumed
    for _ in range(50):
        rates.received(100 << 20, 1.0)
        rates.applied(1 << 30, 2.0, 0.25)
    assert rates.speed.receive == pytest.approx(100 << 20, rel=0.01)
    assert rates.speed.apply == pytest.approx(1 << 29, rel=0.01)
    assert rates.speed.start == pytest.approx(0.25, rel=0.01)
