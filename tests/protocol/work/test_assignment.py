"""``protocol.work.assignment``: the assignment's rules, as properties and as cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.domain import Policy
from protocol.work import assignment
from protocol.work.assignment import Judges, Stability, anybody
from protocol.work.presence import Presence
from tests.protocol.builders import POLICY, digest
from tests.protocol.work.test_presence import PRESENCE

ALL = ("trainer", "relay", "validator", "inference")


def assign(
    presences: Mapping[bytes, Presence], policy: Policy, trainer: bytes | None, judges: Judges = anybody
) -> dict[bytes, str]:
    """The assignment where the log says of everybody what its presence says."""
    standing = {node: presence.role for node, presence in presences.items()}
    return assignment.assign(presences, policy, trainer, standing, judges)


def trainer_candidate(
    presences: Mapping[bytes, Presence], policy: Policy, judges: Judges = anybody, **more: Any
) -> bytes | None:
    """The candidate where the log says of everybody what its presence says."""
    standing = {node: presence.role for node, presence in presences.items()}
    return assignment.trainer_candidate(presences, policy, standing, judges=judges, **more)


def node(index: int) -> bytes:
    """Node ids that ascend with ``index``."""
    return index.to_bytes(32, "big")


def make(index: int, role: str = "none", willing: tuple[str, ...] = ALL, speed: int = 0) -> Presence:
    return replace(PRESENCE, node=node(index), role=role, willing=willing, tokens_per_second=speed)


def table(*rows: Presence) -> dict[bytes, Presence]:
    return {presence.node: presence for presence in rows}


def settle(presences: Mapping[bytes, Presence], trainer: bytes | None) -> dict[bytes, Presence]:
    """The presences once every node took up what it was assigned."""
    roles = assign(presences, POLICY, trainer)
    return {name: replace(presence, role=roles[name]) for name, presence in presences.items()}


roles_of_any = st.sampled_from([*ALL, "none"])
willing_of_any = st.lists(st.sampled_from(ALL), unique=True).map(tuple)


@st.composite
def networks(
    draw: st.DrawFn, least: int = 0, willing: st.SearchStrategy[tuple[str, ...]] = willing_of_any
) -> dict[bytes, Presence]:
    indices = draw(st.lists(st.integers(1, 500), min_size=least, max_size=12, unique=True))
    return table(
        *(
            replace(
                make(index, draw(roles_of_any), draw(willing), draw(st.integers(0, 10**5))),
                bandwidth_kbps=draw(st.integers(0, 10**6)),
                addresses=draw(st.sampled_from([(), ("/ip4/127.0.0.1/tcp/1",)])),
            )
            for index in indices
        )
    )


policies = st.builds(
    lambda relays, validators, relay_share, validator_share: replace(
        POLICY,
        relays_min=relays,
        validators_min=validators,
        relays_per_million=relay_share,
        validators_per_million=validator_share,
    ),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 600_000),
    st.integers(0, 600_000),
)


@settings(max_examples=70, deadline=None)
@given(networks(), policies, st.randoms(use_true_random=False), st.integers(0, 12))
def test_the_order_of_hearing_does_not_matter(
    network: dict[bytes, Presence], policy: Policy, random: Random, pick: int
) -> None:
    trainer = [*network, None][min(pick, len(network))]
    shuffled = list(network.items())
    random.shuffle(shuffled)
    assert assign(network, policy, trainer) == assign(dict(shuffled), policy, trainer)


@settings(max_examples=70, deadline=None)
@given(networks(least=1), policies, st.booleans())
def test_everybody_gets_one_role_and_never_an_unwanted_one(
    network: dict[bytes, Presence], policy: Policy, any_trainer: bool
) -> None:
    trainer = min(network) if any_trainer else None
    roles = assign(network, policy, trainer)
    assert roles.keys() == network.keys()
    for name, role in roles.items():
        presence = network[name]
        assert role == "none" or role in presence.willing or (role == presence.role == "trainer")
        if role == "none":
            # nobody idles who could infer
            assert "inference" not in presence.willing
        if role == "trainer":
            assert name == trainer
    willing_to_infer = [name for name in network if "inference" in network[name].willing and roles[name] != "trainer"]
    if len(willing_to_infer) > 1:
        assert "inference" in roles.values()


@settings(max_examples=70, deadline=None)
@given(networks(least=4, willing=st.just(ALL)))
def test_four_willing_nodes_fill_all_four_roles(network: dict[bytes, Presence]) -> None:
    counts = Counter(assign(network, POLICY, min(network)).values())
    assert counts == {"trainer": 1, "relay": 1, "validator": 1, "inference": len(network) - 3}


@settings(max_examples=70, deadline=None)
@given(networks(), policies)
def test_roles_settle_after_two_rounds(network: dict[bytes, Presence], policy: Policy) -> None:
    trainer = min(network, default=None)
    for _ in range(2):
        roles = assign(network, policy, trainer)
        network = {name: replace(presence, role=roles[name]) for name, presence in network.items()}
    assert assign(network, policy, trainer) == roles


@settings(max_examples=70, deadline=None)
@given(networks(least=4, willing=st.just(ALL)), st.integers(0, 600), st.integers(0, 2**40))
def test_a_newcomer_displaces_nobody(network: dict[bytes, Presence], index: int, speed: int) -> None:
    trainer = min(network)
    reachable = {name: replace(presence, addresses=("/ip4/127.0.0.1/tcp/1",)) for name, presence in network.items()}
    before = settle(reachable, trainer)
    newcomer = replace(make(0 if index > 500 else index, "none", speed=speed), bandwidth_kbps=speed)
    if newcomer.node in before:
        return
    after = assign({newcomer.node: newcomer, **before}, POLICY, trainer)
    assert after.pop(newcomer.node) == "inference"
    assert after == {name: presence.role for name, presence in before.items()}


def test_ties_go_by_node_id() -> None:
    roles = assign(table(*(make(index) for index in range(1, 6))), POLICY, node(1))
    assert [roles[node(index)] for index in range(1, 6)] == ["trainer", "validator", "relay", "inference", "inference"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, {"trainer": 1}),
        (2, {"trainer": 1, "validator": 1}),
        (3, {"trainer": 1, "validator": 1, "inference": 1}),
        (4, {"trainer": 1, "validator": 1, "inference": 1, "relay": 1}),
    ],
)
def test_few_nodes_fill_what_is_needed_most(count: int, expected: dict[str, int]) -> None:
    network = table(*(make(index) for index in range(count)))
    assert Counter(assign(network, POLICY, node(0)).values()) == expected


def test_a_share_of_many_nodes_validates_and_relays() -> None:
    policy = replace(POLICY, relays_per_million=50_000, validators_per_million=100_000)
    roles = assign(table(*(make(index) for index in range(40))), policy, node(0))
    assert Counter(roles.values()) == {"trainer": 1, "validator": 4, "relay": 2, "inference": 33}


def test_measured_ability_decides_before_the_id_but_noise_does_not() -> None:
    fast = table(make(1), make(2, speed=800), make(3, speed=790), make(4, speed=90_000), make(5))
    assert assign(fast, POLICY, node(1))[node(4)] == "validator"
    waver = table(make(1), make(2, speed=600), make(3, speed=900), make(4, speed=700), make(5))
    assert assign(waver, POLICY, node(1))[node(2)] == "validator"


def test_a_relay_has_bandwidth_and_an_address() -> None:
    network = table(
        make(1),
        make(2, "validator"),
        replace(make(3), addresses=()),
        make(4),
        replace(make(5), bandwidth_kbps=10**6),
        replace(make(6), bandwidth_kbps=10**9, addresses=()),
    )
    assert assign(network, POLICY, node(1))[node(5)] == "relay"


def test_a_lost_validator_is_replaced_and_the_relay_stays() -> None:
    before = settle(table(*(make(index) for index in range(1, 6))), node(1))
    left = {name: presence for name, presence in before.items() if presence.role != "validator"}
    roles = assign(left, POLICY, node(1))
    assert roles[node(3)] == "relay"
    assert roles[node(4)] == "validator"


def test_holders_in_excess_give_way() -> None:
    network = table(make(1, "trainer"), *(make(index, "relay") for index in range(2, 5)), make(5, "validator"))
    roles = assign(network, POLICY, node(1))
    assert roles == dict(
        zip(map(node, range(1, 6)), ["trainer", "relay", "inference", "inference", "validator"], strict=True)
    )


def test_a_former_trainer_yields_to_the_grant() -> None:
    network = table(make(1, "trainer"), make(2, "inference"), make(3, "validator"), make(4, "relay"))
    roles = assign(network, POLICY, node(2))
    assert (roles[node(1)], roles[node(2)]) == ("inference", "trainer")


def test_an_absent_or_unwilling_trainer_is_not_replaced_here() -> None:
    network = table(make(1), make(2), make(3, willing=("inference",)))
    assert "trainer" not in assign(network, POLICY, node(9)).values()
    assert "trainer" not in assign(network, POLICY, node(3)).values()
    assert "trainer" not in assign(network, POLICY, None).values()


def test_the_last_node_to_infer_validates_only_where_nobody_else_would() -> None:
    network = table(make(1), make(2, "validator"), make(3, willing=("validator",)))
    assert assign(network, POLICY, node(1)) == {node(1): "trainer", node(2): "inference", node(3): "validator"}
    assert assign(table(make(1), make(2)), POLICY, node(1))[node(2)] == "validator"


def test_nodes_that_cannot_infer_take_the_places() -> None:
    network = table(make(1), make(2), make(3, willing=("validator",)), make(4, willing=("relay",)))
    roles = assign(network, POLICY, node(1))
    assert [roles[node(index)] for index in (2, 3, 4)] == ["inference", "validator", "relay"]


def test_the_next_trainer_is_the_one_who_trains_then_the_ablest_then_the_lowest_id() -> None:
    assert trainer_candidate({}, POLICY) is None
    assert trainer_candidate(table(make(1, willing=("inference",))), POLICY) is None
    assert trainer_candidate(table(make(3), make(2), make(4)), POLICY) == node(2)
    assert trainer_candidate(table(make(3), make(2), make(4, speed=10**4)), POLICY) == node(4)
    assert trainer_candidate(table(make(3, "trainer"), make(2), make(4, speed=10**4)), POLICY) == node(3)


def test_the_next_trainer_leaves_no_other_role_empty() -> None:
    network = table(make(1, "validator"), make(2, "relay"), make(3, "inference"), make(4, "inference"))
    assert trainer_candidate(network, POLICY) == node(3)
    assert trainer_candidate(table(make(1, "validator"), make(2, "relay")), POLICY) == node(1)
    two = table(make(1, "validator"), make(2, "validator"), make(3, "inference"))
    assert trainer_candidate(two, POLICY) == node(1)


def test_only_those_whose_verdicts_count_get_a_place_of_a_validator() -> None:
    network = table(make(1), make(2), make(3), make(4))
    roles = assign(network, POLICY, node(1), lambda name: name == node(4))
    assert roles == {node(1): "trainer", node(2): "relay", node(3): "inference", node(4): "validator"}
    # One that stands there in vain goes; where nobody can judge, the place stays empty.
    held = table(make(1), make(2, "validator"), make(3), make(4))
    assert assign(held, POLICY, node(1), lambda name: name == node(4))[node(2)] != "validator"
    assert "validator" not in assign(held, POLICY, node(1), lambda name: False).values()


def test_the_next_trainer_is_not_the_last_who_can_judge() -> None:
    network = table(make(1), make(2), make(3))
    assert trainer_candidate(network, POLICY, judges=lambda name: name == node(1)) == node(2)
    assert trainer_candidate(network, POLICY, judges=lambda name: name in (node(1), node(3))) == node(1)
    # One who is willing to train but not to validate is no loss.
    unwilling = table(make(1, willing=("trainer",)), make(2), make(3))
    assert trainer_candidate(unwilling, POLICY, judges=lambda name: True) == node(1)
    assert trainer_candidate(table(make(1)), POLICY, judges=lambda name: True) == node(1)


def test_a_proposal_must_stand_before_it_is_acted_on() -> None:
    stability = Stability(15.0)
    assert not stability.stable("relay", 100.0)
    assert not stability.stable("relay", 114.9)
    assert stability.stable("relay", 115.0)
    assert stability.stable("relay", 200.0)
    assert not stability.stable("inference", 201.0)
    assert not stability.stable("relay", 202.0)
    assert not stability.stable("relay", 216.9)
    assert stability.stable("relay", 217.0)


def test_an_unheard_node_has_no_row() -> None:
    assert assign({}, POLICY, digest("nobody")) == {}


def test_what_a_presence_claims_of_a_role_counts_for_nothing() -> None:
    network = table(make(1), make(2), make(3), make(4, "trainer"), make(5, "relay"), make(6, "validator"))
    nobody = assignment.assign(network, POLICY, node(1), {})
    assert nobody[node(4)] == nobody[node(5)] == nobody[node(6)] == "inference"
    assert assignment.trainer_candidate(network, POLICY, {}) == node(1)
    assert assignment.trainer_candidate(network, POLICY, {node(3): "trainer"}) == node(3)


def test_only_members_with_standing_train_the_named_first_and_the_deposed_last() -> None:
    network = table(make(1, speed=10**6), make(2), make(3))
    assert trainer_candidate(network, POLICY, may_train=lambda name: name != node(1)) == node(2)
    assert trainer_candidate(network, POLICY, may_train=lambda name: False) is None
    assert trainer_candidate(network, POLICY, named=(node(3), node(2))) == node(3)
    assert trainer_candidate(network, POLICY, named=(node(3), node(2)), deposed={node(3)}) == node(2)
    assert trainer_candidate(table(make(3)), POLICY, deposed={node(3)}) == node(3)


def test_a_relay_without_an_address_holds_nothing() -> None:
    network = table(make(1), make(2), make(3), replace(make(4, "relay"), addresses=()), make(5))
    assert assign(network, POLICY, node(1))[node(4)] != "relay"
