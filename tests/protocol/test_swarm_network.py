"""Swarms over a simulated network in virtual time."""

from __future__ import annotations

import pytest

from protocol.weights.holders import Holding
from tests.protocol.bulk_simulator import MIB, Peer, World
from tests.protocol.swarms import LINK, bits


def finish(world: World) -> float:
    return max(peer.finished_at for peer in world.peers.values() if peer.finished_at is not None)


def whole(chunks: int) -> int:
    return (1 << chunks) - 1


def test_two_relays_and_eight_nodes_take_less_than_twice_one_transfer() -> None:
    chunks = 64
    world = World(1)
    world.add("origin", chunks, has=whole(chunks), up=LINK, down=LINK, rtt=0.08, author=True)
    for name in ("relay0", "relay1", *(f"node{number}" for number in range(8))):
        world.add(name, chunks, up=LINK, down=LINK, rtt=0.08)
    world.run()
    ideal = chunks * MIB / LINK
    assert finish(world) < 2 * ideal
    origin = world.peers[b"origin"]
    assert origin.served < 1.6 * chunks  # every chunk leaves it about once
    assert all(peer.served > 0 for peer in world.peers.values())


def test_a_lossy_line_is_filled_by_many_flows() -> None:
    world = World(1)
    world.add("origin", 128, has=whole(128), up=LINK, rtt=0.08, per_flow=2.5e6 / 8)
    world.add("node", 128, down=LINK)
    world.run()
    assert finish(world) < 128 * MIB / LINK / 0.5


def test_twenty_joiners_spread_over_all_holders_and_none_queues() -> None:
    chunks = 32
    world = World(2)
    donors = [
        world.add(f"donor{number}", chunks, has=whole(chunks), up=LINK, down=LINK, rtt=0.02) for number in range(4)
    ]
    joiners = [world.add(f"joiner{number}", chunks, up=LINK, down=LINK, rtt=0.02) for number in range(20)]
    world.run()
    fair = sum(donor.served for donor in donors) / 4
    assert all(0.6 * fair < donor.served < 1.5 * fair for donor in donors)
    assert all(len(joiner_sources(world, joiner)) >= 4 for joiner in joiners)
    assert sum(joiner.served for joiner in joiners) > 0.4 * 20 * chunks  # they carry much of it themselves
    assert finish(world) < 3 * chunks * MIB / LINK


def joiner_sources(world: World, joiner: Peer) -> list[bytes]:
    return [peer.node for peer in world.peers.values() if peer.served_to[joiner.node]]


def test_a_donor_that_is_full_sends_them_elsewhere() -> None:
    chunks = 32
    world = World(3)
    small = world.add("small", chunks, has=whole(chunks), up=LINK, rtt=0.02, most_served=3)
    for number in range(2):
        world.add(f"large{number}", chunks, has=whole(chunks), up=LINK, rtt=0.02)
    for number in range(8):
        world.add(f"joiner{number}", chunks, up=LINK, down=LINK, rtt=0.02)
    world.run()
    assert small.most_at_once <= 3
    assert small.served > 0
    assert finish(world) < 3 * chunks * MIB / LINK


def undisturbed(chunks: int, seed: int) -> tuple[World, list[Peer]]:
    world = World(seed)
    for number in range(3):
        world.add(f"holder{number}", chunks, has=whole(chunks), up=LINK, rtt=0.01)
    return world, [world.add(f"node{number}", chunks, up=LINK, down=LINK, rtt=0.01) for number in range(5)]


def test_one_killed_one_throttled_one_lying_and_the_healthy_are_hardly_later() -> None:
    chunks = 48
    world, nodes = undisturbed(chunks, 4)
    world.run()
    plain = finish(world)
    world, nodes = undisturbed(chunks, 4)
    world.add("liar", chunks, has=whole(chunks), up=LINK, rtt=0.01, lies=True)
    killed, throttled = nodes[0], nodes[1]

    def kill() -> None:
        killed.dead = True

    def throttle() -> None:
        throttled.up = throttled.down = LINK / 100

    world.run(at=[(plain / 4, kill), (plain / 3, throttle)], stop=1.5 * plain)
    healthy = nodes[2:]
    assert all(node.finished_at is not None and node.finished_at <= 1.5 * plain for node in healthy)
    assert all(not node.swarm.flows(b"liar", world.now) for node in healthy if node.swarm is not None)


def test_those_who_claim_what_they_do_not_have_delay_nobody() -> None:
    chunks = 48
    world, nodes = undisturbed(chunks, 4)
    world.run()
    plain = finish(world)
    world, nodes = undisturbed(chunks, 4)
    liars = [world.add(f"liar{number}", chunks, up=LINK, rtt=0.001, claims=whole(chunks) & ~1) for number in range(4)]
    for liar in liars:
        liar.holders = lambda: {}  # they fetch nothing
    world.run(stop=2 * plain)
    assert all(node.finished_at is not None and node.finished_at <= 1.2 * plain for node in nodes)
    # By each of the five: what is asked for at one moment, once for each pause.
    assert max(liar.refused for liar in liars) < 5 * 20


def test_a_peer_that_degrades_in_the_midst_loses_its_share() -> None:
    chunks = 96
    world = World(5)
    good = world.add("good", chunks, has=whole(chunks), up=LINK, rtt=0.01)
    fading = world.add("fading", chunks, has=whole(chunks), up=LINK, rtt=0.01)
    node = world.add("node", chunks, down=2 * LINK)
    ideal = chunks * MIB / (2 * LINK)
    before: list[int] = []

    def fade() -> None:
        before.append(fading.served)
        fading.up = LINK / 100

    world.run(at=[(ideal / 2, fade)])
    assert before[0] > chunks / 8
    assert fading.served - before[0] <= 4
    assert good.served > chunks / 2
    assert node.finished_at is not None
    assert node.finished_at < 2.2 * ideal


def test_all_holders_but_one_vanish() -> None:
    chunks = 32
    world = World(6)
    holders = [world.add(f"holder{number}", chunks, has=whole(chunks), up=LINK, rtt=0.01) for number in range(4)]
    node = world.add("node", chunks, down=4 * LINK)

    def vanish() -> None:
        for holder in holders[1:]:
            holder.dead = True

    world.run(at=[(0.3, vanish)])
    assert node.whole
    assert holders[0].served > chunks / 3


def test_only_what_is_missing_is_fetched_after_a_restart() -> None:
    chunks = 64
    world = World(7)
    holder = world.add("holder", chunks, has=whole(chunks), up=LINK)
    half = bits(range(0, chunks, 2))
    node = world.add("node", chunks, has=half)
    world.run()
    assert node.whole
    assert holder.served == chunks // 2


def test_a_chain_cuts_through() -> None:
    """A node that reaches only the relay is done soon after the relay itself."""
    chunks = 48
    world = World(8)
    origin = world.add("origin", chunks, has=whole(chunks), up=LINK, rtt=0.02)
    relay = world.add("relay", chunks, up=LINK, down=LINK, rtt=0.02)
    relay.holders = lambda: {origin.node: Holding()}
    node = world.add("node", chunks, down=LINK)
    node.holders = lambda: {relay.node: Holding(whole=relay.whole)}
    world.run()
    assert relay.finished_at is not None
    assert node.finished_at is not None
    assert node.finished_at < relay.finished_at + 0.5


def test_a_hidden_holder_serves_what_no_other_has() -> None:
    chunks = 16
    world = World(9)
    hidden = world.add("hidden", chunks, has=whole(chunks), up=LINK / 4, rtt=0.02, hidden=True)
    plain = world.add("plain", chunks, has=bits(range(12)), up=LINK, rtt=0.02)
    plain.dead = False
    node = world.add("node", chunks, down=LINK)
    node.holders = lambda: {hidden.node: Holding(direct=False), plain.node: Holding(whole=False)}
    plain.holders = lambda: {}
    world.run(until=30, stop=20)
    assert node.whole
    assert hidden.served <= 6


@pytest.mark.parametrize("seed", range(3))
def test_chance_does_not_matter(seed: int) -> None:
    world, _ = undisturbed(24, seed)
    world.run(until=30)
    assert finish(world) < 3 * 24 * MIB / LINK
