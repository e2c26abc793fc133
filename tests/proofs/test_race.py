"""``proofs.race``: the same tokens as the plain definition, by torch and by the fused sieve."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proofs import race, sampling
from protocol.errors import LocalError
from tests.protocol.builders import digest

torch.set_num_threads(1)  # several wait for each other by spinning where the machine is busy

SIEVES = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="fused", marks=pytest.mark.skipif(race.fused() is None, reason="numba is not installed")),
]


@pytest.fixture(params=SIEVES, autouse=True)
def sieve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(race, "fused", lambda: None)


def keys(count: int, seed: str = "seed") -> torch.Tensor:
    return sampling.keys_tensor((digest(seed), number % 16, number // 16) for number in range(count))


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.0), (0.6, 0.0), (1.7, 0.0), (1.0, 0.05), (0.8, 0.9)])
def test_tokens_and_log_probabilities_of_the_definition(spread: float, temperature: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(100, 1000, generator=generator) * spread
    tokens, logprobs = race.sample(logits, keys(100), temperature, min_p)
    assert torch.equal(tokens, sampling.choose(logits, keys(100), temperature, min_p))
    torch.testing.assert_close(logprobs, sampling.logprobs(logits, tokens, temperature), rtol=1e-5, atol=2e-5)


@settings(max_examples=60)
@given(
    logits=st.lists(
        st.one_of(st.sampled_from([-math.inf, -1e30, 0.0, 88.0, 1000.0]), st.floats(-60, 60, width=32)),
        min_size=1,
        max_size=40,
    ).filter(lambda line: max(line) >= -60),
    number=st.integers(0, 1000),
)
def test_extreme_logits(logits: list[float], number: int) -> None:
    table = torch.tensor([logits])
    places = sampling.keys_tensor([(digest("edge"), 0, number)])
    assert race.sample(table, places, 1.0)[0].tolist() == sampling.choose(table, places, 1.0).tolist()


def test_more_survivors_than_expected() -> None:
    """A row whose uniforms are all but equal keeps every token; no row of real noise does."""
    weights = torch.full((2, 400), 1e-30)
    weights[:, 0] = 1e-38  # its ratio is the largest, and all others follow from noise alone
    rows, tokens, noise = race.survivors(weights, keys(2))
    assert set(rows.tolist()) == {0, 1}
    assert torch.equal(noise, sampling.uniforms(keys(2), 400)[rows, tokens])


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(LocalError, match="not finite"):
        race.sample(torch.full((1, 5), math.nan), keys(1), 1.0)


def test_arguments_are_checked() -> None:
    with pytest.raises(LocalError, match="belong together"):
        race.sample(torch.zeros(2, 5), keys(3), 1.0)
    with pytest.raises(LocalError, match="out of range"):
        race.sample(torch.zeros(2, 5), keys(2), 0.0)
