"""The rollout submission: consecutive groups that one node generated with one version, as one file.

1. The file is the canonical array ``[FORMAT, domain, weights, author, first_counter, groups]``, a group
   ``[prompt, proofs, responses]`` and a response ``[tokens, logprobs, reward, finish]``. It is named by the BLAKE3
   hash of its bytes.
2. Counters are not written: group i has the counter ``first_counter + i``, so a file cannot repeat one.
3. ``prompt``, ``tokens`` and ``logprobs`` are arrays of 32-bit little-endian integers, kept as bytes because msgpack
   would need up to 5 bytes and a step of decoding for each.
4. A log-probability is written as ``−log p · 10⁶``, rounded, which is never negative and at most ``MAX_LOGPROB``.
   It is at the recipe's temperature, without min-p (``proofs.sampling.logprobs``).
5. ``reward`` is in millionths, 0 to 10⁶. ``finish`` is 1 where the response ended itself, 0 where its length did.
6. The recipe bounds everything: exactly ``groups_per_submission`` groups of exactly ``group_size`` responses,
   1 to ``max_prompt_tokens`` and 1 to ``max_response_tokens`` tokens, one log-probability a token.

What a submission *means* (prompt, vocabulary, end token, proofs) is checked in ``proofs``. ``Submission.parse``
raises ``PeerError`` and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from blake3 import blake3

from protocol import codec
from protocol.codec import Array, Bytes, Int, Many
from protocol.constants import FORMAT, MAX_SUBMISSION_BYTES, MILLION, PROOF_CHUNK_TOKENS, PROOF_TOPK_LARGE
from protocol.domain import Recipe
from protocol.errors import LocalError, PeerError

MAX_COUNTER: Final = 2**62
MAX_LOGPROB: Final = 100 * MILLION
"""Largest ``−log p`` that is written, in millionths: rarer tokens are written as this."""

FINISH_LENGTH: Final = 0
FINISH_END: Final = 1


@dataclass(frozen=True, slots=True)
class Response:
    """One response. ``logprobs`` are ``−log p`` in micro, one a token; ``reward`` in micro; ``finish`` by rule 5."""

    tokens: tuple[int, ...]
    logprobs: tuple[int, ...]
    reward: int
    finish: int


@dataclass(frozen=True, slots=True)
class Group:
    """All responses to one prompt, in their order, with the activation proofs over them (``proofs.activation``)."""

    counter: int
    prompt: tuple[int, ...]
    responses: tuple[Response, ...]
    proofs: bytes

    @property
    def signal(self) -> bool:
        """Whether rewards differ, so that some responses are better than others."""
        return len({response.reward for response in self.responses}) > 1


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission. ``domain``, ``weights`` (the version's entry id) and ``author`` have 32 bytes."""

    domain: bytes
    weights: bytes
    author: bytes
    first_counter: int
    groups: tuple[Group, ...]

    @property
    def responses(self) -> int:
        """The number of responses."""
        return sum(len(group.responses) for group in self.groups)

    @property
    def tokens(self) -> int:
        """The number of response tokens."""
        return sum(len(response.tokens) for group in self.groups for response in group.responses)

    @property
    def signal(self) -> int:
        """The number of groups with a signal."""
        return sum(group.signal for group in self.groups)

    @property
    def digest(self) -> bytes:
        """The BLAKE3 hash (32 bytes) of the encoded file."""
        return blake3(self.encode()).digest()

    @classmethod
    def parse(cls, data: bytes, recipe: Recipe) -> Submission:
        """The submission in ``data``, which a peer of a domain with this recipe wrote; raises ``PeerError``."""
        value = codec.parse(data, _schema(recipe), max_bytes=MAX_SUBMISSION_BYTES, what="submission")
        _, domain, weights, author, first_counter, groups = value
        parsed = tuple(_group(first_counter + index, *group) for index, group in enumerate(groups))
        return cls(domain, weights, author, first_counter, parsed)

    def encode(self) -> bytes:
        """The file's bytes. ``LocalError`` for counters out of sequence, negative numbers, or a file too large."""
        groups: list[Any] = []
        for index, group in enumerate(self.groups):
            if group.counter != self.first_counter + index:
                raise LocalError(f"group {index} of a submission has the counter {group.counter}")
            responses = [
                [pack(response.tokens), pack(response.logprobs), response.reward, response.finish]
                for response in group.responses
            ]
            groups.append([pack(group.prompt), group.proofs, responses])
        data = codec.encode([FORMAT, self.domain, self.weights, self.author, self.first_counter, groups])
        if len(data) > MAX_SUBMISSION_BYTES:
            raise LocalError(f"a submission of {len(data)} bytes is too large")
        return data


def max_bytes(recipe: Recipe) -> int:
    """No submission of this recipe is longer: tokens and log-probabilities, the largest commitment, and framing."""
    tokens = recipe.group_size * recipe.max_response_tokens
    proofs = -(-tokens // PROOF_CHUNK_TOKENS) * (2 + 2 * PROOF_TOPK_LARGE)
    group = 4 * recipe.max_prompt_tokens + 8 * tokens + proofs + 32 * (recipe.group_size + 1)
    return min(MAX_SUBMISSION_BYTES, 256 + recipe.groups_per_submission * group)


def pack(values: Sequence[int]) -> bytes:
    """``values`` as 32-bit little-endian integers; ``LocalError`` where one does not fit."""
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except struct.error:
        raise LocalError("a token or log-probability does not fit 32 bits") from None


def unpack(data: bytes) -> tuple[int, ...]:
    """The inverse of ``pack``; ``PeerError`` where the length is no multiple of 4."""
    if len(data) % 4:
        raise PeerError(f"an array of 32-bit integers has {len(data)} bytes")
    return struct.unpack(f"<{len(data) // 4}I", data)


@cache
def _schema(recipe: Recipe) -> Array:
    response = Array(
        (
            ("tokens", Bytes(most=4 * recipe.max_response_tokens)),
            ("logprobs", Bytes(most=4 * recipe.max_response_tokens)),
            ("reward", Int(0, MILLION)),
            ("finish", Int(FINISH_LENGTH, FINISH_END)),
        )
    )
    group = Array(
        (
            ("prompt", Bytes(most=4 * recipe.max_prompt_tokens)),
            ("proofs", Bytes(most=MAX_SUBMISSION_BYTES)),
            ("responses", Many(response, most=recipe.group_size, least=recipe.group_size)),
        )
    )
    return Array(
        (
            ("format", Int(FORMAT, FORMAT)),
            ("domain", codec.HASH),
            ("weights", codec.HASH),
            ("author", codec.KEY),
            ("first_counter", Int(0, MAX_COUNTER)),
            ("groups", Many(group, most=recipe.groups_per_submission, least=recipe.groups_per_submission)),
        )
    )


def _group(counter: int, prompt: bytes, proofs: bytes, responses: list[Any]) -> Group:
    tokens = unpack(prompt)
    if not tokens:
        raise PeerError("submission: a prompt is empty")
    return Group(counter, tokens, tuple(_response(*response) for response in responses), proofs)


def _response(tokens: bytes, logprobs: bytes, reward: int, finish: int) -> Response:
    response = Response(unpack(tokens), unpack(logprobs), reward, finish)
    if not response.tokens or len(response.logprobs) != len(response.tokens):
        raise PeerError("submission: a response has no tokens, or not one log-probability a token")
    if max(response.logprobs) > MAX_LOGPROB:
        raise PeerError("submission: a log-probability is out of range")
    return response
