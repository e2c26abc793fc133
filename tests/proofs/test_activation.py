"""``proofs.activation``: TOPLOC's bytes, the comparison, and what the parser refuses."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proofs import activation, field
from proofs.activation import (
    MALFORMED,
    NO_MANTISSA,
    build,
    build_many,
    proof_bytes,
    to_bfloat16,
    topk_for,
    verify,
    verify_many,
)
from protocol.constants import FIELD_PRIME, PROOF_CHUNK_TOKENS
from protocol.errors import LocalError, PeerError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "activation.json").read_text())


def states(tokens: int, hidden: int, seed: int = 0) -> NDArray[np.float32]:
    """Hidden states whose dimensions have different scales, as real models' do."""
    rng = np.random.default_rng(seed)
    scale = rng.gamma(1.0, 1.0, hidden).astype(np.float32)
    return rng.standard_normal((tokens, hidden), dtype=np.float32) * scale


def mean(result: activation.ActivationResult) -> float:
    return result.mantissa_sum / (result.values - result.mismatches)


@pytest.mark.parametrize("vector", VECTORS["toploc"])
def test_points_encode_to_toplocs_bytes(vector: dict[str, Any]) -> None:
    x, y = np.array([vector["x"]]), np.array([vector["y"]])
    proof = b"\xff\xd9" + field.interpolate(x, y).astype(">u2").tobytes()
    assert base64.b64encode(proof).decode() == vector["proof"]


@pytest.mark.parametrize("vector", VECTORS["points"])
def test_points_encode_to_our_bytes(vector: dict[str, Any]) -> None:
    moduli = activation.moduli_for(np.array([vector["x"]]), vector["size"])
    x = np.array([vector["x"]]) % moduli[:, None]
    coefficients = field.interpolate(x, np.array([vector["y"]]))
    proof = int(moduli[0]).to_bytes(2, "big") + coefficients.astype(">u2").tobytes()
    assert proof.hex() == vector["proof"]


@pytest.mark.parametrize("vector", VECTORS["groups"])
def test_stored_activations_give_the_golden_proofs(vector: dict[str, Any]) -> None:
    bits = np.frombuffer(bytes.fromhex(vector["bfloat16"]), dtype="<u2").astype(np.uint16)
    hidden = bits.reshape(vector["tokens"], vector["hidden"])
    assert build(hidden).hex() == vector["proofs"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.sampled_from([8, 40, 64]), st.integers(0, 1000))
def test_unchanged_states_compare_equal(tokens: int, hidden: int, seed: int) -> None:
    group = states(tokens, hidden, seed)
    proofs = build(group)
    assert len(proofs) == proof_bytes(tokens, hidden)
    result = verify(group, proofs)
    full, tail = divmod(tokens, PROOF_CHUNK_TOKENS)
    assert result.values == full * 32 + (min(32, tail * hidden) if tail else 0)
    assert (result.mismatches, result.mantissa_sum, result.mantissa_median) == (0, 0, 0)


def test_a_small_scale_moves_mantissas_a_little() -> None:
    group = states(5, 16, 1)  # none of whose largest values comes near the next power of two
    result = verify(group * np.float32(1.01), build(group, 4), 4)
    assert result.mismatches == 0
    assert 0 < mean(result) <= 2
    assert 0 < result.mantissa_median <= 2


def test_a_tenth_more_moves_them_far() -> None:
    group = states(5, 16)
    result = verify(group * np.float32(1.10), build(group, 4), 4)
    assert result.mismatches <= 2
    assert mean(result) > 10
    assert result.mantissa_median > 10


def test_another_exponent_matches_nowhere() -> None:
    group = states(5, 16)
    result = verify(group * np.float32(4), build(group, 5), 5)
    assert (result.values, result.mismatches, result.mantissa_median) == (5, 5, NO_MANTISSA)


def test_the_sign_is_compared() -> None:
    group = states(32, 64)
    assert verify(-group, build(group)).mismatches == 32


def test_rounding_differences_cost_an_honest_prover_next_to_nothing() -> None:
    group = states(640, 128)
    noise = np.random.default_rng(9).standard_normal(group.shape, dtype=np.float32)
    result = verify(group * (1 + np.float32(1e-5) * noise), build(group))
    assert result.values == 640
    assert result.mismatches <= 6
    assert mean(result) < 0.05
    assert result.mantissa_median == 0


def test_cheap_forgeries_do_not_pass() -> None:
    group, other = states(32, 128, 1), states(32, 128, 2)
    constant = (FIELD_PRIME).to_bytes(2, "big") + (0x4040).to_bytes(2, "big") + bytes(62)
    for forged in (constant, build(other)):
        result = verify(group, forged)
        assert result.mismatches > 8 or mean(result) > 10


def test_states_of_slightly_wrong_weights_show() -> None:
    group = states(320, 128)
    noise = np.random.default_rng(9).standard_normal(group.shape, dtype=np.float32)
    result = verify(group * (1 + np.float32(0.05) * noise), build(group))
    assert mean(result) > 1
    assert result.mantissa_median > 0


@pytest.mark.parametrize(("hidden", "k"), [(8, 32), (511, 32), (512, 128), (5120, 128)])
def test_k_depends_on_the_hidden_size(hidden: int, k: int) -> None:
    assert topk_for(hidden) == k


@pytest.mark.parametrize(
    ("tokens", "hidden", "size"),
    [(32, 5120, 258), (1000, 5120, 32 * 258), (33, 128, 66 + 66), (1, 8, 18), (40, 2, 66 + 34), (3, 5, 32)],
)
def test_the_size_is_known_beforehand(tokens: int, hidden: int, size: int) -> None:
    assert proof_bytes(tokens, hidden) == size
    assert len(build(states(tokens, hidden))) == size


def test_many_groups_at_once_are_the_same_as_one_by_one() -> None:
    groups = [states(tokens, 40, tokens) for tokens in (1, 5, 32, 33, 64, 70, 5, 37)]
    together = build_many(groups)
    assert together == [build(group) for group in groups]
    shifted = [group * np.float32(1.01) for group in groups]
    pairs = list(zip(shifted, together, strict=True))
    assert verify_many(pairs) == [verify(*pair) for pair in pairs]
    assert build_many([]) == []
    assert verify_many([]) == []


def test_blocks_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [states(100, 16, seed) for seed in range(3)]
    expected = build_many(groups)
    monkeypatch.setattr(activation, "_BLOCK_VALUES", 1000)
    assert build_many(groups) == expected
    assert all(result.mismatches == 0 for result in verify_many(list(zip(groups, expected, strict=True))))


def test_a_malformed_proof_does_not_spoil_its_neighbours() -> None:
    groups = [states(40, 16, seed) for seed in range(3)]
    proofs = build_many(groups)
    results = verify_many([(groups[0], proofs[0]), (groups[1], b""), (groups[2], proofs[2])])
    assert results[1] is MALFORMED
    assert results[1].values == 0
    assert [results[0].mismatches, results[2].mismatches] == [0, 0]
    assert verify_many([(groups[1], b"")]) == [MALFORMED]


def altered(proof: bytes, word: int, value: int) -> bytes:
    return proof[: 2 * word] + value.to_bytes(2, "big") + proof[2 * word + 2 :]


@pytest.mark.parametrize(
    "change",
    [
        lambda proof: b"",
        lambda proof: proof[:2],
        lambda proof: proof[:-1],
        lambda proof: proof[:-2],
        lambda proof: proof + b"\0\0",
        lambda proof: proof[: len(proof) // 2],
        lambda proof: altered(proof, 0, 0),
        lambda proof: altered(proof, 0, 1),
        lambda proof: altered(proof, 0, 2**15),
        lambda proof: altered(proof, 0, FIELD_PRIME - 1),
        lambda proof: altered(proof, 0, FIELD_PRIME + 1),
        lambda proof: altered(proof, 1, FIELD_PRIME),
        lambda proof: altered(proof, 33, 0xFFFF),
        lambda proof: altered(proof, 33, FIELD_PRIME - 1),
    ],
)
def test_a_malformed_proof_is_refused(change: Any) -> None:
    group = states(40, 64)
    proof = build(group)
    assert len(proof) == 2 * 66
    verify(group, proof)
    with pytest.raises(PeerError):
        verify(group, change(proof))


def test_large_chunks_may_have_a_smaller_modulus() -> None:
    # places 0 and 65497 collide modulo 65497, and only a chunk this large has both
    hidden = np.zeros((32, 4096), dtype=np.float32)
    flat = hidden.reshape(-1)
    flat[[0, 65_497]] = [1.0, 2.0]
    proof = build(hidden, 2)
    assert proof.hex() == "ffd83f800080"
    assert verify(hidden, proof, 2).mismatches == 0
    verify(hidden, altered(proof, 0, 2**15 + 1), 2)
    for modulus in (0, 2**15, FIELD_PRIME + 1):
        with pytest.raises(PeerError):
            verify(hidden, altered(proof, 0, modulus), 2)


def test_very_large_chunks_work_as_well() -> None:
    hidden = np.zeros((32, 8192), dtype=np.float32)
    flat = hidden.reshape(-1)
    flat[[3, 200_000, 262_143]] = [1.0, -2.0, 3.0]
    places, bits = activation.largest(to_bfloat16(hidden).reshape(1, -1), 3)
    assert places.tolist() == [[3, 200_000, 262_143]]
    assert bits.tolist() == [[0x3F80, 0xC000, 0x4040]]
    assert verify(hidden, build(hidden, 3), 3).mismatches == 0


def test_equal_magnitudes_go_by_the_lower_place() -> None:
    row = np.array([[1.0, -3.0, 2.0, 2.0, -2.0, 3.0]], dtype=np.float32)
    places, _ = activation.largest(to_bfloat16(row), 3)
    assert places.tolist() == [[1, 2, 5]]


def test_rounding_is_to_nearest_even_like_torchs() -> None:
    special = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-40, float("inf"), float("-inf")]
    values = np.concatenate([np.array(special, dtype=np.float32), states(50, 20).reshape(-1)])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert to_bfloat16(values).tolist() == expected.tolist()
    nan = np.array([0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert to_bfloat16(nan).tolist() == [0x7FC0, 0x7FC0]


def test_bfloat16_bits_are_taken_as_they_are() -> None:
    group = states(33, 16)
    assert build(to_bfloat16(group)) == build(group)
    with pytest.raises(LocalError):
        build(group.astype(np.float64))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_states_that_are_not_finite(value: float) -> None:
    group = states(3, 16)
    proofs = build(group)
    group[1, 1] = value
    with pytest.raises(LocalError, match="finite"):
        build(group)
    # a verifier that overflows finds a difference, and does not fail
    assert verify(group, proofs).mismatches >= 1


@pytest.mark.parametrize("shape", [(0, 8), (4,), (2, 3, 4)])
def test_no_proofs_without_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(LocalError):
        build(np.zeros(shape, dtype=np.float32))
