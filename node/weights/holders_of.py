"""Who holds which version: what presences and relays' offers say, and who made it. Best first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from node.context import Node
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.weights.held import HeldVersions, Notice, payload
from protocol.log.entry import Entry
from protocol.weights.holders import Holding

RELAY: Final = 1.0
OTHER: Final = 0.7
PARTIAL: Final = 0.5
AUTHOR: Final = 0.3
"""Preferences of holders: relays are there to be asked, the trainer's uplink serves those who have nobody else."""

MAX_OFFERS: Final = 8
"""Relays remembered a version."""
MAX_OFFERED: Final = 4
"""Versions of which offers are remembered."""


class HoldersOf:
    """Who has what, among those connected; and what of it is on its way here."""

    def __init__(self, node: Node, own: OwnState, presences: Presences, held: HeldVersions, notice: Notice) -> None:
        self._node = node
        self._own = own
        self._presences = presences
        self._held = held
        self._notice = notice
        self._arriving: list[bytes] = []
        self._offers: dict[bytes, dict[bytes, None]] = {}  # weights entry id -> relays that offered it

    def version(self, entry: Entry) -> dict[bytes, Holding]:
        """Who has a version, or a part of it: best first."""
        node, manifest = self._node, payload(entry).manifest
        alike = {e.id for e in node.log.ledger.lineage() if payload(e).manifest == manifest} | {entry.id}
        connected = node.network.peers
        found: dict[bytes, Holding] = {}
        for peer, presence in self._presences.live().items():
            if peer not in connected or peer == node.id:
                continue
            relays = presence.role == "relay"
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
        return {node for node, presence in self._presences.live().items() if presence.role == "relay"}

    def dropped(self, entry: Entry) -> bool:
        """Whether no other node says any more that it has a version."""
        others = self._presences.live().items()
        return not any(entry.id in presence.versions for node, presence in others if node != self._node.id)

    def lagging(self) -> list[bytes]:
        """Connected nodes that have nothing of the newest version although this node could give them some of it."""
        newest = self._held.newest()
        if newest is None or (newest.id not in self._held and newest.id not in self._arriving):
            return []
        return [
            peer
            for peer, presence in self._presences.live().items()
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
        self._notice.notify()

    @contextmanager
    def arrives(self, entry: Entry) -> Iterator[None]:
        """Let others know, while the block runs, that what is here of a version can be fetched from this node."""
        self._arriving.insert(0, entry.id)
        self._own.arriving = list(dict.fromkeys(self._arriving))
        self._own.announce()
        self._notice.notify()
        try:
            yield
        finally:
            self._arriving.remove(entry.id)
            self._own.arriving = list(dict.fromkeys(self._arriving))
