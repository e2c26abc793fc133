"""The transfers of the bulk child: ``protocol.weights.swarm`` decides, threads fetch.

1. One thread of each looks after the swarm's time: rates, stalls, how many flows and whom to poll
   (``node.weights.bulk.holder_polls``), and what the daemon is to know.
2. A flow is a thread with a connection. It has room for one chunk: it receives there, verifies, writes, and marks.
   Nobody else is given its chunks until it has let go of them: a run that is taken from it is broken off by closing its
   connection, and is free once its thread is out of the way.
3. A flow ends where its holder is gone or is to have fewer; there are never more than the swarm wants.
4. What no direct connection carries the daemon fetches over libp2p: the child asks for a chunk, the daemon writes it
   into the store and says so.
5. Once it is stopped no thread of it writes to the object any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import Final

from node.errors import Busy, Unreachable
from node.store.bulk_object import BulkObject
from node.store.version_store import VersionStore
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.holder_connection import Denied, HolderConnection, Missing
from node.weights.bulk.holder_polls import POLL_WAIT, HolderPolls
from node.weights.bulk.transfer_state import Means, TransferState
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.weights.chunk_set import bitmap_of
from protocol.weights.holders import Run
from protocol.weights.routes import Routes

NEWS: Final = 0.05
"""Seconds after which those who wait for chunks are woken, where some arrived."""
TICK: Final = 0.1
PROGRESS: Final = 0.5
STOP_SECONDS: Final = 2.0
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


class Transfer(TransferState):
    """One object on its way. All of its threads end with ``stop``, or once it is whole."""

    def __init__(self, means: Means, digest: bytes, held: BulkObject, routes: Routes) -> None:
        super().__init__(means, digest, held, routes)
        self._flows = TransferFlows(self)
        self._polls = HolderPolls(self)
        self._fallbacks: dict[tuple[bytes, int], Run] = {}
        self._haves_at: dict[bytes, float] = {}

    def stop(self) -> None:
        """End: no thread of it writes to the object any more."""
        deadline = time.monotonic() + STOP_SECONDS
        with self.changed:
            self.over = True
            for connection, _ in self._flows.running.values():
                connection.abort()
            self._polls.abort()
            self.changed.notify_all()
            while self._flows.running and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)

    def coming(self) -> bytes:
        """The bitmap of the chunks on their way."""
        with self.changed:
            return b"" if self.over else bitmap_of(self.swarm.coming, self.held.count)

    # --- from the daemon ---------------------------------------------------------------------------------------------

    def take_chunk(self, node: bytes, index: int, outcome: messages.Outcome) -> None:
        """A chunk that was asked for over libp2p came, or did not."""
        now = time.monotonic()
        with self.changed:
            run = self._fallbacks.pop((node, index), None)
            if run is None:
                return
            more = False
            if outcome == "ok" and self.held.has(index):
                run.received += CHUNK_BYTES
                more = self.swarm.arrived(run, now)
                self.fresh = True
            elif outcome == "lacks":
                self.swarm.refused(run, now)
                self._haves_at.pop(node, None)
            elif outcome == "busy":
                self.swarm.busy(node, 1.0, now)
            elif outcome == "wrong":
                self.swarm.lied(run, now)
            elif outcome == "unkept":
                self.swarm.unkept(run, now)
            elif not run.broken_off:
                self.swarm.failed(node, now)
            if more and not self.over:
                self._ask_daemon(run)
            else:
                self.swarm.finished(run, now)
                self.changed.notify_all()

    # --- its own thread ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look after it until it is over; for a thread of its own."""
        next_progress = next_tick = 0.0
        woken = True
        while True:
            with self.changed:
                if self.over:
                    break
                now = time.monotonic()
                if woken or now >= next_tick:
                    self.soon.clear()
                    next_tick = now + TICK
                    self._tick(now)
                fresh, self.fresh = self.fresh, False
                done = self.swarm.done
            if fresh or done:
                self.means.more_chunks()
            if now >= next_progress and not done:
                next_progress = now + PROGRESS
                self._progress()
            if done:
                self.stop()
                self._progress()
                self.means.send(messages.TransferDone(self.digest))
            else:
                woken = self.soon.wait(NEWS)
        self.means.more_chunks()

    def _tick(self, now: float) -> None:
        swarm = self.swarm
        for run, (connection, base) in self._flows.running.items():
            run.received = max(run.received, connection.received() - base)
        if any(0 < place.hidden_until <= now for place in self.places.values()):
            self.update_holders()
        swarm.tick(now)
        for run in swarm.aborts:
            if run in self._flows.running:
                self._flows.running[run][0].abort()
        swarm.aborts.clear()
        for node, place in self.places.items():
            if place.direct(now):
                self._flows.tend(node, now)
            else:
                while (asked := swarm.next(node, now)) is not None:
                    self._ask_daemon(asked)
        for node in swarm.partial():
            place = self.places[node]
            if place.direct(now):
                self._polls.tend(node)
            elif self._haves_at.get(node, 0.0) <= now:
                self._haves_at[node] = now + POLL_WAIT
                self.means.send(messages.WantFallback(self.digest, node, -1))

    def _ask_daemon(self, run: Run) -> None:
        self._fallbacks[run.node, run.at] = run
        self.means.send(messages.WantFallback(self.digest, run.node, run.at))

    def _progress(self) -> None:
        with self.changed:
            swarm = self.swarm
            have = swarm.chunks - swarm.missing.bit_count()
            peers = len({run.node for run in [*self._flows.running, *self._fallbacks.values()]})
            rate, why = int(swarm.rate), self.why
        self.means.send(messages.TransferProgress(self.digest, have, swarm.chunks, rate, peers, why))


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
        digest = message.digest
        if isinstance(message, messages.BeginTransfer):
            held = self._store.open(digest)
            if held is None:
                self._means.send(messages.TransferFailed(digest, "it was not begun"))
            else:
                transfer = Transfer(self._means, digest, held, self._routes)
                self._replace(digest, transfer)
                transfer.thread(transfer.watch)
            return
        found = self._all.get(digest)
        if found is None:
            return  # it is over
        match message:
            case messages.SetHolders(rows=rows):
                found.set_holders(rows)
            case messages.GiveChunk(node=node, index=index, outcome=outcome):
                found.take_chunk(node, index, outcome)
            case messages.GiveHaves(node=node, bitmap=bitmap):
                with found.changed:
                    found.take_haves(node, bitmap)
            case _:
                self._replace(digest, None)

    def _replace(self, digest: bytes, transfer: Transfer | None) -> None:
        with self._lock:
            before = self._all.pop(digest, None)
            if transfer is not None:
                self._all[digest] = transfer
        if before is not None:
            before.stop()
