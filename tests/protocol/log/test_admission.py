"""Admission: who may join, by whose word, and at what price."""

from __future__ import annotations

import dataclasses
from itertools import count
from random import Random

import pytest

from protocol import codec
from protocol.constants import FULL_CUTS, TICKET_CUTS
from protocol.errors import PeerError
from protocol.log import admission
from protocol.log.admission import LONE_CUTS, LONE_USES, Admissions, Ticket, search, work_of
from protocol.log.branches import Outcome
from protocol.log.proposal import problem
from protocol.log.quorum import Cut
from protocol.log.replica import Replica
from protocol.records import Invite, Join
from protocol.rules import Admission
from tests.protocol.builders import Story, Writer, cut_for, digest, key, small_domain
from tests.protocol.credit.test_snapshot import restart

OPEN, INVITED = Admission("open", 0, 3), Admission("invited", 0, 3)


def story(rules: Admission = OPEN) -> Story:
    return Story(members=("trainer", "v1", "i1", "i2"), admission=rules)


def join(name: str) -> Join:
    return Join(digest(f"recovery {name}"), "farflung/test", name)


def test_only_whom_a_cut_admitted_may_join() -> None:
    told = story()
    early = Writer("s", told.domain.id, joined=False)
    early.anchor = told.replica.newest_cut_id
    with pytest.raises(PeerError, match="no cut admitted"):
        told.replica.add_entry(early.append(join("s")))
    told.admit("s")
    assert not told.ledger.member(told.node("s"))
    with pytest.raises(PeerError, match="no cut admitted"):
        told.replica.add_entry(early.entries[0])  # it anchors below the cut that admitted it
    told.join("s")
    assert told.ledger.member(told.node("s"))
    assert told.ledger.member(told.node("i1"))
    assert not told.ledger.member(told.node("z"))


def test_a_cut_may_hold_tickets_alone_and_nothing_may_not_be() -> None:
    told = story()
    told.cut()
    height = len(told.replica.cuts)
    told.admit("s", "z")
    assert len(told.replica.cuts) == height + 1
    newest = told.replica.newest_cut
    assert newest is not None
    value = codec.decode(newest.cut.body, max_bytes=1 << 20)
    with pytest.raises(PeerError, match="changes nothing"):
        Cut.parse(codec.encode([*value[:-2], [], []]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda told: [Ticket(told.node("i1"), told.domain.id, 0)], "admitted before"),
        (lambda told: [Ticket(told.node("s"), digest("?"), 0)], "newest cuts"),
        (lambda told: [Ticket(told.node("s"), told.domain.id, 0, told.node("e1"), bytes(64))], "unknown"),
        (lambda told: [Ticket(key(name).node, told.domain.id, 0) for name in "qrst"], "at most 3"),
    ],
)
def test_a_cut_with_a_ticket_that_admits_nobody_is_none(change: object, why: str) -> None:
    told = story()
    assert callable(change)
    with pytest.raises(PeerError, match=why):
        told.replica.add_cut(cut_for(told.replica, "elector", tickets=change(told)))


def test_a_ticket_for_an_old_cut_is_stale() -> None:
    told = story()
    ticket = Ticket(told.node("s"), told.replica.newest_cut_id, 0)
    for number in range(TICKET_CUTS - 1):
        told.admit(f"outsider {number}")
    height, of = len(told.replica.cuts) + 1, told.replica.height
    assert told.replica.admissions.problem(ticket, height, of) is None
    told.admit("last")
    assert "newest cuts" in (told.replica.admissions.problem(ticket, height + 1, of) or "")


def test_work_is_what_it_says() -> None:
    domain, node = digest("domain"), key("s").node
    found = search(domain, node, domain, 16, count())
    assert found is not None
    assert work_of(domain, found) >= 16
    assert all(work_of(domain, Ticket(node, domain, nonce)) < 16 for nonce in range(found.nonce))
    assert search(domain, node, domain, 2**40, range(3)) is None
    assert search(domain, node, domain, 1, [7]) == Ticket(node, domain, 7)
    assert Ticket.parse(found.encode()) == found
    # Somebody else's work is of no use.
    other = dataclasses.replace(found, node=key("z").node)
    assert work_of(domain, other) != work_of(domain, found)


def test_the_work_of_a_ticket_is_as_many_hashes_as_one_expects() -> None:
    """Of many tickets the share whose work is w or more is about 1/w."""
    domain = digest("domain")
    works = [work_of(domain, Ticket(key("s").node, domain, nonce)) for nonce in range(400)]
    for asked in (2, 4, 8):
        assert 0.6 < sum(work >= asked for work in works) / 400 * asked < 1.5


def test_voters_judge_the_work_and_replicas_follow_them() -> None:
    told = story(Admission("open", 64, 3))
    cheap = Ticket(told.node("s"), told.replica.newest_cut_id, 0)
    assert work_of(told.domain.id, cheap) < 64
    cut = cut_for(told.replica, "elector", tickets=[cheap])
    assert problem(told.replica, cut.cut, prepared=False) == "a ticket's work is less than what is asked"
    assert problem(told.replica, cut.cut, prepared=True) is None
    dear = search(told.domain.id, told.node("s"), told.replica.newest_cut_id, 64, count())
    assert dear is not None
    assert problem(told.replica, cut_for(told.replica, "elector", tickets=[dear]).cut, prepared=False) is None


def test_the_asked_work_follows_from_the_log() -> None:
    domain = small_domain(admission=Admission("open", 8, 2))
    rules, names = Admissions(domain), count()
    height = 0

    def cut(admitted: int) -> None:
        nonlocal height
        height += 1
        tickets = [Ticket(key(f"n{next(names)}").node, domain.id, 0) for _ in range(admitted)]
        rules.cover(height, tickets, [], domain.electors)

    for _ in range(FULL_CUTS - 1):
        cut(2)
    assert rules.work == 8
    cut(1)
    for _ in range(FULL_CUTS):
        cut(2)
    assert rules.work == 16
    for _ in range(FULL_CUTS):
        cut(2)
    assert rules.work == 32
    for _ in range(2 * FULL_CUTS):
        cut(1)
    assert rules.work == 8
    for _ in range(FULL_CUTS):
        cut(0)
    assert rules.work == 8


def invite(told: Story, by: str, uses: int = 2, expires: int = 90, name: str = "invitation") -> bytes:
    told.say(by, Invite(key(name).node, uses, expires))
    told.cut()
    return key(name).node


def invited(told: Story, name: str, by: str = "invitation") -> Ticket:
    return Ticket.invited(told.domain.id, key(by), told.node(name))


def elected(rules: Admission = INVITED) -> Story:
    told = story(rules)
    told.join("elector")
    return told


def test_work_admits_nobody_where_one_must_be_invited() -> None:
    told = elected()
    with pytest.raises(PeerError, match="for the invited"):
        told.replica.add_cut(cut_for(told.replica, "elector", tickets=[Ticket(told.node("s"), told.domain.id, 0)]))
    invite(told, "elector")
    told.cut(invited(told, "s"))
    told.join("s")
    assert told.ledger.member(told.node("s"))


def test_an_overheard_ticket_is_of_no_use_to_another() -> None:
    told = elected()
    invite(told, "elector")
    stolen = dataclasses.replace(invited(told, "s"), node=told.node("z"))
    assert told.replica.admissions.problem(stolen, 9, told.replica.height) == "the invitation's signature is wrong"


def test_uses_are_counted_and_an_invitation_ends() -> None:
    told = elected()
    invite(told, "elector", uses=2, expires=20)
    tickets = [invited(told, name) for name in "stz"]
    with pytest.raises(PeerError, match="fewer uses left"):
        told.replica.add_cut(cut_for(told.replica, "elector", tickets=tickets))
    told.cut(invited(told, "s"))
    told.cut(invited(told, "z"))
    assert "used up" in (told.replica.admissions.problem(invited(told, "t"), 9, told.replica.height) or "")
    invite(told, "elector", uses=5, expires=20)
    assert told.replica.admissions.problem(invited(told, "t"), 20, told.replica.height) is None
    assert "over" in (told.replica.admissions.problem(invited(told, "t"), 21, told.replica.height) or "")
    invite(told, "elector", uses=0)
    assert "unknown" in (told.replica.admissions.problem(invited(told, "t"), 20, told.replica.height) or "")


def test_only_electors_and_the_founder_invite_and_nobody_takes_anothers_back() -> None:
    told = elected()
    invite(told, "i1")
    assert not told.replica.admissions.invitations
    key_of = invite(told, "elector", uses=2)
    invite(told, "i1", uses=0)
    assert told.replica.admissions.invitations[key_of].uses == 2


def test_one_inviter_lets_in_no_more_than_so_many_at_a_time() -> None:
    domain = small_domain(admission=Admission("invited", 0, 256))
    rules = Admissions(domain)
    writer = Writer("elector", domain.id)
    writer.append(Invite(key("invitation").node, 1000, 1000))
    rules.cover(1, [], writer.entries, domain.electors)
    tickets = [Ticket.invited(domain.id, key("invitation"), key(f"n{n}").node) for n in range(LONE_USES + 5)]
    chosen = rules.choose(tickets, 2, lambda cut: 0)
    assert len(chosen) == LONE_USES
    rules.cover(2, chosen, [], domain.electors)
    assert rules.choose(tickets, 3, lambda cut: 0) == []
    assert len(rules.choose(tickets, 2 + LONE_CUTS, lambda cut: 0)) == 5


def test_what_was_admitted_survives_a_snapshot() -> None:
    told = elected(Admission("open", 4, 3))
    invite(told, "elector")
    told.cut(invited(told, "s"))
    told.admit("z")
    told.join("s")
    told.cut()
    resumed = restart(told.ledger)
    assert resumed.replica.admissions.to_value() == told.replica.admissions.to_value()
    assert resumed.replica.budgets.spent == told.replica.budgets.spent
    again = Writer("z", told.domain.id, joined=False)
    again.anchor = told.replica.newest_cut_id
    assert resumed.replica.add_entry(again.append(join("z"))) is Outcome.ADDED


@pytest.mark.parametrize("seed", [0, 3])
def test_an_honest_newcomer_gets_in_under_a_flood(seed: int) -> None:
    """10,000 strangers, each with the hashes of one newcomer: it is admitted within 200 cuts (of four chances the
    slowest took 177; that of the mean is 10,000 / 32 / 2)."""
    domain = small_domain(admission=Admission("open", 256, 32))
    rules, chance = Admissions(domain), Random(seed)
    hashes, honest = 512, 10_000  # what each makes from cut to cut, and who is watched
    best, left = [0] * (honest + 1), set(range(honest + 1))
    height = 0
    while honest in left and height < 200:
        height += 1
        for number in left:
            best[number] = max(best[number], int(hashes / max(chance.random(), 1e-12)))
        asked = rules.work
        line = sorted((number for number in left if best[number] >= asked), key=lambda number: -best[number])[:32]
        rules.cover(height, [Ticket(number.to_bytes(32, "big"), domain.id, 0) for number in line], [], domain.electors)
        left -= set(line)
    assert honest not in left


def test_the_constants_bound_a_ticket() -> None:
    longest = Ticket(bytes(32), bytes(32), 2**63 - 1, bytes(32), bytes(64))
    assert len(longest.encode()) <= admission.MAX_TICKET_BYTES
    assert isinstance(Replica(small_domain()).admissions, Admissions)
