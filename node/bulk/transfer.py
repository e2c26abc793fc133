"""Transfers in the bulk child: ``protocol.swarm`` decides, threads with a connection each fetch.

1. A flow is a thread with one connection and room for one chunk. It receives there, verifies, writes, and marks.
   Nobody else is given its chunks until it has let go of them: a run that is taken from it is broken off by closing
   its connection, and is free once its thread is out of the way.
2. A thread a partial holder asks which chunks that has, by long poll.
3. One thread a transfer looks after the swarm's time: rates, stalls, how many flows, whom to poll, and what to tell the
   daemon.
4. What no direct connection carries the daemon fetches over libp2p: the child asks for a chunk, the daemon writes it
   into the store and says so. A holder that cannot be connected to ``TRIES`` times is one of these for a while.
5. Tokens are the daemon's business: it is told of one that was refused, and meanwhile its holder is left alone.

Messages, each with the object's ``digest``: from the daemon ``fetch`` (of what was begun in the store), ``holders``
(all of them, again whenever that changes), ``delivered``, ``haves`` and ``stop``; to it ``progress``, ``done``,
``failed``, ``fault``, ``token`` and ``fallback`` (where ``index`` is −1 it asks which chunks that holder has).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from node.bulk.fetch import Busy, Connection, Denied, Missing
from node.errors import Unreachable
from node.store.held import Held
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.routes import Routes
from protocol.swarm import Holding, Run, Swarm, bitmap_of, bits_of

if TYPE_CHECKING:
    from node.bulk.child import Child, Operation

log = logging.getLogger(__name__)

TICK: Final = 0.05
IDLE: Final = 0.1
"""Seconds until a flow without work looks again, where nothing wakes it."""
PROGRESS: Final = 0.5
POLL: Final = 0.08
"""Seconds between two questions to one holder, at least."""
POLL_WAIT: Final = 0.5
CHUNK_TIMEOUT: Final = 300.0
"""A chunk that arrives slowly is given up by the swarm's rules, much earlier where somebody else has it."""
STOP_SECONDS: Final = 2.0
TRIES: Final = 2
HIDDEN_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Place:
    """Where a holder is, as the daemon says."""

    address: str
    token: str
    holding: Holding
    failures: int = 0
    hidden_until: float = 0.0
    doubted: bool = False
    """It said that it has the whole, and had not."""


class _Ended(Exception):
    """The rest of a request is not wanted any more."""


class _Wrong(Exception):
    """A chunk arrived with wrong bytes."""


class Transfer:
    """One object on its way. All of its threads end with ``stop``, or once it is whole."""

    def __init__(self, child: Child, digest: bytes, held: Held, routes: Routes) -> None:
        self.digest = digest
        self._child = child
        self._held = held
        self._changed = threading.Condition()
        """Guards all that follows; told when there may be work for an idle flow."""
        have = bits_of(held.bitmap(), held.count)
        self._swarm = Swarm(held.count, have, routes=routes, chance=random.Random(), now=time.monotonic())  # noqa: S311
        self._places: dict[bytes, _Place] = {}
        self._flows: Counter[bytes] = Counter()
        self._running: dict[Run, tuple[Connection, int]] = {}
        self._polls: dict[bytes, Connection | None] = {}
        self._fallbacks: dict[tuple[bytes, int], Run] = {}
        self._haves_at: dict[bytes, float] = {}
        self._why = "nobody holds it"
        self._fresh = False
        self._soon = threading.Event()
        self._over = False

    def start(self) -> None:
        """Begin."""
        self._thread(self._watch)

    def stop(self) -> None:
        """End: no thread of it writes to the object any more."""
        deadline = time.monotonic() + STOP_SECONDS
        with self._changed:
            self._over = True
            for connection, _ in self._running.values():
                connection.abort()
            for poll in self._polls.values():
                if poll is not None:
                    poll.abort()
            self._changed.notify_all()
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def coming(self) -> bytes:
        """The bitmap of the chunks on their way."""
        with self._changed:
            return b"" if self._over else bitmap_of(self._swarm.coming, self._held.count)

    # --- from the daemon ---------------------------------------------------------------------------------------------

    def holders(self, rows: Sequence[Sequence[Any]]) -> None:
        """Rows of node id, multiaddress or "", token, whole 0|1, preference in thousandths, spared 0|1."""
        with self._changed:
            places: dict[bytes, _Place] = {}
            for node, address, token, whole, preference, spared in rows:
                holding = Holding(bool(address), bool(whole), max(preference, 1) / 1000, bool(spared))
                place = self._places.get(node)
                if place is None:
                    place = _Place(address, token, holding)
                elif place.address != address:
                    place.address, place.failures, place.hidden_until = address, 0, 0.0
                place.token = token
                place.holding = holding
                places[node] = place
            self._places = places
            self._hold()

    def delivered(self, node: bytes, index: int, outcome: str) -> None:
        """A chunk that was asked for over libp2p: "ok" (it is in the store), "lacks", "wrong" or "failed"."""
        now = time.monotonic()
        with self._changed:
            run = self._fallbacks.pop((node, index), None)
            if run is None:
                return
            more = False
            if outcome == "ok" and self._held.has(index):
                run.received += CHUNK_BYTES
                more = self._swarm.arrived(run, now)
                self._fresh = True
            elif outcome == "lacks":
                self._swarm.refused(run, now)
                self._haves_at.pop(node, None)
            elif outcome == "wrong":
                self._swarm.lied(run, now)
            elif not run.broken_off:
                self._swarm.failed(node, now)
            if more and not self._over:
                self._ask_daemon(run)
            else:
                self._swarm.finished(run, now)
                self._changed.notify_all()

    def haves(self, node: bytes, bitmap: bytes) -> None:
        """The answer to a ``fallback`` of index −1."""
        with self._changed:
            self._tell(node, bitmap)

    # --- threads -----------------------------------------------------------------------------------------------------

    def _thread(self, work: Callable[..., None], *arguments: Any) -> bool:
        try:
            threading.Thread(target=self._guarded, args=(work, *arguments), daemon=True, name="bulk-fetch").start()
        except RuntimeError as error:  # no more threads to be had: the flows that there are go on
            log.warning("bulk: %s", error)
            return False
        return True

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:
            log.exception("bulk: a transfer's thread failed")

    def _watch(self) -> None:
        next_progress = 0.0
        while True:
            with self._changed:
                if self._over:
                    break
                now = time.monotonic()
                self._tick(now)
                fresh, self._fresh = self._fresh, False
                done = self._swarm.done
            if fresh or done:
                self._child.news.tell()
            if now >= next_progress and not done:
                next_progress = now + PROGRESS
                self._progress()
            if done:
                self.stop()
                self._progress()
                self._child.daemon.say("done", digest=self.digest)
            else:
                self._soon.wait(TICK)
        self._child.news.tell()

    def _tick(self, now: float) -> None:
        swarm = self._swarm
        for run, (connection, base) in self._running.items():
            run.received = max(run.received, connection.received() - base)
        if any(0 < place.hidden_until <= now for place in self._places.values()):
            self._hold()
        swarm.tick(now)
        for run in swarm.aborts:
            if run in self._running:
                self._running[run][0].abort()
        swarm.aborts.clear()
        for node, place in self._places.items():
            if self._direct(place, now):
                for _ in range(swarm.flows(node, now) - self._flows[node]):
                    self._flows[node] += 1
                    if not self._thread(self._flow, node):
                        self._flows[node] -= 1
            else:
                while (asked := swarm.next(node, now)) is not None:
                    self._ask_daemon(asked)
        for node in swarm.partial(now):
            place = self._places[node]
            if self._direct(place, now):
                if node not in self._polls:
                    self._polls[node] = None
                    if not self._thread(self._poll, node):
                        del self._polls[node]
            elif self._haves_at.get(node, 0.0) <= now:
                self._haves_at[node] = now + POLL_WAIT
                self._child.daemon.say("fallback", digest=self.digest, node=node, index=-1)

    def _ask_daemon(self, run: Run) -> None:
        self._fallbacks[run.node, run.at] = run
        self._child.daemon.say("fallback", digest=self.digest, node=run.node, index=run.at)

    def _progress(self) -> None:
        with self._changed:
            swarm = self._swarm
            values = {
                "have": swarm.chunks - swarm.missing.bit_count(),
                "total": swarm.chunks,
                "rate": int(swarm.rate),
                "peers": len({run.node for run in self._running} | {run.node for run in self._fallbacks.values()}),
                "why": self._why,
            }
        self._child.daemon.say("progress", digest=self.digest, **values)

    # --- flows -------------------------------------------------------------------------------------------------------

    def _flow(self, node: bytes) -> None:
        """One flow, from its connection to its end."""
        room = memoryview(bytearray(CHUNK_BYTES))
        connection: Connection | None = None
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
            with self._changed:
                self._flows[node] -= 1

    def _connect(self, node: bytes, connection: Connection | None) -> Connection | None:
        """A connection to ask over, ``connection`` if it is still one; None where none can be had."""
        with self._changed:
            place = self._places.get(node)
            if self._over or place is None or not self._direct(place, time.monotonic()):
                return None
            address, token = place.address, place.token
        if connection is not None:
            connection.token = token
            return connection
        connection = None
        try:
            connection = self._child.connection(address, node, token, chunk_timeout=CHUNK_TIMEOUT)
            seconds = connection.connect()
        except (Unreachable, PeerError) as error:
            if connection is not None:
                connection.close()
            now = time.monotonic()
            with self._changed:
                self._unreached(node, place, error, now)
            return None
        with self._changed:
            place.failures = 0
            self._swarm.connected(node, seconds)
        return connection

    def _await_run(self, node: bytes, connection: Connection) -> Run | None:
        with self._changed:
            while True:
                now = time.monotonic()
                if self._over or self._flows[node] > self._swarm.flows(node, now) or node not in self._places:
                    return None
                run = self._swarm.next(node, now)
                if run is not None:
                    self._running[run] = (connection, connection.received())
                    return run
                self._changed.wait(IDLE)

    def _fetch(self, run: Run, connection: Connection, room: memoryview) -> bool:
        """Ask for one run, chunk by chunk into ``room``; whether the connection is good for another."""
        held, swarm, changed = self._held, self._swarm, self._changed
        buffers = [room[: held.listing.chunk_size(index)] for index in range(run.first, run.end)]
        last = run.end - 1

        def arrived(index: int) -> None:
            right = held.take(index, buffers[index - run.first])
            now = time.monotonic()
            with changed:
                run.received = max(run.received, (index + 1 - run.first) * CHUNK_BYTES)
                if not right:
                    raise _Wrong
                self._fresh = True
                if not swarm.arrived(run, now) and index != last:
                    raise _Ended

        outcome: Exception | None = None
        try:
            connection.get(self.digest, run.first, buffers, arrived)
        except (_Ended, _Wrong, Unreachable, PeerError, OSError) as error:
            outcome = error
        finally:
            with changed:
                if outcome is not None:
                    self._settle(run, outcome, time.monotonic())
                self._running.pop(run)
                swarm.finished(run, time.monotonic())
                if swarm.done:
                    self._soon.set()
                if swarm.done or self._over or run.at <= last:
                    changed.notify_all()
        return outcome is None or isinstance(outcome, Missing)

    def _settle(self, run: Run, outcome: Exception, now: float) -> None:
        """What an ill-fated request means for the holder."""
        node = run.node
        if isinstance(outcome, _Ended) or run.broken_off or self._over:
            return
        self._why = str(outcome) or "wrong bytes"
        if isinstance(outcome, _Wrong):
            self._swarm.lied(run, now)
            self._fault(node, f"chunk {run.at} has the wrong hash")
        elif isinstance(outcome, PeerError):
            self._swarm.lied(run, now)
            self._fault(node, str(outcome))
        elif isinstance(outcome, Missing):
            self._swarm.refused(run, now)
            self._doubt(node)
        elif isinstance(outcome, OSError):  # our own disk's: it is tried again for as long as the daemon waits
            self._swarm.refused(run, now)
        elif isinstance(outcome, Busy):
            self._swarm.busy(node, outcome.retry_after, now)
        elif isinstance(outcome, Denied):
            self._denied(node, now)
        else:
            self._swarm.failed(node, now)

    def _unreached(self, node: bytes, place: _Place, error: Exception, now: float) -> None:
        """No connection to a holder came about; after a few times libp2p is to carry its chunks."""
        self._why = str(error)
        place.failures += 1
        self._swarm.failed(node, now)
        if place.failures >= TRIES and self._direct(place, now):
            place.hidden_until = now + HIDDEN_SECONDS
            self._child.daemon.say("token", digest=self.digest, node=node)
            self._hold()
            self._swarm.forgive(node, now)

    def _fault(self, node: bytes, text: str) -> None:
        self._child.daemon.say("fault", digest=self.digest, node=node, text=text)

    def _denied(self, node: bytes, now: float) -> None:
        self._swarm.busy(node, 1.0, now)
        self._child.daemon.say("token", digest=self.digest, node=node)

    def _doubt(self, node: bytes) -> None:
        """It lacks what it was said to have: it is to tell what it has."""
        place = self._places.get(node)
        if place is not None and place.holding.whole and not place.doubted:
            place.doubted = True
            self._hold()
            self._swarm.heard(node, 0, 0, time.monotonic())

    # --- what holders have -------------------------------------------------------------------------------------------

    def _poll(self, node: bytes) -> None:
        """Ask a partial holder what it has, until that is of no interest any more."""
        connection: Connection | None = None
        more_than = 0
        try:
            while True:
                began = time.monotonic()
                with self._changed:
                    place = self._places.get(node)
                    if self._over or place is None or node not in self._swarm.partial(began):
                        return
                    if not self._direct(place, began):
                        return
                    address, token = place.address, place.token
                try:
                    if connection is None:
                        connection = self._child.connection(address, node, token)
                        with self._changed:
                            self._polls[node] = connection
                    connection.token = token
                    bitmap = connection.have(self.digest, more_than, POLL_WAIT)
                    with self._changed:
                        place.failures = 0
                        more_than = self._tell(node, bitmap) + self._swarm.batch(node) - 1
                    pause = POLL
                except Missing:
                    with self._changed:
                        self._swarm.heard(node, 0, 0, time.monotonic())
                    more_than, pause = 0, POLL_WAIT
                except (Unreachable, PeerError) as error:
                    self._poll_failed(node, connection, error)
                    connection = None
                    pause = 2 * POLL_WAIT
                time.sleep(max(0.0, began + pause - time.monotonic()))
        finally:
            if connection is not None:
                connection.close()
            with self._changed:
                self._polls.pop(node, None)

    def _poll_failed(self, node: bytes, connection: Connection | None, error: Exception) -> None:
        if connection is not None:
            connection.close()
        now = time.monotonic()
        with self._changed:
            self._polls[node] = None
            if self._over:
                return
            if isinstance(error, PeerError):
                self._fault(node, str(error))
                self._swarm.failed(node, now)
            elif isinstance(error, Denied):
                self._denied(node, now)
            elif not isinstance(error, Busy) and (place := self._places.get(node)) is not None:
                self._unreached(node, place, error, now)

    def _tell(self, node: bytes, bitmap: bytes) -> int:
        """Take in what a holder has, and perhaps what is on its way there; how many it has."""
        count = self._held.count
        size = (count + 7) // 8
        has = bits_of(bitmap[:size], count)
        self._swarm.heard(node, has, bits_of(bitmap[size : 2 * size], count), time.monotonic())
        self._changed.notify_all()
        return has.bit_count()

    # --- holders -----------------------------------------------------------------------------------------------------

    def _direct(self, place: _Place, now: float) -> bool:
        return bool(place.address) and place.hidden_until <= now

    def _hold(self) -> None:
        now = time.monotonic()
        holdings = {}
        for node, place in self._places.items():
            if 0 < place.hidden_until <= now:
                place.hidden_until, place.failures = 0.0, TRIES - 1
            known = place.holding
            whole = known.whole and not place.doubted
            holdings[node] = Holding(self._direct(place, now), whole, known.preference, known.spared)
        self._swarm.set_holders(holdings, now)
        self._changed.notify_all()


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
