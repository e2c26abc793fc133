"""``proofs.checksum``: what changes the checksum of weights and what does not."""

from __future__ import annotations

import struct

import pytest
import torch

from proofs import checksum
from proofs.checksum import value_checksum
from tests.proofs.test_sampling import mix

WEIGHTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def test_it_is_the_sum_of_its_formula() -> None:
    expected = sum(mix(struct.unpack("<I", struct.pack("<f", value))[0]) for value in WEIGHTS.reshape(-1).tolist())
    assert value_checksum([WEIGHTS]) == expected


def test_layout_does_not_matter() -> None:
    expected = value_checksum([WEIGHTS])
    assert value_checksum([WEIGHTS.T]) == expected
    assert value_checksum([WEIGHTS[:7], WEIGHTS[7:].reshape(-1)]) == expected
    assert value_checksum([WEIGHTS.reshape(-1).flip(0)]) == expected
    assert value_checksum([WEIGHTS, torch.zeros(13)]) == expected


def test_a_wide_type_has_the_checksum_of_its_narrow_values() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        narrow = WEIGHTS.to(dtype)
        assert value_checksum([narrow]) == value_checksum([narrow.float()]) != value_checksum([WEIGHTS])


def test_the_smallest_change_of_one_value_shows() -> None:
    changed = WEIGHTS.clone()
    changed[3, 3] = torch.nextafter(changed[3, 3], torch.tensor(9.0))
    assert value_checksum([changed]) != value_checksum([WEIGHTS])


def test_the_weights_are_left_alone_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = WEIGHTS.clone()
    expected = value_checksum([WEIGHTS])
    monkeypatch.setattr(checksum, "BLOCK_VALUES", 7)
    assert value_checksum([WEIGHTS]) == expected
    assert torch.equal(WEIGHTS, before)


def test_it_is_never_zero() -> None:
    assert value_checksum([torch.zeros(5)]) == 1
    assert value_checksum([]) == 1
