"""The same replication over real sockets, a real libp2p host each and SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from node.log.elector import open_elector
from node.log.log_opening import load
from node.log.replicated_log import LogService
from node.log.replication import LogSync
from node.net.host import Network, open_network
from node.store.log_store import open_log_store
from protocol.records import Join, Role
from tests.protocol.builders import digest, key, small_domain

DOMAIN = small_domain()


@asynccontextmanager
async def run_node(path: Path, name: str, known: dict[bytes, str]) -> AsyncIterator[tuple[LogService, Network]]:
    identity = key(name)
    async with (
        open_log_store(path / f"{name}.db", DOMAIN) as store,
        open_network(identity, listen=["/ip4/127.0.0.1/tcp/0"], domain_tag="test") as network,
        trio.open_nursery() as nursery,
    ):
        service = LogService(identity, await load(store, DOMAIN), store, known=known)
        sync = LogSync(service, network, interval=0.2)
        network.on_connect(sync.soon)
        sync.serve()
        nursery.start_soon(sync.run)
        if identity.node in DOMAIN.electors:
            elector = await open_elector(service, identity)
            nursery.start_soon(elector.run)
        for address in known.values():
            await network.add_peer(address)
        if service.own_seq < 0:
            await service.append(Join(digest(name), "farflung/test", name))
        yield service, network
        nursery.cancel_scope.cancel()


async def test_three_nodes_and_a_restart(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with run_node(tmp_path, "elector", {}) as (first, network):
            known = {first.identity.node: network.addresses[0]}
            async with run_node(tmp_path, "a", known) as (second, _):
                async with run_node(tmp_path, "b", known) as (third, _):
                    for service in (first, second, third):
                        await service.append(Role("inference"))
                    await agree(first, second, third)
                await second.append(Role("relay"))
                async with run_node(tmp_path, "b", known) as (third, _):
                    await third.append(Role("validator"))
                    await agree(first, second, third)
                    assert third.replica.next_for(third.identity.node) == 3
                    assert third.replica.next_for(second.identity.node) == 3
            assert not first.replica.forks
            assert sum(network.traffic) > 0


async def agree(*services: LogService) -> None:
    """Wait until all hold the same log and a cut covers it."""
    seen = -1
    while True:
        replicas = [service.replica for service in services]
        if len({(r.heads_root(), r.newest_cut_id) for r in replicas}) == 1 and not replicas[0].uncovered():
            return
        seen = await services[-1].wait_change(seen, timeout=0.2)
