"""Relays that push."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from node.errors import Refused
from node.weights import offers
from node.weights.holders_of import MAX_OFFERED
from protocol import codec
from protocol.weights.holders import Holding
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import open_cluster


async def test_a_relay_offers_to_those_who_lag_and_to_no_others(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        r, i, v = (cluster.running[name] for name in ("r", "i", "v"))
        assert r.weights.holders_of.lagging() == []  # it has nothing to offer itself
        await r.weights.hold(version, timeout=10)
        await v.weights.hold(version, timeout=10)
        await trio.sleep(1)
        assert i.id in r.weights.holders_of.lagging()
        assert v.id not in r.weights.holders_of.lagging()
        offered: Counter[str] = Counter()

        def counter(name: str) -> Callable[[bytes], Awaitable[None]]:
            async def count(request: bytes) -> None:
                await trio.lowlevel.checkpoint()
                offered[name] += 1

            return count

        for name, running in cluster.running.items():
            running.before_answering(offers.PROTOCOL, counter(name))
        r.nursery.start_soon(offers.push, r.node, r.weights)
        await trio.sleep(1)
        assert (offered["i"], offered["v"]) == (1, 0)
        await trio.sleep(4 * cluster.domain.timings.presence_ms / 1000)
        assert offered["i"] == 2  # it still lags
        await i.weights.hold(version, timeout=10)
        await trio.sleep(1)
        before = offered["i"]
        await trio.sleep(10 * cluster.domain.timings.presence_ms / 1000)
        assert offered["i"] == before


async def test_an_offer_makes_its_relay_a_holder_before_any_presence_says_so(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        r, i = cluster.running["r"], cluster.running["i"]
        live = i.presences.live
        await cluster.until(lambda: r.id in live() and live()[r.id].role == "relay", 30)
        i.port.topics.clear()
        await r.weights.hold(version, timeout=10)
        # Only the relay can reach the node, and gossip does not: it has seen the relay's old presence only.
        others = [running.id for name, running in cluster.running.items() if name not in ("r", "i")]
        cluster.network.partition([i.id], others)
        assert r.id not in i.weights.holders_of.version(version)
        i.nursery.start_soon(i.weights.run)
        await trio.sleep(0.2)  # shorter than a presence lives
        assert i.weights.held.ids() == []
        await r.node.network.request(i.id, offers.PROTOCOL, codec.encode([version.id]), timeout=5, max_response=0)
        await cluster.until(lambda: i.weights.held.ids() == [version.id], 5)
        assert i.weights.held.paths(version.id)[1].read_bytes() == WHOLE_0


async def test_only_relays_may_offer_and_few_offers_are_remembered(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", r="relay", i="inference")
        r, i, v = (cluster.running[name] for name in ("r", "i", "v"))
        await trio.sleep(1)

        async def offer(port: object, request: bytes) -> None:
            await port.request(i.id, offers.PROTOCOL, request, timeout=5, max_response=0)  # type: ignore[attr-defined]

        with pytest.raises(Refused, match="only relays"):
            await offer(v.port, codec.encode([version.id]))
        with pytest.raises(Refused):
            await offer(r.port, b"rubbish")
        assert [peer for peer, _ in i.port.blamed] == [r.id]
        others = [running.id for name, running in cluster.running.items() if name not in ("r", "i")]
        cluster.network.partition([i.id], others)
        await trio.sleep(5)  # nobody else is known to hold it any more
        for number in range(20):
            await offer(r.port, codec.encode([version.id]))
            assert i.weights.holders_of.version(version) == {r.id: Holding(whole=False)}
            for other in range(MAX_OFFERED):
                await offer(r.port, codec.encode([bytes([number, other]) * 16]))
            assert i.weights.holders_of.version(version) == {}  # it was forgotten for those
