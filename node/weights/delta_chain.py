"""Getting a version by what changed since one that is here (``protocol.weights.delta``, rule 5), instead of whole.

1. Deltas are taken where that is expected to be quicker: sizes are known from their manifests, rates were measured.
2. Each delta travels like a version and makes one, which is then held and served like any other.
3. Whatever goes wrong with a delta is a health warning and costs time only: the chunks that came out wrong, or all that
   lack, are fetched as parts of the whole.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

import trio

from node.context import Node
from node.errors import Unreachable
from node.store.version_store import VersionStore
from node.weights import delta_making
from node.weights.checked_manifests import CheckedManifests
from node.weights.delta_making import Rates
from node.weights.fetching import AskHolders, Fetching
from node.weights.held import HeldVersions, payload
from node.weights.holders_of import HoldersOf
from node.workers.child_process import OpenWorker, WorkerError
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


class DeltaChain:
    """The deltas of one node's weights."""

    def __init__(
        self,
        node: Node,
        versions: VersionStore,
        held: HeldVersions,
        holders_of: HoldersOf,
        manifests: CheckedManifests,
        fetching: Fetching,
        rates: Rates,
        open_worker: OpenWorker,
    ) -> None:
        self._node = node
        self._versions = versions
        self._held = held
        self._holders_of = holders_of
        self._manifests = manifests
        self._fetching = fetching
        self.rates = rates
        self._open_worker = open_worker
        self.applied = 0
        """Versions that were made from deltas."""

    async def take(self, entry: Entry, manifest: Manifest) -> None:
        """Make the version here from deltas where that pays; the caller fetches what lacks afterwards.

        Raises ``OSError`` where the disk refuses.
        """
        try:
            chain = await self._chain(entry)
            speed = self.rates.speed
            missing = await self._missing(manifest)
            if not chain or seconds_for_whole(missing, speed) <= speed.start:
                return
            listings = [await self._manifests.delta(link) for link in chain]
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
            if chain_pays(missing, [lacking], target.size, self.rates.speed):
                await self._make(listing, target, ask_holders)
        except (Unreachable, PeerError) as error:
            self._fall_back(str(error))

    async def hold_delta(self, entry: Entry) -> None:
        """Have the delta of a version here to give it to others; a failure is no trouble of this node's."""
        wanted = payload(entry)
        if wanted.delta is None or await trio.to_thread.run_sync(self._versions.complete, wanted.delta):
            return
        try:
            listing = await self._manifests.delta(entry)
            await self._fetching.bring(listing, lambda: self._holders_of.delta(entry), stall=STALL)
        except (Unreachable, PeerError, OSError) as error:
            self._node.logger.debug("the delta of version %d is not here: %s", wanted.number, error)

    async def _chain(self, entry: Entry) -> list[Entry]:
        """The versions, oldest first, whose deltas lead from one that is here whole to this one; none where none do."""
        chain: list[Entry] = []
        known = {e.id: e for e in self._node.log.ledger.lineage()[-KNOWN:]}
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
        target = await self._manifests.version(link)
        if self._fetching.is_made(target.digest):
            return False  # somebody else fetches it; waiting for each other might have no end
        async with self._fetching.alone(target.digest):
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
            folders = [versions.paths(digest)[0].parent for digest in (listing.digest, listing.base, target.digest)]
            try:
                wrong = await delta_making.apply(
                    self._open_worker, self.rates, folders[0], folders[1], folders[2], target.size
                )
            except WorkerError as error:
                self._fall_back(str(error))
                return False
        if wrong:
            self._fall_back(f"{len(wrong)} of {len(target.chunks)} chunks came out wrong")
            return False
        self._node.health.clear(TOPIC)
        self.applied += 1
        return True

    def _fall_back(self, why: str) -> None:
        self._node.health.warn(TOPIC, f"a delta did not serve, the whole version is fetched instead: {why}")

    async def _missing(self, listing: ChunkList) -> int:
        """How many bytes of an object are not here."""

        def count() -> int:
            held = self._versions.open(listing.digest)
            return listing.size if held is None else min(listing.size, len(held.missing()) * CHUNK_BYTES)

        return await trio.to_thread.run_sync(count)
