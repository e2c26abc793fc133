"""A version is on two machines before its entry exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from node.config import WILLING
from node.log.replicated_log import LogNews
from node.net.requests import Refused
from node.store.hashing import hash_bytes
from node.weights import second_holder
from node.weights.second_holder import MAX_REQUEST, PATIENCE, PROTOCOL
from protocol import codec
from protocol.log.entry import Entry
from protocol.records import Blob, Weights
from protocol.weights.manifest import Manifest
from tests.node.fake_children import WHOLE_0, Faults, manifest_of
from tests.node.fakes import Cluster, Running, open_cluster

RAW = b"\7" + WHOLE_0[1:]


async def stage(cluster: Cluster) -> Running:
    """A trainer that has made a version and published nothing of it, with a relay, a validator and an inference node
    around it."""
    await cluster.stage(t="trainer", r="relay", v="validator", i="inference")
    trainer = cluster.running["t"]
    cluster.adopt(trainer, RAW)
    # Presences of all have gone round.
    await cluster.until(lambda: len(trainer.presences.live()) == len(cluster.running))
    return trainer


async def give(running: Running, raw: bytes = RAW, within: float = 60.0) -> None:
    manifest = manifest_of(raw)
    described = Blob(manifest.digest, len(manifest.encode()))
    await second_holder.give(running.node, running.presences, described, None, len(raw), within)


def holders(cluster: Cluster) -> set[str]:
    return {name for name, r in cluster.running.items() if r.versions.complete(manifest_of(RAW).digest)}


async def test_the_relay_is_asked_first_and_keeps_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        await give(trainer)
        assert holders(cluster) == {"t", "r"}
        assert trainer.node.health.warnings == {}
        # What is fetched and noted meanwhile does not displace it.
        relay = cluster.running["r"]
        newest = relay.node.log.ledger.newest_weights()
        assert newest is not None
        await relay.weights.hold(newest, timeout=10)
        assert holders(cluster) == {"t", "r"}


async def test_without_a_relay_another_takes_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        cluster.crash("r")
        await give(trainer)
        assert holders(cluster) == {"t", "v"}


async def test_one_that_is_silent_holds_up_nobody(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async def silent(peer: bytes, request: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        cluster.running["r"].port.serve(PROTOCOL, silent, max_request=MAX_REQUEST)
        began = trio.current_time()
        await give(trainer)
        assert trio.current_time() - began < PATIENCE
        assert holders(cluster) == {"t", "v"}
        assert trainer.node.health.warnings == {}


async def test_silent_ones_cost_a_publication_no_more_than_its_share_of_a_step(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async def silent(peer: bytes, request: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        for name in ("r", "v", "i", "elector"):
            cluster.running[name].port.serve(PROTOCOL, silent, max_request=MAX_REQUEST)
        began = trio.current_time()
        await give(trainer, within=3.0)
        assert trio.current_time() - began <= 3.0
        assert "no other node holds" in trainer.node.health.warnings["entrusting"]


async def test_where_nobody_takes_it_the_trainer_goes_on_with_a_warning(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        for name in ("r", "v", "i", "elector"):
            cluster.crash(name)
        await give(trainer)
        assert trainer.node.health.warnings["entrusting"] == (
            "no other node holds the newest version yet: nobody is connected"
        )


async def test_only_the_trainer_in_office_entrusts(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        manifest = manifest_of(RAW)
        request = codec.encode([manifest.digest, len(manifest.encode()), None, 0])
        stranger = cluster.running["i"].node
        with pytest.raises(Refused, match="only the trainer in office"):
            await stranger.network.request(cluster.running["r"].id, PROTOCOL, request, timeout=5, max_response=0)
        assert holders(cluster) == {"t"}
        assert trainer.node.health.warnings == {}


async def test_a_version_of_another_size_is_refused(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        longer = Manifest.of_file([("weights", "F32", (8, 4))], RAW + RAW, 1)
        trainer.blobs.put(longer.encode())
        described = Blob(longer.digest, len(longer.encode()))
        await second_holder.give(trainer.node, trainer.presences, described, None, 64, 60.0)
        assert "another size" in trainer.node.health.warnings["entrusting"]
        assert longer.digest not in cluster.running["r"].versions.held()


async def test_manifests_of_an_absurd_size_are_refused_before_a_byte_of_them(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        trainer = await stage(cluster)
        manifest = manifest_of(RAW)
        size, bomb = len(manifest.encode()), bytes(4096)
        trainer.blobs.put(bomb)
        for change in ([hash_bytes(bomb), len(bomb), None, 0], [manifest.digest, size, hash_bytes(bomb), len(bomb)]):
            with pytest.raises(Refused):
                await trainer.node.network.request(
                    cluster.running["r"].id, PROTOCOL, codec.encode(change), timeout=5, max_response=0
                )
        assert not cluster.running["r"].blobs.has(hash_bytes(bomb))
        assert holders(cluster) == {"t"}


async def test_whenever_a_version_is_published_another_node_holds_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.start("elector", willing=("inference",))
        for name in ("a", "b", "c"):
            await cluster.start(name, willing=WILLING)
        held: list[int] = []

        def count(news: LogNews) -> None:
            for entry in news.of(Entry) if news.own else ():
                if isinstance(entry.payload, Weights) and entry.payload.number > 0:
                    others = [r for r in cluster.running.values() if r.id != entry.author]
                    held.append(sum(r.versions.complete(entry.payload.manifest) for r in others))

        for running in cluster.running.values():
            running.node.log.subscribe(count)
        await cluster.until(lambda: all(running.steps >= 3 for running in cluster.running.values()))
        assert len(held) >= 3
        assert all(held)
