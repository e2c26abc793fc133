"""Weights over libp2p streams: the way that always works, and the slow one (``node.bulk`` is the other).

1. ``protocol.weights.swarm`` decides whom to ask for what; a run's chunks are asked for one after the other.
2. A chunk is verified before it is written. Its sender is blamed for a wrong one, and not asked again.
3. A peer that refuses a chunk lacks it, which is no fault the first time. What partial holders have they are asked
   every ``POLL`` seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from node.errors import Busy, Refused, Unreachable
from node.net.blob_exchange import CHUNK_PROTOCOL, HAVE_PROTOCOL
from node.net.host import Network
from protocol import codec
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.weights.chunk_set import bits, bits_of
from protocol.weights.holders import Holding, Run
from protocol.weights.manifest import ChunkList
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

TICK: Final = 0.1
POLL: Final = 0.5
TIMEOUT: Final = 30.0
"""Seconds that a chunk may take: a stream carries 35 KB a second, or another holder is asked."""


@dataclass(frozen=True, slots=True)
class Store:
    """Where chunks go. ``write`` verifies: it raises ``PeerError`` for wrong bytes, and ``OSError``."""

    listing: ChunkList
    missing: Callable[[], list[int]]
    write: Callable[[int, bytes], None]


async def ask_chunk(network: Network, peer: bytes, digest: bytes, index: int) -> bytes:
    """Chunk ``index`` as ``peer`` gives it, not verified. Raises ``Unreachable`` (``Refused``) or ``PeerError``."""
    request = codec.encode([digest, index])
    return await network.request(peer, CHUNK_PROTOCOL, request, timeout=TIMEOUT, max_response=CHUNK_BYTES)


async def ask_have(network: Network, peer: bytes, listing: ChunkList) -> bytes:
    """The bitmap of the chunks that ``peer`` has. Raises ``Unreachable`` (``Refused``) or ``PeerError``."""
    size = math.ceil(len(listing.chunks) / 8)
    bitmap = await network.request(peer, HAVE_PROTOCOL, listing.digest, timeout=TIMEOUT, max_response=size)
    if len(bitmap) != size:
        raise PeerError("have: a bitmap of another length")
    return bitmap


async def fetch(
    network: Network,
    store: Store,
    holders: Callable[[], Mapping[bytes, Holding]],
    *,
    routes: Routes,
    chance: random.Random,
    stall: float,
    told: Callable[[Swarm], None] = lambda swarm: None,
) -> None:
    """Fetch what is missing from those that ``holders()`` names at each moment.

    ``told`` is called about ten times a second. What arrived is stored, also where this ends early. Raises
    ``Unreachable`` after ``stall`` seconds without a new chunk, and whatever ``store`` raises but ``PeerError``.
    """
    await _Fetch(network, store, holders, routes, chance, stall, told).run()


class _Fetch:
    def __init__(
        self,
        network: Network,
        store: Store,
        holders: Callable[[], Mapping[bytes, Holding]],
        routes: Routes,
        chance: random.Random,
        stall: float,
        told: Callable[[Swarm], None],
    ) -> None:
        self._network = network
        self._store = store
        self._holders = holders
        self._routes = routes
        self._chance = chance
        self._stall = stall
        self._told = told
        self._digest = store.listing.digest
        self._scopes: dict[Run, trio.CancelScope] = {}
        self._polled: dict[bytes, float] = {}
        """When a holder is to be asked (again) what it has."""
        self._doubted: set[bytes] = set()
        self._soon = trio.Event()
        self._why = "nobody holds them"
        self._error: Exception | None = None

    async def run(self) -> None:
        listing = self._store.listing
        count = len(listing.chunks)
        missing = await trio.to_thread.run_sync(self._store.missing)
        held = ((1 << count) - 1) & ~bits(missing)
        swarm = Swarm(count, held, routes=self._routes, chance=self._chance, now=trio.current_time())
        async with trio.open_nursery() as nursery:
            while not swarm.done and self._error is None:
                self._step(swarm, nursery)
                if trio.current_time() - swarm.progress > self._stall:
                    count = swarm.missing.bit_count()
                    self._error = Unreachable(f"{count} chunks of {self._digest.hex()[:8]} are missing: {self._why}")
                    break
                with trio.move_on_after(TICK):
                    await self._soon.wait()
                self._soon = trio.Event()
            nursery.cancel_scope.cancel()
        if self._error is not None:
            raise self._error

    def _step(self, swarm: Swarm, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        holdings = {
            node: Holding(False, holding.whole and node not in self._doubted, holding.preference, holding.spared)
            for node, holding in self._holders().items()
        }
        swarm.set_holders(holdings, now)
        swarm.tick(now)
        self._told(swarm)
        for broken_off in swarm.aborts:
            if broken_off in self._scopes:
                self._scopes[broken_off].cancel()
        swarm.aborts.clear()
        for node in holdings:
            while (run := swarm.next(node, now)) is not None:
                self._scopes[run] = trio.CancelScope()
                nursery.start_soon(self._fetch_run, swarm, run)
        for node in swarm.partial(now):
            if self._polled.get(node, 0.0) <= now:
                self._polled[node] = math.inf  # until it has answered: one that takes its time is not asked twice
                nursery.start_soon(self._poll, swarm, node)

    async def _fetch_run(self, swarm: Swarm, run: Run) -> None:
        try:
            with self._scopes[run]:
                await self._fetch_chunks(swarm, run)
        except Busy as error:
            self._why = str(error)
            swarm.busy(run.node, error.retry_after, trio.current_time())
        except Refused as error:
            self._why = str(error)
            swarm.refused(run, trio.current_time())
            if swarm.has(run.node) == swarm.all:
                self._doubted.add(run.node)
                swarm.heard(run.node, 0, 0, trio.current_time())
        except Unreachable as error:
            self._why = str(error)
            swarm.failed(run.node, trio.current_time())
        except PeerError as error:
            self._why = str(error)
            swarm.lied(run, trio.current_time())
            self._network.blame(run.node, error)
        except Exception as error:  # the store's: not to be wrapped in a group
            self._error = error
        finally:
            del self._scopes[run]
            swarm.finished(run, trio.current_time())
            self._soon.set()

    async def _fetch_chunks(self, swarm: Swarm, run: Run) -> None:
        more = True
        while more:
            data = await ask_chunk(self._network, run.node, self._digest, run.at)
            await trio.to_thread.run_sync(self._store.write, run.at, data)
            run.received += len(data)
            more = swarm.arrived(run, trio.current_time())

    async def _poll(self, swarm: Swarm, node: bytes) -> None:
        listing = self._store.listing
        try:
            has = bits_of(await ask_have(self._network, node, listing), len(listing.chunks))
        except Unreachable:
            has = 0
        except PeerError as error:
            self._network.blame(node, error)
            has = 0
        self._polled[node] = trio.current_time() + POLL
        swarm.heard(node, has, 0, trio.current_time())
        self._soon.set()
