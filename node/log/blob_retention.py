"""Which files of ``blobs/`` a node keeps: those that its log or its genesis still has a use for.

1. What the genesis names never goes, nor does what belongs to the newest versions: manifests, deltas, step blobs.
2. A submission's file goes once the log has decided on it and nobody uses its version any more: steps reach back
   ``async_level`` versions, audits and replayed verdicts ``KEPT_VERSIONS``.
3. What the log does not name goes when it is old: it may be about to be named, as a submission on its way to its entry.
4. Where there is more than the quota, more goes: what was refused first, then what is too old to be trained with, the
   oldest first. Never what is still to be judged or trained with, however much that is; then the owner is told.
5. A liar may announce another's file, or one of the genesis, as its own: what anything needs is needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from node.context import Node
from node.store.blob_store import BlobStore
from protocol.constants import KEPT_VERSIONS
from protocol.credit.ledger import Ledger
from protocol.records import Rollout, Step, Weights
from protocol.weights.delta import MAX_CHAIN

GRACE: Final = 3600.0
"""Seconds after which it is clear that the log does not name a file."""

PAUSE: Final = 60.0
"""Seconds between two looks."""


@dataclass(frozen=True, slots=True)
class BlobUses:
    """What is ``needed``, what the quota may take (``spare``, the first to go first) and what is ``over``. Nothing that
    is needed is among the others; what is in none of them is unknown to the log."""

    needed: AbstractSet[bytes]
    spare: Sequence[bytes]
    over: AbstractSet[bytes]


def uses(ledger: Ledger) -> BlobUses:
    """What the log, as it is now, has a use for."""
    domain, level = ledger.domain, ledger.domain.recipe.async_level
    entry = ledger.newest_weights()
    newest = -1 if entry is None else ledger.version_number(entry.id) or 0
    oldest = newest + 1 - max(KEPT_VERSIONS, level + 2)
    needed = {blob.hash for blob in domain.blobs}
    versions = max(newest - oldest, MAX_CHAIN) + 1
    for entry in [*ledger.lineage()[-versions:], *ledger.steps()[-versions:]]:
        match entry.payload:
            case Weights(manifest=manifest, delta=delta):
                needed |= {manifest} if delta is None else {manifest, delta}
            case Step(blob=blob):
                needed.add(blob)
    spare: list[tuple[bool, int, bytes]] = []
    over: set[bytes] = set()
    decided = [(entry, status.outcome == "accepted") for entry, status in ledger.decisions()]
    for entry, accepted in [*decided, *((entry, None) for entry in ledger.outstanding())]:
        assert isinstance(entry.payload, Rollout)
        number = ledger.version_number(entry.payload.weights)
        file = entry.payload.submission
        if number is None:
            continue  # of a version that was thrown away: it may come back, and it goes when it is old
        if number < oldest:
            over.add(file)
        elif accepted is None or (accepted and number >= newest - level):
            needed.add(file)
        else:
            spare.append((accepted, number, file))
    ordered = dict.fromkeys(file for _, _, file in sorted(spare) if file not in needed)
    return BlobUses(needed, tuple(ordered), over - needed - ordered.keys())


def clear(blobs: BlobStore, known: BlobUses, *, before: float, quota: int) -> int:
    """Delete what is over, what is unknown and was not put since ``before`` (seconds since the epoch), and what is
    spare while there is more than ``quota`` bytes (0: no limit). Returns the bytes that are left.

    Raises ``OSError`` of the first file that cannot be deleted, after the others were.
    """
    sizes: dict[bytes, int] = {}
    failures: list[OSError] = []

    def delete(digest: bytes, *, before: float | None = None) -> None:
        try:
            if blobs.delete(digest, before=before):
                del sizes[digest]
        except OSError as error:
            failures.append(error)

    for digest, size in blobs.sizes():
        sizes[digest] = size
    kept = {*known.needed, *known.spare}
    for digest in sizes.keys() - kept:
        delete(digest, before=None if digest in known.over else before)
    used = sum(sizes.values())
    for digest in known.spare:
        if quota and used > quota and digest in sizes:
            used -= sizes[digest]
            delete(digest)
    if failures:
        raise failures[0]
    return used


async def keep_clear(node: Node, blobs: BlobStore) -> None:
    """Delete what nothing needs, for ever."""
    quota = node.config.blobs.quota << 20
    while True:
        known = uses(node.log.ledger)
        job = partial(clear, blobs, known, before=time.time() - GRACE, quota=quota)
        try:
            used = await trio.to_thread.run_sync(job)
        except OSError as error:
            node.health.warn("blobs", f"files that nothing needs are not removed: {error}")
        else:
            if quota and used > quota:
                over = f"{used >> 20} MiB, more than blobs.quota allows ({quota >> 20} MiB)"
                node.health.warn("blobs", f"files that are still to be judged or trained with take {over}")
            else:
                node.health.clear("blobs")
        await trio.sleep(PAUSE)
