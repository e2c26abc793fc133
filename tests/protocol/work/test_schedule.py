"""``protocol.work.schedule``: seeds, tasks, audits and lag."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import MAX_DUE_VALIDATORS, MILLION
from protocol.domain import Task
from protocol.errors import LocalError
from protocol.records import Blob
from protocol.work import schedule
from tests.protocol.builders import RECIPE, digest

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "seed.json").read_text())
DOMAIN, WEIGHTS, NODE = digest("domain"), digest("weights"), digest("node")


@pytest.mark.parametrize("vector", VECTORS["seeds"])
def test_seeds_are_the_golden_ones(vector: dict[str, str | int]) -> None:
    domain, weights, node = (bytes.fromhex(str(vector[field])) for field in ("domain", "weights", "node"))
    assert schedule.seed(domain, weights, node, int(vector["counter"])).hex() == vector["seed"]


@pytest.mark.parametrize("vector", VECTORS["tasks"])
def test_tasks_are_the_golden_ones(vector: dict[str, object]) -> None:
    weights = vector["weights"]
    assert isinstance(weights, list)
    assert list(schedule.choose_task(bytes.fromhex(str(vector["seed"])), weights)) == [vector["task"], vector["item"]]


@pytest.mark.parametrize("vector", VECTORS["lengths"])
def test_target_lengths_are_the_golden_ones(vector: dict[str, object]) -> None:
    targets = vector["targets"]
    assert isinstance(targets, list)
    assert schedule.target_length(bytes.fromhex(str(vector["seed"])), targets) == vector["length"]


@pytest.mark.parametrize("vector", VECTORS["audits"])
def test_audited_groups_are_the_golden_ones(vector: dict[str, object]) -> None:
    groups, share = vector["groups"], vector["share"]
    assert isinstance(groups, int)
    assert isinstance(share, int)
    assert list(schedule.audited_groups(bytes.fromhex(str(vector["draw"])), groups, share)) == vector["audited"]


def test_a_seed_is_the_hash_of_its_formula() -> None:
    expected = sha256(b"farflung/seed/v1\0" + DOMAIN + WEIGHTS + NODE + (258).to_bytes(8, "big")).digest()
    assert schedule.seed(DOMAIN, WEIGHTS, NODE, 258) == expected


def test_every_input_changes_the_seed() -> None:
    other = digest("other")
    seeds = {
        schedule.seed(DOMAIN, WEIGHTS, NODE, 0),
        schedule.seed(other, WEIGHTS, NODE, 0),
        schedule.seed(DOMAIN, other, NODE, 0),
        schedule.seed(DOMAIN, WEIGHTS, other, 0),
        schedule.seed(DOMAIN, WEIGHTS, NODE, 1),
    }
    assert len(seeds) == 5
    with pytest.raises(LocalError):
        schedule.seed(DOMAIN[:31], WEIGHTS, NODE, 0)


def test_tasks_come_in_the_proportion_of_their_weights() -> None:
    drawn = [schedule.choose_task(digest(f"seed {index}"), [1, 0, 3]) for index in range(4000)]
    counts = Counter(task for task, _ in drawn)
    assert counts[1] == 0
    assert abs(counts[2] - 3000) < 140  # five standard deviations
    items = [item for _, item in drawn]
    assert all(0 <= item < 2**31 for item in items)
    assert len(set(items)) > 3990
    assert max(items) > 2**30 * 1.9


@pytest.mark.parametrize("weights", [[], [0, 0], [2, -1]])
def test_tasks_without_positive_weights_are_our_own_mistake(weights: list[int]) -> None:
    with pytest.raises(LocalError):
        schedule.choose_task(digest("seed"), weights)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=64, max_size=64), st.integers(1, 40), st.integers(0, MILLION))
def test_the_audited_share_is_rounded_up_and_never_empty(draw: bytes, groups: int, share: int) -> None:
    audited = schedule.audited_groups(draw, groups, share)
    assert list(audited) == sorted(set(audited))
    assert all(0 <= index < groups for index in audited)
    assert len(audited) == max(1, -(-groups * share // MILLION))
    assert schedule.audited_groups(draw, groups, MILLION) == tuple(range(groups))


def test_every_group_is_audited_equally_often() -> None:
    counts = Counter(
        index for lot in range(2000) for index in schedule.audited_groups(digest(str(lot)) * 2, 8, 250_000)
    )
    assert set(counts) == set(range(8))
    assert all(abs(count - 500) < 100 for count in counts.values())


@pytest.mark.parametrize(("groups", "share"), [(0, 1), (1, -1), (1, MILLION + 1)])
def test_an_impossible_audit_is_our_own_mistake(groups: int, share: int) -> None:
    with pytest.raises(LocalError):
        schedule.audited_groups(bytes(64), groups, share)


def test_due_are_the_lowest_hashes_whatever_the_order() -> None:
    validators = [digest(f"validator {index}") for index in range(9)]
    due = schedule.due_validators(WEIGHTS, NODE, 16, validators)

    def rank(validator: bytes) -> bytes:
        return sha256(WEIGHTS + NODE + (16).to_bytes(8, "big") + validator).digest()

    assert list(due) == sorted(validators, key=rank)[:MAX_DUE_VALIDATORS]
    assert schedule.due_validators(WEIGHTS, NODE, 16, [*reversed(validators), *validators]) == due
    assert any(schedule.due_validators(WEIGHTS, NODE, first, validators) != due for first in range(16))


def test_few_validators_are_all_due() -> None:
    assert schedule.due_validators(WEIGHTS, NODE, 0, []) == ()
    assert schedule.due_validators(WEIGHTS, NODE, 0, [WEIGHTS]) == (WEIGHTS,)


def test_nobody_is_due_to_judge_itself() -> None:
    validators = [NODE, *(digest(f"validator {index}") for index in range(2))]
    for first in range(8):
        assert set(schedule.due_validators(WEIGHTS, NODE, first, validators)) == set(validators[1:])
    assert schedule.due_validators(WEIGHTS, NODE, 0, [NODE]) == ()


@pytest.mark.parametrize(
    ("base", "version", "counts"), [(5, 5, True), (5, 4, True), (5, 3, True), (5, 2, False), (5, 6, False)]
)
def test_a_rollout_counts_for_two_versions(base: int, version: int, counts: bool) -> None:
    assert schedule.usable(base - version, 2) is counts


def test_target_lengths_are_drawn_evenly_and_told_in_the_prompt() -> None:
    targets = (100, 200, 300)
    drawn = Counter(schedule.target_length(digest(f"seed {index}"), targets) for index in range(3000))
    assert drawn.keys() == set(targets)
    assert all(abs(count - 1000) < 130 for count in drawn.values())  # five standard deviations
    seed = digest("seed")
    place = int.from_bytes(sha256(b"farflung/length/v1\0" + seed).digest()[:8], "big") % 3
    assert schedule.target_length(seed, targets) == targets[place]
    recipe = replace(RECIPE, target_lengths=targets, budget_prompt="Use {} tokens.")
    assert schedule.prompt("1 + 1?", seed, recipe) == f"1 + 1?\nUse {targets[place]} tokens."
    assert schedule.target_length(seed, ()) is None
    assert schedule.prompt("1 + 1?", seed, RECIPE) == "1 + 1?"


def test_the_share_falls_by_halves_as_trust_grows() -> None:
    trusts = [(MILLION * (accepted + 1)) // (accepted + 2) for accepted in range(20_000)]
    tiers = [schedule.audit_tier(trust) for trust in trusts]
    assert tiers[0] == schedule.audit_tier(0) == 0
    assert tiers == sorted(tiers)
    assert [tiers.index(tier) for tier in range(5)] == [0, 18, 38, 78, 158]
    assert schedule.audit_tier(MILLION) == tiers[-1] == schedule.MAX_TIER
    assert [schedule.audit_share(tier, 62_500) for tier in range(6)] == [
        MILLION,
        500_000,
        250_000,
        125_000,
        62_500,
        62_500,
    ]
    assert schedule.audit_share(3, MILLION) == MILLION
    assert [schedule.audited_count(8, share) for share in (MILLION, 500_000, 125_000, 62_500, 0)] == [8, 4, 1, 1, 1]


def test_an_evaluations_seed_is_the_hash_of_its_formula_and_no_training_seed() -> None:
    task = Task("jsonl", "homework", 3, "{}", "0.9.0", Blob(digest("data"), 5))
    described = codec.encode(["jsonl", "homework", "{}", "0.9.0", digest("data")])
    expected = sha256(b"farflung/eval/v1\0" + DOMAIN + sha256(described).digest() + (7).to_bytes(8, "big")).digest()
    assert schedule.eval_seed(DOMAIN, task, 7) == expected
    assert schedule.eval_item(expected) == schedule.choose_task(expected, [1])[1]
    # Its share of the mix is none of its identity; all else is.
    assert schedule.eval_seed(DOMAIN, replace(task, weight=9), 7) == expected
    others = (replace(task, name="other"), replace(task, parameters='{"a":1}'), replace(task, data=None))
    seeds = {schedule.eval_seed(DOMAIN, other, 7) for other in (*others, replace(task, version="1"))}
    seeds |= {schedule.eval_seed(digest("other"), task, 7), schedule.eval_seed(DOMAIN, task, 8)}
    assert len(seeds) == 6
    assert expected not in seeds
    # The contexts differ in bytes that no field can reach: a training seed of the same digest would be a collision.
    assert not schedule.SEED_CONTEXT.startswith(schedule.EVAL_CONTEXT)
    assert not schedule.EVAL_CONTEXT.startswith(schedule.SEED_CONTEXT)
