"""Checkpoints over the network: a quorum cosigns each cut, and every node comes to hold the newest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import trio
import trio.testing

from node.log import replication_messages
from node.log.checkpoint_exchange import Checkpoints
from node.log.offline_proof import CHECKPOINT
from protocol.errors import PeerError
from protocol.log import merkle
from protocol.log.checkpoint import Checkpoint, CosignedCheckpoint, cosign, verify_cosignature
from protocol.log.replica import Replica
from protocol.records import Role
from tests.protocol.builders import Writer, cut_for, digest, key, small_domain
from tests.protocol.reference_log import ReferenceLog, verify_consistency
from tests.simulator import Disk, Network, SimNode, converge, open_world

NAMES = ("e1", "e2", "e3", "e4")
DOMAIN = small_domain(NAMES)
NOW = 1_800_000_000


async def settled(nodes: Iterable[SimNode]) -> None:
    """Wait until every node holds the checkpoint of the newest cut, and nothing is left to cut."""
    nodes = list(nodes)
    with trio.fail_after(60):
        while any(  # noqa: ASYNC110  several services change, each with an event of its own
            node.service.replica.uncovered() or node.service.checkpoints.lacking for node in nodes
        ):
            await trio.sleep(0.1)


async def test_every_node_holds_the_newest(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = [await world.start(key(name)) for name in (*NAMES, "observer")]
        seen: list[Checkpoint] = []
        for _ in range(3):
            for node in nodes:
                await node.service.append(Role("relay"))
            await converge(nodes)
            await settled(nodes)
            newest = [node.service.checkpoints.newest for node in nodes]
            (checkpoint,) = {found.checkpoint for found in newest if found is not None}
            replica = nodes[-1].service.replica
            assert (checkpoint.size, checkpoint.root) == (
                len(replica.cuts),
                merkle.root([cut.cut.body for cut in replica.cuts]),
            )
            for found in newest:
                assert found is not None
                found.require_quorum(DOMAIN.electors)
                assert CosignedCheckpoint.parse(found.encode(), DOMAIN.id, DOMAIN.electors) == found
            seen.append(checkpoint)
        # Each is a prefix of the next one.
        log = ReferenceLog(DOMAIN.id, [cut.cut.body for cut in nodes[0].service.replica.cuts])
        for first, second in pairwise(seen):
            proof = log.consistency(first.size, second.size)
            verify_consistency(first.size, second.size, proof, first.root, second.root)
        assert all(node.port.blamed == [] for node in nodes)


async def test_one_elector_cosigns_alone(autojump_clock: trio.testing.MockClock) -> None:
    alone = small_domain(("e1",))
    async with open_world(alone, Network()) as world:
        nodes = [await world.start(key(name)) for name in ("e1", "observer")]
        await converge(nodes)
        await settled(nodes)
        assert all(node.service.checkpoints.size > 0 for node in nodes)


async def test_a_silent_elector_costs_no_checkpoint_and_two_cost_all(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = [await world.start(key(name)) for name in NAMES]
        await converge(nodes)
        await settled(nodes)
        world.crash(nodes[3])
        await nodes[0].service.append(Role("relay"))
        await settled(nodes[:3])
        before = nodes[0].service.checkpoints.size
        # With no quorum left there is no cut either; the last checkpoint stays what it was.
        world.crash(nodes[2])
        await nodes[0].service.append(Role("relay"))
        await trio.sleep(30)
        assert nodes[0].service.checkpoints.size == before


async def test_equal_nodes_ask_for_one_only_while_they_lack_it(autojump_clock: trio.testing.MockClock) -> None:
    async with open_world(DOMAIN, Network()) as world:
        nodes = [await world.start(key(name)) for name in NAMES]
        await converge(nodes)
        await settled(nodes)
        first = await nodes[0].sync.sync_with(nodes[1].id)
        assert first.sent + first.received <= 1024
        held = nodes[0].service.checkpoints.newest
        assert held is not None
        nodes[0].service.checkpoints.newest = None
        again = await nodes[0].sync.sync_with(nodes[1].id)
        assert again.received - first.received == len(held.encode()) + 3
        assert nodes[0].service.checkpoints.newest is not None


def grown(cuts: int) -> Replica:
    """A replica with so many cuts."""
    replica = Replica(DOMAIN)
    writer = Writer("a", DOMAIN.id)
    assert replica.add_entry(writer.entries[0])
    for _ in range(cuts):
        assert replica.add_cut(cut_for(replica, *NAMES[:3]))
        writer.anchor = replica.newest_cut_id
        assert replica.add_entry(writer.append(Role("relay")))
    return replica


def kept(replica: Replica, disk: Disk | None = None) -> Checkpoints:
    return Checkpoints(replica, disk or Disk(), clock=lambda: NOW + 0.5)


async def made(replica: Replica, *names: str) -> bytes:
    """The checkpoint of the newest cut, cosigned by these electors."""
    here = kept(replica)
    found = {key(name).node: here.cosign(key(name), replica.newest_cut_id) for name in names}
    assert await here.gather(replica.newest_cut_id, {node: one for node, one in found.items() if one is not None})
    assert here.newest is not None
    return here.newest.encode()


async def test_only_electors_cosign_and_only_their_newest_cut() -> None:
    replica = grown(3)
    here = kept(replica)
    current = here.current()
    assert current is not None
    signature = here.cosign(key("e1"), replica.newest_cut_id)
    assert signature is not None
    assert verify_cosignature(current, key("e1").node, signature)[0] == NOW
    assert here.cosign(key("e1"), replica.cuts[1].cut.id) is None
    assert here.cosign(key("stranger"), replica.newest_cut_id) is None
    assert kept(Replica(DOMAIN)).cosign(key("e1"), DOMAIN.id) is None
    assert kept(Replica(DOMAIN)).current() is None
    here.check(key("e1").node, signature)
    for wrong in (bytes(72), cosign(key("e2"), current, NOW)):
        with pytest.raises(PeerError):
            here.check(key("e1").node, wrong)


async def test_too_few_cosignatures_make_none() -> None:
    replica = grown(2)
    here = kept(replica)
    good = {key(name).node: here.cosign(key(name), replica.newest_cut_id) or b"" for name in NAMES[:2]}
    assert not await here.gather(replica.newest_cut_id, good)
    assert not await here.gather(replica.newest_cut_id, {**good, key("e3").node: bytes(72)})
    assert not await here.gather(replica.cuts[0].cut.id, good)
    assert here.newest is None
    assert here.lacking


async def test_what_peers_send_is_judged() -> None:
    replica = grown(3)
    data = await made(replica, "e1", "e2", "e4")
    disk = Disk()
    here = kept(grown(3), disk)
    assert await here.take(data)
    assert not here.lacking
    assert not await here.take(data)
    # A node that is behind cannot judge it yet; one that is ahead takes it where it has none.
    assert not await kept(grown(2)).take(data)
    signed = key("stranger")
    later = ReferenceLog(DOMAIN.id, [b"a", b"b", b"c", b"d"]).checkpoint()
    newer = CosignedCheckpoint(later, ((signed.node, NOW, cosign(signed, later, NOW)[8:]),))
    assert not await kept(grown(3)).take(newer.encode())
    ahead = kept(grown(5))
    assert await ahead.take(data)
    assert (ahead.size, ahead.lacking) == (3, True)
    assert not await ahead.take(await made(grown(2), *NAMES))
    for wrong in (
        b"rubbish",
        data.replace(DOMAIN.id.hex().encode(), digest("domain").hex().encode()),
        data[:-3] + b"AAA=\n",
        b"".join(data.splitlines(keepends=True)[:-1]),
    ):
        with pytest.raises(PeerError):
            await kept(grown(3)).take(wrong)
    # A quorum that cosigned another history is believed by nobody who holds this one.
    other = ReferenceLog(DOMAIN.id, [b"another", b"history", b"altogether"]).checkpoint()
    forged = CosignedCheckpoint(
        other, tuple(sorted((key(name).node, NOW, cosign(key(name), other, NOW)[8:]) for name in NAMES))
    )
    with pytest.raises(PeerError, match="another history"):
        await kept(grown(3)).take(forged.encode())
    # It survives a restart; what is damaged is dropped.
    again = kept(grown(3), disk)
    await again.load()
    assert again.newest == here.newest
    disk.values[CHECKPOINT] = data[:-1]
    damaged = kept(grown(3), disk)
    await damaged.load()
    assert damaged.newest is None


async def test_a_full_disk_keeps_it_in_memory() -> None:
    disk = Disk(full=True)
    here = kept(grown(3), disk)
    assert await here.take(await made(grown(3), *NAMES))
    assert here.size == 3
    assert CHECKPOINT not in disk.values


def test_the_request_reads_as_written() -> None:
    assert replication_messages.parse_request(replication_messages.request("checkpoint", 7)) == ("checkpoint", 7)
