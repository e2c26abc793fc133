"""Verification of what peers send, piece by piece, and of stored draws.

1. A bad piece is reported and the rest is good. Nothing here changes the log.
2. Large deliveries are verified in threads, on all cores: libsodium works outside the interpreter's lock.
3. What is held already is not verified again, nor is what waits: it was when it came.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from node.log.intake import Intake
from node.store.log_store import Item
from protocol import entry as entries
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.feed import ForkProof
from protocol.identity import ENTRY, verify
from protocol.ledger import Ledger, check_draw
from protocol.quorum import CertifiedCut, CertifiedGrant
from protocol.records import Rollout, Verdict

T = TypeVar("T")

THREAD_FROM: Final = 32
"""Deliveries of so many objects (about 100 µs each) are verified in a thread."""

VERIFIED_AT_ONCE: Final = 256
"""Entries that one thread verifies in one go."""

VERIFIERS: Final = trio.CapacityLimiter(os.cpu_count() or 1)


@dataclass(slots=True)
class Received:
    """What became of a delivery: objects added; whether some wait for others; what is wrong with the rest."""

    added: int = 0
    waiting: bool = False
    errors: list[PeerError] = field(default_factory=list)


class Verifier:
    """Verifies what the log of ``ledger`` does not hold; in threads where a delivery has ``thread_from`` objects."""

    def __init__(self, ledger: Ledger, intake: Intake, thread_from: int) -> None:
        self._ledger = ledger
        self._replica = ledger.replica
        self._intake = intake
        self._thread_from = thread_from

    async def verify(
        self,
        entries: Sequence[bytes],
        cuts: Sequence[bytes],
        grants: Sequence[bytes],
        forks: Sequence[bytes],
        result: Received,
    ) -> tuple[list[Entry], list[CertifiedCut], list[CertifiedGrant | ForkProof]]:
        """The entries, the cuts and the rest of a delivery that are good; ``result`` is told what is wrong."""
        others: list[CertifiedGrant | ForkProof] = []
        new_cuts: list[CertifiedCut] = []

        def judge_sides() -> None:
            new_cuts.extend(_parsed(cuts, CertifiedCut.parse, result))
            others.extend(_parsed(forks, ForkProof.parse, result))
            others.extend(_parsed(grants, CertifiedGrant.parse, result))

        if len(entries) + len(cuts) + len(grants) + len(forks) < self._thread_from:
            judge_sides()
            good = self._judged(entries, result)
        else:
            if cuts or grants or forks:
                await trio.to_thread.run_sync(judge_sides, limiter=VERIFIERS)
            good = await self._judged_in_threads(entries, result)
        return good, new_cuts, others

    async def _judged_in_threads(self, data: Sequence[bytes], result: Received) -> list[Entry]:
        """Parse and verify on all cores."""
        starts = range(0, len(data), VERIFIED_AT_ONCE)
        parts: list[list[Entry]] = [[] for _ in starts]

        async def judge(place: int, some: Sequence[bytes]) -> None:
            parts[place] = await trio.to_thread.run_sync(self._judged, some, result, limiter=VERIFIERS)

        async with trio.open_nursery() as nursery:
            for place, start in enumerate(starts):
                nursery.start_soon(judge, place, data[start : start + VERIFIED_AT_ONCE])
        return [entry for part in parts for entry in part]

    async def draws(self, taken: Sequence[Item]) -> None:
        """Check the draws of the verdicts among what the log took, in threads where that is much."""
        if len(taken) >= self._thread_from:
            await check_draws(self._ledger, taken, self._announced)

    def _announced(self, rollout_id: bytes) -> Rollout | None:
        entry = self._replica.entry(rollout_id)
        if entry is not None and isinstance(entry.payload, Rollout):
            return entry.payload
        return self._ledger.announced(rollout_id)

    def _judged(self, data: Sequence[bytes], result: Received) -> list[Entry]:
        """The entries that are new here and whose signatures are right. May run in a thread."""
        good = []
        for entry in _parsed(data, _entry, result):
            if self._replica.entry(entry.id) is None:
                try:
                    # What waits was verified when it came.
                    if not self._intake.holds(entry):
                        verify(entry.author, ENTRY, entry.body, entry.signature, "entry")
                    good.append(entry)
                except PeerError as error:
                    result.errors.append(error)
        return good


async def check_draws(ledger: Ledger, items: Iterable[Item], find: Callable[[bytes], Rollout | None]) -> None:
    """Check the draws of verdicts whose submissions are at hand: the ledger would do it one by one, in the loop."""
    some = [item for item in items if isinstance(item, Entry)]
    rollouts = {entry.id: entry.payload for entry in some if isinstance(entry.payload, Rollout)}
    pairs: list[tuple[Entry, Rollout]] = []
    for entry in some:
        if isinstance(entry.payload, Verdict):
            rollout = rollouts.get(entry.payload.rollout) or find(entry.payload.rollout)
            if rollout is not None and not ledger.knows_draw(entry.id):
                pairs.append((entry, rollout))

    async def check(part: Sequence[tuple[Entry, Rollout]]) -> None:
        found = await trio.to_thread.run_sync(lambda: [check_draw(*pair) for pair in part], limiter=VERIFIERS)
        for (entry, _), right in zip(part, found, strict=True):
            ledger.note_drawn(entry.id, right)

    async with trio.open_nursery() as nursery:
        for start in range(0, len(pairs), VERIFIED_AT_ONCE):
            nursery.start_soon(check, pairs[start : start + VERIFIED_AT_ONCE])


def _entry(data: bytes) -> Entry:
    return entries.decode(data, verify=False)


def _parsed(items: Iterable[bytes], parse: Callable[[bytes], T], result: Received) -> list[T]:
    parsed = []
    for data in items:
        try:
            parsed.append(parse(data))
        except PeerError as error:
            result.errors.append(error)
    return parsed
