"""Whom a transfer asks what they have: a thread a partial holder, by long poll."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from node.errors import Busy, Unreachable
from node.weights.bulk.holder_connection import Connection, Denied, Missing
from node.weights.bulk.transfer_state import Shared
from protocol.errors import PeerError

POLL: Final = 0.08
"""Seconds between two questions to one holder, at least."""
EACH: Final = 0.02
"""The same for each that is asked: with many holders patience costs little, and every answer costs time."""
POLL_WAIT: Final = 0.5


class Polls:
    """All polls of one transfer."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._running: dict[bytes, Connection | None] = {}
        size = (shared.held.count + 7) // 8
        self._sizes = (size, 2 * size)
        """Bytes of an answer: what a holder has, and perhaps what is on its way there."""

    def tend(self, node: bytes) -> None:
        """Ask this holder from now on, if it is not asked already. To be called holding ``changed``."""
        if node not in self._running:
            self._running[node] = None
            if not self._shared.thread(partial(self._poll, node)):
                del self._running[node]

    def abort(self) -> None:
        """Break off what is being asked. To be called holding ``changed``."""
        for connection in self._running.values():
            if connection is not None:
                connection.abort()

    def _poll(self, node: bytes) -> None:
        """Ask a partial holder what it has, until that is of no interest any more."""
        connection: Connection | None = None
        more_than = 0
        try:
            while True:
                began = time.monotonic()
                with self._shared.changed:
                    place = self._shared.places.get(node)
                    if self._shared.over or place is None or node not in self._shared.swarm.partial(began):
                        return
                    if not self._shared.direct(place, began):
                        return
                    row = place.row
                try:
                    if connection is None:
                        connection = self._shared.means.connect(row.address, node, row.token)
                        with self._shared.changed:
                            self._running[node] = connection
                    connection.token = row.token
                    bitmap = connection.have(self._shared.digest, more_than, POLL_WAIT)
                    if len(bitmap) not in self._sizes:
                        raise PeerError(f"a bitmap of {len(bitmap)} bytes")
                    with self._shared.changed:
                        self._shared.met(place)
                        more_than = self._shared.take_haves(node, bitmap) + self._shared.swarm.batch(node) - 1
                    pause = max(POLL, EACH * len(self._running))
                except Missing as error:
                    if self._shared.strange(place):
                        self._poll_failed(node, connection, error)
                        connection = None
                    with self._shared.changed:
                        self._shared.swarm.learn(node, 0, 0, time.monotonic())
                    more_than, pause = 0, POLL_WAIT
                except (Unreachable, PeerError) as error:
                    self._poll_failed(node, connection, error)
                    connection = None
                    pause = 2 * POLL_WAIT
                time.sleep(max(0.0, began + pause - time.monotonic()))
        finally:
            if connection is not None:
                connection.close()
            with self._shared.changed:
                self._running.pop(node, None)

    def _poll_failed(self, node: bytes, connection: Connection | None, error: Exception) -> None:
        if connection is not None:
            connection.close()
        now = time.monotonic()
        with self._shared.changed:
            self._running[node] = None
            if self._shared.over:
                return
            if isinstance(error, PeerError):
                self._shared.fault(node, str(error))
                self._shared.swarm.failed(node, now)
                return
            place = self._shared.places.get(node)
            if place is not None and self._shared.strange(place):
                self._shared.unreached(node, place, error, now)
            elif isinstance(error, Denied):
                self._shared.denied(node, now)
            elif not isinstance(error, Busy) and place is not None:
                self._shared.unreached(node, place, error, now)
