"""Getting a version by what changed since one that is here (``protocol.weights.delta``, rule 5), instead of whole.

1. Deltas are taken where that is expected to be quicker: sizes are known from their manifests, rates were measured. A
   node that measured nothing yet assumes a common link.
2. Each delta travels like a version and makes one, which is then held and served like any other.
3. A child (``node.workers.delta_child``) is started for one piece of work and ends with it: versions are minutes apart,
   and it takes a third of a second to start. Cancelling kills it, which leaves a sound store (see there).
4. Whatever goes wrong with a delta is a health warning and costs time only: the chunks that came out wrong, or all that
   lack, are fetched as parts of the whole.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace

from node.errors import Unreachable
from node.weights.fetching import AskHolders, Fetching, Rates
from node.weights.held import HeldVersions, WeightsMeans, payload
from node.weights.holders_of import HoldersOf
from node.workers.child_messages import ApplyDelta, DescribeVersion, TensorRow
from node.workers.child_process import OpenWorker, Worker, WorkerError
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.weights.delta import MAX_CHAIN, DeltaManifest, chain_pays, seconds_for_whole
from protocol.weights.manifest import ChunkList, Manifest

TOPIC: Final = "delta"
"""The health warning's."""
KNOWN: Final = 2 * MAX_CHAIN + 8
"""Newest versions among which a base is looked for: some may only announce the same weights again."""
STALL: Final = 10.0
"""Seconds without a chunk of a delta after which the whole is fetched."""
MODULE: Final = "node.workers.delta_child"
NAME: Final = "delta"
PATIENCE: Final = 60.0
SLOWEST: Final = 20 << 20
"""A child has ``PATIENCE`` seconds, and one for every so many bytes of the whole: a niced process on a busy machine."""
THREADS: Final = 4
"""At most so many threads: more do not read and write memory faster."""


@dataclass(frozen=True, slots=True)
class Described:
    """A new version's manifest, and that of its delta where one was made; seconds that it took."""

    manifest: Manifest
    delta: DeltaManifest | None
    seconds: float


class DeltaChain:
    """The deltas of one node's weights."""

    def __init__(self, means: WeightsMeans, held: HeldVersions, holders_of: HoldersOf, fetching: Fetching) -> None:
        self._means = means
        self._versions = means.versions
        self._held = held
        self._holders_of = holders_of
        self._fetching = fetching
        self.applied = 0
        """Versions that were made from deltas."""

    async def take(self, entry: Entry, manifest: Manifest) -> None:
        """Make the version here from deltas where that pays; the caller fetches what lacks afterwards.

        Raises ``OSError`` where the disk refuses.
        """
        try:
            chain = await self._chain(entry)
            speed = self._fetching.rates.speed
            missing = await self._missing(manifest)
            if not chain or seconds_for_whole(missing, speed) <= speed.start:
                return
            listings = [await self._holders_of.delta_manifest(link) for link in chain]
            lacking = [await self._missing(listing) for listing in listings]
            if not chain_pays(missing, lacking, manifest.size, speed):
                return
            for link, listing in zip(chain, listings, strict=True):
                if link.id == entry.id:
                    await self._make(listing, manifest, lambda: self._holders_of.delta(entry))
                elif not await self._make_link(link, listing):
                    return
        except (Unreachable, PeerError) as error:
            self._fall_back(str(error))

    async def take_unpublished(self, listing: DeltaManifest, target: Manifest, ask_holders: AskHolders) -> None:
        """The same for a version that the log does not name yet, by its delta on one that is here.

        Raises ``OSError`` where the disk refuses.
        """
        try:
            if not await trio.to_thread.run_sync(self._versions.complete, listing.base):
                return
            missing, lacking = await self._missing(target), await self._missing(listing)
            if chain_pays(missing, [lacking], target.size, self._fetching.rates.speed):
                await self._make(listing, target, ask_holders)
        except (Unreachable, PeerError) as error:
            self._fall_back(str(error))

    async def hold_delta(self, entry: Entry) -> None:
        """Have the delta of a version here to give it to others; a failure is no trouble of this node's."""
        wanted = payload(entry)
        if wanted.delta is None or await trio.to_thread.run_sync(self._versions.complete, wanted.delta):
            return
        try:
            listing = await self._holders_of.delta_manifest(entry)
            await self._fetching.bring(listing, lambda: self._holders_of.delta(entry), stall=STALL)
        except (Unreachable, PeerError, OSError) as error:
            self._means.node.logger.debug("the delta of version %d is not here: %s", wanted.number, error)

    async def _chain(self, entry: Entry) -> list[Entry]:
        """The versions, oldest first, whose deltas lead from one that is here whole to this one; none where none do."""
        chain: list[Entry] = []
        known = {e.id: e for e in self._means.node.log.ledger.lineage()[-KNOWN:]}
        link = entry
        while True:
            wanted = payload(link)
            before = None if wanted.predecessor is None else known.get(wanted.predecessor)
            if before is None:
                return []
            if payload(before).manifest != wanted.manifest:  # else the same weights were announced again
                if wanted.delta is None or len(chain) == MAX_CHAIN:
                    return []
                chain.append(link)
            whole = await trio.to_thread.run_sync(self._versions.complete, payload(before).manifest)
            if chain and whole:
                return chain[::-1]
            link = before

    async def _make_link(self, link: Entry, listing: DeltaManifest) -> bool:
        """Make a version on the way to the one that is wanted, and hold it; False where that failed."""
        target = await self._holders_of.manifest(link)
        alone = self._fetching.alone(target.digest)
        if alone.locked():
            return False  # somebody else fetches it; waiting for each other might have no end
        async with alone:
            if not await self._make(listing, target, lambda: self._holders_of.delta(link)):
                return False
        self._held.note(link)
        return True

    async def _make(self, listing: DeltaManifest, target: Manifest, ask_holders: AskHolders) -> bool:
        """Fetch a delta and make its target. False where something of the target lacks afterwards.

        Raises ``PeerError`` for a delta that belongs to other versions, ``Unreachable`` where it does not arrive, and
        ``OSError`` where the disk refuses.
        """
        versions = self._versions
        base = await trio.to_thread.run_sync(versions.open, listing.base)
        if base is None or not isinstance(base.listing, Manifest):
            raise PeerError("the base of the delta is not here any more")
        listing.check(base.listing, target)
        with ExitStack() as stack:
            for digest in (listing.base, listing.digest, target.digest):
                stack.enter_context(versions.pin(digest))
            await self._fetching.bring(listing, ask_holders, stall=STALL)
            await self._fetching.make_room(target)
            parts = (listing.digest, listing.base, target.digest)
            delta, before, after = (versions.paths(digest)[0].parent for digest in parts)
            try:
                wrong = await apply(self._means.open_worker, self._fetching.rates, delta, before, after, target.size)
            except WorkerError as error:
                self._fall_back(str(error))
                return False
        if wrong:
            self._fall_back(f"{len(wrong)} of {len(target.chunks)} chunks came out wrong")
            return False
        self._means.node.health.clear(TOPIC)
        self.applied += 1
        return True

    def _fall_back(self, why: str) -> None:
        self._means.node.health.warn(TOPIC, f"a delta did not serve, the whole version is fetched instead: {why}")

    async def _missing(self, listing: ChunkList) -> int:
        """How many bytes of an object are not here."""

        def count() -> int:
            held = self._versions.open(listing.digest)
            return listing.size if held is None else min(listing.size, len(held.missing()) * CHUNK_BYTES)

        return await trio.to_thread.run_sync(count)


def timeout(size: int) -> float:
    """Seconds that a child may take for a whole of ``size`` bytes."""
    return PATIENCE + size / SLOWEST


def threads() -> int:
    """Threads for a child: its priority is low, so it takes what is left over."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0))))


def open_child(open_worker: OpenWorker) -> AbstractAsyncContextManager[Worker]:
    """A child for one piece of work. Raises ``WorkerError``."""
    return open_worker(MODULE, name=NAME)


async def describe(
    worker: Worker,
    tensors: list[TensorRow],
    checksum: int,
    whole: Path,
    size: int,
    base: Path | None,
    delta: Path,
) -> Described:
    """Hash the new version of ``size`` bytes in the file ``whole``, and write the ``delta`` from the one in the folder
    ``base``. Where the base cannot be used, there is no delta. Raises ``WorkerError``.
    """
    alone = DescribeVersion(tensors, checksum, str(whole), None, str(delta), threads())
    try:
        request = alone if base is None else replace(alone, base=str(base))
        answer = await worker.call(request, timeout=timeout(size))
    except WorkerError as error:
        if error.kind != "user":
            raise
        answer = await worker.call(alone, timeout=timeout(size))
    found = answer.delta_manifest
    return Described(
        manifest=await trio.to_thread.run_sync(Manifest.parse, answer.manifest),
        delta=None if found is None else await trio.to_thread.run_sync(DeltaManifest.parse, found),
        seconds=answer.seconds,
    )


async def apply(open_worker: OpenWorker, rates: Rates, delta: Path, base: Path, target: Path, size: int) -> list[int]:
    """Make the version of ``size`` bytes in the folder ``target`` from those in the other two.

    Returns the chunks that came out wrong. Raises ``WorkerError``, of kind "user" where the delta is at fault.
    """
    begun = time.monotonic()
    async with open_child(open_worker) as worker:
        request = ApplyDelta(str(delta), str(base), str(target), threads())
        answer = await worker.call(request, timeout=timeout(size))
    rates.applied(size, answer.seconds, time.monotonic() - begun - answer.seconds)
    return answer.wrong
