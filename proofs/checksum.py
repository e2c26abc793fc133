"""The layout-independent checksum of weights (``protocol.weights.manifest``, rule 5).

1. Each value is widened to float32; its 32 bits go through the mixer L of ``proofs.sampling``. The checksum is the sum
   of the results modulo 2⁶³, and 1 where that is 0.
2. A sum does not care where values stand, so an engine that fuses, splits or reorders tensors gets the same; L(0) = 0,
   so padding with zeros changes nothing. An engine that ties or copies tensors must pass each value once.
3. It catches a reload that silently kept old tensors: a training step changes too little for any probe of outputs to
   see. It is no defence against forgery; the chunk hashes are.

Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from proofs.sampling import mix

BLOCK_VALUES: Final = 1 << 22
"""Values worked on at a time: bounds scratch memory, and has no influence on the result."""


def value_checksum(tensors: Iterable[Tensor]) -> int:
    """The checksum of all values of ``tensors`` (float32, bfloat16 or float16, of any shape): 1 to 2⁶³ − 1."""
    return checksum_of_sums([value_sum(tensors)])


def checksum_of_sums(sums: Iterable[int]) -> int:
    """The checksum of weights in parts, from the ``value_sum`` of each."""
    return sum(sums) % 2**63 or 1


def value_sum(tensors: Iterable[Tensor]) -> int:
    """The sum that the checksum is made of, not reduced: 0 where there are no values."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), BLOCK_VALUES):
            # a copy, because the mixer works in place
            values = torch.empty_like(flat[start : start + BLOCK_VALUES], dtype=torch.float32)
            values.copy_(flat[start : start + BLOCK_VALUES])
            # each term is below 2³², so that a block's sum stays below 2⁵⁴
            total += int((mix(values.view(torch.int32)).to(torch.int64) & 0xFFFFFFFF).sum())
    return total
