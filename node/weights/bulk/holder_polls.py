"""What the holders of an object have of it while it comes from them: those that have a part are asked again and again,
each by a thread with a connection of its own, by long poll."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from node.errors import Busy, Unreachable
from node.weights.bulk.holder_connection import Denied, HolderConnection, Missing
from node.weights.bulk.transfer_state import TransferState
from protocol.errors import PeerError

POLL: Final = 0.08
"""Seconds between two questions to one holder, at least."""
EACH: Final = 0.02
"""The same for each that is asked: with many holders patience costs little, and every answer costs time."""
POLL_WAIT: Final = 0.5


class HolderPolls:
    """All polls of one transfer."""

    def __init__(self, state: TransferState) -> None:
        self._state = state
        self._running: dict[bytes, HolderConnection | None] = {}
        size = (state.held.count + 7) // 8
        self._sizes = (size, 2 * size)
        """Bytes of an answer: what a holder has, and perhaps what is on its way there."""

    def tend(self, node: bytes) -> None:
        """Ask this holder from now on, if it is not asked already. To be called holding ``changed``."""
        if node not in self._running:
            self._running[node] = None
            if not self._state.thread(partial(self._poll, node)):
                del self._running[node]

    def abort(self) -> None:
        """Break off what is being asked. To be called holding ``changed``."""
        for connection in self._running.values():
            if connection is not None:
                connection.abort()

    def _poll(self, node: bytes) -> None:
        """Ask a partial holder what it has, until that is of no interest any more."""
        state = self._state
        connection: HolderConnection | None = None
        more_than = 0
        try:
            while True:
                began = time.monotonic()
                with state.changed:
                    place = state.direct(node, began)
                    if place is None or node not in state.swarm.partial():
                        return
                    row = place.row
                try:
                    if connection is None:
                        connection = state.means.connect(row.address, node, row.token)
                        with state.changed:
                            self._running[node] = connection
                    connection.token = row.token
                    bitmap = connection.have(state.digest, more_than, POLL_WAIT)
                    if len(bitmap) not in self._sizes:
                        raise PeerError(f"a bitmap of {len(bitmap)} bytes")
                    with state.changed:
                        place.met()
                        more_than = state.take_haves(node, bitmap) + state.swarm.batch(node) - 1
                    pause = max(POLL, EACH * len(self._running))
                except Missing as error:
                    if place.strange:
                        self._poll_failed(node, connection, error)
                        connection = None
                    with state.changed:
                        state.swarm.learn(node, 0, 0, time.monotonic())
                    more_than, pause = 0, POLL_WAIT
                except (Unreachable, PeerError) as error:
                    self._poll_failed(node, connection, error)
                    connection = None
                    pause = 2 * POLL_WAIT
                time.sleep(max(0.0, began + pause - time.monotonic()))
        finally:
            if connection is not None:
                connection.close()
            with state.changed:
                self._running.pop(node, None)

    def _poll_failed(self, node: bytes, connection: HolderConnection | None, error: Exception) -> None:
        if connection is not None:
            connection.close()
        state, now = self._state, time.monotonic()
        with state.changed:
            self._running[node] = None
            place = state.places.get(node)
            if state.over:
                return
            if isinstance(error, PeerError):
                state.fault(node, str(error))
                state.swarm.failed(node, now)
            elif isinstance(error, Denied) and not (place is not None and place.strange):
                state.denied(node, now)
            elif place is not None and (place.strange or not isinstance(error, Busy)):
                state.unreached(node, place, error, now)
