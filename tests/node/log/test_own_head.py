"""When a feed may be continued."""

from __future__ import annotations

import pytest

from node.log.own_head import OwnHead

NODE, ELECTOR, A, B, C, D = (bytes([number]) * 32 for number in range(6))
ELECTORS = tuple(bytes([100 + number]) * 32 for number in range(7))


def test_a_new_key_has_nothing_to_wait_for() -> None:
    own = OwnHead(NODE, [ELECTOR], [A, B, C], fresh=True)
    assert own.confirmed(-1)
    own.seen(4)  # but it is not new, as it turns out
    assert not own.confirmed(3)
    assert own.confirmed(4)


def test_a_node_that_knows_nobody() -> None:
    assert OwnHead(NODE, [NODE], [], fresh=False).confirmed(7)
    assert OwnHead(NODE, [NODE], [NODE], fresh=False).confirmed(7)


@pytest.mark.parametrize(("known", "needed"), [([A], 1), ([A, B], 2), ([A, B, C], 3), ([A, B, C, D], 3)])
def test_known_peers(known: list[bytes], needed: int) -> None:
    own = OwnHead(NODE, [NODE], known, fresh=False)
    for count, peer in enumerate(known[:needed]):
        assert not own.confirmed(7)
        assert f"{count} of {needed}" in own.missing()
        own.confirm(peer)
        own.confirm(peer)
    assert own.confirmed(7)


def test_strangers_do_not_count() -> None:
    own = OwnHead(NODE, [NODE], [A], fresh=False)
    for peer in (B, C, D):
        own.confirm(peer)
    assert not own.confirmed(7)


def test_one_elector_is_enough_where_one_is_all() -> None:
    own = OwnHead(NODE, [ELECTOR], [A, B, C], fresh=False)
    own.confirm(ELECTOR)
    assert own.confirmed(7)


def test_more_than_f_electors_are_asked() -> None:
    own = OwnHead(NODE, ELECTORS, [A, B, C], fresh=False)  # n = 7, f = 2
    for elector in ELECTORS[:2]:
        own.confirm(elector)
        assert not own.confirmed(7)
    own.confirm(ELECTORS[2])
    assert own.confirmed(7)


def test_an_elector_does_not_count_itself() -> None:
    own = OwnHead(ELECTORS[0], ELECTORS, [A], fresh=False)
    for elector in ELECTORS[:3]:
        own.confirm(elector)
    assert not own.confirmed(7)


def test_it_catches_up_first() -> None:
    own = OwnHead(NODE, [ELECTOR], [], fresh=False)
    own.seen(9)
    own.confirm(ELECTOR)
    assert not own.confirmed(8)
    assert own.confirmed(9)


def test_a_backup_from_before_it_met_anybody_waits_for_electors() -> None:
    own = OwnHead(ELECTORS[0], ELECTORS, [], fresh=False)  # n = 7, f = 2
    assert own.missing() == "0 of 3 electors told this node where its feed ends"
    for elector in ELECTORS[:4]:
        assert not own.confirmed(7)
        own.confirm(elector)
    assert own.confirmed(7)
    assert not OwnHead(NODE, [ELECTOR], [], fresh=False).confirmed(-1)
