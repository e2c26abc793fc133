"""Which versions a node holds whole, and what of the disk is kept (``node.weights.retention`` says why)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from node.context import Node
from node.errors import Unreachable
from node.net.blob_exchange import BlobExchange
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.store.version_store import VersionStore
from node.weights import retention
from node.weights.bulk.bulk_messages import ForgetObject
from node.weights.bulk.bulk_process import BulkProcess
from node.weights.bulk.token_exchange import TokenExchange
from node.workers.child_process import OpenWorker, open_worker
from protocol import records
from protocol.constants import KEPT_VERSIONS
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest
from protocol.weights.manifest import Manifest


class Notice:
    """Wakes those who wait for something to change: a version is held, begins to arrive or is offered, or a holder is
    reached in another way."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = trio.Event()

    async def wait(self, timeout: float) -> None:
        """Return when something changes, or after ``timeout`` seconds."""
        with trio.move_on_after(timeout):
            await self._event.wait()


@dataclass(frozen=True, slots=True)
class WeightsMeans:
    """What all that has to do with a node's weights works with."""

    node: Node
    own: OwnState
    presences: Presences
    versions: VersionStore
    blobs: BlobExchange
    bulk: BulkProcess
    tokens: TokenExchange
    open_worker: OpenWorker = open_worker
    notice: Notice = field(default_factory=Notice)


class HeldVersions:
    """The versions this node holds whole, by the id of their ``weights`` entry."""

    def __init__(self, means: WeightsMeans) -> None:
        self._means = means
        self._log = means.node.log
        self._versions = means.versions
        self._digests: dict[bytes, bytes] = {}  # weights entry id -> manifest hash, oldest first
        self._expected: tuple[bytes, ...] = ()
        self._untidy = trio.Event()

    def __contains__(self, weights: bytes) -> bool:
        return weights in self._digests

    def ids(self) -> list[bytes]:
        """Ids of the ``weights`` entries held whole, newest first."""
        return list(reversed(self._digests))

    def newest_number(self) -> int:
        """The number of the newest version of the lineage, held or not; -1 before version 0."""
        entry = self._log.ledger.newest_weights()
        return -1 if entry is None else payload(entry).number

    def newest_held(self) -> Entry | None:
        """The newest version of the lineage that is held whole."""
        return next((e for e in reversed(self._log.ledger.lineage()) if e.id in self._digests), None)

    def outdated(self, weights: bytes) -> bool:
        """Whether a version is older than those that every holder keeps, so that nobody needs to have it."""
        number = self._log.ledger.version_number(weights)
        return number is not None and number <= self.newest_number() - KEPT_VERSIONS

    def paths(self, weights: bytes) -> tuple[Path, Path]:
        """The manifest's and the raw tensors' files of a version; ``Unreachable`` where it is not held any more."""
        if weights not in self._digests:
            raise Unreachable("the version is not held any more")
        return self._versions.paths(self._digests[weights])

    def note(self, entry: Entry) -> None:
        """The store has this version whole: hold it, and have others know."""
        self._digests[entry.id] = payload(entry).manifest
        place = {e.id: i for i, e in enumerate(self._log.ledger.lineage())}
        self._digests = dict(sorted(self._digests.items(), key=lambda item: place.get(item[0], -1)))
        for weights in list(self._digests)[:-KEPT_VERSIONS]:
            del self._digests[weights]
        self._untidy.set()
        self._publish()
        self._means.notice.notify()

    # What is kept

    def expect(self, manifest: Manifest, delta: DeltaManifest | None) -> None:
        """Keep a version, and its delta, that the trainer made and may be about to publish, until the next one."""
        self._expected = (manifest.digest,) if delta is None else (manifest.digest, delta.digest)

    def lineage(self) -> retention.RetentionBasis:
        """What retention goes by."""
        return retention.lineage_of(self._log.ledger.lineage(), self._means.node.domain, self._expected)

    def spare(self, present: Collection[bytes]) -> list[bytes]:
        """What of all that is ``present`` may go where room is short, the first to go first."""
        return list(retention.spare(self.lineage(), present))

    def kept(self, present: Collection[bytes]) -> set[bytes]:
        """Digests of what retention leaves alone of what is ``present``."""
        return {*self._digests.values(), *retention.reasons(self.lineage(), present)}

    async def tidy(self) -> None:
        """Delete what nothing keeps any more whenever a version has come, for ever: large files take seconds."""
        keep = partial(trio.from_thread.run_sync, self.kept)
        while True:
            await self._untidy.wait()
            self._untidy = trio.Event()
            for gone in await trio.to_thread.run_sync(self._versions.retain, keep):
                self._means.bulk.send(ForgetObject(gone))

    async def clean(self, *, dry_run: bool) -> retention.Cleaned:
        """Delete what nothing keeps and, where room is short, what can be spared; or only say what that would be."""
        found = await trio.to_thread.run_sync(partial(retention.clean, self._versions, self.lineage(), dry_run=dry_run))
        if not dry_run:
            await self.drop_gone()
        return found

    async def drop_gone(self) -> None:
        """Let go of versions that had to go because room was short."""
        with trio.CancelScope(shield=True):
            present = set(await trio.to_thread.run_sync(self._versions.held))
        for weights, digest in list(self._digests.items()):
            if digest not in present:
                del self._digests[weights]
                self._means.bulk.send(ForgetObject(digest))
                self._publish()

    def _publish(self) -> None:
        self._means.own.versions = self.ids()
        self._means.own.announce()


def payload(entry: Entry) -> records.Weights:
    """The payload of a ``weights`` entry."""
    assert isinstance(entry.payload, records.Weights)
    return entry.payload
