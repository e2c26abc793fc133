"""Tickets that wait: bounded, the best ones stay, and electors admit by them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import trio
import trio.testing

from node.log import ticket_heap
from node.log.ticket_heap import TicketHeap
from protocol.errors import PeerError
from protocol.log.admission import Ticket, search, work_of
from protocol.log.replica import Replica
from protocol.records import Invite
from protocol.rules import Admission
from tests.node.fake_children import Faults, genesis
from tests.node.fakes import Cluster, open_cluster
from tests.protocol.builders import Writer, key, small_domain

OUTSIDER = "zoe"


async def at_once(work: Callable[[], int]) -> int:
    await trio.lowlevel.checkpoint()
    return work()


def heap(rules: Admission) -> tuple[TicketHeap, Replica]:
    replica = Replica(small_domain(admission=rules))
    return TicketHeap(replica, at_once), replica


async def test_the_most_work_comes_first_and_too_little_waits_nowhere() -> None:
    waiting, replica = heap(Admission("open", 8, 2))
    domain = replica.domain.id
    tickets = [search(domain, key(f"s{n}").node, domain, 8, count()) for n in range(4)]
    for ticket in tickets:
        assert ticket is not None
        assert await waiting.offer(ticket)
    best = sorted((t for t in tickets if t is not None), key=lambda t: -work_of(domain, t))[:2]
    assert {ticket.node for ticket in waiting.admissible()} == {ticket.node for ticket in best}
    poor = next(t for n in count() if work_of(domain, t := Ticket(key("poor").node, domain, n)) < 8)
    assert not await waiting.offer(poor)


async def test_what_admits_nobody_is_refused() -> None:
    waiting, replica = heap(Admission("invited", 0, 2))
    with pytest.raises(PeerError, match="for the invited"):
        await waiting.offer(Ticket(key("sam").node, replica.domain.id, 0))
    assert len(waiting) == 0


async def test_a_flood_is_bounded_and_the_better_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_heap, "MAX_TICKETS", 20)
    waiting, replica = heap(Admission("open", 2, 8))
    domain = replica.domain.id
    works = {}
    for number in range(60):
        ticket = search(domain, key(f"s{number}").node, domain, 2, count())
        assert ticket is not None
        works[ticket.node] = work_of(domain, ticket)
        await waiting.offer(ticket)
    assert len(waiting) == 20
    kept = {ticket.node for ticket in waiting.admissible()}
    assert min(works[node] for node in kept) >= sorted(works.values(), reverse=True)[19]


async def newcomer(cluster: Cluster, seed: bytes | None = None) -> None:
    """A stranger that knows an address and a domain, and does everything by itself."""
    await cluster.start("elector")
    await cluster.cut()
    running = await cluster.node(OUTSIDER, join=False)
    if seed is not None:
        running.node.directory.save_invitation(seed)
    running.keep("asking for admission", "keeping the own feed")


@pytest.mark.parametrize("work", [0, 4])
async def test_a_stranger_is_admitted_within_two_cuts(
    work: int, tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    data = genesis(admission=Admission("open", work, 4))
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        await newcomer(cluster)
        elector = cluster.running["elector"].node.log
        height = len(elector.replica.cuts)
        await cluster.until(lambda: elector.ledger.member(key(OUTSIDER).node))
        admitted = elector.replica.admissions.admitted[key(OUTSIDER).node]
        assert admitted <= height + 2


async def test_an_invitation_lets_in_where_work_does_not(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    data = genesis(admission=Admission("invited", 0, 4))
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        await newcomer(cluster)
        elector = cluster.running["elector"].node.log
        await trio.sleep(10)
        stranger = cluster.running[OUTSIDER].node
        assert "for the invited" in stranger.health.warnings["admission"]
        assert not elector.ledger.member(key(OUTSIDER).node)
        await elector.append(Invite(key("invitation").node, 1, 1000))
        stranger.directory.save_invitation(key("invitation").seed)
        await cluster.until(lambda: elector.ledger.member(key(OUTSIDER).node))
        await cluster.until(lambda: "admission" not in stranger.health.warnings)


async def test_one_invitation_has_as_many_places_as_it_has_uses() -> None:
    waiting, replica = heap(Admission("invited", 0, 8))
    writer = Writer("elector", replica.domain.id)
    writer.append(Invite(key("invitation").node, 2, 1000))
    replica.admissions.cover(1, [], writer.entries, replica.domain.electors)
    tickets = [Ticket.invited(replica.domain.id, key("invitation"), key(f"s{n}").node) for n in range(5)]
    assert [await waiting.offer(ticket) for ticket in tickets] == [True, True, False, False, False]
    assert await waiting.offer(tickets[0])
    assert len(waiting.admissible()) == 2
