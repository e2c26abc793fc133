"""Amendments: what they say, when they count, and from which cut on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol import codec
from protocol.domain import Thresholds
from protocol.errors import LocalError, PeerError
from protocol.log.amendment import Amendment
from protocol.log.branches import Outcome
from protocol.log.replica import Replica
from protocol.records import Amend, parse_payload
from tests.protocol.builders import THRESHOLDS, Writer, cut_for, grant_for, key, small_domain

OLD, NEW = ("e1", "e2", "e3", "e4"), ("e3", "e4", "e5", "e6")
DOMAIN = small_domain(OLD)
STRICT = replace(THRESHOLDS, deficit_mean=1)


def amendment(number: int = 1, names: tuple[str, ...] = NEW, thresholds: Thresholds = STRICT) -> Amendment:
    return Amendment.make(DOMAIN.id, number, [key(name).node for name in names], thresholds)


def payload(made: Amendment, *names: str) -> Amend:
    return made.payload({key(name).node: made.sign(key(name)) for name in names})


def nodes(*names: str) -> tuple[bytes, ...]:
    return tuple(sorted(key(name).node for name in names))


def test_an_amendment_reads_as_written() -> None:
    made = amendment()
    assert Amendment.parse(made.body) == made
    carried = payload(made, *OLD[:3])
    assert parse_payload("amend", codec.decode(codec.encode(carried.to_value()), max_bytes=4096)) == carried
    assert Amendment.of(DOMAIN.id, carried) == made
    made.verify(carried.votes, DOMAIN.electors)
    with pytest.raises(LocalError):
        amendment(number=0)
    with pytest.raises(LocalError):
        amendment(names=("e1", "e1"))
    value = carried.to_value()
    for place, wrong in ((1, list(reversed(carried.electors or ()))), (5, list(reversed(carried.votes))), (5, [])):
        with pytest.raises(PeerError):
            parse_payload("amend", [*value[:place], wrong, *value[place + 1 :]])


def test_it_counts_from_the_cut_after_the_one_that_covers_it() -> None:
    replica = Replica(DOMAIN)
    author = Writer("author", DOMAIN.id)
    author.append(payload(amendment(), *OLD[:3]))
    for entry in author.entries:
        assert replica.add_entry(entry)
    assert replica.electors_at(1) == replica.electors_at(9) == DOMAIN.electors
    with pytest.raises(PeerError, match="elector"):
        replica.add_cut(cut_for(replica, *NEW[:3], among=nodes(*NEW)))
    first = cut_for(replica, *OLD[1:])
    assert replica.add_cut(first)
    assert replica.electors_at(1) == DOMAIN.electors
    assert replica.electors_at(2) == replica.electors_at(9) == nodes(*NEW)
    assert [replica.thresholds_at(height) for height in (0, 1, 2)] == [THRESHOLDS, THRESHOLDS, STRICT]
    author.anchor = first.cut.id
    assert replica.add_entry(author.append(payload(amendment(2, OLD), *NEW[:3])))
    with pytest.raises(PeerError, match="elector"):
        replica.add_cut(cut_for(replica, *OLD[:3], among=nodes(*OLD)))
    # Neither do they grant terms any more, not even on an anchor of their time.
    assert replica.add_grant(grant_for(DOMAIN, 1, author.node, electors=OLD[:3])) is Outcome.OUTDATED
    with pytest.raises(PeerError, match="elector"):
        replica.add_grant(grant_for(DOMAIN, 2, author.node, electors=OLD[:3], anchor=first.cut.id))
    assert replica.add_cut(cut_for(replica, *NEW[1:]))
    assert replica.electors_at(3) == DOMAIN.electors
    assert replica.amendments.number == 2


@pytest.mark.parametrize(
    "carried",
    [
        payload(amendment(), *OLD[:2]),
        payload(amendment(), *OLD[:2], "stranger"),
        payload(amendment(number=2), *OLD[:3]),
        payload(amendment(thresholds=STRICT), *NEW[:3]),
        replace(payload(amendment(), *OLD[:3]), thresholds=(2,) * 8),
        replace(payload(amendment(), *OLD[:3]), thresholds=(1, 2**62, *(1,) * 6)),
    ],
    ids=["too few", "a stranger", "not the next", "the wrong electors", "other content", "no thresholds"],
)
def test_any_other_means_nothing(carried: Amend) -> None:
    replica = Replica(DOMAIN)
    author = Writer("author", DOMAIN.id)
    author.append(carried)
    for entry in author.entries:
        assert replica.add_entry(entry)
    assert replica.add_cut(cut_for(replica, *OLD[:3]))
    assert replica.electors_at(2) == DOMAIN.electors
    assert replica.amendments.number == 0
