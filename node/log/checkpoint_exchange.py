"""The newest cosigned checkpoint of a domain's cuts: made by electors, kept and passed on by every node.

1. An elector cosigns the checkpoint of its newest cut only, and that is stored before: so it never signs a smaller tree
   than before, nor one that its earlier ones are no part of.
2. Who certified a cut gathers the others' cosignatures; a quorum of them makes the checkpoint.
3. A node takes a checkpoint whose quorum it can judge and that is newer than its own. Nothing depends on having it: one
   that is lost is overtaken by the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from node.log.offline_proof import CHECKPOINT
from node.store.log_store import LogStore
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.log import checkpoint as rules
from protocol.log.checkpoint import Checkpoint, CosignedCheckpoint, assemble, verify_cosignature
from protocol.log.replica import Replica

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of ``replica``; the newest is kept in ``store``. ``clock`` gives POSIX seconds."""

    def __init__(self, replica: Replica, store: LogStore, clock: Callable[[], float] = time.time) -> None:
        self._replica = replica
        self._store = store
        self._clock = clock
        self.newest: CosignedCheckpoint | None = None

    @property
    def size(self) -> int:
        """The number of cuts under the newest cosigned checkpoint; 0 without one."""
        return 0 if self.newest is None else self.newest.checkpoint.size

    @property
    def lacking(self) -> bool:
        """Whether there are cuts above the newest cosigned checkpoint."""
        return self.size < len(self._replica.cuts)

    async def load(self) -> None:
        """Take up what the store holds; something damaged there counts as nothing."""
        try:
            data = await self._store.meta(CHECKPOINT)
            if data is not None:
                self.newest = rules.read(data, self._replica.domain.id, self._replica.electors_at)
        except (PeerError, OSError) as error:
            logger.warning("the stored checkpoint is dropped: %s", error)

    def current(self) -> Checkpoint | None:
        """The checkpoint of the newest cut, without signatures; None before the first cut."""
        size = len(self._replica.cuts)
        return Checkpoint(self._replica.domain.id, size, self._replica.cut_range.root) if size else None

    def cosign(self, elector: Identity, cut_id: bytes) -> bytes | None:
        """The elector's cosignature (72 bytes) of the checkpoint that ends in this cut; None where that is not its
        newest one (rule 1), or where it was no elector for it."""
        current = self.current()
        if current is None or cut_id != self._replica.newest_cut_id:
            return None
        if elector.node not in self._replica.electors_at(current.size):
            return None
        return rules.cosign(elector, current, int(self._clock()))

    def check(self, elector: bytes, cosignature: bytes) -> None:
        """Raise ``PeerError`` unless this is the elector's cosignature of the checkpoint of the newest cut."""
        current = self.current()
        if current is None:
            raise PeerError("cosignature: there is no checkpoint")
        verify_cosignature(current, elector, cosignature)

    async def gather(self, cut_id: bytes, cosignatures: Mapping[bytes, bytes]) -> bool:
        """Make the checkpoint that ends in this cut from electors' cosignatures; False where they are no quorum, or
        where the log went on."""
        current = self.current()
        if current is None or cut_id != self._replica.newest_cut_id:
            return False
        try:
            made = assemble(current, cosignatures, self._replica.electors_at(current.size))
        except PeerError as error:
            logger.debug("no checkpoint of %d cuts: %s", current.size, error)
            return False
        await self._keep(made)
        return True

    async def take(self, data: bytes) -> bool:
        """Take a checkpoint from a peer; False where it brings nothing, or where its cuts are not held, so that their
        electors may be unknown. Raises ``PeerError`` for one that does not hold, or that contradicts the own cuts."""
        size = rules.size(data, self._replica.domain.id)
        if size <= self.size or size > len(self._replica.cuts):
            return False
        found = rules.read(data, self._replica.domain.id, self._replica.electors_at)
        if size == len(self._replica.cuts) and found.checkpoint != self.current():
            logger.error("electors cosigned another history than this node holds: %s", data.decode("ascii", "replace"))
            raise PeerError("checkpoint: it is of another history")
        await self._keep(found)
        return True

    async def _keep(self, made: CosignedCheckpoint) -> None:
        if made.checkpoint.size > self.size:
            self.newest = made
            try:
                await self._store.append((), {CHECKPOINT: made.encode()})
            except OSError as error:
                # Nothing is lost with it; that the disk is full is told by what matters more.
                logger.debug("the checkpoint is not stored: %s", error)
