"""The threads of a transfer, with one connection each: flows fetch what the swarm gives them, polls ask holders what
they have.

1. A flow has room for one chunk: it receives there, verifies, writes, and marks. Nobody else is given its chunks until
   it has let go of them: a run that is taken from it is broken off by closing its connection, and is free once its
   thread is out of the way.
2. A flow ends where its holder is gone or is to have fewer; there are never more than the swarm wants.
3. A partial holder is asked what it has by long poll.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Final

from node.errors import Busy, Unreachable
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.holder_connection import Denied, HolderConnection, Missing
from node.weights.bulk.transfer_state import TransferState
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.weights.holders import Run

POLL: Final = 0.08
"""Seconds between two questions to one holder, at least."""
EACH: Final = 0.02
"""The same for each that is asked: with many holders patience costs little, and every answer costs time."""
POLL_WAIT: Final = 0.5
IDLE: Final = 0.1
"""Seconds until a flow without work asks again, where nothing wakes it."""


class Ended(Exception):
    """The rest of a request is not wanted any more."""


class Wrong(Exception):
    """A chunk arrived with wrong bytes."""


class TransferFlows:
    """All flows of one transfer. ``running`` has the connection of each run, and what that had received before it."""

    def __init__(self, state: TransferState) -> None:
        self._state = state
        self._count: Counter[bytes] = Counter()
        self.running: dict[Run, tuple[HolderConnection, int]] = {}

    def tend(self, node: bytes, now: float) -> None:
        """Begin what flows to a holder there are too few of. To be called holding ``changed``."""
        for _ in range(self._state.flows(node, now) - self._count[node]):
            self._count[node] += 1
            if not self._state.thread(partial(self._flow, node)):
                self._count[node] -= 1

    def _flow(self, node: bytes) -> None:
        """One flow, from its connection to its end."""
        room = memoryview(bytearray(CHUNK_BYTES))
        connection: HolderConnection | None = None
        try:
            while (connection := self._connect(node, connection)) is not None:
                run = self._await_run(node, connection)
                if run is None:
                    return
                if not self._fetch(run, connection, room):
                    connection.close()
                    connection = None
        finally:
            if connection is not None:
                connection.close()
            with self._state.changed:
                self._count[node] -= 1

    def _connect(self, node: bytes, connection: HolderConnection | None) -> HolderConnection | None:
        """A connection to ask over, ``connection`` if it is still one; None where none can be had."""
        state = self._state
        with state.changed:
            place = state.direct(node, time.monotonic())
            if place is None:
                return None
            row = place.row
        if connection is not None:
            connection.token = row.token
            return connection
        try:
            connection = state.means.connect(row.address, node, row.token)
            seconds = connection.connect()
        except (Unreachable, PeerError) as error:
            with state.changed:
                state.unreached(node, place, error, time.monotonic())
            return None
        with state.changed:
            if not place.strange:
                place.failures = 0
            state.swarm.connected(node, seconds)
        return connection

    def _await_run(self, node: bytes, connection: HolderConnection) -> Run | None:
        state = self._state
        with state.changed:
            while True:
                now = time.monotonic()
                if state.over or node not in state.places or self._count[node] > state.flows(node, now):
                    return None
                run = state.swarm.next(node, now)
                if run is not None:
                    self.running[run] = (connection, connection.received())
                    return run
                state.changed.wait(IDLE)

    def _fetch(self, run: Run, connection: HolderConnection, room: memoryview) -> bool:
        """Ask for one run, chunk by chunk into ``room``; whether the connection is good for another."""
        state = self._state
        held, swarm, changed = state.held, state.swarm, state.changed
        buffers = [room[: held.listing.chunk_size(index)] for index in range(run.first, run.end)]
        last = run.end - 1

        def arrived(index: int) -> None:
            right = held.take(index, buffers[index - run.first])
            now = time.monotonic()
            with changed:
                run.received = max(run.received, (index + 1 - run.first) * CHUNK_BYTES)
                if not right:
                    raise Wrong
                state.fresh = True
                if (place := state.places.get(run.node)) is not None and not place.proven:
                    place.met()
                if not swarm.arrived(run, now) and index != last:
                    raise Ended

        outcome: Exception | None = None
        try:
            connection.get(state.digest, run.first, buffers, arrived)
        except (Ended, Wrong, Unreachable, PeerError, OSError) as error:
            outcome = error
        finally:
            with changed:
                if outcome is not None:
                    self._conclude(run, outcome, time.monotonic())
                self.running.pop(run)
                swarm.finished(run, time.monotonic())
                if swarm.done:
                    state.soon.set()
                if swarm.done or state.over or run.at <= last:
                    changed.notify_all()
        return outcome is None or isinstance(outcome, Missing)

    def _conclude(self, run: Run, outcome: Exception, now: float) -> None:
        """What an ill-fated request means for the holder."""
        node, state, swarm = run.node, self._state, self._state.swarm
        if isinstance(outcome, Ended) or run.broken_off or state.over:
            return
        state.why = str(outcome) or "wrong bytes"
        place = state.places.get(node)
        if place is not None and place.strange and isinstance(outcome, Unreachable):
            state.unreached(node, place, outcome, now)
        elif isinstance(outcome, Wrong | PeerError):
            swarm.lied(run, now)
            state.fault(node, str(outcome) or f"chunk {run.at} has the wrong hash")
        elif isinstance(outcome, Missing):
            swarm.refused(run, now)
            if place is not None and place.row.whole and not place.doubted:
                place.doubted = True
                state.update_holders()
                swarm.learn(node, 0, 0, now)
        elif isinstance(outcome, OSError):
            swarm.unkept(run, now)
            state.means.send(messages.DiskRefused(state.digest, outcome.errno or 0, outcome.strerror or str(outcome)))
        elif isinstance(outcome, Busy):
            swarm.busy(node, outcome.retry_after, now)
        elif isinstance(outcome, Denied):
            state.denied(node, now)
        else:
            swarm.failed(node, now)


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
