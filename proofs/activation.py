"""Commitments to last-layer hidden states in TOPLOC's format (258 bytes for 32 tokens), with a strict verifier.

1. A group's hidden states are concatenated over its responses, in order; row t is the state whose logits chose
   token t. They are cut into chunks of ``PROOF_CHUNK_TOKENS`` tokens; the last chunk may be shorter.
2. Values are bfloat16, rounded to nearest, ties to even. A chunk of t tokens has ``size = t · hidden`` values; it
   commits to the ``k = min(topk_for(hidden), size)`` of largest magnitude (ties: the lower index).
3. The points are x = flat index mod m and y = the raw bfloat16 bits; the modulus m is the largest number up to
   65497 that keeps the indices different. Where ``size ≤ 65497`` that is 65497 itself, and no other is valid;
   larger chunks (TOPLOC's) may have any m above 2¹⁵.
4. A chunk's proof is m and the k coefficients of the polynomial over GF(65497) through the points, each as two
   big-endian bytes, powers ascending. A group's proofs are its chunks' in order, with nothing between.
5. The verifier evaluates the polynomial at the top-k places of its own states. A value whose sign or exponent
   differs is a mismatch; of the others the difference of the mantissas (0 to 127) counts. A place that
   is not among the prover's top-k yields a random value: ties at the k-th place cost an honest prover a few.
6. Anything but the exact length, a modulus by rule 3 and coefficients below 65497 is malformed, checked before
   any arithmetic. No proof is accepted by being short or empty.

The sign is compared, the number of chunks is fixed and the median is defined (the lower one of two): three points
where TOPLOC's own code differs or is silent. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from proofs import field
from protocol.constants import (
    FIELD_PRIME,
    PROOF_CHUNK_TOKENS,
    PROOF_HIDDEN_LARGE,
    PROOF_TOPK_LARGE,
    PROOF_TOPK_SMALL,
)
from protocol.errors import LocalError, PeerError

SMALLEST_MODULUS: Final = 2**15 + 1
NO_MANTISSA: Final = 128
"""The median mantissa error where no value matches: above every real one."""

_BLOCK_VALUES: Final = 1 << 22
"""Hidden values worked on at a time: bounds scratch memory, and has no influence on results."""
_INDEX_BITS: Final = 17
"""Index bits beside 15 bits of magnitude in a 32-bit sorting key."""

Hidden = NDArray[Any]
"""Hidden states [tokens, hidden]: float32, or uint16 holding bfloat16 bits."""


@dataclass(frozen=True, slots=True)
class ActivationResult:
    """What the comparison of one group found. ``values`` places were compared, ``mismatches`` of them differ in sign
    or exponent; ``mantissa_sum`` and ``mantissa_median`` are over the others (units in the last place; lower median;
    ``NO_MANTISSA`` where there are none). ``values`` is 0 for a malformed proof and for nothing else."""

    values: int
    mismatches: int
    mantissa_sum: int
    mantissa_median: int


MALFORMED: Final = ActivationResult(0, 0, 0, NO_MANTISSA)


def topk_for(hidden: int) -> int:
    """Values that a full chunk of a model with this hidden size commits to."""
    return PROOF_TOPK_LARGE if hidden >= PROOF_HIDDEN_LARGE else PROOF_TOPK_SMALL


def proof_bytes(tokens: int, hidden: int, topk: int | None = None) -> int:
    """The exact size of the proofs of a group of ``tokens`` response tokens."""
    return sum(2 + 2 * count for _, count in _layout(tokens, hidden, topk or topk_for(hidden)))


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bfloat16 bits of a float32 array (nearest, ties to even); uint16 arrays are bits already."""
    if values.dtype == np.uint16:
        return values
    if values.dtype != np.float32:
        raise LocalError(f"hidden states are float32 or bfloat16 bits, not {values.dtype}")
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # the carry of rounding would turn some NaNs into infinities or zeros
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def build(hidden_th: Hidden, topk: int | None = None) -> bytes:
    """The proofs of one group's states. ``LocalError`` where a state is not finite: the engine is broken then."""
    return build_many([hidden_th], topk)[0]


def build_many(groups: Sequence[Hidden], topk: int | None = None) -> list[bytes]:
    """``build`` for many groups, all their chunks of equal size at once."""
    pieces: list[list[tuple[int, bytes]]] = [[] for _ in groups]
    for states, slots, count in _batches(groups, topk):
        places, bits = largest(states, count)
        if bool(((bits & 0x7F80) == 0x7F80).any()):
            raise LocalError("hidden states are not finite: the engine or the weights are broken")
        moduli = moduli_for(places, states.shape[1])
        coefficients = field.interpolate(places % moduli[:, None], bits)
        encoded = np.concatenate([moduli[:, None].astype(np.uint32), coefficients], axis=1).astype(">u2")
        for row, (group, chunk) in enumerate(slots):
            pieces[group].append((chunk, encoded[row].tobytes()))
    return [b"".join(data for _, data in sorted(chunks)) for chunks in pieces]


def verify(hidden_th: Hidden, proofs: bytes, topk: int | None = None) -> ActivationResult:
    """Compare the verifier's states of one group with its proofs; ``PeerError`` where they are malformed."""
    result = verify_many([(hidden_th, proofs)], topk)[0]
    if result is MALFORMED:
        raise PeerError("the activation proofs are malformed")
    return result


def verify_many(pairs: Sequence[tuple[Hidden, bytes]], topk: int | None = None) -> list[ActivationResult]:
    """``verify`` for many ``(states, proofs)`` at once, except that malformed proofs yield ``MALFORMED``, so that
    one bad group does not spoil the others."""
    parsed = [_parse(proofs, states, topk) for states, proofs in pairs]
    sound = [(states, chunks) for (states, _), chunks in zip(pairs, parsed, strict=True) if chunks is not None]
    found: list[list[Differences]] = [[] for _ in sound]
    for states, slots, count in _batches([states for states, _ in sound], topk):
        places, bits = largest(states, count)
        proof = np.stack([sound[group][1][chunk] for group, chunk in slots])
        values = field.evaluate(proof[:, 1:], places % proof[:, :1].astype(np.int64))
        same = (values >> 7 == bits >> 7) & ((bits & 0x7F80) != 0x7F80)
        errors = np.abs((values & 0x7F).astype(np.int64) - (bits & 0x7F).astype(np.int64))
        for row, (group, _) in enumerate(slots):
            found[group].append((count, errors[row][same[row]]))
    results = map(_summary, found)
    return [MALFORMED if chunks is None else next(results) for chunks in parsed]


Differences = tuple[int, NDArray[np.int64]]
"""Values compared in a chunk, and the mantissa errors of those that match in sign and exponent."""


def _summary(chunks: list[Differences]) -> ActivationResult:
    values = sum(count for count, _ in chunks)
    errors = np.sort(np.concatenate([found for _, found in chunks]))
    median = int(errors[(len(errors) - 1) // 2]) if len(errors) else NO_MANTISSA
    return ActivationResult(values, values - len(errors), int(errors.sum()), median)


def _layout(tokens: int, hidden: int, topk: int) -> list[tuple[int, int]]:
    """``(tokens, values committed to)`` of every chunk of a group."""
    if tokens < 1 or hidden < 1 or topk < 1:
        raise LocalError(f"no proofs for {tokens} tokens, hidden size {hidden}, {topk} values")
    full, tail = divmod(tokens, PROOF_CHUNK_TOKENS)
    sizes = [PROOF_CHUNK_TOKENS] * full + [tail] * (tail > 0)
    return [(size, min(topk, size * hidden)) for size in sizes]


def _parse(proofs: bytes, states: Hidden, topk: int | None) -> list[NDArray[np.uint32]] | None:
    """The chunks' ``[modulus, coefficients…]``, or None where rule 6 is broken."""
    tokens, hidden = _shape(states)
    layout = _layout(tokens, hidden, topk or topk_for(hidden))
    if len(proofs) != sum(2 + 2 * count for _, count in layout):
        return None
    words = np.frombuffer(proofs, dtype=">u2").astype(np.uint32)
    chunks: list[NDArray[np.uint32]] = []
    start = 0
    for size, count in layout:
        chunk = words[start : start + 1 + count]
        start += 1 + count
        smallest = FIELD_PRIME if size * hidden <= FIELD_PRIME else SMALLEST_MODULUS
        if not smallest <= int(chunk[0]) <= FIELD_PRIME or int(chunk[1:].max()) >= FIELD_PRIME:
            return None
        chunks.append(chunk)
    return chunks


def _shape(states: Hidden) -> tuple[int, int]:
    if states.ndim != 2:
        raise LocalError(f"hidden states are [tokens, hidden], not {list(states.shape)}")
    return int(states.shape[0]), int(states.shape[1])


def _batches(
    groups: Sequence[Hidden], topk: int | None
) -> Iterator[tuple[NDArray[np.uint16], list[tuple[int, int]], int]]:
    """All groups' chunks in batches of equal shape: ``(bfloat16 bits [m, size], (group, chunk) of each row, k)``."""
    by_shape: dict[tuple[int, int], list[tuple[NDArray[np.uint16], tuple[int, int]]]] = {}
    for group, states in enumerate(groups):
        tokens, hidden = _shape(states)
        bits = to_bfloat16(states)
        for chunk, (size, count) in enumerate(_layout(tokens, hidden, topk or topk_for(hidden))):
            start = chunk * PROOF_CHUNK_TOKENS
            flat = bits[start : start + size].reshape(-1)
            by_shape.setdefault((len(flat), count), []).append((flat, (group, chunk)))
    for (size, count), rows in by_shape.items():
        step = max(1, _BLOCK_VALUES // size)
        for start in range(0, len(rows), step):
            flats, slots = zip(*rows[start : start + step], strict=True)
            yield np.stack(flats), list(slots), count


def largest(states: NDArray[np.uint16], count: int) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Places and bits, [m, count], of the values of largest magnitude in each row of ``states`` [m, size].

    The magnitudes of bfloat16 values order like their bits without the sign, so magnitude and inverted index make
    one integer key that sorts by rule 2 and decodes to the place.
    """
    size = states.shape[1]
    shift = _INDEX_BITS if size <= 1 << _INDEX_BITS else 40  # 32-bit keys where they do: twice as fast
    mask = (1 << shift) - 1
    keys: NDArray[Any] = (states & 0x7FFF).astype(np.uint32 if shift == _INDEX_BITS else np.uint64)
    keys = keys << shift | (mask - np.arange(size)).astype(keys.dtype)
    top = np.partition(keys, size - count, axis=1)[:, size - count :].astype(np.int64)
    places = np.sort(mask - (top & mask), axis=1)
    return places, np.take_along_axis(states, places, axis=1)


def moduli_for(places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The largest modulus for each row of ``places`` by rule 3, int64 [m]."""
    moduli = np.full(len(places), FIELD_PRIME, dtype=np.int64)
    if size <= FIELD_PRIME:
        return moduli
    for row in range(len(places)):
        while len(np.unique(places[row] % moduli[row])) < places.shape[1]:
            moduli[row] -= 1
            if moduli[row] < SMALLEST_MODULUS:
                raise LocalError("no modulus keeps the places of a chunk apart")
    return moduli
