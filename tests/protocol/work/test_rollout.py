"""``protocol.work.rollout``: the submission's bytes, its bounds, and what its parser refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import MAX_SUBMISSION_BYTES, MILLION
from protocol.errors import LocalError, PeerError
from protocol.work.rollout import (
    FINISH_END,
    FINISH_LENGTH,
    MAX_COUNTER,
    MAX_LOGPROB,
    Group,
    Response,
    Submission,
    pack,
    unpack,
)
from tests.protocol.builders import RECIPE, digest

SMALL = replace(RECIPE, group_size=2, groups_per_submission=2, max_prompt_tokens=3, max_response_tokens=4)
VECTOR = json.loads((Path(__file__).parents[2] / "vectors" / "submission.json").read_text())

SUBMISSION = Submission(
    digest("domain"),
    digest("weights"),
    digest("author"),
    7,
    (
        Group(7, (1, 2, 3), (Response((5, 0), (10, 20), MILLION, 1), Response((9,) * 4, (0,) * 4, 0, 0)), b"proof 7"),
        Group(8, (4,), (Response((70_000,), (MAX_LOGPROB,), 250_000, 1), Response((0,), (1,), 0, 1)), b"proof 8"),
    ),
)


def words(most: int, largest: int = 2**32 - 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, largest), min_size=1, max_size=most).map(tuple)


@st.composite
def responses(draw: st.DrawFn) -> Response:
    tokens = draw(words(4))
    logprobs = draw(st.lists(st.integers(0, MAX_LOGPROB), min_size=len(tokens), max_size=len(tokens)))
    return Response(tokens, tuple(logprobs), draw(st.integers(0, MILLION)), draw(st.sampled_from([0, 1])))


@st.composite
def submissions(draw: st.DrawFn) -> Submission:
    ids = [draw(st.binary(min_size=32, max_size=32)) for _ in range(3)]
    first = draw(st.integers(0, MAX_COUNTER))
    groups = tuple(
        Group(first + index, draw(words(3)), (draw(responses()), draw(responses())), draw(st.binary(max_size=40)))
        for index in range(2)
    )
    return Submission(ids[0], ids[1], ids[2], first, groups)


def value_of(submission: Submission) -> Any:
    return codec.decode(submission.encode(), max_bytes=MAX_SUBMISSION_BYTES)


def test_the_encoding_is_the_golden_one() -> None:
    assert SUBMISSION.encode().hex() == VECTOR["bytes"]
    assert SUBMISSION.digest.hex() == VECTOR["digest"]
    assert Submission.parse(bytes.fromhex(VECTOR["bytes"]), SMALL) == SUBMISSION


@settings(max_examples=50, deadline=None)
@given(submissions())
def test_parsing_inverts_encoding(submission: Submission) -> None:
    data = submission.encode()
    assert Submission.parse(data, SMALL) == submission
    assert submission.digest == blake3(data).digest()


def test_a_flipped_bit_is_refused_or_names_another_submission() -> None:
    data = SUBMISSION.encode()
    for place in range(len(data)):
        for bit in (0, 3, 7):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            try:
                parsed = Submission.parse(bytes(altered), SMALL)
            except PeerError:
                continue
            assert parsed != SUBMISSION
            assert parsed.encode() == altered


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_a_peer_error(data: bytes) -> None:
    with pytest.raises(PeerError):
        Submission.parse(data, SMALL)


def test_every_truncation_is_refused() -> None:
    data = SUBMISSION.encode()
    for size in range(len(data)):
        with pytest.raises(PeerError):
            Submission.parse(data[:size], SMALL)
    with pytest.raises(PeerError):
        Submission.parse(data + b"\0", SMALL)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0,), 2),
        ((1,), b"short"),
        ((4,), MAX_COUNTER + 1),
        ((5,), []),
        ((5, 0, 0), b""),
        ((5, 0, 0), b"12345"),
        ((5, 0, 0), pack([1, 2, 3, 4])),
        ((5, 0, 1), None),
        ((5, 0, 2), [[pack([1]), pack([1]), 0, 1]]),
        ((5, 0, 2, 0), [pack([1]), pack([1]), 0]),
        ((5, 0, 2, 0, 0), b""),
        ((5, 0, 2, 0, 0), pack([1, 2, 3])),
        ((5, 0, 2, 0, 0), b"\0" * 7),
        ((5, 0, 2, 0, 1), pack([MAX_LOGPROB + 1, 0])),
        ((5, 0, 2, 0, 2), MILLION + 1),
        ((5, 0, 2, 0, 3), 2),
    ],
)
def test_what_breaks_a_bound_is_refused(path: tuple[int, ...], value: Any) -> None:
    altered = value_of(SUBMISSION)
    part = altered
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(PeerError):
        Submission.parse(codec.encode(altered), SMALL)


def test_the_recipe_fixes_the_numbers_of_groups_and_responses() -> None:
    data = SUBMISSION.encode()
    for recipe in (
        replace(SMALL, group_size=3),
        replace(SMALL, group_size=1),
        replace(SMALL, groups_per_submission=1),
        replace(SMALL, groups_per_submission=3),
        replace(SMALL, max_prompt_tokens=2),
        replace(SMALL, max_response_tokens=3),
    ):
        with pytest.raises(PeerError):
            Submission.parse(data, recipe)


def test_totals_count_responses_and_their_tokens() -> None:
    assert (SUBMISSION.responses, SUBMISSION.tokens) == (4, 8)


def test_counters_out_of_sequence_are_our_own_mistake() -> None:
    groups = (SUBMISSION.groups[1], SUBMISSION.groups[0])
    with pytest.raises(LocalError, match="counter"):
        replace(SUBMISSION, groups=groups).encode()


@pytest.mark.parametrize("value", [-1, 2**32])
def test_what_does_not_fit_32_bits_is_our_own_mistake(value: int) -> None:
    with pytest.raises(LocalError):
        pack([value])


def test_words_are_little_endian() -> None:
    assert pack([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack(pack([1, 2**32 - 1])) == (1, 2**32 - 1)
    with pytest.raises(PeerError):
        unpack(b"123")


def test_the_finish_codes_are_fixed() -> None:
    assert (FINISH_LENGTH, FINISH_END) == (0, 1)
