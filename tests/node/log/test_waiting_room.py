"""The waiting room: what wakes what waits there, and how much of it there may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.log.replicated_log import LogService
from node.log.signature_check import Check, check
from node.log.waiting_room import RoomBounds, WaitingRoom, add
from protocol.credit.ledger import Ledger
from protocol.log.entry import Entry
from protocol.log.heads import RangeRequest
from protocol.log.quorum import CertifiedCut
from protocol.log.replica import Replica
from protocol.records import Role
from tests.protocol.builders import Writer, cut_for, key, small_domain
from tests.simulator import Disk

DOMAIN = small_domain()
A, B = b"a" * 32, b"b" * 32


def history(names: tuple[str, ...], cuts: int) -> tuple[list[Entry], list[CertifiedCut], Replica]:
    """Feeds that grow by one entry between cuts, each on the newest one."""
    replica = Replica(DOMAIN)
    writers = [Writer(name, DOMAIN.id) for name in names]
    for writer in writers:
        assert replica.add_entry(writer.entries[0])
    made = []
    for number in range(cuts):
        made.append(cut_for(replica, "elector"))
        assert replica.add_cut(made[-1])
        for writer in writers:
            writer.anchor = made[-1].cut.id
            assert replica.add_entry(writer.append(Role("relay" if number % 2 else "none")))
    return [entry for writer in writers for entry in writer.entries], made, replica


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_of_cuts_and_entries_falls_into_place(backwards: bool) -> None:
    entries, cuts, source = history(("a", "b", "c"), 40)
    room = WaitingRoom(Ledger(replica := Replica(DOMAIN)))
    order = 1 if not backwards else -1
    first = room.deliver(entries[::order], origin=A)
    rest = room.deliver(cuts=cuts[::order], origin=A)
    assert len(first.items) + len(rest.items) == len(entries) + len(cuts)
    assert replica.heads_root() == source.heads_root()
    assert len(replica.cuts) == 40
    assert not room.waits(entries, cuts)
    # What was taken stands in an order in which it can be taken again.
    again = Ledger(Replica(DOMAIN))
    for item in [*first.items, *rest.items]:
        assert add(again, item)


def starts(wanted: list[RangeRequest]) -> dict[bytes, int]:
    """The first seq that is asked for, by author."""
    return {one.author: one.first_seq for one in reversed(wanted)}


def test_one_peers_waiting_entries_are_bounded() -> None:
    entries, cuts, _ = history(("a", "b"), 30)
    room = WaitingRoom(Ledger(replica := Replica(DOMAIN)), RoomBounds(peer_bytes=5 * 1300))
    room.deliver([entry for entry in entries if entry.author == key("a").node], origin=A)
    room.deliver([entry for entry in entries if entry.author == key("b").node], origin=B)
    kept = {name: sum(room.holds(e) for e in entries if e.author == key(name).node) for name in ("a", "b")}
    assert 3 <= kept["a"] == kept["b"] <= 5
    # The first ones are those that stay, so the feed goes on from where it ended.
    assert room.holds(entries[1])
    room.deliver(cuts=cuts, origin=A)
    assert replica.next_for(key("a").node) == kept["a"] + 1
    assert not any(room.holds(entry) for entry in entries)
    room.deliver(entries, origin=A)
    assert len(replica.cuts) == 30


def test_no_more_is_asked_for_than_there_is_room_for() -> None:
    _, cuts, _ = history(("a", "b", "c"), 40)

    def asked(room: WaitingRoom) -> int:
        room.deliver(cuts=cuts)
        return sum(one.last_seq - one.first_seq + 1 for one in room.missing_for_cuts())

    assert asked(WaitingRoom(Ledger(Replica(DOMAIN)))) == 3 * 40
    assert 15 < asked(WaitingRoom(Ledger(Replica(DOMAIN)), RoomBounds(entries=30))) <= 18


def test_what_waits_is_not_asked_for_again_unless_it_leads_nowhere() -> None:
    entries, cuts, _ = history(("a", "b"), 10)
    room = WaitingRoom(Ledger(Replica(DOMAIN)))
    room.deliver(cuts=cuts)
    of_a = [entry for entry in entries if entry.author == key("a").node]
    room.deliver(of_a[:7], origin=A)  # the first is taken, the others wait for cuts that cover b's as well
    a, b = key("a").node, key("b").node
    assert starts(room.missing_for_cuts()) == {a: 7, b: 0}
    assert starts(room.missing_for_cuts(again=True)) == {a: 1, b: 0}
    # Nor is what is under way.
    assert starts(room.missing_for_cuts(asked={a: 7, b: 4})) == {a: 8, b: 5}
    # What does not follow what is held may be rubbish, and is no reason not to ask.
    other = Writer("a", DOMAIN.id)
    stray = other.append(Role("trainer"))
    room = WaitingRoom(Ledger(Replica(DOMAIN)))
    room.deliver(cuts=cuts)
    room.deliver([other.append(Role("relay"))], origin=A)
    assert stray.seq == 1
    assert starts(room.missing_for_cuts())[a] == 0


def test_cuts_are_asked_for_in_their_order() -> None:
    _, cuts, _ = history(("a", "b"), 10)
    room = WaitingRoom(Ledger(Replica(DOMAIN)))
    room.deliver(cuts=cuts)
    wanted = room.missing_for_cuts(most=6)
    assert [(one.first_seq, one.last_seq) for one in wanted] == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]


def test_what_comes_in_the_order_of_cuts_does_not_wait() -> None:
    entries, cuts, source = history(("a", "b"), 10)
    room = WaitingRoom(Ledger(replica := Replica(DOMAIN)))
    room.deliver(cuts=cuts)
    taken = room.deliver(sorted(entries, key=lambda entry: entry.seq), origin=A)
    assert len(taken.items) == len(entries) + len(cuts)
    assert replica.heads_root() == source.heads_root()


async def test_what_waits_is_verified_once() -> None:
    entries, cuts, _ = history(("a",), 3)
    seen: list[Check] = []

    async def counting(checks: Sequence[Check]) -> list[bool]:
        seen.extend(checks)
        return check(checks)

    service = LogService(key("b"), Replica(DOMAIN), Disk(), fresh=True, thread_from=1, checking=counting)
    data = [entry.encode() for entry in entries]
    for _ in range(3):
        assert (await service.intake.receive(entries=data)).errors == []
    assert len(seen) == len(entries)
    await service.intake.receive(cuts=[cut.encode() for cut in cuts])
    await service.intake.receive(entries=data)
    assert len(seen) == len(entries)
    assert service.replica.next_for(key("a").node) == 4
