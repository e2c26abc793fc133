"""Counter-based Gumbel noise: how a token is chosen, and how a verifier replays the choice.

1. The noise of a token depends on the prompt's seed, the response's number in its group, the token's position
   in the response and the token's id, and on nothing else: no batch, device, library or order of calls.
2. ``k1 ‖ k2`` = the first 8 bytes of SHA-256(``"farflung/noise/v1\\0"`` ‖ seed ‖ u32 response ‖ u32 position),
   hashed integers big-endian, k1 and k2 little-endian.
3. ``x = L(L(token · 0x9E3779B1 + k1) ^ k2)`` modulo 2³², where L is the 32-bit mixer x ^= x>>>16, ·0x7FEB352D,
   x ^= x>>>15, ·0x846CA68B, x ^= x>>>16. The integers are the same bits everywhere.
4. ``u = min(((x>>>1) + ½)·2⁻³¹, 1 − 2⁻²⁴)`` and ``G = −log(−log1p(−u))``. Both ends are finite (−2.82 to 22.19):
   a float32 uniform that rounds to 1.0 would let a random token win about once in 500 tokens.
5. The chosen token maximises ``logits / temperature + G`` (the Gumbel-max rule: an exact sample of the softmax)
   among the tokens that min-p admits: those whose probability is at least ``min_p`` times the largest.
6. A replay does not ask whether the tokens are equal, since floats differ a little between machines. It asks
   how far the logits would have to move for the choice to be right: the deficit, in units of the score.

All floats are float32. Work is done in blocks of rows, so that a vocabulary of 152,000 needs little
scratch memory. Needs torch, and so runs in child processes only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor

from protocol.errors import LocalError

CONTEXT: Final = b"farflung/noise/v1\0"
_PLACE: Final = struct.Struct(">II")
BLOCK_ELEMENTS: Final = 1 << 17
"""Elements of one block of rows on a CPU, so that it stays in cache; results do not depend on it."""
BLOCK_ELEMENTS_DEVICE: Final = 1 << 25
"""The same on an accelerator, where few large launches count and memory is bounded by it."""

LARGEST_UNIFORM: Final = 1.0 - 2.0**-24
"""The largest float32 below 1: keeps ``log1p(-u)`` finite."""


def _signed(value: int) -> int:
    """The int32 with the same bits as the unsigned 32-bit ``value``."""
    return value - (1 << 32) if value >= 1 << 31 else value


GOLDEN: Final = _signed(0x9E3779B1)
MIX_1: Final = _signed(0x7FEB352D)
MIX_2: Final = _signed(0x846CA68B)


def keys_tensor(places: Iterable[tuple[bytes, int, int]]) -> Tensor:
    """The keys k1 and k2 (rule 2) of many ``(seed, response, position)`` places: int64 [n, 2], values below 2³².

    Seeds have 32 bytes; ``response`` counts the group's responses and ``position`` the response's tokens, both from 0.
    """
    bases: dict[bytes, Any] = {}
    parts: list[bytes] = []
    for seed, response, position in places:
        if len(seed) != 32:
            raise LocalError(f"a prompt's seed has 32 bytes, not {len(seed)}")
        if seed not in bases:  # what all places of one seed share
            bases[seed] = sha256(CONTEXT + seed)
        state = bases[seed].copy()
        state.update(_PLACE.pack(response, position))
        parts.append(state.digest()[:8])
    digests = b"".join(parts)
    if not digests:
        return torch.zeros((0, 2), dtype=torch.int64)
    words = torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 2, 4).to(torch.int64)
    # assembled byte by byte, because a view as int32 would depend on the machine's byte order
    return words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16 | words[..., 3] << 24


def choose(logits: Tensor, keys: Tensor, temperature: float, min_p: float = 0.0) -> Tensor:
    """The chosen tokens, int64 [n], of ``logits`` [n, V] and ``keys`` [n, 2] (rule 5).

    ``temperature`` is above 0, ``min_p`` from 0 to below 1; ``LocalError`` otherwise.
    """
    check(logits, keys, temperature, min_p)
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for block in _blocks(logits):
        scaled = logits[block].float() / temperature
        score = scaled + gumbel(keys[block], logits.shape[1])
        if min_p > 0:
            score.masked_fill_(scaled < cut(scaled, min_p), -math.inf)
        chosen[block] = score.argmax(dim=1)
    return chosen


def deficits(logits: Tensor, keys: Tensor, tokens: Tensor, temperature: float, min_p: float = 0.0) -> Tensor:
    """How far each of ``tokens`` (int64 [n]) is from being the right choice: float32 [n], 0 where it is.

    With score s, scaled logit z, chosen token t and min-p's cut c, it is the larger of ``c − z_t`` and the
    largest ``min(s_v − s_t, z_v − c)`` over the tokens v: a rival stops being one when its score falls by
    the first or it drops below the cut by the second. Without min-p that is ``max s − s_t``.
    """
    check(logits, keys, temperature, min_p)
    result = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for block in _blocks(logits):
        scaled = logits[block].float() / temperature
        score = scaled + gumbel(keys[block], logits.shape[1])
        token = tokens[block, None]
        rival = score - score.gather(1, token)
        if min_p > 0:
            above = scaled - cut(scaled, min_p)
            worst = torch.minimum(rival, above).amax(dim=1)
            result[block] = torch.maximum(worst, -above.gather(1, token)[:, 0])
        else:
            result[block] = rival.amax(dim=1)
    return result.clamp_(min=0.0)


def logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """``log_softmax(logits / temperature)`` of ``tokens``: float32 [n], at most 0.

    Min-p does not enter: the trainer divides by the same temperature and knows no cut.
    """
    result = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for block in _blocks(logits):
        scaled = logits[block].float() / temperature
        result[block] = scaled.gather(1, tokens[block, None])[:, 0] - scaled.logsumexp(dim=1)
    return result.clamp_(max=0.0)


def check(logits: Tensor, keys: Tensor, temperature: float, min_p: float) -> None:
    """Raise ``LocalError`` for arguments of ``choose`` that do not belong together or are out of range."""
    if keys.dtype != torch.int64 or keys.dim() != 2 or keys.shape[1] != 2:
        raise LocalError(f"noise keys are int64 [n, 2], not {keys.dtype} {list(keys.shape)}")
    if logits.dim() != 2 or len(keys) != len(logits):
        raise LocalError(f"logits {list(logits.shape)} and keys {list(keys.shape)} do not belong together")
    if not temperature > 0 or not 0 <= min_p < 1:
        raise LocalError(f"temperature {temperature} or min-p {min_p} is out of range")


def _blocks(table: Tensor) -> Iterator[slice]:
    elements = BLOCK_ELEMENTS if table.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
    rows, vocabulary = table.shape
    step = max(1, elements // max(1, vocabulary))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def cut(scaled: Tensor, min_p: float) -> Tensor:
    """The scaled logit below which min-p drops a token, [n, 1]."""
    return scaled.amax(dim=1, keepdim=True) + math.log(min_p)


def mix(x: Tensor) -> Tensor:
    """The mixer L of rule 3, in place on a writable int32 tensor, which is returned.

    Masks turn int32's arithmetic shifts into logical ones, and products wrap modulo 2³² whatever the sign.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= MIX_1
    x ^= (x >> 15) & 0x1FFFF
    x *= MIX_2
    x ^= (x >> 16) & 0xFFFF
    return x


def noise_bits(keys: Tensor, vocabulary: int) -> Tensor:
    """The 32 random bits of every token as an int32 tensor [n, vocabulary]."""
    signed = (keys - ((keys >> 31) << 32)).to(torch.int32)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) * GOLDEN
    x = tokens[None, :] + signed[:, :1]
    mix(x)
    x ^= signed[:, 1:]
    return mix(x)


def uniforms(keys: Tensor, vocabulary: int) -> Tensor:
    """The uniforms of rule 4, before they are clamped: float32 [n, vocabulary]."""
    half = (noise_bits(keys, vocabulary) >> 1) & 0x7FFFFFFF
    return half.to(torch.float32).add_(0.5).mul_(2.0**-31)


def gumbel_of(uniforms: Tensor) -> Tensor:
    """The Gumbel values of ``uniforms``, in place."""
    return uniforms.clamp_(max=LARGEST_UNIFORM).neg_().log1p_().neg_().log_().neg_()


def gumbel(keys: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocabulary] on the device of ``keys`` (int64 [n, 2])."""
    return gumbel_of(uniforms(keys, vocabulary))
