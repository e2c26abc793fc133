"""Bringing bulk objects here: through the bulk child, or over libp2p alone while none runs.

1. An object is pinned and has its room on the disk before a byte of it is asked for.
2. The child is told who holds it, where, and with which token, again whenever that changes. Where a holder hands out
   no token its chunks come over libp2p (``fallback``).
3. It is over once the store says that the object is whole. A child that dies in the midst costs what was on its way:
   its successor, or libp2p, goes on with what is in the store.
4. Where our own disk refuses a chunk it ends at once: more of them would come for nothing.
5. Where no chunk arrives for ``stall`` seconds, although somebody may hold it, it fails; what arrived stays.
"""

from __future__ import annotations

import errno
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from node.context import Node
from node.errors import Busy, Refused, Unreachable
from node.net import chunks
from node.store.version_store import NoRoom, VersionStore
from node.weights.bulk.bulk_process import Bulk
from node.weights.bulk.token_exchange import Route
from node.weights.bulk.token_exchange import Routes as TokenExchange
from protocol.errors import PeerError
from protocol.weights.holders import Holding
from protocol.weights.manifest import ChunkList
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

STALL: Final = 60.0
LOOK: Final = 0.25
"""Seconds between two looks at who holds it."""
NO_ROUTE_SECONDS: Final = 15.0
"""How long a holder that gave no token is left to libp2p."""
MOST: Final = 30
"""Holders that a child is told of."""
REDRAW: Final = 30.0
REDRAW_IDLE: Final = 5.0
"""Seconds between two draws of them, and where nothing arrived for as long."""
RELAYED: Final = 2
"""Requests to one peer over libp2p on behalf of the child, at a time: no peer's slowness keeps another's chunks away. A
transfer asks at most ten peers in this way."""

Holders = Callable[[], Mapping[bytes, Holding]]


@dataclass(slots=True)
class Progress:
    """How far an object is: chunks, bytes a second, and the peers that send now."""

    have: int
    total: int
    rate: int = 0
    peers: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    listing: ChunkList
    progress: Progress
    moved: float
    """When a chunk last arrived."""
    done: bool = False
    disk: OSError | None = None
    """Why our own disk takes no more."""
    why: str = "nobody holds it"
    soon: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    nursery: trio.Nursery | None = None
    routes: dict[bytes, Route | None] = field(default_factory=dict)
    """How each holder is reached; None where it gave no token."""
    ask_at: dict[bytes, float] = field(default_factory=dict)
    """When a holder is to be asked for a token (again)."""
    rows: list[list[Any]] = field(default_factory=list)
    """What the child was told of the holders."""
    drawn_at: float = 0.0
    asking: set[bytes] = field(default_factory=set)
    """Holders that are being asked over libp2p which chunks they have."""


class Carrier:
    """Brings objects to one node."""

    def __init__(self, node: Node, versions: VersionStore, bulk: Bulk, tokens: TokenExchange) -> None:
        self._node = node
        self._versions = versions
        self._bulk = bulk
        self._tokens = tokens
        self._jobs: dict[bytes, _Job] = {}
        self._routes = Routes()
        self._chance = random.Random()  # noqa: S311  whom to ask is no secret
        self._relayed: dict[bytes, trio.CapacityLimiter] = {}
        for op, handler in (
            ("progress", self._progressed),
            ("done", self._done),
            ("failed", self._failed),
            ("disk", self._disk),
            ("fault", self._fault),
            ("token", self._token),
            ("misled", self._misled),
            ("fallback", self._fallback),
        ):
            bulk.hear(op, handler)
        bulk.on_change(self._changed)

    @property
    def progress(self) -> Mapping[bytes, Progress]:
        """What is on its way, by digest."""
        return {digest: job.progress for digest, job in self._jobs.items()}

    async def bring(self, listing: ChunkList, holders: Holders, *, stall: float = STALL) -> None:
        """Make an object whole in the store. ``holders()`` tells who has it, or a part of it, at each moment.

        Raises ``Unreachable`` where it does not arrive, ``NoRoom`` and other ``OSError`` where the disk refuses. Where
        it is on its way already this waits for that first.
        """
        versions, digest = self._versions, listing.digest
        while (other := self._jobs.get(digest)) is not None:
            await other.over.wait()  # what it leaves is in the store
        job = self._jobs[digest] = _Job(listing, Progress(0, len(listing.chunks)), trio.current_time())
        try:
            with versions.pin(digest):
                await trio.to_thread.run_sync(versions.begin, listing)
                while not await trio.to_thread.run_sync(versions.complete, digest):
                    if self._bulk.up:
                        await self._by_child(job, holders, stall)
                    else:
                        await self._by_libp2p(job, holders, stall)
        finally:
            del self._jobs[digest]
            job.over.set()

    def look(self) -> None:
        """Somebody has more than before: ask who holds what at once."""
        for job in self._jobs.values():
            job.soon.set()

    def _changed(self, up: bool) -> None:
        del up
        self.look()

    # --- over libp2p --------------------------------------------------------------------------------------------------

    async def _by_libp2p(self, job: _Job, holders: Holders, stall: float) -> None:
        """Return once it is done, or a child is there for it."""
        versions, digest = self._versions, job.listing.digest
        store = chunks.Store(job.listing, partial(versions.missing, digest), partial(versions.write_chunk, digest))
        with trio.CancelScope() as scope:

            def told(swarm: Swarm) -> None:
                job.progress = Progress(swarm.chunks - swarm.missing.bit_count(), swarm.chunks, int(swarm.rate))
                if self._bulk.up:
                    scope.cancel()

            await chunks.fetch(
                self._node.network, store, holders, routes=self._routes, chance=self._chance, stall=stall, told=told
            )

    # --- through the child --------------------------------------------------------------------------------------------

    async def _by_child(self, job: _Job, holders: Holders, stall: float) -> None:
        """Return once it is done, or the child is gone."""
        bulk, digest = self._bulk, job.listing.digest
        starts, job.done, job.disk, job.moved = bulk.starts, False, None, trio.current_time()
        job.rows = []
        if not bulk.tell("fetch", digest=digest):
            await trio.sleep(LOOK)
            return
        try:
            async with trio.open_nursery() as nursery:
                job.nursery = nursery
                while (
                    not (job.done or job.disk)
                    and (bulk.up and bulk.starts == starts)
                    and trio.current_time() < job.moved + stall
                ):
                    self._tell_holders(job, holders())
                    with trio.move_on_after(LOOK):
                        await job.soon.wait()
                    job.soon = trio.Event()
                nursery.cancel_scope.cancel()
        finally:
            job.nursery = None
            bulk.tell("stop", digest=digest)
        if job.disk is not None:
            raise job.disk
        if trio.current_time() >= job.moved + stall:
            count = job.progress.total - job.progress.have
            raise Unreachable(f"{count} chunks of {digest.hex()[:8]} are missing: {job.why}")

    def _tell_holders(self, job: _Job, holders: Mapping[bytes, Holding]) -> None:
        assert job.nursery is not None
        now = trio.current_time()
        rows = []
        for peer, holding in holders.items():
            if job.ask_at.get(peer, 0.0) <= now:
                job.ask_at[peer] = math.inf
                job.nursery.start_soon(self._ask_route, job, peer)
            if peer in job.routes:
                route = job.routes[peer]
                address, token, foreign = (
                    ("", "", False) if route is None else (route.address, route.token, route.foreign)
                )
                preference = int(1000 * holding.preference)
                whole, spared = int(holding.whole), int(holding.spared)
                rows.append([peer, address, token, whole, preference, spared, int(foreign)])
        if len(rows) > MOST:
            rows = self._drawn(job, rows, now)
        if rows != job.rows:
            job.rows = rows
            self._bulk.tell("holders", digest=job.listing.digest, rows=rows)

    def _drawn(self, job: _Job, rows: list[list[Any]], now: float) -> list[list[Any]]:
        """``MOST`` of the rows by chance: the author's, those that the child knows, and others. Some give way now and
        then, half of them where nothing arrives: anybody can say that he holds something, under many names."""
        known = {row[0] for row in job.rows}
        idle = now - job.moved > REDRAW_IDLE
        if now >= job.drawn_at + (REDRAW_IDLE if idle else REDRAW):
            job.drawn_at = now
            known -= set(self._chance.sample(sorted(known), len(known) // (2 if idle else 3)))
        chance = {row[0]: self._chance.random() for row in rows}
        drawn = sorted(rows, key=lambda row: (not row[5], row[0] not in known, chance[row[0]]))[:MOST]
        return sorted(drawn, key=lambda row: bytes(row[0]))

    async def _ask_route(self, job: _Job, peer: bytes) -> None:
        try:
            route = await self._tokens.route(peer)
        except (Unreachable, PeerError) as error:
            if isinstance(error, PeerError):
                self._node.network.blame(peer, error)
            job.routes[peer] = None
            job.ask_at[peer] = trio.current_time() + NO_ROUTE_SECONDS
        else:
            job.routes[peer] = route
            job.ask_at[peer] = route.until
        job.soon.set()

    async def _relay(self, job: _Job, peer: bytes, index: int) -> None:
        """Fetch a chunk for the child, or what the peer has."""
        node, digest = self._node, job.listing.digest
        if index < 0:
            try:
                bitmap = await chunks.ask_have(node.network, peer, job.listing)
            except (Unreachable, PeerError):
                bitmap = b""
            finally:
                job.asking.discard(peer)
            self._bulk.tell("haves", digest=digest, node=peer, bitmap=bitmap)
            return
        async with self._slot(peer):
            outcome = "ok"
            try:
                data = await chunks.ask_chunk(node.network, peer, digest, index)
                await trio.to_thread.run_sync(self._versions.write_chunk, digest, index, data)
            except Busy:
                outcome = "busy"
            except Refused:
                outcome = "lacks"
            except Unreachable:
                outcome = "failed"
            except OSError as error:
                outcome = "unkept"
                self._disk(digest, error.errno or 0, error.strerror or str(error))
            except PeerError as error:
                outcome = "wrong"
                node.network.blame(peer, error)
            self._bulk.tell("delivered", digest=digest, node=peer, index=index, outcome=outcome)

    @asynccontextmanager
    async def _slot(self, peer: bytes) -> AsyncIterator[None]:
        limiter = self._relayed.setdefault(peer, trio.CapacityLimiter(RELAYED))
        try:
            async with limiter:
                yield
        finally:
            found = limiter.statistics()
            if not found.borrowed_tokens and not found.tasks_waiting:
                self._relayed.pop(peer, None)

    # --- what the child says ------------------------------------------------------------------------------------------

    def _progressed(self, digest: bytes, have: int, total: int, rate: int, peers: int, why: str) -> None:
        job = self._jobs.get(digest)
        if job is not None:
            if have > job.progress.have:
                job.moved = trio.current_time()
            job.progress = Progress(have, total, rate, peers)
            job.why = str(why)

    def _done(self, digest: bytes) -> None:
        job = self._jobs.get(digest)
        if job is not None:
            job.done = True
            job.soon.set()

    def _failed(self, digest: bytes, why: str) -> None:
        job = self._jobs.get(digest)
        if job is not None:
            job.why = str(why)  # and nothing comes: it fails for that in time, and is not begun again and again

    def _disk(self, digest: bytes, number: int, text: str) -> None:
        job = self._jobs.get(digest)
        if job is not None:
            full = number in (errno.ENOSPC, errno.EDQUOT)
            job.disk = NoRoom("the disk is full") if full else OSError(number, text)
            job.soon.set()

    def _fault(self, digest: bytes, node: bytes, text: str) -> None:
        job = self._jobs.get(digest)
        if job is not None and node in job.routes:
            self._node.network.blame(node, PeerError(f"weights: {text}"))

    def _token(self, digest: bytes, node: bytes) -> None:
        job = self._jobs.get(digest)
        if job is not None and node in job.routes and job.ask_at.get(node, 0.0) < math.inf:
            self._tokens.spoil(node)
            job.ask_at[node] = 0.0
            job.soon.set()

    def _misled(self, digest: bytes, node: bytes) -> None:
        job = self._jobs.get(digest)
        if job is not None and node in job.routes:
            self._tokens.misled(node)
            self._token(digest, node)

    def _fallback(self, digest: bytes, node: bytes, index: int) -> None:
        job = self._jobs.get(digest)
        if job is not None and job.nursery is not None and node in job.routes and index < len(job.listing.chunks):
            if index < 0:
                if node in job.asking:
                    return  # the child asks again and again, and a holder may take its time
                job.asking.add(node)
            job.nursery.start_soon(self._relay, job, node, index)
