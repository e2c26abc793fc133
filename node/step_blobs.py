"""Which rollouts the steps on the lineage consumed: their blobs, fetched once and remembered."""

from __future__ import annotations

import trio

from node.context import Node
from node.net.rpc import Unreachable
from protocol.constants import MAX_STEP_BLOB_BYTES
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.records import Step, StepBlob


class StepBlobs:
    """Follows the ``step`` entries of the lineage."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: set[bytes] = set()
        self.consumed: set[bytes] = set()
        """Ids of the ``rollout`` entries that some step on the lineage trained on."""

    def add(self, step: Entry, blob: StepBlob) -> None:
        """A step of our own: nothing to fetch."""
        self._known.add(step.id)
        self.consumed.update(rollout for rollout, _ in blob.submissions)

    async def update(self) -> None:
        """Fetch what is new. A blob that nobody gives is tried again at the next call: it is a hint, not a rule."""
        for step in self._node.log.ledger.steps():
            if step.id in self._known:
                continue
            payload = step.payload
            assert isinstance(payload, Step)
            if payload.blob_size > MAX_STEP_BLOB_BYTES:
                self._known.add(step.id)
                continue
            peers = [step.author, *(p for p in self._node.network.peers if p != step.author)]
            try:
                data = await self._node.fetch_blob(payload.blob, payload.blob_size, peers, timeout=5)
                self.add(step, StepBlob.parse(data))
            except PeerError as error:
                self._known.add(step.id)
                self._node.network.blame(step.author, error)
            except Unreachable:
                await trio.lowlevel.checkpoint()
