"""One transfer in the bulk child: ``protocol.weights.swarm`` decides, threads fetch.

1. One thread looks after the swarm's time: rates, stalls, how many flows (``node.weights.bulk.transfer_flows``), whom
   to poll (``node.weights.bulk.holder_polls``), and what the daemon is to know.
2. What no direct connection carries the daemon fetches over libp2p: the child asks for a chunk, the daemon writes it
   into the store and says so.
3. Once it is stopped no thread of it writes to the object any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from node.store.bulk_object import Held
from node.weights.bulk.bulk_messages import HolderRow, Outcome, TransferDone, TransferProgress, WantFallback
from node.weights.bulk.holder_polls import POLL_WAIT, Polls
from node.weights.bulk.transfer_flows import Flows
from node.weights.bulk.transfer_state import Means, Shared
from protocol.constants import CHUNK_BYTES
from protocol.weights.chunk_set import bitmap_of
from protocol.weights.holders import Run
from protocol.weights.routes import Routes

NEWS: Final = 0.05
"""Seconds after which those who wait for chunks are woken, where some arrived."""
TICK: Final = 0.1
PROGRESS: Final = 0.5
STOP_SECONDS: Final = 2.0


class Transfer:
    """One object on its way. All of its threads end with ``stop``, or once it is whole."""

    def __init__(self, means: Means, digest: bytes, held: Held, routes: Routes) -> None:
        self._shared = Shared(means, digest, held, routes)
        self._flows = Flows(self._shared)
        self._polls = Polls(self._shared)
        self._fallbacks: dict[tuple[bytes, int], Run] = {}
        self._haves_at: dict[bytes, float] = {}

    def start(self) -> None:
        """Begin."""
        self._shared.thread(self._watch)

    def stop(self) -> None:
        """End: no thread of it writes to the object any more."""
        deadline = time.monotonic() + STOP_SECONDS
        with self._shared.changed:
            self._shared.over = True
            for connection, _ in self._flows.running.values():
                connection.abort()
            self._polls.abort()
            self._shared.changed.notify_all()
            while self._flows.running and (left := deadline - time.monotonic()) > 0:
                self._shared.changed.wait(left)

    def coming(self) -> bytes:
        """The bitmap of the chunks on their way."""
        with self._shared.changed:
            return b"" if self._shared.over else bitmap_of(self._shared.swarm.coming, self._shared.held.count)

    # --- from the daemon ---------------------------------------------------------------------------------------------

    def set_holders(self, rows: Sequence[HolderRow]) -> None:
        """Take these for the holders."""
        self._shared.set_holders(rows)

    def take_chunk(self, node: bytes, index: int, outcome: Outcome) -> None:
        """A chunk that was asked for over libp2p came, or did not."""
        now = time.monotonic()
        with self._shared.changed:
            run = self._fallbacks.pop((node, index), None)
            if run is None:
                return
            more = False
            if outcome == "ok" and self._shared.held.has(index):
                run.received += CHUNK_BYTES
                more = self._shared.swarm.arrived(run, now)
                self._shared.fresh = True
            elif outcome == "lacks":
                self._shared.swarm.refused(run, now)
                self._haves_at.pop(node, None)
            elif outcome == "busy":
                self._shared.swarm.busy(node, 1.0, now)
            elif outcome == "wrong":
                self._shared.swarm.lied(run, now)
            elif outcome == "unkept":
                self._shared.swarm.unkept(run, now)
            elif not run.broken_off:
                self._shared.swarm.failed(node, now)
            if more and not self._shared.over:
                self._ask_daemon(run)
            else:
                self._shared.swarm.finished(run, now)
                self._shared.changed.notify_all()

    def take_haves(self, node: bytes, bitmap: bytes) -> None:
        """What a holder has, as it said over libp2p."""
        with self._shared.changed:
            self._shared.take_haves(node, bitmap)

    # --- its own thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        next_progress = next_tick = 0.0
        woken = True
        while True:
            with self._shared.changed:
                if self._shared.over:
                    break
                now = time.monotonic()
                if woken or now >= next_tick:
                    self._shared.soon.clear()
                    next_tick = now + TICK
                    self._tick(now)
                fresh, self._shared.fresh = self._shared.fresh, False
                done = self._shared.swarm.done
            if fresh or done:
                self._shared.means.more_chunks()
            if now >= next_progress and not done:
                next_progress = now + PROGRESS
                self._progress()
            if done:
                self.stop()
                self._progress()
                self._shared.means.send(TransferDone(self._shared.digest))
            else:
                woken = self._shared.soon.wait(NEWS)
        self._shared.means.more_chunks()

    def _tick(self, now: float) -> None:
        swarm = self._shared.swarm
        for run, (connection, base) in self._flows.running.items():
            run.received = max(run.received, connection.received() - base)
        if any(0 < place.hidden_until <= now for place in self._shared.places.values()):
            self._shared.update_holders()
        swarm.tick(now)
        for run in swarm.aborts:
            if run in self._flows.running:
                self._flows.running[run][0].abort()
        swarm.aborts.clear()
        for node, place in self._shared.places.items():
            if self._shared.direct(place, now):
                self._flows.tend(node, now)
            else:
                while (asked := swarm.next(node, now)) is not None:
                    self._ask_daemon(asked)
        for node in swarm.partial(now):
            place = self._shared.places[node]
            if self._shared.direct(place, now):
                self._polls.tend(node)
            elif self._haves_at.get(node, 0.0) <= now:
                self._haves_at[node] = now + POLL_WAIT
                self._shared.means.send(WantFallback(self._shared.digest, node, -1))

    def _ask_daemon(self, run: Run) -> None:
        self._fallbacks[run.node, run.at] = run
        self._shared.means.send(WantFallback(self._shared.digest, run.node, run.at))

    def _progress(self) -> None:
        with self._shared.changed:
            swarm = self._shared.swarm
            have = swarm.chunks - swarm.missing.bit_count()
            peers = len({run.node for run in [*self._flows.running, *self._fallbacks.values()]})
            rate, why = int(swarm.rate), self._shared.why
        self._shared.means.send(TransferProgress(self._shared.digest, have, swarm.chunks, rate, peers, why))
