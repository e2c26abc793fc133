"""One node's log: appending, waiting, receiving."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from node.errors import UserError
from node.log.elector import Elector, open_elector
from node.log.log_opening import load
from node.log.replicated_log import LogNews, LogService, NotReady
from node.log.waiting_room import RoomBounds
from protocol.constants import MAX_ENTRIES_PER_ANCHOR
from protocol.errors import LocalError
from protocol.log.entry import Entry
from protocol.log.heads import Head
from protocol.log.quorum import CertifiedCut, Cut, commit, grant_vote
from protocol.log.replica import Replica
from protocol.records import Join, Leave, Role, Step, Weights
from tests.protocol.builders import Writer, cut_for, digest, grant_for, key, small_domain
from tests.simulator import Disk

DOMAIN = small_domain()
ELECTOR = key("elector")
JOIN = Join(digest("recovery"), "farflung/test", "elector")


async def start(disk: Disk | None = None, *, fresh: bool = True, known: tuple[bytes, ...] = ()) -> LogService:
    disk = disk or Disk()
    replica = await load(disk, DOMAIN)
    return LogService(ELECTOR, replica, disk, fresh=fresh, known=known, thread_from=1 << 30)


async def with_elector() -> tuple[LogService, Elector]:
    service = await start()
    return service, await open_elector(service, ELECTOR)


async def test_append_stores_before_it_tells() -> None:
    service = await start()
    disk = service.store
    assert isinstance(disk, Disk)
    order: list[str] = []
    disk.after = lambda: order.append("stored")
    service.subscribe(lambda news: order.append(f"told {[e.seq for e in news.of(Entry)]} {news.own}"))
    (entry,) = await service.append(JOIN)
    assert order == ["stored", "told [0] True"]
    assert service.replica.entry(entry.id) is entry
    assert service.own_seq == 0
    assert service.generation == 1


async def test_a_later_payload_can_name_an_earlier_entry() -> None:
    service = await start()
    await service.append(JOIN)
    await service.intake.receive(grants=[grant_for(DOMAIN, 1, ELECTOR.node).encode()])
    step = Step(1, 1, digest("base"), digest("blob"), 10, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0)

    def weights(made: list[Entry]) -> Weights:
        return Weights(1, 1, digest("base"), digest("manifest"), 10, digest("whole"), 4, made[-1].id)

    first, second = await service.append(step, weights)
    assert isinstance(second.payload, Weights)
    assert second.payload.step == first.id
    assert (second.prev, second.seq) == (first.id, 2)


async def test_a_bad_payload_changes_nothing() -> None:
    service = await start()
    with pytest.raises(LocalError):
        await service.append(Leave())  # the first entry must be a join
    await service.append(JOIN)
    with pytest.raises(LocalError):
        await service.append(Role("relay"), Role("king"))
    assert service.own_seq == 0
    assert isinstance(service.store, Disk)
    assert len(service.store.items) == 1


async def test_too_many_entries_wait_for_a_cut(autojump_clock: trio.testing.MockClock) -> None:
    service, elector = await with_elector()
    await service.append(JOIN)
    for _ in range(MAX_ENTRIES_PER_ANCHOR - 1):
        await service.append(Role("relay"))
    with pytest.raises(NotReady, match="wait for a cut"):
        await service.append(Role("relay"), timeout=5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.append, Role("relay"))
        await trio.sleep(1)
        assert service.own_seq == MAX_ENTRIES_PER_ANCHOR - 1
        assert await elector.cut() is not None
    assert service.own_seq == MAX_ENTRIES_PER_ANCHOR
    assert service.replica.entries(ELECTOR.node)[-1].anchor == service.replica.newest_cut_id


async def test_wait_change(autojump_clock: trio.testing.MockClock) -> None:
    service = await start()
    started = trio.current_time()
    assert await service.wait_change(0, timeout=3) == 0
    assert trio.current_time() == started + 3
    seen: list[int] = []

    async def wait() -> None:
        seen.append(await service.wait_change(0, timeout=3))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(1)
        await service.append(JOIN)
    assert seen == [1]
    assert trio.current_time() == started + 4
    assert await service.wait_change(0, timeout=3) == 1


async def test_a_cancelled_append_is_done_or_not(autojump_clock: trio.testing.MockClock) -> None:
    service = await start()
    with trio.CancelScope() as scope:
        scope.cancel()
        await service.append(JOIN)
    assert service.own_seq == -1
    assert isinstance(service.store, Disk)
    assert service.store.items == []
    with trio.CancelScope() as scope:
        service.store.before = scope.cancel
        await service.append(JOIN)
        await trio.sleep(1)
    assert service.own_seq == 0
    assert len(service.store.items) == 1


async def test_receive_in_any_order() -> None:
    service = await start()
    writer = Writer("a", DOMAIN.id)
    for _ in range(5):
        writer.append(Role("relay"))
    wires = [entry.encode() for entry in writer.entries]
    received = await service.intake.receive(entries=wires[3:])
    assert (received.added, received.waiting, received.errors) == (0, True, [])
    received = await service.intake.receive(entries=wires[1:3])
    assert (received.added, received.waiting) == (0, True)
    received = await service.intake.receive(entries=wires[:1])
    assert (received.added, received.waiting) == (6, False)
    received = await service.intake.receive(entries=wires)
    assert (received.added, received.waiting, received.errors) == (0, False, [])
    assert isinstance(service.store, Disk)
    assert len(service.store.items) == 6


async def test_bad_entries_do_not_stop_good_ones() -> None:
    service = await start()
    writer, other = Writer("a", DOMAIN.id), Writer("b", digest("another domain"))
    good = writer.append(Role("relay")).encode()
    bad = good[:-1] + bytes([good[-1] ^ 1])
    join = writer.entries[0].encode()
    received = await service.intake.receive(entries=[b"", bad, join, other.entries[0].encode(), good[:-1], good])
    assert received.added == 2
    assert len(received.errors) == 4
    assert service.replica.next_for(writer.node) == 2


async def test_a_bad_signature_does_not_take_the_place_of_a_good_one_that_waits() -> None:
    service = await start()
    writer = Writer("a", DOMAIN.id)
    good = writer.append(Role("relay")).encode()
    bad = good[:-1] + bytes([good[-1] ^ 1])
    assert (await service.intake.receive(entries=[good])).waiting
    assert len((await service.intake.receive(entries=[bad])).errors) == 1
    await service.intake.receive(entries=[writer.entries[0].encode()])
    assert [entry.encode() for entry in service.replica.entries(writer.node)][1:] == [good]


async def test_big_deliveries_are_verified_in_a_thread() -> None:
    service = LogService(ELECTOR, Replica(DOMAIN), Disk(), fresh=True, thread_from=8)
    writer = Writer("a", DOMAIN.id)
    for _ in range(20):
        writer.append(Role("relay"))
    wires = [entry.encode() for entry in writer.entries]
    received = await service.intake.receive(entries=[*wires, wires[5][:-1] + bytes([wires[5][-1] ^ 1])])
    assert (received.added, len(received.errors)) == (21, 1)


async def test_the_waiting_room_is_bounded() -> None:
    service = LogService(ELECTOR, Replica(DOMAIN), Disk(), fresh=True, bounds=RoomBounds(entries=10))
    writers = [Writer(f"w{index}", DOMAIN.id) for index in range(1, 7)]
    for writer in writers:
        for _ in range(3):
            writer.append(Role("relay"))
        await service.intake.receive(entries=[entry.encode() for entry in writer.entries[1:]])
    # The oldest lost its place, and still gets in when it comes in order.
    await service.intake.receive(entries=[writers[0].entries[0].encode(), writers[5].entries[0].encode()])
    assert service.replica.next_for(writers[0].node) == 1
    assert service.replica.next_for(writers[5].node) == 4
    await service.intake.receive(entries=[entry.encode() for entry in writers[0].entries])
    assert service.replica.next_for(writers[0].node) == 4


async def test_waiting_cuts_are_bounded_in_bytes() -> None:
    first, elector = await with_elector()
    await first.append(JOIN)
    cuts = []
    for _ in range(3):
        made = await elector.cut()
        assert made is not None
        cuts.append(made)
        await first.append(Role("relay"))
    second = LogService(key("b"), Replica(DOMAIN), Disk(), fresh=True, bounds=RoomBounds(cut_bytes=100_000))
    # Anybody can certify a cut with a key of its own.
    stranger, rows = key("stranger"), tuple(Head(bytes([at]) * 32, 9, bytes(32), bytes(32)) for at in range(200))
    for height in range(2, 60):
        cut = Cut.make(DOMAIN.id, height, digest("prev"), digest(f"root {height}"), rows)
        forged = CertifiedCut(cut, 1, (commit(stranger, cut, 1),))
        assert (await second.intake.receive(cuts=[forged.encode()])).errors == []
    assert sum(len(cut.cut.body) for cut in second.intake.room._cuts.values()) <= 100_000
    # What the electors certified finds room all the same.
    await second.intake.receive(cuts=[cut.encode() for cut in cuts[1:]])
    await second.intake.receive(
        cuts=[cuts[0].encode()], entries=[entry.encode() for entry in first.replica.entries(ELECTOR.node)]
    )
    assert second.replica.newest_cut_id == cuts[-1].cut.id


async def test_nobody_is_blamed_for_what_others_left_waiting() -> None:
    first, elector = await with_elector()
    second = LogService(key("b"), Replica(DOMAIN), Disk(), fresh=True)
    await first.append(JOIN)
    cut = await elector.cut()
    assert cut is not None
    bad = Writer("a", DOMAIN.id)
    bad.anchor = cut.cut.id
    bad.append(Role("relay"))
    bad.anchor = DOMAIN.id  # an anchor that goes back
    bad.append(Role("inference"))
    wires = [entry.encode() for entry in bad.entries]
    assert (await second.intake.receive(entries=wires[2:])).errors == []  # cannot be judged yet
    await second.intake.receive(cuts=[cut.encode()], entries=[first.replica.entries(ELECTOR.node)[0].encode()])
    received = await second.intake.receive(entries=wires[:2])
    assert (received.added, received.errors) == (2, [])
    assert second.replica.next_for(bad.node) == 2
    again = await second.intake.receive(entries=wires[2:])
    assert [str(error) for error in again.errors] == ["feed: the anchor of entry 2 goes back"]


async def test_entries_wait_for_the_cut_they_anchor_on() -> None:
    first, elector = await with_elector()
    second = LogService(key("a"), Replica(DOMAIN), Disk(), fresh=True)
    await first.append(JOIN)
    cut = await elector.cut()
    assert cut is not None
    await first.append(Role("relay"))
    entries = [entry.encode() for entry in first.replica.entries(ELECTOR.node)]
    assert (await second.intake.receive(entries=entries[1:])).waiting
    assert (await second.intake.receive(cuts=[cut.encode()])).waiting
    news: list[LogNews] = []
    second.subscribe(news.append)
    assert (await second.intake.receive(entries=entries[:1])).added == 3
    assert [entry.seq for entry in news[0].of(Entry)] == [0, 1]
    assert news[0].of(CertifiedCut) == [cut]
    assert not news[0].own
    assert second.replica.heads_root() == first.replica.heads_root()
    assert isinstance(second.store, Disk)
    assert (await load(second.store, DOMAIN)).replica.newest_cut_id == cut.cut.id


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_certificates_of_made_up_electors_keep_nothing_out(order: tuple[int, int]) -> None:
    source = Replica(DOMAIN)
    writer = Writer("a", DOMAIN.id)
    source.add_entry(writer.entries[0])
    first = cut_for(source, "elector")
    source.add_cut(first)
    writer.anchor = first.cut.id
    source.add_entry(writer.append(Role("relay")))
    second = cut_for(source, "elector")
    made_up = CertifiedCut(second.cut, 9, (commit(key("stranger"), second.cut, 9),))
    false_grant = grant_for(DOMAIN, 1, key("stranger").node, anchor=first.cut.id)
    false_grant = replace(false_grant, votes=(grant_vote(key("stranger"), false_grant.grant),))
    grant = grant_for(DOMAIN, 1, writer.node, anchor=first.cut.id)
    service = await start()
    for number in order:
        received = await service.intake.receive(
            cuts=[(second, made_up)[number].encode()], grants=[(grant, false_grant)[number].encode()]
        )
        assert received.waiting
        assert received.errors == []
    received = await service.intake.receive(entries=[entry.encode() for entry in writer.entries], cuts=[first.encode()])
    assert received.errors == []
    assert list(service.replica.cuts) == [first, second]
    assert service.replica.grants == {1: grant}
    assert isinstance(service.store, Disk)
    assert (await load(service.store, DOMAIN)).replica.heads_root() == source.heads_root()
    assert [str(error) for error in (await service.intake.receive(grants=[false_grant.encode()])).errors] == [
        "grant: a signer is no elector"
    ]


async def test_a_cut_waits_for_the_grant_of_a_version_that_it_covers() -> None:
    writer = Writer("a", DOMAIN.id)
    writer.append(Weights(1, 0, None, digest("m"), 9, digest("n"), 9, None))
    source = Replica(DOMAIN)
    grant = grant_for(DOMAIN, 1, writer.node)
    source.add_grant(grant)
    for entry in writer.entries:
        source.add_entry(entry)
    cut = cut_for(source, "elector")
    service = await start()
    received = await service.intake.receive(entries=[entry.encode() for entry in writer.entries], cuts=[cut.encode()])
    assert received.waiting
    assert not service.replica.cuts
    # Until then nothing of the version stays in memory: it is fetched again.
    assert service.replica.next_for(writer.node) == 1
    received = await service.intake.receive(
        grants=[grant.encode()], entries=[entry.encode() for entry in writer.entries]
    )
    assert received.added == 3
    assert list(service.replica.cuts) == [cut]


async def test_somebody_elses_use_of_the_key_stops_appending(autojump_clock: trio.testing.MockClock) -> None:
    service = await start()
    await service.append(JOIN)
    assert isinstance(service.store, Disk)
    twin = await start(service.store.copy())
    entries = [(await twin.append(Role("relay")))[0].encode(), (await twin.append(Leave()))[0].encode()]
    await service.intake.receive(entries=entries[1:])
    assert not service.ready.is_set()
    with pytest.raises(NotReady):
        await service.append(Role("relay"), timeout=1)
    await service.intake.receive(entries=entries[:1])
    assert service.ready.is_set()
    assert (await service.append(Role("relay")))[0].seq == 3


async def test_a_commit_of_unknown_outcome_blocks_its_place() -> None:
    service = await start()
    await service.append(JOIN)
    disk = service.store
    assert isinstance(disk, Disk)

    def fail() -> None:
        disk.after = lambda: None
        raise OSError("the answer got lost")

    disk.after = fail
    with pytest.raises(OSError, match="lost"):
        await service.append(Role("relay"))
    with pytest.raises(LocalError, match="stored already"):
        await service.append(Leave())
    again = await start(disk)
    assert again.own_seq == 1
    assert (await again.append(Leave()))[0].seq == 2


async def test_a_damaged_store_is_noticed() -> None:
    service = await start()
    await service.append(JOIN)
    await service.append(Role("relay"))
    assert isinstance(service.store, Disk)
    del service.store.items[0]
    with pytest.raises(UserError, match="damaged"):
        await load(service.store, DOMAIN)


async def test_the_elector_keeps_its_state() -> None:
    service, elector = await with_elector()
    assert await elector.cut() is None
    await service.append(JOIN)
    cut = await elector.cut()
    assert cut is not None
    assert (cut.cut.height, cut.epoch) == (1, 1)
    assert await elector.cut() is None
    await elector.grant_term(key("a").node)
    again = await open_elector(service, ELECTOR)
    assert (await again.grant_term(key("b").node)).grant.term == 2
    await service.append(Leave())
    second = await again.cut()
    assert second is not None
    assert (second.cut.height, second.epoch) == (2, 2)
    assert isinstance(service.store, Disk)
    service.store.values["elector"] = b"\xc1"
    with pytest.raises(UserError, match=r"damaged.*; delete the folder log"):
        await open_elector(service, ELECTOR)


async def test_an_unconfirmed_elector_abstains() -> None:
    service = await start()
    await service.append(JOIN)
    assert isinstance(service.store, Disk)
    again = await start(service.store, fresh=False, known=(key("a").node,))
    abstaining = await open_elector(again, ELECTOR)
    assert await abstaining.cut() is None
    again.on_own_head(key("a").node)
    assert await abstaining.cut() is not None


async def test_who_may_be_the_elector() -> None:
    service = await start()
    with pytest.raises(LocalError):
        await open_elector(service, key("a"))
    several = small_domain(electors=("elector", "another"))
    service = LogService(ELECTOR, Replica(several), Disk(), fresh=True)
    with pytest.raises(LocalError, match="a way to the others"):
        await open_elector(service, ELECTOR)
