"""Manifests of versions and of deltas, checked: what must not be followed is refused before a byte of it is fetched."""

from __future__ import annotations

import operator

import trio

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.weights.held import payload
from node.weights.holders_of import HoldersOf
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest, largest_manifest
from protocol.weights.manifest import Manifest

SECONDS = 5.0
"""That each mebibyte of a manifest may take."""


class CheckedManifests:
    """Fetches manifests and holds them against what the log and the genesis say."""

    def __init__(self, node: Node, blobs: BlobExchange, holders_of: HoldersOf) -> None:
        self._node = node
        self._blobs = blobs
        self._holders_of = holders_of
        self._version_0: Manifest | None = None

    async def check_entry(self, entry: Entry) -> None:
        """Raise ``PeerError`` for a version by another than the trainer whose term counts, or of an absurd size."""
        wanted = payload(entry)
        if self._node.log.ledger.weights(entry.id) is None:
            raise PeerError("a version by another than the trainer whose term counts")
        model = await self._model()
        if wanted.size != model.size or wanted.manifest_size > 2 * self._node.domain.model.manifest.size:
            raise PeerError(f"a version of an absurd size ({wanted.size} bytes, the model has {model.size})")

    async def version(self, entry: Entry) -> Manifest:
        """The manifest of a version, which is its entry's, and the model's. Raises ``PeerError`` or ``Unreachable``."""
        wanted = payload(entry)
        holders = list(self._holders_of.version(entry))
        data = await self._blobs.fetch(wanted.manifest, wanted.manifest_size, holders, timeout=SECONDS)
        manifest = await trio.to_thread.run_sync(Manifest.parse, data)
        if manifest.whole != wanted.whole or manifest.size != wanted.size:
            raise PeerError("the manifest is not the one that the weights entry describes")
        await self.check_model(manifest)
        return manifest

    async def delta(self, entry: Entry) -> DeltaManifest:
        """The manifest of the delta that a version has, which is its entry's. Raises ``PeerError`` or
        ``Unreachable``."""
        wanted = payload(entry)
        assert wanted.delta is not None
        if wanted.delta_size > largest_manifest(wanted.size):
            raise PeerError(f"the delta's manifest has an absurd size ({wanted.delta_size} bytes)")
        holders = list(self._holders_of.version(entry))
        data = await self._blobs.fetch(wanted.delta, wanted.delta_size, holders, timeout=SECONDS)
        listing = await trio.to_thread.run_sync(DeltaManifest.parse, data)
        if listing.target != wanted.manifest or listing.whole_size != wanted.size:
            raise PeerError("the delta is not one to the version that it came with")
        return listing

    async def check_model(self, manifest: Manifest) -> None:
        """Raise ``PeerError`` where a manifest describes other tensors than version 0 has."""
        known = (await self._model()).tensors
        if await trio.to_thread.run_sync(operator.ne, manifest.tensors, known):
            raise PeerError("the manifest describes other tensors than those of version 0")

    async def _model(self) -> Manifest:
        """The manifest of version 0, which the genesis names."""
        if self._version_0 is None:
            blob = self._node.domain.model.manifest
            data = await self._blobs.fetch(blob.hash, blob.size, timeout=SECONDS)
            self._version_0 = await trio.to_thread.run_sync(Manifest.parse, data)
        return self._version_0
