"""Verification of what peers send, piece by piece, and of stored draws.

1. A bad piece is reported and the rest is good. Nothing here changes the log.
2. Signatures of large deliveries, and the draws of their verdicts, are checked elsewhere and on all cores
   (``Checking``). All is parsed in the loop, a little at a time: a thread that parses and a loop that runs keep each
   other waiting for the interpreter's lock.
3. What is held already is not verified again, nor is what waits: it was when it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from node.log.intake import Intake
from node.log.signature_check import Check
from node.log.signature_checkers import Checking, check_in_threads
from node.store.log_rows import Item
from protocol.credit.ledger import Ledger
from protocol.errors import PeerError
from protocol.identity import DRAW, ENTRY, verify
from protocol.log import entry as entries
from protocol.log.entry import Entry
from protocol.log.feed import ForkProof
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from protocol.records import Rollout, Verdict
from protocol.work.schedule import draw_message

T = TypeVar("T")

THREAD_FROM: Final = 32
"""Signatures of deliveries of so many objects (about 100 µs each) are checked elsewhere."""

PARSED_AT_ONCE: Final = 64
"""Entries that are parsed without a pause for others: a millisecond or two."""


@dataclass(slots=True)
class Received:
    """What became of a delivery: objects added; whether some wait for others; what is wrong with the rest."""

    added: int = 0
    waiting: bool = False
    errors: list[PeerError] = field(default_factory=list)


class Verifier:
    """Verifies what the log of ``ledger`` does not hold; with ``checking`` where a delivery has ``thread_from``
    objects."""

    def __init__(self, ledger: Ledger, intake: Intake, thread_from: int, checking: Checking = check_in_threads) -> None:
        self._ledger = ledger
        self._replica = ledger.replica
        self._intake = intake
        self._thread_from = thread_from
        self._checking = checking

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
                await trio.to_thread.run_sync(judge_sides)
            good = await self._judged_elsewhere(entries, result)
        return good, new_cuts, others

    async def _judged_elsewhere(self, data: Sequence[bytes], result: Received) -> list[Entry]:
        """Parse here, and have all signatures checked."""
        new: list[Entry] = []
        for start in range(0, len(data), PARSED_AT_ONCE):
            parsed = _parsed(data[start : start + PARSED_AT_ONCE], _entry, result)
            new += [entry for entry in parsed if self._replica.entry(entry.id) is None]
            await trio.lowlevel.checkpoint()
        # What waits was verified when it came.
        unknown = [entry for entry in new if not self._intake.holds(entry)]
        drawn = draws_of(self._ledger, unknown, self._announced)
        checks: list[Check] = [(entry.author, ENTRY, entry.body, entry.signature) for entry in unknown]
        right = await self._checking([*checks, *map(_draw, drawn)])
        bad = {id(entry) for entry, fits in zip(unknown, right, strict=False) if not fits}
        for (entry, _), fits in zip(drawn, right[len(unknown) :], strict=True):
            if id(entry) not in bad:
                self._ledger.draws.note(entry.id, fits)
        result.errors += [PeerError("entry: the signature is wrong") for _ in bad]
        return [entry for entry in new if id(entry) not in bad]

    async def draws(self, taken: Sequence[Item]) -> None:
        """Check the draws of the verdicts among what the log took, elsewhere where that is much."""
        if len(taken) >= self._thread_from:
            await check_draws(self._ledger, taken, self._announced, self._checking)

    def _announced(self, rollout_id: bytes) -> Rollout | None:
        entry = self._replica.entry(rollout_id)
        if entry is not None and isinstance(entry.payload, Rollout):
            return entry.payload
        return self._ledger.announced(rollout_id)

    def _judged(self, data: Sequence[bytes], result: Received) -> list[Entry]:
        """The entries that are new here and whose signatures are right."""
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


Find = Callable[[bytes], Rollout | None]
"""The payload of a rollout entry by its id, if it is at hand."""


def draws_of(ledger: Ledger, items: Iterable[Item], find: Find) -> list[tuple[Entry, Rollout]]:
    """The verdicts among ``items`` whose draws are not checked yet, with their submissions, as far as at hand."""
    some = [item for item in items if isinstance(item, Entry)]
    rollouts = {entry.id: entry.payload for entry in some if isinstance(entry.payload, Rollout)}
    pairs: list[tuple[Entry, Rollout]] = []
    for entry in some:
        if isinstance(entry.payload, Verdict) and entry.id not in ledger.draws:
            rollout = rollouts.get(entry.payload.rollout) or find(entry.payload.rollout)
            if rollout is not None:
                pairs.append((entry, rollout))
    return pairs


async def check_draws(ledger: Ledger, items: Iterable[Item], find: Find, checking: Checking = check_in_threads) -> None:
    """Check the draws of verdicts whose submissions are at hand: the ledger would do it one by one, in the loop."""
    pairs = draws_of(ledger, items, find)
    if pairs:
        for (entry, _), right in zip(pairs, await checking([*map(_draw, pairs)]), strict=True):
            ledger.draws.note(entry.id, right)


def _draw(pair: tuple[Entry, Rollout]) -> Check:
    verdict, rollout = pair
    assert isinstance(verdict.payload, Verdict)
    return verdict.author, DRAW, draw_message(rollout.submission, verdict.payload.rollout), verdict.payload.draw


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
