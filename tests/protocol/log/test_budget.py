"""Budgets: what a key may add to everybody's log."""

from __future__ import annotations

import pytest

from protocol.constants import BUDGET_CUTS, BUDGET_PER_SUBMISSION, ELECTOR_BUDGET_CUTS, MAX_UNJUDGED
from protocol.errors import PeerError
from protocol.log.branches import Outcome
from protocol.log.budget import UNBOUNDED, Budgets, affordable, costs
from protocol.log.grants import Terms
from protocol.log.heads import Head
from protocol.log.proposal import NEWCOMERS, propose, within_reason
from protocol.records import Role, Step
from protocol.rules import Admission
from tests.protocol.builders import Story, cut_for, digest
from tests.protocol.credit.test_snapshot import restart

SMALL = Admission("open", 0, 3, 12)


def story() -> Story:
    told = Story(admission=SMALL)
    told.work = told.ledger
    return told


def left(told: Story, name: str) -> int:
    """How many entries of no special kind the author may append before the next cut."""
    writer = told.writers[name]
    count = 0
    while True:
        entry = writer.append(Role("relay"))
        if told.replica.add_entry(entry, told.ledger) is not Outcome.ADDED:
            writer.entries.pop()
            return count
        count += 1


def test_a_fresh_key_has_a_small_budget_and_no_more() -> None:
    told = story()
    assert left(told, "i1") == 12 - 2  # its join and its role
    told.cut()
    assert left(told, "i1") == 0
    assert told.replica.budgets.spent[told.node("i1")] == 12


def test_work_earns_more() -> None:
    told = story()
    first = told.rollout("i1", 0)
    told.cut()
    assert told.ledger.worked(told.node("i1")) == 1  # nobody judged it yet
    told.judge("v1", first)
    told.cut()
    assert told.ledger.worked(told.node("i1")) == 1
    assert left(told, "i1") == 12 + BUDGET_PER_SUBMISSION - 3


def test_rejected_work_earns_nothing() -> None:
    told = story()
    first = told.rollout("i1", 0)
    told.cut()
    told.judge("v1", first, "hard")
    told.cut()
    assert told.ledger.worked(told.node("i1")) == 0
    assert left(told, "i1") == 12 - 3


def test_few_unjudged_submissions_count() -> None:
    told = story()
    for number in range(10):
        told.rollout("i1", 2 * number)
    told.cut()
    assert told.ledger.worked(told.node("i1")) == MAX_UNJUDGED


def test_a_trainers_versions_and_a_validators_verdicts_cost_nothing() -> None:
    told = story()
    rollout = told.rollout("i2", 0)
    told.cut()
    for _ in range(20):
        told.train()
        told.judge("v1", rollout)
        told.cut()
    # Its join, its role, and version 0, before which nothing said that the term came to something.
    assert told.replica.budgets.spent[told.node("trainer")] == 3
    assert told.replica.budgets.spent[told.node("v1")] == 2
    step = Step(7, 1, digest("base"), digest("blob"), 90, 0, 0, 0, 2, 8, 0, 8, 40, 9, 1, 1, 0)
    assert costs(told.say("trainer", step), told.replica.terms, told.ledger) == 1
    assert costs(told.judge("i1", rollout), told.replica.terms, told.ledger) == 1


def test_what_a_step_costs_follows_from_cuts_and_not_from_when_a_grant_came() -> None:
    told = story()
    step = Step(1, 1, told.newest.id, digest("blob"), 90, 0, 0, 0, 2, 8, 0, 8, 40, 9, 1, 1, 0)
    early = told.say("trainer", step)
    assert costs(early, told.replica.terms, told.ledger) == 1  # the grant is held, and no cut says so
    told.cut()
    assert costs(early, told.replica.terms, told.ledger) == 0


def test_time_gives_one_entry_now_and_then() -> None:
    budgets = Budgets(32, {digest("a"): 32})
    table = story().ledger
    assert budgets.left(digest("a"), BUDGET_CUTS - 1, table) == 0
    assert budgets.left(digest("a"), 3 * BUDGET_CUTS, table) == 3
    assert budgets.left(digest("a"), 3 * ELECTOR_BUDGET_CUTS, table, elector=True) == 3


def test_no_cut_covers_more_than_a_budget_pays_for() -> None:
    told = story()
    for _ in range(11):
        entry = told.writers["i1"].append(Role("relay"))
        assert told.replica.add_entry(entry)  # as a replica without budgets would
    rows = {head.author: head.seq for head in told.replica.reportable(work=told.ledger)}
    assert rows[told.node("i1")] == 11
    cut = cut_for(told.replica, "elector")
    with pytest.raises(PeerError, match="budget"):
        told.replica.add_cut(cut, told.ledger)
    assert told.replica.add_cut(cut)


def test_newcomers_bind_the_proposer_the_smallest_first() -> None:
    told = story()
    names = [f"w{number}" for number in range(1, 4)]
    for name in names:
        told.join(name)
    for count, name in enumerate(names, 1):
        for _ in range(count * NEWCOMERS // 3):
            entry = told.writers[name].append(Role("relay")) if len(told.writers[name].entries) < 200 else None
            if entry is not None:
                assert told.replica.add_entry(entry)
    heads = {head.author: head for head in told.replica.uncovered()}
    report = _Report(told.domain.electors[0], tuple(heads.values()))
    cut = propose(
        told.domain.id,
        len(told.replica.cuts) + 1,
        told.replica.newest_cut_id,
        told.replica.certified,
        [report],  # type: ignore[list-item]
        told.domain.electors,
        told.replica.head_at,
        work=told.ledger,
    )
    assert cut is not None
    assert sum(head.seq + 1 for head in cut.changes if head.author in {told.node(name) for name in names}) <= NEWCOMERS


class _Report:
    def __init__(self, elector: bytes, heads: tuple[object, ...]) -> None:
        self.elector, self.heads = elector, heads


def test_what_was_spent_survives_a_snapshot() -> None:
    told = story()
    left(told, "i1")
    told.cut()
    resumed = restart(told.ledger)
    assert resumed.replica.budgets.spent == told.replica.budgets.spent
    entry = told.writers["i1"].append(Role("relay"))
    assert resumed.replica.add_entry(entry, resumed) is Outcome.OVER_BUDGET


def test_the_affordable_ones_are_the_first_ones() -> None:
    told = story()
    entries = told.writers["i1"].entries
    for most in range(4):
        assert affordable(entries, most, Terms(), told.ledger) == min(most, len(entries))
    assert affordable(entries, 2**30, Terms(), UNBOUNDED) == len(entries)


def test_a_feed_larger_than_what_newcomers_share_is_covered_alone() -> None:
    """A domain may give budgets beyond ``NEWCOMERS``; the smallest of what waits goes all the same."""
    told = Story()
    sizes = {"w1": 9000, "w2": 7000}
    chosen = {told.node(name): Head(told.node(name), size, digest(name), digest(name)) for name, size in sizes.items()}
    assert within_reason(sorted(chosen), chosen, {}, told.ledger) == [told.node("w2")]
