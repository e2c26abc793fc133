from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from node.log.round_order import HOLD, MAX_FAULTS, REMEMBERED, ROOM, Rank, RoundOrder
from tests.protocol.builders import digest

ELECTOR, MEMBER, OTHER = digest("elector"), digest("member"), digest("other")
RANKS = {ELECTOR: Rank.ELECTOR, MEMBER: Rank.MEMBER, OTHER: Rank.STRANGER}


def crowd(count: int, rank: Rank = Rank.STRANGER) -> dict[bytes, Rank]:
    return {digest(f"one of a crowd {number}"): rank for number in range(count)}


class Clock:
    """A time that stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def new_order(clock: Clock | None = None) -> RoundOrder:
    return RoundOrder(clock or Clock())


def rounds(
    order: RoundOrder,
    ranks: dict[bytes, Rank],
    count: int,
    *,
    good: Callable[[bytes], bool | None] = lambda peer: True,
    wanting: Iterable[bytes] = (),
) -> Counter[bytes]:
    """Who had how many of the next rounds; ``wanting`` are asked for all the time."""
    had: Counter[bytes] = Counter()
    for _ in range(count):
        for peer in wanting:
            order.want(peer)
        begun = order.begin(ranks)
        assert begun is not None
        had[begun] += 1
        order.end(begun, good(begun))
    return had


def test_whoever_waits_longest_is_next() -> None:
    order, ranks = new_order(), crowd(5)
    assert set(rounds(order, ranks, 5).values()) == {1}
    assert set(rounds(order, ranks, 10).values()) == {2}


def test_nobody_is_there() -> None:
    order = new_order()
    order.want(OTHER)
    assert not order.pressing({})
    assert order.begin({}) is None


def test_who_was_asked_for_goes_first() -> None:
    order, ranks = new_order(), crowd(5)
    wanted = list(ranks)[3]
    order.want(wanted)
    assert order.pressing(ranks)
    assert order.begin(ranks) == wanted
    assert not order.pressing(ranks)
    order.want(wanted)
    assert not order.pressing(ranks)  # its round runs
    order.end(wanted, True)
    assert order.pressing(ranks)


def test_one_that_is_always_asked_for_has_every_other_round() -> None:
    ranks = crowd(5)
    wanted = list(ranks)[3]
    had = rounds(new_order(), ranks, 40, wanting=[wanted])
    assert had.pop(wanted) == 20
    assert set(had.values()) == {5}


def test_half_of_the_rounds_are_for_the_domains_own() -> None:
    ranks = RANKS | crowd(40)
    had = rounds(new_order(), ranks, 400, wanting=crowd(40))
    assert had[ELECTOR] + had[MEMBER] >= 200
    assert had[ELECTOR] >= 100
    assert all(had[peer] for peer in ranks)


def test_what_stalls_leaves_room_to_the_more_trusted() -> None:
    order = new_order()
    strangers, members = crowd(40), {digest(f"member {number}"): Rank.MEMBER for number in range(40)}
    begun = [order.begin(strangers) for _ in range(ROOM[Rank.STRANGER])]
    assert None not in begun
    assert order.begin(strangers) is None
    while order.begin(strangers | members) is not None:
        pass
    order.want(ELECTOR)
    assert order.pressing(strangers | members | RANKS)
    assert order.begin(strangers | members | RANKS) == ELECTOR
    assert not order.pressing(strangers | members | RANKS)
    stranger = begun[0]
    assert stranger is not None
    order.end(stranger, False)
    order.restart()
    assert order.begin(strangers) is not None


@pytest.mark.parametrize("wanting", [False, True])
def test_one_that_is_of_no_use_falls_behind_and_comes_back(wanting: bool) -> None:
    order, ranks = new_order(), crowd(5)
    idle = list(ranks)[3]
    wanted = [idle] if wanting else []
    faulty = rounds(order, ranks, 400, good=lambda peer: peer != idle, wanting=wanted)
    assert order.faults(idle) == MAX_FAULTS
    assert 3 + MAX_FAULTS <= faulty.pop(idle) <= 400 / 5 / 4
    assert min(faulty.values()) > 90
    assert rounds(order, ranks, 400, wanting=wanted)[idle] >= MAX_FAULTS
    assert order.faults(idle) == 0
    assert rounds(order, ranks, 100)[idle] == 20


def test_a_round_that_says_nothing_of_the_peer_changes_nothing() -> None:
    order, ranks = new_order(), crowd(2)
    one, other = ranks
    rounds(order, ranks, 10, good=lambda peer: False if peer == one else None)
    assert order.faults(one) > 0
    assert order.faults(other) == 0
    before = order.faults(one)
    rounds(order, {one: Rank.STRANGER}, 10, good=lambda peer: None)
    assert order.faults(one) == before


def test_one_alone_is_asked_as_ever() -> None:
    order = new_order()
    assert rounds(order, {OTHER: Rank.STRANGER}, 50, good=lambda peer: False)[OTHER] == 50


def test_faults_outlast_a_connection_and_are_bounded() -> None:
    order = new_order()
    for number in range(2 * REMEMBERED):
        peer = digest(f"churn {number}")
        assert order.begin({peer: Rank.STRANGER}) == peer
        order.end(peer, False)
    order.begin({})
    assert sum(order.faults(digest(f"churn {number}")) for number in range(2 * REMEMBERED)) == REMEMBERED
    assert order.faults(digest(f"churn {2 * REMEMBERED - 1}")) == 1


def test_one_that_fell_behind_waits_no_longer_than_a_while() -> None:
    clock = Clock()
    order, ranks = new_order(clock), crowd(50)
    idle = max(ranks)  # the last of the newcomers
    rounds(order, ranks, 50, good=lambda peer: peer != idle)
    assert order.faults(idle) == 1
    assert idle not in rounds(order, ranks, 20)
    order.want(idle)
    assert not order.pressing(ranks)
    clock.now = 2 * HOLD
    assert order.pressing(ranks)
    assert rounds(order, ranks, 4)[idle] == 1


def test_where_all_are_of_no_use_nobody_is_behind() -> None:
    order, ranks = new_order(), crowd(5)
    had = rounds(order, ranks, 200, good=lambda peer: False)
    assert min(had.values()) > 35
    wanted = list(ranks)[3]
    order.want(wanted)
    assert order.pressing(ranks)


def test_an_elector_that_is_asked_for_does_not_wait() -> None:
    order, ranks = new_order(), RANKS | crowd(5)
    rounds(order, ranks, 100, good=lambda peer: peer not in (ELECTOR, MEMBER))
    order.want(MEMBER)
    assert not order.pressing(ranks)
    order.want(ELECTOR)
    assert order.pressing(ranks)
    assert ELECTOR in rounds(order, ranks, 4)


def test_what_is_asked_for_is_bounded() -> None:
    order = new_order()
    for number in range(2 * REMEMBERED):
        order.want(digest(f"stranger {number}"))
    late = {digest(f"stranger {2 * REMEMBERED - 1}"): Rank.STRANGER}
    assert not order.pressing(late)
    assert order.begin(late) is not None  # what is not connected is forgotten
    order.restart()
    order.want(*late)
    assert order.pressing(late)
