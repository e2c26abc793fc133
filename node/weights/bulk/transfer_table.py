"""All transfers of the bulk child, and what the daemon says to them.

Messages, each with the object's ``digest``: from the daemon ``fetch`` (of what was begun in the store), ``holders``
(all of them, again whenever that changes), ``delivered``, ``haves`` and ``stop``; to it ``progress``, ``done``,
``failed``, ``disk``, ``fault``, ``token``, ``misled`` and ``fallback`` (where ``index`` is −1 it asks which chunks that
holder has).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from node.weights.bulk.transfer import Transfer
from protocol.weights.routes import Routes

if TYPE_CHECKING:
    from node.weights.bulk.bulk_child import Child, Operation


class Transfers:
    """All transfers of a child, and what it knows of routes."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._routes = Routes()
        self._lock = threading.Lock()
        self._all: dict[bytes, Transfer] = {}

    def operations(self) -> dict[str, Operation]:
        """What the daemon may ask for."""
        return {
            "fetch": self._fetch,
            "holders": self._holders,
            "delivered": self._delivered,
            "haves": self._haves,
            "stop": self._stop,
        }

    def coming(self, digest: bytes) -> bytes:
        """The bitmap of the chunks of an object that are on their way; empty where none is."""
        with self._lock:
            transfer = self._all.get(digest)
        return b"" if transfer is None else transfer.coming()

    def _fetch(self, digest: bytes) -> None:
        held = self._child.store.open(digest)
        if held is None:
            self._child.daemon.say("failed", digest=digest, why="it was not begun")
            return
        transfer = Transfer(self._child, digest, held, self._routes)
        with self._lock:
            before = self._all.pop(digest, None)
            self._all[digest] = transfer
        if before is not None:
            before.stop()
        transfer.start()

    def _stop(self, digest: bytes) -> None:
        with self._lock:
            transfer = self._all.pop(digest, None)
        if transfer is not None:
            transfer.stop()

    def _holders(self, digest: bytes, rows: Sequence[Sequence[Any]]) -> None:
        with suppress(KeyError):
            self._all[digest].holders(rows)

    def _delivered(self, digest: bytes, node: bytes, index: int, outcome: str) -> None:
        with suppress(KeyError):
            self._all[digest].delivered(node, index, outcome)

    def _haves(self, digest: bytes, node: bytes, bitmap: bytes) -> None:
        with suppress(KeyError):
            self._all[digest].haves(node, bitmap)
