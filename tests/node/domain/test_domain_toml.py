"""domain.toml: what people write, what it means in the genesis, and how a mistake is told."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.domain import domain_toml
from node.errors import UserError
from node.starter import defaults
from proofs.checks import FLOAT32_THRESHOLDS
from protocol.domain import default_timings
from protocol.identity import Identity, peer_id

NODES = [Identity(bytes([number]) * 32).node for number in range(3)]
PATH = Path("/somewhere/domain.toml")
LEAST = 'name = "arithmetic"\nmodel = "model"\n\n[[task]]\nname = "chain_sum"\n'


def test_the_least_that_is_needed_takes_all_defaults() -> None:
    found = domain_toml.parse(LEAST, PATH)
    assert (found.name, found.model) == ("arithmetic", Path("/somewhere/model"))
    assert (found.electors, found.validators, found.private) == ((), (), False)
    assert found.recipe == defaults.RECIPE
    assert found.timings == default_timings(devnet=False)
    assert found.thresholds == FLOAT32_THRESHOLDS
    assert found.policy.validator_reputation == 0  # or nobody could ever validate
    assert [(row["kind"], row["name"], row["weight"]) for row in found.tasks] == [("reasoning-gym", "chain_sum", 1)]


def test_everything_can_be_said_in_the_units_of_people() -> None:
    text = f"""
name = "x"
model = "/models/m"
electors = ["{peer_id(NODES[0])}"]
validators = ["{NODES[2].hex()}", "{peer_id(NODES[1])}"]
private = true

[recipe]
learning_rate = 3e-4
temperature = 0.9
group_size = 4
clip_max = 5

[timings]
presence = 0.5
epoch = 2

[policy]
min_nodes = 2
relays_share = 0.25
validator_reputation = 0.5

[thresholds]
logprob_error = 0.01

[[task]]
name = "chain_sum"
parameters = {{ ratio = 0.5 }}
"""
    found = domain_toml.parse(text, PATH)
    assert found.electors == (NODES[0],)
    assert found.private
    assert found.validators == tuple(sorted((NODES[1], NODES[2])))
    assert (found.recipe.learning_rate, found.recipe.temperature) == (300_000_000, 900_000)
    assert (found.recipe.group_size, found.recipe.clip_max) == (4, 5_000_000)
    assert (found.timings.presence_ms, found.timings.epoch_ms) == (500, 2000)
    assert (found.policy.min_nodes, found.policy.relays_per_million) == (2, 250_000)
    assert found.policy.validator_reputation == 500_000
    assert found.thresholds.logprob_error == 10_000
    (row,) = found.tasks
    assert row["parameters"] == '{"ratio": 0.5}'


def test_length_control_by_list_and_by_name() -> None:
    text = f'{LEAST}\n[recipe]\nmax_response_tokens = 16000\nnormalisation = "sequence"\nlength_penalty = 0.0005\n'
    listed = domain_toml.parse(f'{text}target_lengths = [8, 20]\nbudget_prompt = "{{}} tokens"', PATH).recipe
    assert (listed.target_lengths, listed.length_penalty) == ((8, 20), 500)
    assert (listed.normalisation, listed.budget_prompt) == ("sequence", "{} tokens")
    named = domain_toml.parse(f'{text}target_lengths = "TARGET-LONG"', PATH).recipe
    assert named.target_lengths == (2000, 4000, 6000, 8000, 10_000)


def test_named_validators_are_not_joined_by_newcomers() -> None:
    text = f'validators = ["{NODES[0].hex()}"]\n{LEAST}'
    assert domain_toml.parse(text, PATH).policy.validator_reputation == domain_toml.EARNED_REPUTATION


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "m"', "name is missing"),
        ('name = "x"', "model is missing"),
        ('name = ""\nmodel = "m"', "line 1: name: expected a text"),
        ('name = "é"\nmodel = "m"', "line 1: name: a name is"),
        ('name = "x"\nmodel = 3', "line 2: model: expected a text"),
        ('name = "x"\nmodel = "m"', "0 tasks"),
        (f"{LEAST}\ncolour = 1", "line 4: task 1: unknown key 'colour'"),  # below a section it is that section's
        (f"colour = 1\n{LEAST}", "line 1: colour: unknown key"),
        (f"{LEAST}\n[recipe]\n# a remark\nlerning_rate = 1", "line 9: recipe.lerning_rate: unknown key"),
        (f"{LEAST}\n[recipe]\ntemperature = 0", "line 8: recipe.temperature: expected a number from 0.000001 to 100"),
        (f"{LEAST}\n[recipe]\ntemperature = true", "recipe.temperature"),
        (f'{LEAST}\n[recipe]\ntemperature = "1"', "recipe.temperature"),
        (f"{LEAST}\n[recipe]\ntemperature = nan", "recipe.temperature"),
        (f"{LEAST}\n[recipe]\ntemperature = 1e999999", "recipe.temperature"),
        (f"{LEAST}\n[recipe]\ntemperature = 0.0000015", "a multiple of 0.000001"),
        (f"{LEAST}\n[recipe]\ngroup_size = 1.5", "a whole number"),
        (f"{LEAST}\n[recipe]\ngroup_size = {'9' * 5000}", "not TOML"),
        (
            f'{LEAST}\n[recipe]\nnormalisation = "group"',
            "recipe.normalisation: expected one of token, sequence",
        ),
        (f"{LEAST}\n[recipe]\ntarget_lengths = 3", "recipe.target_lengths: expected a list"),
        (f'{LEAST}\n[recipe]\ntarget_lengths = "SHORT"', "or TARGET-SHORT or TARGET-LONG"),
        (f"{LEAST}\n[recipe]\ntarget_lengths = [0]", "recipe.target_lengths: expected an integer from 1"),
        (f"{LEAST}\n[recipe]\ntarget_lengths = [6]", "line 7: recipe: a target length is longer"),
        (f'{LEAST}\n[recipe]\nbudget_prompt = "é"', "recipe.budget_prompt: expected a printable ASCII text"),
        (f"{LEAST}\n[timings]\npresence = -1", "line 8: timings.presence: expected seconds from 0.001"),
        (f"{LEAST}\n[policy]\naudit_share = 2", "policy.audit_share: expected a number from 0 to 1"),
        (f"{LEAST}\n[policy]\nvalidator_reputation = 0.5", "nobody could earn it"),
        (f"recipe = 3\n{LEAST}", "line 1: recipe: expected a section"),
        (f"private = 1\n{LEAST}", "line 1: private: expected true or false"),
        (f"electors = []\n{LEAST}", "line 1: electors: a domain needs an elector"),
        (f'electors = ["you"]\n{LEAST}', "line 1: electors: 'you' is neither"),
        (f"electors = [3]\n{LEAST}", "line 1: electors: 3 is neither"),
        (f'validators = ["{NODES[0].hex()}", "{peer_id(NODES[0])}"]\n{LEAST}', "named twice"),
        ('name = "x"\nmodel = "m"\ntask = 3', "line 3: task: expected [[task]]"),
        ("name = ", "line 1: not TOML"),
    ],
)
def test_a_mistake_names_file_line_and_key(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        domain_toml.parse(text, PATH)
    assert str(caught.value).startswith(f"{PATH}: ")
    assert words in str(caught.value)
    assert caught.value.remedy


def test_a_mistake_in_a_task_names_its_line() -> None:
    text = f'{LEAST}\n[[task]]\nname = "gcd"\nweight = 0\n'
    with pytest.raises(UserError, match=r"line 7: task 2: the weight of gcd"):
        domain_toml.parse(text, PATH)


def test_a_domain_may_have_several_electors() -> None:
    text = f'electors = ["{NODES[0].hex()}", "{NODES[1].hex()}"]\n{LEAST}'
    assert domain_toml.parse(text, PATH).electors == tuple(NODES[:2])


@given(value=st.integers(1, 10**12))
def test_no_number_is_rounded(value: int) -> None:
    rate = Decimal(value).scaleb(-12)
    text = (
        f"{LEAST}\n[recipe]\nlearning_rate = {rate:f}\n"
        if value < 10**12
        else f"{LEAST}\n[recipe]\nlearning_rate = 1\n"
    )
    assert domain_toml.parse(text, PATH).recipe.learning_rate == value


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        domain_toml.load(tmp_path / "domain.toml")
    (tmp_path / "domain.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UserError, match="UTF-8"):
        domain_toml.load(tmp_path / "domain.toml")
