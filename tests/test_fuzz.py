"""A short run of the fuzzer, with a fixed seed; ``python -m tests.fuzz`` has the long one."""

from __future__ import annotations

import math

import pytest

from protocol.errors import PeerError
from tests import fuzz


def test_nothing_but_refusals() -> None:
    counts = fuzz.fuzz(math.inf, 7, most=6_000)
    assert counts.total() == 6_000
    taken = {name.removesuffix(" +") for name in counts if name.endswith("+")}
    refused = {name.removesuffix(" −") for name in counts if name.endswith("−")}
    assert refused == set(fuzz.targets())
    # Some mutants are valid, so that more than the outermost checks is tried.
    assert len(taken) > 5


@pytest.mark.parametrize("name", sorted(fuzz.targets()))
def test_what_is_mutated_is_valid(name: str) -> None:
    data, read = fuzz.targets()[name]
    assert read(data) in (None, data)


def test_any_other_error_is_told_with_its_input() -> None:
    def broken(data: bytes) -> bytes | None:
        if len(data) % 2:
            raise PeerError("odd")
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as caught:
        fuzz.fuzz(math.inf, 1, most=1_000, chosen={"object": (b"\x90", broken)})
    assert caught.value.__notes__[0].startswith("object: ")
