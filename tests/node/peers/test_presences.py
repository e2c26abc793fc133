"""Publishing our presence and taking in those of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.peers.presences import TOPIC
from protocol.errors import PeerError
from protocol.identity import peer_id
from protocol.records import Role, Rollout
from protocol.work.presence import Presence
from tests.node.fake_children import Faults
from tests.node.fakes import Running, open_cluster, presence
from tests.protocol.builders import digest, key


def published(running: Running) -> list[Presence]:
    found = []
    for data in running.port.sent:
        try:
            found.append(Presence.parse(data))
        except Exception:
            continue  # the log's gossip
    return found


async def test_a_presence_every_interval_and_at_once_after_a_change(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference")
        running = cluster.running["i"]
        node = running.node
        running.port.sent.clear()
        await trio.sleep(5)
        found = published(running)
        assert 9 <= len(found) <= 11  # half a second apart
        assert [p.counter for p in found] == list(range(found[0].counter, found[0].counter + len(found)))
        newest = found[-1]
        assert (newest.node, newest.boot, newest.role, newest.paused) == (node.id, 1, "inference", 0)
        assert newest.willing == node.config.willing
        assert newest.addresses == tuple(running.port.addresses)
        assert newest.versions == ()
        assert running.presences.ours(newest)
        assert not running.presences.ours(replace(newest, load=newest.load + 1))
        assert newest.memory_mb > 0
        assert newest.cpus > 0
        await running.weights.hold(version, timeout=10)
        await trio.sleep(0.2)
        assert published(running)[-1].versions == (version.id,)
        # However many changes there are, at most five a second are sent.
        count = len(published(running))
        for _ in range(100):
            running.own.announce()
            await trio.sleep(0.01)
        assert len(published(running)) - count <= 11


async def test_others_are_heard_until_they_fall_silent(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        a, b = await cluster.node("a"), await cluster.node("b")
        assert a.presences.founded_for() == -1.0
        for running in (a, b):
            running.nursery.start_soon(running.presences.run)
        await trio.sleep(2)
        assert set(a.presences.live()) == {a.id, b.id}
        assert 1.0 < a.presences.founded_for() < 2.0
        assert a.port.learned[b.id] == b.port.addresses
        cluster.crash("b")
        await trio.sleep(0.9)
        assert b.id in a.presences.live()
        await trio.sleep(0.8)
        assert set(a.presences.live()) == {a.id}


async def test_bad_presences_are_their_senders_fault(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        a, b = await cluster.node("a"), await cluster.node("b")
        good = presence(b.node, role="relay")
        hear = a.port.topics[TOPIC]
        for bad in (
            b"\x90",
            replace(good, domain=digest("another")).sign(key("b")),
            presence(a.node, role="relay").sign(key("a")),  # under another's name
        ):
            # The network blames whoever sent it, and hands it on to nobody.
            with pytest.raises(PeerError):
                await hear(b.id, bad)
        assert a.presences.live() == {}
        await hear(b.id, good.sign(key("b")))
        assert a.presences.live() == {b.id: good}
        # Old news change nothing and are nobody's fault.
        await hear(b.id, replace(good, counter=0, role="trainer").sign(key("b")))
        assert a.presences.live() == {b.id: good}
        assert a.port.blamed == []


async def test_nobody_else_speaks_for_us(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        a = await cluster.node("a")
        await a.port.topics[TOPIC](a.id, presence(a.node, boot=99, role="trainer").sign(key("a")))
        assert a.presences.live() == {}


async def test_addresses_are_learned_with_the_peers_own_name(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        a, b = await cluster.node("a"), await cluster.node("b")
        plain, full = "/ip4/192.0.2.1/tcp/4001", f"/ip4/192.0.2.2/tcp/4001/p2p/{peer_id(b.id)}"
        await a.port.topics[TOPIC](b.id, presence(b.node, addresses=(plain, full)).sign(key("b")))
        assert a.port.learned[b.id] == [f"{plain}/p2p/{peer_id(b.id)}", full]


async def test_a_majority_of_the_due_must_be_here_and_at_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", w="validator", i="inference")
        await trio.sleep(1)
        running = cluster.running["i"]
        presences, ledger = running.presences, running.node.log.ledger
        v, w = cluster.running["v"].id, cluster.running["w"].id
        assert presences.can_decide([v])
        assert presences.can_decide([v, w])
        assert not presences.can_decide([])
        assert not presences.can_decide([v, digest("gone")])
        assert presences.can_decide([v, w, digest("gone")])
        # At most three are due, so two decide, however many there are.
        assert presences.can_decide([v, w, *(digest(f"gone {i}") for i in range(5))])
        (entry,) = await running.node.log.append(Rollout(version.id, 0, 2, 8, 16, digest("file"), 10, 2))
        assert presences.can_decide(ledger.due(entry))
        await cluster.running["w"].node.log.append(Role("inference"))
        await cluster.agree()
        assert not presences.can_decide(ledger.due(entry))
