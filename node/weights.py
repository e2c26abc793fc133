"""Following the lineage: every node fetches the newest version, keeps the newest few, and serves their chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from node.context import Node
from node.net.rpc import Unreachable
from node.net.transfer import fetch_chunks
from protocol import records
from protocol.constants import KEPT_VERSIONS, MAX_MANIFEST_BYTES
from protocol.entry import Entry
from protocol.errors import Error, PeerError
from protocol.manifest import Manifest, verify_chunk

FETCH_TIMEOUT = 120.0
"""Seconds a version may take before its fetch is begun anew (what arrived is kept)."""


class Weights:
    """The versions this node holds whole, by the id of their ``weights`` entry."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._held: dict[bytes, bytes] = {}  # weights entry id -> manifest hash, oldest first
        self._entrusted: bytes | None = None  # manifest hash of what the trainer made and may be about to publish
        self._lock = trio.Lock()
        self._changed = trio.Event()

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
        return self._node.versions.paths(self._held[weights])

    async def wait_changed(self, timeout: float) -> None:
        """Return when another version is held, or after ``timeout`` seconds."""
        with trio.move_on_after(timeout):
            await self._changed.wait()

    async def run(self) -> None:
        """Hold the newest version, for ever."""
        seen = 0
        while True:
            newest = self.newest()
            if newest is not None and newest.id not in self._held:
                await self._try(newest)
            seen = await self._node.log.wait_change(seen, timeout=1)

    async def _try(self, entry: Entry) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_once_gone, entry, nursery.cancel_scope)
            try:
                await self.hold(entry, timeout=FETCH_TIMEOUT)
                self._node.health.clear("weights")
            except (Error, OSError, trio.TooSlowError) as error:
                why = "it took too long" if isinstance(error, trio.TooSlowError) else str(error)
                self._node.health.warn("weights", f"version {payload(entry).number} has not arrived: {why}")
                await trio.sleep(self._node.domain.timings.presence_ms / 1000)
            nursery.cancel_scope.cancel()

    async def _cancel_once_gone(self, entry: Entry, scope: trio.CancelScope) -> None:
        """End the fetch of a version that newer ones have displaced everywhere: nobody is left to give it."""
        seen = 0
        while True:
            newest, others = self.newest(), self._node.presences.live()
            displaced = newest is not None and newest.id != entry.id and newest.id not in self._held
            if displaced and not any(entry.id in p.versions for n, p in others.items() if n != self._node.id):
                scope.cancel()
            seen = await self._node.log.wait_change(seen, timeout=1)

    async def hold(self, entry: Entry, *, timeout: float) -> None:
        """Fetch one version unless it is held.

        Raises ``PeerError``, ``Unreachable`` or ``trio.TooSlowError``, and ``OSError`` where the disk refuses.
        """
        with trio.fail_after(timeout):
            async with self._lock:
                if entry.id in self._held:
                    return
                wanted = payload(entry)
                if not await trio.to_thread.run_sync(self._node.versions.complete, wanted.manifest):
                    await self._fetch(entry, wanted)
                self._note(entry)

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
        kept = {*self._held.values(), self._node.domain.model.manifest.hash}
        self._node.versions.retain(kept if self._entrusted is None else kept | {self._entrusted})
        self._changed.set()
        self._changed = trio.Event()
        self._node.presences.announce_soon()

    async def keep_entrusted(self, manifest: Manifest, trainer: bytes) -> None:
        """Fetch a version that ``trainer`` has not published yet, and keep it until the next one.

        Raises ``PeerError`` or ``Unreachable``, and ``OSError`` where the disk refuses.
        """
        self._entrusted = manifest.digest
        if not await trio.to_thread.run_sync(self._node.versions.complete, manifest.digest):
            await self._fetch_chunks(manifest, lambda: [trainer])

    async def _fetch(self, entry: Entry, wanted: records.Weights) -> None:
        await self._head_start(entry)
        await self._fetch_chunks(await self._manifest(entry, wanted), lambda: self._holders(entry))

    async def _fetch_chunks(self, manifest: Manifest, holders: Callable[[], list[bytes]]) -> None:
        digest = manifest.digest
        with self._node.versions.pin(digest):
            await trio.to_thread.run_sync(self._node.versions.begin, manifest)
            missing = await trio.to_thread.run_sync(self._node.versions.missing, digest)

            async def store(index: int, data: bytes) -> None:
                await trio.to_thread.run_sync(self._node.versions.write_chunk, digest, index, data)

            await fetch_chunks(
                self._node.network, holders, digest, missing, verify=partial(verify_chunk, manifest), store=store
            )
            if not await trio.to_thread.run_sync(self._node.versions.complete, digest):
                raise PeerError("the chunks are there but do not make up the version")
            await trio.to_thread.run_sync(self._node.versions.sync, digest)

    async def _manifest(self, entry: Entry, wanted: records.Weights) -> Manifest:
        if wanted.manifest_size > MAX_MANIFEST_BYTES:
            raise PeerError("a manifest of an absurd size")
        peers = self._holders(entry)
        data = await self._node.fetch_blob(wanted.manifest, wanted.manifest_size, peers, timeout=5)
        manifest = Manifest.parse(data)
        if manifest.whole != wanted.whole or manifest.size != wanted.size:
            raise PeerError("the manifest is not the one that the weights entry describes")
        return manifest

    async def _head_start(self, entry: Entry) -> None:
        """Leave the trainer's uplink to the relays for one presence interval, where there is a relay."""
        presences = self._node.presences.live()
        relays = {n for n, p in presences.items() if p.role == "relay"}
        if self._node.role == "relay" or not relays:
            return
        deadline = trio.current_time() + self._node.domain.timings.presence_ms / 1000
        while trio.current_time() < deadline:
            if any(entry.id in p.versions for n, p in self._node.presences.live().items() if n in relays):
                return
            await trio.sleep(0.05)

    def _holders(self, entry: Entry) -> list[bytes]:
        """Who to ask, best first: relays that hold it, others that hold it, its author."""
        presences = self._node.presences.live()
        connected = self._node.network.peers
        ranks: dict[bytes, float] = {entry.author: 2, self._node.domain.creator: 3}
        for node, presence in presences.items():
            if entry.id in presence.versions:
                ranks[node] = 0 if presence.role == "relay" else min(1, ranks.get(node, math.inf))
        return [n for n, _ in sorted(ranks.items(), key=lambda item: item[1]) if n in connected and n != self._node.id]


def payload(entry: Entry) -> records.Weights:
    """The payload of a ``weights`` entry."""
    assert isinstance(entry.payload, records.Weights)
    return entry.payload
