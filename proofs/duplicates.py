"""Same and near-same responses: within a submission, across its author's, and across nodes.

1. A response is known by fingerprints: of the whole, and of every run of ``RUN`` tokens whose hash is divisible by
   ``EVERY``. So a copied stretch is found wherever it stands, for a sixteenth of the memory.
2. Two responses are near-same where they share their whole, or at least two runs and a quarter of the later one's, and
   what they share had a surprise of at least ``SURPRISE`` by the log-probabilities of the earlier one: less is chance.
   The answers of a model that has learned arithmetic agree honestly.
3. Near-same responses are a suspicion and no proof. Every response is drawn with its own seed, so the group is replayed
   whatever the draw says, and replay decides: the copy fails it, the original does not. Where both pass they are both
   right. So it does not matter who announced first, in which order entries became final, or whose log says what.

An index keeps the newest ``capacity`` fingerprints. Pure Python, for the daemon.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from protocol.constants import MILLION
from protocol.work.rollout import Response, Submission

RUN: Final = 8
EVERY: Final = 16
SURPRISE: Final = 30 * MILLION
"""30 nats: chance makes such a pair once in 10¹³."""
CAPACITY: Final = 200_000


@dataclass(frozen=True, slots=True)
class ResponsePlace:
    """Where a response stands; ``submission`` is the id of its rollout entry."""

    author: bytes
    submission: bytes
    group: int
    response: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A response (``group``, ``response``) that is near-same to an earlier one."""

    group: int
    response: int
    earlier: ResponsePlace


class Index:
    """The responses seen so far."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        # fingerprint → where it was seen first, and the surprise (micro) there
        self._seen: dict[int, tuple[ResponsePlace, int]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def take(self, submission: Submission, entry_id: bytes) -> list[Pair]:
        """Index a submission and return its responses that are near-same to earlier ones, its own included, each once.
        A submission that was taken before is not compared with itself."""
        found = []
        for number, group in enumerate(submission.groups):
            for place, response in enumerate(group.responses):
                here = ResponsePlace(submission.author, entry_id, number, place)
                earlier = self._near(response, here)
                if earlier is not None:
                    found.append(Pair(number, place, earlier))
                self._add(response, here)
        return found

    def _near(self, response: Response, here: ResponsePlace) -> ResponsePlace | None:
        runs: dict[ResponsePlace, tuple[int, int]] = {}
        count = 0
        for number, (fingerprint, _) in enumerate(_fingerprints(response)):
            count += number > 0
            place, surprise = self._seen.get(fingerprint, (None, 0))
            if place is None or (place.submission == here.submission and not _before(place, here)):
                continue
            if number == 0 and surprise >= SURPRISE:
                return place
            shared, total = runs.get(place, (0, 0))
            runs[place] = (shared + (number > 0), total + surprise * (number > 0))
        for place, (shared, total) in runs.items():
            if shared >= 2 and 4 * shared >= count and total >= SURPRISE:
                return place
        return None

    def _add(self, response: Response, here: ResponsePlace) -> None:
        for fingerprint, surprise in _fingerprints(response):
            self._seen.setdefault(fingerprint, (here, surprise))
        while len(self._seen) > self._capacity:
            del self._seen[next(iter(self._seen))]


def _before(place: ResponsePlace, here: ResponsePlace) -> bool:
    return (place.group, place.response) < (here.group, here.response)


def _fingerprints(response: Response) -> Iterator[tuple[int, int]]:
    """(fingerprint, surprise in micro): of the whole first, then of the runs that count."""
    data = struct.pack(f"<{len(response.tokens)}I", *response.tokens)
    yield _hash(b"whole" + data), sum(response.logprobs)
    for start in range(len(response.tokens) - RUN + 1):
        fingerprint = _hash(data[4 * start : 4 * (start + RUN)])
        if fingerprint % EVERY == 0:
            yield fingerprint, sum(response.logprobs[start : start + RUN])


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
