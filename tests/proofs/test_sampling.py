"""``proofs.sampling``: the noise's exact integers, its limits and distribution, choice and deficit."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import sampling
from proofs.sampling import choose, deficits, gumbel, keys_tensor, logprobs
from protocol.errors import LocalError
from tests.protocol.builders import digest

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())
SEED = digest("seed")
MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """The mixer in Python's integers, from the formula."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def bits(keys: tuple[int, int], token: int) -> int:
    return mix(mix((token * 0x9E3779B1 + keys[0]) & MASK) ^ keys[1])


def twin(keys: NDArray[Any], vocabulary: int) -> NDArray[np.float32]:
    """The whole noise in numpy's unsigned integers and float32."""

    def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return np.asarray(x ^ (x >> np.uint32(16)), dtype=np.uint32)

    k = keys.astype(np.uint32)
    x = mixed(np.arange(vocabulary, dtype=np.uint32)[None] * np.uint32(0x9E3779B1) + k[:, :1])
    x = mixed(x ^ k[:, 1:])
    u = np.minimum(
        ((x >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31), np.float32(1 - 2**-24)
    )
    return np.asarray(-np.log(-np.log1p(-u)), dtype=np.float32)


def places(count: int) -> Tensor:
    return keys_tensor([(SEED, index // 7, index % 7) for index in range(count)])


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vector", VECTORS)
def test_the_noise_is_the_golden_one(vector: dict[str, Any]) -> None:
    place = (bytes.fromhex(vector["seed"]), vector["response"], vector["position"])
    keys = keys_tensor([place])
    assert keys.tolist() == [vector["keys"]]
    vocabulary = max(vector["tokens"]) + 1
    got = (sampling.noise_bits(keys, vocabulary)[0].to(torch.int64) & MASK)[vector["tokens"]].tolist()
    assert got == vector["bits"]
    noise = gumbel(keys, vocabulary)[0][vector["tokens"]].tolist()
    assert noise == pytest.approx(vector["gumbel"], rel=2e-6, abs=2e-6)


def test_the_keys_are_the_hash_of_their_formula() -> None:
    raw = sha256(b"farflung/noise/v1\0" + SEED + (3).to_bytes(4, "big") + (258).to_bytes(4, "big")).digest()
    expected = (int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:8], "little"))
    assert keys_tensor([(SEED, 0, 0), (SEED, 3, 258)]).tolist()[1] == list(expected)
    assert keys_tensor([]).shape == (0, 2)
    with pytest.raises(LocalError):
        keys_tensor([(SEED[:31], 0, 0)])


def test_the_integers_equal_pythons() -> None:
    ((k1, k2),) = keys_tensor([(SEED, 1, 2)]).tolist()
    for keys in ((0, 0), (MASK, MASK), (0x80000000, 0x7FFFFFFF), (k1, k2)):
        got = sampling.noise_bits(torch.tensor([keys]), 300)[0].to(torch.int64) & MASK
        assert got.tolist() == [bits(keys, token) for token in range(300)]


def test_the_noise_equals_numpys() -> None:
    keys = places(40)
    np.testing.assert_allclose(gumbel(keys, 1000).numpy(), twin(keys.numpy(), 1000), rtol=2e-6, atol=2e-6)


def test_the_noise_depends_on_its_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = places(30)
    whole = gumbel(keys, 500)
    for row in (0, 13, 29):
        assert torch.equal(gumbel(keys[row : row + 1], 500)[0], whole[row])
    assert torch.equal(gumbel(keys, 200), whole[:, :200])
    logits = random_logits(30, 500)
    tokens = choose(logits, keys, 1.0)
    for block in (1, 700, 10**9):
        monkeypatch.setattr(sampling, "BLOCK_ELEMENTS", block)
        assert torch.equal(choose(logits, keys, 1.0), tokens)


def test_the_noise_is_never_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = [0, 1, 2, -1, -2, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1, 2**30]
    monkeypatch.setattr(sampling, "noise_bits", lambda keys, vocabulary: torch.tensor([extremes], dtype=torch.int32))
    noise = gumbel(torch.zeros((1, 2), dtype=torch.int64), len(extremes))[0]
    assert bool(torch.isfinite(noise).all())
    assert noise.max().item() == pytest.approx(32 * math.log(2), abs=1e-4)
    assert noise.min().item() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-4)


def test_the_noise_has_gumbels_distribution() -> None:
    noise = gumbel(places(400), 2500).double().reshape(-1)
    count = noise.numel()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=5 * 1.2825 / math.sqrt(count))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.015)
    uniform = torch.exp(-torch.exp(-noise))
    observed = torch.histc(uniform, bins=64, min=0.0, max=1.0)
    chi2 = float(((observed - count / 64) ** 2 / (count / 64)).sum())
    assert abs(chi2 - 63) / math.sqrt(2 * 63) < 4
    table = noise.view(400, 2500) - noise.mean()
    for left, right in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(float((left * right).mean() / noise.var())) < 5 / math.sqrt(count)


def test_choices_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    temperature = 1.5
    keys = keys_tensor([(SEED, 0, position) for position in range(20_000)])
    counts = torch.bincount(choose(logits.expand(20_000, 5), keys, temperature), minlength=5)
    expected = torch.softmax(logits / temperature, 0) * 20_000
    assert bool(((counts - expected).abs() < 5 * expected.sqrt() + 1).all())


def test_choice_is_the_largest_score() -> None:
    logits, keys = random_logits(50, 90), places(50)
    expected = (logits / 0.7 + gumbel(keys, 90)).argmax(dim=1)
    assert torch.equal(choose(logits, keys, 0.7), expected)


def test_the_choice_has_no_deficit_and_others_have_their_gap() -> None:
    logits, keys = random_logits(50, 90), places(50)
    tokens = choose(logits, keys, 0.7)
    assert float(deficits(logits, keys, tokens, 0.7).max()) == 0
    score = logits / 0.7 + gumbel(keys, 90)
    other = (tokens + 1) % 90
    gap = score.amax(dim=1) - score[torch.arange(50), other]
    assert bool((gap > 0).all())
    torch.testing.assert_close(deficits(logits, keys, other, 0.7), gap)


def test_min_p_admits_what_is_likely_enough_only() -> None:
    logits, keys = random_logits(200, 30), places(200)
    tokens = choose(logits, keys, 1.0, 0.2)
    probability = torch.softmax(logits, dim=1)
    admitted = probability >= 0.2 * probability.amax(dim=1, keepdim=True) * (1 - 1e-5)
    assert bool(admitted[torch.arange(200), tokens].all())
    assert not torch.equal(tokens, choose(logits, keys, 1.0))
    assert float(deficits(logits, keys, tokens, 1.0, 0.2).max()) == 0


def test_the_deficit_under_min_p_is_its_definition() -> None:
    logits, keys = random_logits(40, 12), places(40)
    tokens = torch.arange(40) % 12
    got = deficits(logits, keys, tokens, 1.0, 0.1).tolist()
    noise = gumbel(keys, 12)
    for row in range(40):
        z = logits[row].tolist()
        s = (logits[row] + noise[row]).tolist()
        cut, t = max(z) + math.log(0.1), int(tokens[row])
        rivals = [min(s[v] - s[t], z[v] - cut) for v in range(12)]
        assert got[row] == pytest.approx(max(0.0, cut - z[t], *rivals), abs=1e-5)


def test_near_min_ps_cut_a_small_error_is_a_small_deficit() -> None:
    # the second token wins by noise, and its probability is just about at the cut
    keys = places(2000)
    for shift in (-1e-4, 1e-4):
        prover = torch.tensor([[0.0, math.log(0.5) + shift]]).expand(2000, 2)
        verifier = torch.tensor([[0.0, math.log(0.5) - shift]]).expand(2000, 2)
        tokens = choose(prover, keys, 1.0, 0.5)
        assert float(deficits(verifier, keys, tokens, 1.0, 0.5).max()) < 1e-3


def test_log_probabilities_are_at_the_temperature() -> None:
    logits = random_logits(60, 40)
    tokens = torch.arange(60) % 40
    expected = torch.log_softmax(logits / 0.6, dim=1)[torch.arange(60), tokens]
    torch.testing.assert_close(logprobs(logits, tokens, 0.6), expected)


def test_replay_tells_other_logits_from_rounding() -> None:
    logits, keys = random_logits(2000, 60), places(2000)
    tokens = choose(logits, keys, 1.0)
    honest = deficits(logits + 1e-5 * random_logits(2000, 60, 1), keys, tokens, 1.0)
    assert float(honest.mean()) < 1e-6
    wrong = deficits(logits + 0.1 * random_logits(2000, 60, 1), keys, tokens, 1.0)
    assert float(wrong.clamp(max=1).mean()) > 1e-2
    elsewhere = deficits(logits, keys_tensor([(digest("other"), 0, place) for place in range(2000)]), tokens, 1.0)
    assert float(elsewhere.clamp(max=1).mean()) > 0.3


@pytest.mark.parametrize(
    ("temperature", "min_p"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, 1.0), (1.0, -0.1)]
)
def test_what_cannot_be_sampled_is_our_own_mistake(temperature: float, min_p: float) -> None:
    with pytest.raises(LocalError):
        choose(random_logits(2, 3), places(2), temperature, min_p)


def test_keys_and_logits_must_fit() -> None:
    with pytest.raises(LocalError):
        choose(random_logits(3, 3), places(2), 1.0)
    with pytest.raises(LocalError):
        choose(random_logits(2, 3), places(2).to(torch.int32), 1.0)
    with pytest.raises(LocalError):
        choose(random_logits(2, 3), places(2)[:, :1], 1.0)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_integers_and_nearly_the_same_noise() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    keys = places(40)
    assert torch.equal(sampling.noise_bits(keys.cuda(), 5000).cpu(), sampling.noise_bits(keys, 5000))
    torch.testing.assert_close(gumbel(keys.cuda(), 5000).cpu(), gumbel(keys, 5000), rtol=1e-5, atol=1e-5)
