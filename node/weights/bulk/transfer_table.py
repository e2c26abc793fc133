"""All transfers of the bulk child, and what the daemon says to them."""

from __future__ import annotations

import threading

from node.store.version_store import VersionStore
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.transfer import Transfer
from node.weights.bulk.transfer_state import Means
from protocol.weights.routes import Routes


class Transfers:
    """All transfers of a child, and what it knows of routes. ``store`` opens the objects."""

    def __init__(self, store: VersionStore, means: Means) -> None:
        self._store = store
        self._means = means
        self._routes = Routes()
        self._lock = threading.Lock()
        self._all: dict[bytes, Transfer] = {}

    def coming(self, digest: bytes) -> bytes:
        """The bitmap of the chunks of an object that are on their way; empty where none is. From any thread."""
        with self._lock:
            transfer = self._all.get(digest)
        return b"" if transfer is None else transfer.coming()

    def receive(self, message: messages.ToTransfer) -> None:
        """Act upon what the daemon says."""
        if isinstance(message, messages.BeginTransfer):
            self._begin(message.digest)
            return
        transfer = self._all.get(message.digest)
        if transfer is None:
            return  # it is over
        match message:
            case messages.SetHolders(rows=rows):
                transfer.shared.set_holders(rows)
            case messages.GiveChunk(node=node, index=index, outcome=outcome):
                transfer.take_chunk(node, index, outcome)
            case messages.GiveHaves(node=node, bitmap=bitmap):
                with transfer.shared.changed:
                    transfer.shared.take_haves(node, bitmap)
            case _:
                self._replace(message.digest, None)

    def _begin(self, digest: bytes) -> None:
        held = self._store.open(digest)
        if held is None:
            self._means.send(messages.TransferFailed(digest, "it was not begun"))
            return
        transfer = Transfer(self._means, digest, held, self._routes)
        self._replace(digest, transfer)
        transfer.start()

    def _replace(self, digest: bytes, transfer: Transfer | None) -> None:
        with self._lock:
            before = self._all.pop(digest, None)
            if transfer is not None:
                self._all[digest] = transfer
        if before is not None:
            before.stop()
