"""The choice of ``proofs.sampling`` as an exponential race: the same tokens without a logarithm for each of them.

1. With E = −log1p(−u) the Gumbel value is −log E, so the largest ``z + G`` is the smallest ``E / w`` where w = exp(z).
2. E is at least u. So a token whose ``u / w`` is above the ``E / w`` of any other token has lost, and the few that
   remain are compared by the protocol's own formula. ``SLACK`` is far above the rounding of float32 in scores of up to
   some thousands.
3. With numba at hand (vLLM brings it) hashing and sieving run fused, in registers; torch makes some thirty passes over
   memory for the same numbers. The survivors are the same.

Needs torch, and so runs in child processes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from proofs import sampling
from proofs.sampling import GOLDEN, LARGEST_UNIFORM, MIX_1, MIX_2
from protocol.errors import LocalError

SLACK: Final = 1.0 + 2.0**-10

Survivors = tuple[Tensor, Tensor, Tensor]
"""Rows, tokens (int64, ascending by row and token) and the noise's uniforms (float32) of what may still win."""


def sample(logits: Tensor, keys: Tensor, temperature: float, min_p: float = 0.0) -> tuple[Tensor, Tensor]:
    """The tokens of ``sampling.choose`` (int64 [n]) and their ``sampling.logprobs`` (float32 [n]), in one go.

    On an accelerator, where logarithms cost nothing beside the memory, it calls the two.
    """
    if logits.device.type != "cpu":
        tokens = sampling.choose(logits, keys, temperature, min_p)
        return tokens, sampling.logprobs(logits, tokens, temperature)
    sampling.check(logits, keys, temperature, min_p)
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    top = scaled.amax(dim=1, keepdim=True)
    weights = torch.empty_like(scaled)
    totals = torch.empty_like(top)
    for row in range(len(scaled)):  # row by row, so that one stays in cache from operation to operation
        torch.sub(scaled[row], top[row], out=weights[row]).exp_()
        totals[row] = weights[row].sum()
    if min_p > 0:
        weights.masked_fill_(scaled < sampling.cut(scaled, min_p), 0.0)
    rows, tokens, noise = survivors(weights, keys)
    scores = scaled[rows, tokens] + sampling.gumbel_of(noise)
    chosen = [-1] * len(scaled)
    best = [-math.inf] * len(scaled)
    for row, token, score in zip(rows.tolist(), tokens.tolist(), scores.tolist(), strict=True):
        if score > best[row]:  # of equals the first
            chosen[row], best[row] = token, score
    if -1 in chosen:
        raise LocalError("logits are not finite: the engine or the weights are broken")
    picked = torch.tensor(chosen, dtype=torch.int64)
    logprobs = scaled.gather(1, picked[:, None]) - top - totals.log_()
    return picked, logprobs[:, 0].clamp_(max=0.0)


def survivors(weights: Tensor, keys: Tensor) -> Survivors:
    """Who may win the race: ``weights`` float32 [n, V] on a CPU (0: out of it), ``keys`` int64 [n, 2].

    Each row has at least one survivor unless its weights are all 0 or not finite.
    """
    if (sieve := fused()) is not None:
        return _sift(sieve, weights, keys)
    noise = sampling.uniforms(keys, weights.shape[1])
    ratio = noise / weights
    least, best = ratio.min(dim=1, keepdim=True)
    limit = -torch.log1p(-noise.gather(1, best).clamp_(max=LARGEST_UNIFORM)) / weights.gather(1, best) * SLACK
    rows, tokens = ((ratio <= limit) & (least < torch.inf)).nonzero(as_tuple=True)
    return rows, tokens, noise[rows, tokens]


@cache
def fused() -> Callable[..., Any] | None:
    """The compiled sieve, None without numba. Made at its first use: vLLM 0.32 fails to start where numba's libraries
    are in the process already."""
    try:
        import numba
    except ImportError:
        return None

    u32, i32, f32 = np.uint32, np.int32, np.float32
    golden, mix_1, mix_2 = (u32(value & 0xFFFFFFFF) for value in (GOLDEN, MIX_1, MIX_2))
    infinite, unsigned = i32(0x7F800000), i32(0x7FFFFFFF)
    half, unit, slack, largest = f32(0.5), f32(2.0**-31), f32(SLACK), f32(LARGEST_UNIFORM)

    def sieve(weights, keys, rows, tokens, uniforms):  # type: ignore[no-untyped-def]
        """Fill the three arrays with survivors; return how many there are, which may be more than fit."""
        vocabulary = weights.shape[1]
        limit = np.empty(1, f32)
        bits = limit.view(np.int32)
        noise = np.empty(vocabulary, f32)
        ratio = np.empty(vocabulary, f32)
        # Floats from 0 to infinity are in the order of their bits as integers, and NaN without its sign comes last.
        order = ratio.view(np.int32)
        found = 0
        for row in range(weights.shape[0]):
            k1, k2 = keys[row, 0], keys[row, 1]
            for token in range(vocabulary):
                x = u32(u32(token) * golden + k1)
                x ^= x >> u32(16)
                x = u32(x * mix_1)
                x ^= x >> u32(15)
                x = u32(x * mix_2)
                x ^= x >> u32(16)
                x ^= k2
                x ^= x >> u32(16)
                x = u32(x * mix_1)
                x ^= x >> u32(15)
                x = u32(x * mix_2)
                x ^= x >> u32(16)
                noise[token] = (f32(i32(x >> u32(1))) + half) * unit
                ratio[token] = noise[token] / weights[row, token]
            least = infinite
            for token in range(vocabulary):
                least = min(least, order[token] & unsigned)
            if least == infinite:
                continue
            best = 0
            while order[best] & unsigned != least:
                best += 1
            limit[0] = f32(-np.log1p(-min(noise[best], largest))) / weights[row, best] * slack
            for token in range(vocabulary):
                if order[token] & unsigned <= bits[0]:
                    if found < rows.shape[0]:
                        rows[found] = row
                        tokens[found] = token
                        uniforms[found] = noise[token]
                    found += 1
        return found

    signature = "int64(float32[:, ::1], uint32[:, ::1], int64[::1], int64[::1], float32[::1])"
    compiled: Callable[..., Any] = numba.njit(signature, error_model="numpy", nogil=True)(sieve)
    return compiled


def _sift(sieve: Callable[..., Any], weights: Tensor, keys: Tensor) -> Survivors:
    table = weights.contiguous().numpy()
    words = keys.numpy().astype(np.uint32)
    room = 64 + 16 * len(table)
    while True:
        rows, tokens, noise = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.float32)
        found = sieve(table, words, rows, tokens, noise)
        if found <= room:
            return (
                torch.from_numpy(rows[:found]),
                torch.from_numpy(tokens[:found]),
                torch.from_numpy(noise[:found]),
            )
        room = found
