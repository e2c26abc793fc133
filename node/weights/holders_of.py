"""What others have: who holds which version (what presences and relays' offers say, and who made it, best first), and
the manifests that they give, checked: what must not be followed is refused before a byte of it is fetched."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar

import trio

from node.weights.held import HeldVersions, WeightsMeans, payload
from protocol.errors import PeerError
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest, largest_manifest
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest

RELAY: Final = 1.0
OTHER: Final = 0.7
PARTIAL: Final = 0.5
AUTHOR: Final = 0.3
"""Preferences of holders: relays are there to be asked, the trainer's uplink serves those who have nobody else."""

MAX_OFFERS: Final = 8
"""Relays remembered a version."""
MAX_OFFERED: Final = 4
"""Versions of which offers are remembered."""
SECONDS: Final = 5.0
"""That each mebibyte of a manifest may take."""

T = TypeVar("T")


class HoldersOf:
    """Who has what, among those connected; and what of it is on its way here."""

    def __init__(self, means: WeightsMeans, held: HeldVersions) -> None:
        self._means = means
        self._node = means.node
        self._held = held
        self._arriving: list[bytes] = []
        self._offers: dict[bytes, dict[bytes, None]] = {}  # weights entry id -> relays that offered it
        self._version_0: Manifest | None = None

    def version(self, entry: Entry) -> dict[bytes, Holding]:
        """Who has a version, or a part of it: best first."""
        node, manifest = self._node, payload(entry).manifest
        alike = {e.id for e in node.log.ledger.lineage() if payload(e).manifest == manifest} | {entry.id}
        connected = node.network.peers
        found: dict[bytes, Holding] = {}
        standing = self._means.presences.standing()
        for peer, presence in self._means.presences.members().items():
            if peer not in connected or peer == node.id:
                continue
            relays = standing.get(peer) == "relay"
            if alike.intersection(presence.versions):
                found[peer] = Holding(preference=RELAY if relays else OTHER)
            elif alike.intersection(presence.arriving) or peer in self._offers.get(entry.id, ()):
                found[peer] = Holding(whole=False, preference=RELAY if relays else PARTIAL)
        authors = [entry.author]
        if manifest == node.domain.model.manifest.hash:
            authors.append(node.domain.creator)  # gave version 0 to the first
        for author in authors:
            if author in connected and author != node.id:
                found[author] = Holding(preference=AUTHOR, spared=bool(found.keys() - {*authors}))
        return dict(sorted(found.items(), key=lambda item: (not item[1].whole, -item[1].preference)))

    def delta(self, entry: Entry) -> dict[bytes, Holding]:
        """Who may have a delta: whoever has its version, but a presence does not say so, and they are asked."""
        return {peer: replace(holding, whole=False) for peer, holding in self.version(entry).items()}

    def relays(self) -> set[bytes]:
        """All relays that are present."""
        return {node for node, role in self._means.presences.standing().items() if role == "relay"}

    def dropped(self, entry: Entry) -> bool:
        """Whether no other node says any more that it has a version."""
        others = self._means.presences.members().items()
        return not any(entry.id in presence.versions for node, presence in others if node != self._node.id)

    def lagging(self) -> list[bytes]:
        """Connected nodes that have nothing of the newest version although this node could give them some of it."""
        newest = self._node.log.ledger.newest_weights()
        if newest is None or (newest.id not in self._held and newest.id not in self._arriving):
            return []
        return [
            peer
            for peer, presence in self._means.presences.members().items()
            if peer in self._node.network.peers
            and newest.id not in presence.versions
            and newest.id not in presence.arriving
        ]

    def on_offer(self, peer: bytes, weights: bytes) -> None:
        """A relay offers a version, whole or arriving. It counts as a holder from now on."""
        if weights in self._held:
            return
        relays = self._offers.setdefault(weights, {})
        relays[peer] = None
        while len(relays) > MAX_OFFERS:
            del relays[next(iter(relays))]
        while len(self._offers) > MAX_OFFERED:
            del self._offers[next(iter(self._offers))]
        self._means.notice.notify()

    @contextmanager
    def arrives(self, entry: Entry) -> Iterator[None]:
        """Let others know, while the block runs, that what is here of a version can be fetched from this node."""
        self._arriving.insert(0, entry.id)
        self._means.own.arriving = list(dict.fromkeys(self._arriving))
        self._means.own.announce()
        self._means.notice.notify()
        try:
            yield
        finally:
            self._arriving.remove(entry.id)
            self._means.own.arriving = list(dict.fromkeys(self._arriving))

    # --- their manifests ----------------------------------------------------------------------------------------------

    async def check_entry(self, entry: Entry) -> None:
        """Raise ``PeerError`` for a version by another than the trainer whose term counts, or of an absurd size."""
        wanted = payload(entry)
        if self._node.log.ledger.weights(entry.id) is None:
            raise PeerError("a version by another than the trainer whose term counts")
        model = await self._model()
        if wanted.size != model.size or wanted.manifest_size > 2 * self._node.domain.model.manifest.size:
            raise PeerError(f"a version of an absurd size ({wanted.size} bytes, the model has {model.size})")

    async def manifest(self, entry: Entry) -> Manifest:
        """The manifest of a version, which is its entry's, and the model's. Raises ``PeerError`` or ``Unreachable``."""
        wanted = payload(entry)
        manifest = await self._fetch(wanted.manifest, wanted.manifest_size, Manifest.parse, self.version(entry))
        if manifest.whole != wanted.whole or manifest.size != wanted.size:
            raise PeerError("the manifest is not the one that the weights entry describes")
        await self.check_model(manifest)
        return manifest

    async def delta_manifest(self, entry: Entry) -> DeltaManifest:
        """The manifest of the delta that a version has, which is its entry's. Raises ``PeerError`` or
        ``Unreachable``."""
        wanted = payload(entry)
        assert wanted.delta is not None
        if wanted.delta_size > largest_manifest(wanted.size):
            raise PeerError(f"the delta's manifest has an absurd size ({wanted.delta_size} bytes)")
        listing = await self._fetch(wanted.delta, wanted.delta_size, DeltaManifest.parse, self.version(entry))
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
            self._version_0 = await self._fetch(blob.hash, blob.size, Manifest.parse)
        return self._version_0

    async def _fetch(
        self, digest: bytes, size: int, parse: Callable[[bytes], T], holders: Collection[bytes] | None = None
    ) -> T:
        asked = None if holders is None else list(holders)
        data = await self._means.blobs.fetch(digest, size, asked, timeout=SECONDS)
        return await trio.to_thread.run_sync(parse, data)
