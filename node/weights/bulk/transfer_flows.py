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
from node.weights.bulk.holder_connection import Denied, HolderConnection, Missing
from node.weights.bulk.transfer_state import Shared
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
CHUNK_TIMEOUT: Final = 300.0
"""A chunk that arrives slowly is given up by the swarm's rules, much earlier where somebody else has it."""


class Ended(Exception):
    """The rest of a request is not wanted any more."""


class Wrong(Exception):
    """A chunk arrived with wrong bytes."""


class TransferFlows:
    """All flows of one transfer. ``running`` has the connection of each run, and what that had received before it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._count: Counter[bytes] = Counter()
        self.running: dict[Run, tuple[HolderConnection, int]] = {}

    def tend(self, node: bytes, now: float) -> None:
        """Begin what flows to a holder there are too few of. To be called holding ``changed``."""
        for _ in range(self._shared.flows(node, now) - self._count[node]):
            self._count[node] += 1
            if not self._shared.thread(partial(self._flow, node)):
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
            with self._shared.changed:
                self._count[node] -= 1

    def _connect(self, node: bytes, connection: HolderConnection | None) -> HolderConnection | None:
        """A connection to ask over, ``connection`` if it is still one; None where none can be had."""
        with self._shared.changed:
            place = self._shared.places.get(node)
            if self._shared.over or place is None or not self._shared.direct(place, time.monotonic()):
                return None
            row = place.row
        if connection is not None:
            connection.token = row.token
            return connection
        connection = None
        try:
            connection = self._shared.means.connect(row.address, node, row.token, chunk_timeout=CHUNK_TIMEOUT)
            seconds = connection.connect()
        except (Unreachable, PeerError) as error:
            if connection is not None:
                connection.close()
            now = time.monotonic()
            with self._shared.changed:
                self._shared.unreached(node, place, error, now)
            return None
        with self._shared.changed:
            if not self._shared.strange(place):
                place.failures = 0
            self._shared.swarm.connected(node, seconds)
        return connection

    def _await_run(self, node: bytes, connection: HolderConnection) -> Run | None:
        with self._shared.changed:
            while True:
                now = time.monotonic()
                if (
                    self._shared.over
                    or self._count[node] > self._shared.flows(node, now)
                    or node not in self._shared.places
                ):
                    return None
                run = self._shared.swarm.next(node, now)
                if run is not None:
                    self.running[run] = (connection, connection.received())
                    return run
                self._shared.changed.wait(IDLE)

    def _fetch(self, run: Run, connection: HolderConnection, room: memoryview) -> bool:
        """Ask for one run, chunk by chunk into ``room``; whether the connection is good for another."""
        held, swarm, changed = self._shared.held, self._shared.swarm, self._shared.changed
        buffers = [room[: held.listing.chunk_size(index)] for index in range(run.first, run.end)]
        last = run.end - 1

        def arrived(index: int) -> None:
            right = held.take(index, buffers[index - run.first])
            now = time.monotonic()
            with changed:
                run.received = max(run.received, (index + 1 - run.first) * CHUNK_BYTES)
                if not right:
                    raise Wrong
                self._shared.fresh = True
                if (place := self._shared.places.get(run.node)) is not None and not place.proven:
                    self._shared.met(place)
                if not swarm.arrived(run, now) and index != last:
                    raise Ended

        outcome: Exception | None = None
        try:
            connection.get(self._shared.digest, run.first, buffers, arrived)
        except (Ended, Wrong, Unreachable, PeerError, OSError) as error:
            outcome = error
        finally:
            with changed:
                if outcome is not None:
                    self._conclude(run, outcome, time.monotonic())
                self.running.pop(run)
                swarm.finished(run, time.monotonic())
                if swarm.done:
                    self._shared.soon.set()
                if swarm.done or self._shared.over or run.at <= last:
                    changed.notify_all()
        return outcome is None or isinstance(outcome, Missing)

    def _conclude(self, run: Run, outcome: Exception, now: float) -> None:
        """What an ill-fated request means for the holder."""
        node = run.node
        if isinstance(outcome, Ended) or run.broken_off or self._shared.over:
            return
        self._shared.why = str(outcome) or "wrong bytes"
        place = self._shared.places.get(node)
        if place is not None and self._shared.strange(place) and isinstance(outcome, Unreachable):
            self._shared.unreached(node, place, outcome, now)
        elif isinstance(outcome, Wrong):
            self._shared.swarm.lied(run, now)
            self._shared.fault(node, f"chunk {run.at} has the wrong hash")
        elif isinstance(outcome, PeerError):
            self._shared.swarm.lied(run, now)
            self._shared.fault(node, str(outcome))
        elif isinstance(outcome, Missing):
            self._shared.swarm.refused(run, now)
            self._shared.doubt(node)
        elif isinstance(outcome, OSError):
            self._shared.swarm.unkept(run, now)
            self._shared.disk(outcome)
        elif isinstance(outcome, Busy):
            self._shared.swarm.busy(node, outcome.retry_after, now)
        elif isinstance(outcome, Denied):
            self._shared.denied(node, now)
        else:
            self._shared.swarm.failed(node, now)


class HolderPolls:
    """All polls of one transfer."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._running: dict[bytes, HolderConnection | None] = {}
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
        connection: HolderConnection | None = None
        more_than = 0
        try:
            while True:
                began = time.monotonic()
                with self._shared.changed:
                    place = self._shared.places.get(node)
                    if self._shared.over or place is None or node not in self._shared.swarm.partial():
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

    def _poll_failed(self, node: bytes, connection: HolderConnection | None, error: Exception) -> None:
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
