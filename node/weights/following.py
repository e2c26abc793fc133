"""Following the lineage: every node fetches the newest version, keeps the newest few, and serves their chunks."""

from __future__ import annotations

import math
import operator
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.net.requests import Unreachable
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.store.version_store import VersionStore
from node.weights import retention
from node.weights.bulk.bulk_process import Bulk
from node.weights.bulk.token_exchange import Routes
from node.weights.delta_chain import CatchingUp
from node.weights.fetching import STALL, Carrier, Holders
from node.workers.child_process import OpenWorker, open_worker
from protocol import records
from protocol.constants import CHUNK_BYTES, KEPT_VERSIONS
from protocol.errors import Error, PeerError
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest
from protocol.weights.holders import Holding
from protocol.weights.manifest import ChunkList, Manifest

RELAY: Final = 1.0
OTHER: Final = 0.7
PARTIAL: Final = 0.5
AUTHOR: Final = 0.3
"""Preferences of holders: relays are there to be asked, the trainer's uplink serves those who have nobody else."""

MAX_OFFERS: Final = 8
"""Relays remembered a version."""
MAX_OFFERED: Final = 4
"""Versions of which offers are remembered."""


class Weights:
    """The versions this node holds whole, by the id of their ``weights`` entry."""

    def __init__(
        self,
        node: Node,
        own: OwnState,
        presences: Presences,
        versions: VersionStore,
        blobs: BlobExchange,
        bulk: Bulk,
        tokens: Routes,
        *,
        open_worker: OpenWorker = open_worker,
    ) -> None:
        self._node = node
        self._own = own
        self._presences = presences
        self._versions = versions
        self._blobs = blobs
        self._bulk = bulk
        self._held: dict[bytes, bytes] = {}  # weights entry id -> manifest hash, oldest first
        self._entrusted: tuple[bytes, ...] = ()  # what the trainer made and may be about to publish, its delta too
        self._spare: tuple[bytes, ...] = ()
        self._making: dict[bytes, trio.Lock] = {}
        self._arriving: list[bytes] = []
        self._offers: dict[bytes, dict[bytes, None]] = {}  # weights entry id -> relays that offered it
        self._version_0: Manifest | None = None
        self._stirred = trio.Event()
        self._untidy = trio.Event()
        self.carrier = Carrier(node, versions, bulk, tokens)
        self.catching_up = CatchingUp(node, self, versions, blobs, open_worker)
        versions.spare = lambda: self._spare

    def held(self) -> list[bytes]:
        """Ids of the ``weights`` entries held whole, newest first."""
        return list(reversed(self._held))

    def newest(self) -> Entry | None:
        """The newest version of the lineage, held or not."""
        return self._node.log.ledger.newest_weights()

    def newest_number(self) -> int:
        """Its number, -1 before version 0."""
        entry = self.newest()
        return -1 if entry is None else payload(entry).number

    def newest_held(self) -> Entry | None:
        """The newest version of the lineage that is held whole."""
        for entry in reversed(self._node.log.ledger.lineage()):
            if entry.id in self._held:
                return entry
        return None

    def outdated(self, weights: bytes) -> bool:
        """Whether a version is older than those that every holder keeps, so that nobody needs to have it."""
        number = self._node.log.ledger.version_number(weights)
        return number is not None and number <= self.newest_number() - KEPT_VERSIONS

    def paths(self, weights: bytes) -> tuple[Path, Path]:
        """The manifest's and the raw tensors' files of a version; ``Unreachable`` where it is not held any more."""
        if weights not in self._held:
            raise Unreachable("the version is not held any more")
        return self._versions.paths(self._held[weights])

    async def wait_stirred(self, timeout: float) -> None:
        """Return when a version is held, begins to arrive or is offered, or after ``timeout`` seconds."""
        with trio.move_on_after(timeout):
            await self._stirred.wait()

    async def run(self) -> None:
        """Hold the newest version, for ever; a relay its delta as well, for others."""
        seen = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tidy)
            while True:
                newest = self.newest()
                if newest is not None and newest.id not in self._held:
                    await self._try(newest)
                    if newest.id in self._held and self._own.role == "relay":
                        nursery.start_soon(self.catching_up.hold_delta, newest)
                seen = await self._node.log.wait_change(seen, timeout=1)

    async def _try(self, entry: Entry) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_once_gone, entry, nursery.cancel_scope)
            try:
                await self.hold(entry)
                self._node.health.clear("weights")
            except (Error, OSError) as error:
                self._node.health.warn("weights", f"version {payload(entry).number} has not arrived: {error}")
                interval = self._node.domain.timings.presence_ms / 1000
                await trio.sleep(interval / 5)
                await self.wait_stirred(interval * 4 / 5)  # an offer may be what was missing
            nursery.cancel_scope.cancel()

    async def _cancel_once_gone(self, entry: Entry, scope: trio.CancelScope) -> None:
        """End the fetch of a version that newer ones have displaced everywhere: nobody is left to give it. Or nobody
        has to be: one holder that trickles would keep this node from all newer ones."""
        seen = 0
        while True:
            newest, others = self.newest(), self._presences.live()
            displaced = newest is not None and newest.id != entry.id and newest.id not in self._held
            held = any(entry.id in p.versions for n, p in others.items() if n != self._node.id)
            if displaced and (not held or self.outdated(entry.id)):
                scope.cancel()
            seen = await self._node.log.wait_change(seen, timeout=1)

    async def hold(self, entry: Entry, *, timeout: float = math.inf) -> None:
        """Fetch one version unless it is held.

        Raises ``PeerError`` for one that must not be followed, ``Unreachable`` where it does not arrive,
        ``trio.TooSlowError`` after ``timeout`` seconds, ``NoRoom`` and other ``OSError`` where the disk refuses.
        """
        with trio.fail_after(timeout):
            if entry.id in self._held:
                await trio.lowlevel.checkpoint()
                return
            wanted = payload(entry)
            async with self.alone(wanted.manifest):
                if entry.id in self._held:
                    return
                if not await trio.to_thread.run_sync(self._versions.complete, wanted.manifest):
                    await self._fetch(entry, wanted)
                self._note(entry)

    @asynccontextmanager
    async def alone(self, digest: bytes) -> AsyncIterator[None]:
        """Be the only one that makes an object whole, once nobody else does.

        A chunk that a delta has made right and another fetch still receives in place would be served meanwhile.
        """
        lock = self._making.setdefault(digest, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            statistics = lock.statistics()
            if not statistics.locked and not statistics.tasks_waiting and self._making.get(digest) is lock:
                del self._making[digest]

    def is_made(self, digest: bytes) -> bool:
        """Whether somebody makes an object whole at the moment."""
        return digest in self._making

    def adopt(self, entry: Entry) -> None:
        """Our own new version, whose file the store has already."""
        self._note(entry)

    def _note(self, entry: Entry) -> None:
        self._held[entry.id] = payload(entry).manifest
        lineage = [e.id for e in self._node.log.ledger.lineage()]
        place = {weights: i for i, weights in enumerate(lineage)}
        self._held = dict(sorted(self._held.items(), key=lambda item: place.get(item[0], -1)))
        for weights in list(self._held)[:-KEPT_VERSIONS]:
            del self._held[weights]
        self._offers.pop(entry.id, None)
        self._untidy.set()
        self._stir()
        self._publish()

    async def _tidy(self) -> None:
        """Delete what nothing keeps any more whenever a version has come, for ever: large files take seconds."""
        keep = partial(trio.from_thread.run_sync, self.kept)
        while True:
            await self._untidy.wait()
            self._untidy = trio.Event()
            for gone in await trio.to_thread.run_sync(self._versions.retain, keep):
                self._bulk.tell("forget", digest=gone)

    def kept(self, present: Collection[bytes]) -> set[bytes]:
        """Digests of what retention leaves alone (``node.weights.retention``) of what is ``present``."""
        return {*self._held.values(), *retention.reasons(self.lineage(), present)}

    def lineage(self) -> retention.Lineage:
        """What retention goes by."""
        domain, ledger = self._node.domain, self._node.log.ledger
        return retention.lineage_of(ledger.lineage(), domain, self._entrusted)

    async def clean(self, *, dry_run: bool) -> retention.Cleaned:
        """Delete what nothing keeps and, where room is short, what can be spared; or only tell what that would be."""
        lineage = self.lineage()
        found = await trio.to_thread.run_sync(partial(retention.clean, self._versions, lineage, dry_run=dry_run))
        if not dry_run:
            await self._miss_gone()
        return found

    async def _miss_gone(self) -> None:
        """Notice what had to go because room was short."""
        with trio.CancelScope(shield=True):
            present = set(await trio.to_thread.run_sync(self._versions.held))
        for weights, digest in list(self._held.items()):
            if digest not in present:
                del self._held[weights]
                self._bulk.tell("forget", digest=digest)
                self._publish()

    def _publish(self) -> None:
        """Have others know what is here and what arrives."""
        self._own.versions, self._own.arriving = self.held(), self.arriving()
        self._own.announce()

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = trio.Event()

    def expect(self, manifest: Manifest, delta: DeltaManifest | None) -> None:
        """Keep a version, and its delta, that may be published soon, until the next one."""
        self._entrusted = (manifest.digest,) if delta is None else (manifest.digest, delta.digest)

    async def keep_entrusted(self, manifest: Manifest, delta: DeltaManifest | None, trainer: bytes) -> None:
        """Fetch a version that ``trainer`` has not published yet, durably, and keep it until the next one. Where its
        delta serves, it is taken first.

        Raises ``PeerError`` or ``Unreachable``, and ``OSError`` where the disk refuses.
        """
        self.expect(manifest, delta)
        await self._refuse_other_model(manifest)

        def holders() -> dict[bytes, Holding]:
            return {trainer: Holding()}

        async with self.alone(manifest.digest):
            if delta is not None:
                await self.catching_up.take_entrusted(delta, manifest, holders)
            await self.bring(manifest, holders)
        if delta is not None:
            await self.bring(delta, holders)
        await trio.to_thread.run_sync(self._versions.sync, manifest.digest)

    async def bring(self, listing: ChunkList, holders: Holders, *, stall: float = STALL) -> None:
        """Make a bulk object whole in the store, from those that ``holders()`` names at each moment.

        Raises ``Unreachable`` where it does not arrive within ``stall`` seconds of the chunk before, ``NoRoom`` and
        other ``OSError`` where the disk refuses.
        """
        present, before = await trio.to_thread.run_sync(self._look, listing.digest)
        self._spare, began = tuple(retention.spare(self.lineage(), present)), trio.current_time()
        try:
            await self.carrier.bring(listing, holders, stall=stall)
        finally:
            await self._miss_gone()
        came = (len(listing.chunks) - before) * CHUNK_BYTES
        self.catching_up.rates.received(min(listing.size, came), trio.current_time() - began)

    def _look(self, digest: bytes) -> tuple[list[bytes], int]:
        """All that is on the disk, and how many chunks of one object are."""
        held = self._versions.open(digest)
        return self._versions.held(), 0 if held is None else held.present()

    # What must not be followed is refused before a byte of it is fetched.

    async def _fetch(self, entry: Entry, wanted: records.Weights) -> None:
        if self._node.log.ledger.weights(entry.id) is None:
            raise PeerError("a version by another than the trainer whose term counts")
        model = await self._model()
        if wanted.size != model.size or wanted.manifest_size > 2 * self._node.domain.model.manifest.size:
            raise PeerError(f"a version of an absurd size ({wanted.size} bytes, the model has {model.size})")
        await self._head_start(entry)
        manifest = await self.manifest(entry)
        with self._arrives(entry):
            await self.catching_up.take(entry, manifest)
            await self.bring(manifest, lambda: self.holders(entry))

    async def manifest(self, entry: Entry) -> Manifest:
        """The manifest of a version, checked against its entry and against the model.

        Raises ``PeerError`` or ``Unreachable``.
        """
        wanted = payload(entry)
        peers = list(self.holders(entry))
        data = await self._blobs.fetch(wanted.manifest, wanted.manifest_size, peers, timeout=5)
        manifest = await trio.to_thread.run_sync(Manifest.parse, data)
        if manifest.whole != wanted.whole or manifest.size != wanted.size:
            raise PeerError("the manifest is not the one that the weights entry describes")
        await self._refuse_other_model(manifest)
        return manifest

    async def _refuse_other_model(self, manifest: Manifest) -> None:
        known = (await self._model()).tensors
        if await trio.to_thread.run_sync(operator.ne, manifest.tensors, known):
            raise PeerError("the manifest describes other tensors than those of version 0")

    async def _model(self) -> Manifest:
        """The manifest of version 0, which the genesis names."""
        if self._version_0 is None:
            blob = self._node.domain.model.manifest
            data = await self._blobs.fetch(blob.hash, blob.size, timeout=5)
            self._version_0 = await trio.to_thread.run_sync(Manifest.parse, data)
        return self._version_0

    # Who holds what

    @contextmanager
    def _arrives(self, entry: Entry) -> Iterator[None]:
        """Let others know that what is here of a version can be fetched from this node already."""
        self._arriving.append(entry.id)
        self._stir()
        self._publish()
        try:
            yield
        finally:
            self._arriving.remove(entry.id)
            self._own.arriving = self.arriving()

    def progress(self, entry: Entry) -> dict[str, int | str]:
        """How far a version is: of the ``part`` that arrives now (its delta, or the whole) the bytes that are here and
        in all, the rate in bytes a second, and how many peers send."""
        wanted = payload(entry)
        for part, digest in (("delta", wanted.delta), ("whole", wanted.manifest)):
            found = None if digest is None else self.carrier.progress.get(digest)
            if found is not None:
                have, total = found.have * CHUNK_BYTES, found.total * CHUNK_BYTES
                return {"part": part, "have": have, "total": total, "rate": found.rate, "peers": found.peers}
        return {"part": "whole", "have": 0, "total": wanted.size, "rate": 0, "peers": 0}

    def arriving(self) -> list[bytes]:
        """Ids of the ``weights`` entries that are on their way, newest first."""
        return list(dict.fromkeys(reversed(self._arriving)))

    def holders(self, entry: Entry) -> dict[bytes, Holding]:
        """Who has a version, or a part of it, among those connected: best first."""
        node = self._node
        alike = {e.id for e in node.log.ledger.lineage() if payload(e).manifest == payload(entry).manifest} | {entry.id}
        found: dict[bytes, Holding] = {}
        for peer, presence in self._presences.live().items():
            if alike.intersection(presence.versions):
                found[peer] = Holding(preference=RELAY if presence.role == "relay" else OTHER)
            elif alike.intersection(presence.arriving) or peer in self._offers.get(entry.id, ()):
                found[peer] = Holding(whole=False, preference=RELAY if presence.role == "relay" else PARTIAL)
        connected = node.network.peers
        found = {peer: holding for peer, holding in found.items() if peer in connected and peer != node.id}
        authors = [entry.author]
        if payload(entry).manifest == node.domain.model.manifest.hash:
            authors.append(node.domain.creator)  # gave version 0 to the first
        for author in authors:
            if author in connected and author != node.id:
                found[author] = Holding(preference=AUTHOR, spared=bool(found.keys() - {*authors}))
        return dict(sorted(found.items(), key=lambda item: (not item[1].whole, -item[1].preference)))

    def offered(self, peer: bytes, weights: bytes) -> None:
        """A relay offers a version, whole or arriving. It counts as a holder from now on."""
        if weights in self._held:
            return
        relays = self._offers.setdefault(weights, {})
        relays[peer] = None
        while len(relays) > MAX_OFFERS:
            del relays[next(iter(relays))]
        while len(self._offers) > MAX_OFFERED:
            del self._offers[next(iter(self._offers))]
        self.carrier.look()
        self._stir()

    def lagging(self) -> list[bytes]:
        """Connected nodes that have nothing of the newest version although this node could give them some of it."""
        newest = self.newest()
        if newest is None or (newest.id not in self._held and newest.id not in self._arriving):
            return []
        live, connected = self._presences.live(), self._node.network.peers
        return [
            peer
            for peer, presence in live.items()
            if peer in connected and newest.id not in presence.versions and newest.id not in presence.arriving
        ]

    async def _head_start(self, entry: Entry) -> None:
        """Leave the trainer's uplink to the relays for one presence interval, where there is a relay."""
        presences = self._presences.live()
        relays = {n for n, p in presences.items() if p.role == "relay"}
        if self._own.role == "relay" or not relays:
            return
        deadline = trio.current_time() + self._node.domain.timings.presence_ms / 1000
        while trio.current_time() < deadline:
            if relays.intersection(self.holders(entry)):
                return
            await self.wait_stirred(0.05)


def payload(entry: Entry) -> records.Weights:
    """The payload of a ``weights`` entry."""
    assert isinstance(entry.payload, records.Weights)
    return entry.payload
