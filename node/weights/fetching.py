"""Bringing bulk objects here, each once however many want it: the bulk child fetches, the daemon says from whom.

1. An object is pinned and has its room on the disk before a byte of it is asked for. What has to go for it is what
   retention can spare.
2. The child is to know who holds the object, where, and with which token, again whenever that changes. Where a holder
   hands out no token its chunks come over libp2p, one at a time, when the child asks for them.
3. It is over once the store says that the object is whole. A child that dies in the midst costs what was on its way:
   its successor goes on with what is in the store, and is waited for.
4. Where our own disk refuses a chunk it ends at once: more of them would come for nothing.
5. Where no chunk arrives for ``stall`` seconds, although somebody may hold it, it fails; what arrived stays.
"""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import trio

from node.errors import Busy, Refused, Unreachable
from node.net.blob_exchange import fetch_chunk, fetch_haves
from node.store.version_store import NoRoom
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.token_exchange import Route
from node.weights.held import HeldVersions, WeightsMeans
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.weights.delta import Speed
from protocol.weights.holders import Holding
from protocol.weights.manifest import ChunkList

STALL: Final = 60.0
REFRESH: Final = 0.25
"""Seconds after which it is asked again who holds it."""
NO_ROUTE_SECONDS: Final = 15.0
"""How long a holder that gave no token is left to libp2p."""
MOST: Final = 30
"""Holders that a child knows of."""
REDRAW: Final = 30.0
REDRAW_IDLE: Final = 5.0
"""Seconds between two draws of them, and where nothing arrived for as long."""
RELAYED: Final = 2
"""Requests to one peer over libp2p on behalf of the child, at a time: no peer's slowness keeps another's chunks away. A
transfer asks at most ten peers in this way."""
PeerSlots = WeakValueDictionary[bytes, trio.CapacityLimiter]
"""These, for as long as somebody uses them."""

MEASURABLE: Final = 4 << 20
"""Bytes from which on a transfer tells a rate: the start of a smaller one is most of it."""
WEIGHT: Final = 0.3
"""Part of a measured rate that a new measurement replaces."""
ASSUMED: Final = Speed(receive=12.5e6, hash=1e9, apply=0.5e9, start=0.5)
"""Before anything is measured: 100 Mb/s, and a common processor."""

AskHolders = Callable[[], Mapping[bytes, Holding]]
"""Who has an object, or a part of it, at the moment."""


class Rates:
    """The speeds of this node, as far as they are measured: until then those of a common link and processor."""

    def __init__(self) -> None:
        self.speed = ASSUMED

    def received(self, size: int, seconds: float) -> None:
        """``size`` bytes were received and verified in so many seconds."""
        if size >= MEASURABLE and seconds > 0:
            self.speed = replace(self.speed, receive=_smoothed(self.speed.receive, size / seconds))

    def applied(self, size: int, seconds: float, start: float) -> None:
        """A whole of ``size`` bytes was made in so many seconds by a child that took ``start`` seconds besides."""
        if size >= MEASURABLE and seconds > 0:
            rate = _smoothed(self.speed.apply, size / seconds)
            # Hashing is the largest part of it; it is measured nowhere else, and never slower.
            self.speed = replace(self.speed, apply=rate, hash=max(self.speed.hash, rate))
        self.speed = replace(self.speed, start=_smoothed(self.speed.start, start))


def _smoothed(old: float, new: float) -> float:
    return (1 - WEIGHT) * old + WEIGHT * new


class ObjectTransfer:
    """Brings one object, which was begun in the store, from those that ``ask_holders()`` names at each moment.

    ``slots`` bound the requests to each peer over libp2p: all transfers of a node share them.
    """

    def __init__(
        self, means: WeightsMeans, slots: PeerSlots, listing: ChunkList, ask_holders: AskHolders, *, stall: float
    ) -> None:
        self._means = means
        self._slots = slots
        self._listing = listing
        self._digest = listing.digest
        self._ask_holders = ask_holders
        self._stall = stall
        self.progress = messages.TransferProgress(self._digest, 0, len(listing.chunks))
        self.over = trio.Event()
        """For those who wait until it is, however it ended."""
        self._moved = 0.0
        """When a chunk last arrived."""
        self._scope = trio.CancelScope()
        self._refused: OSError | None = None
        """Why our own disk takes no more."""
        self._why = "nobody holds it"
        self._routes: dict[bytes, Route | None] = {}
        """How each holder is reached; None where it gave no token."""
        self._ask_at: dict[bytes, float] = {}
        """When a holder is to be asked for a token (again)."""
        self._rows: list[messages.HolderRow] = []
        """What the child knows of the holders."""
        self._drawn_at = 0.0
        self._chance = random.Random()  # noqa: S311  whom to ask is no secret
        self._asking: set[bytes] = set()
        """Holders that are being asked over libp2p which chunks they have."""

    async def run(self) -> None:
        """Return once the object is whole.

        Raises ``Unreachable`` where it does not arrive, ``NoRoom`` and other ``OSError`` where the disk refuses.
        """
        while not await trio.to_thread.run_sync(self._means.versions.complete, self._digest):
            with trio.move_on_after(self._stall):
                await self._means.bulk.wait_up()
            if not self._means.bulk.up:
                self._why = "the process that fetches weights does not run"
                raise self._missing()
            await self._by_child()

    async def _by_child(self) -> None:
        """Return once it is done, or the child is gone."""
        self._rows, self._moved = [], trio.current_time()
        with self._means.bulk.open_transfer(self._digest) as said, trio.CancelScope() as self._scope:
            self._scope.deadline = self._moved + self._stall
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_holders, nursery)
                async for message in said:
                    if isinstance(message, messages.TransferDone):
                        break
                    self._receive(message, nursery)
                else:
                    await trio.sleep(REFRESH)  # until its successor can be asked
                nursery.cancel_scope.cancel()
        if self._refused is not None:
            raise self._refused
        if self._scope.cancelled_caught:
            raise self._missing()

    def _missing(self) -> Unreachable:
        count = self.progress.total - self.progress.have
        return Unreachable(f"{count} chunks of {self._digest.hex()[:8]} are missing: {self._why}")

    # --- who holds it -------------------------------------------------------------------------------------------------

    async def _keep_holders(self, nursery: trio.Nursery) -> None:
        """Have the child know who holds the object and how each is reached, for ever."""
        while True:
            now = trio.current_time()
            rows = []
            for peer, holding in self._ask_holders().items():
                if self._ask_at.get(peer, 0.0) <= now:
                    self._ask_at[peer] = math.inf
                    nursery.start_soon(self._ask_route, peer)
                if peer in self._routes:
                    rows.append(_row(peer, holding, self._routes[peer]))
            if len(rows) > MOST:
                rows = self._drawn(rows, now)
            if rows != self._rows:
                self._rows = rows
                self._means.bulk.send(messages.SetHolders(self._digest, rows))
            await self._means.notice.wait(REFRESH)

    def _drawn(self, rows: list[messages.HolderRow], now: float) -> list[messages.HolderRow]:
        """``MOST`` of the rows by chance: the author's, those that the child knows, and others. Some give way now and
        then, half of them where nothing arrives: anybody can say that he holds something, under many names."""
        known = {row.node for row in self._rows}
        idle = now - self._moved > REDRAW_IDLE
        if now >= self._drawn_at + (REDRAW_IDLE if idle else REDRAW):
            self._drawn_at = now
            known -= set(self._chance.sample(sorted(known), len(known) // (2 if idle else 3)))
        chance = {row.node: self._chance.random() for row in rows}
        drawn = sorted(rows, key=lambda row: (not row.spared, row.node not in known, chance[row.node]))[:MOST]
        return sorted(drawn, key=lambda row: row.node)

    async def _ask_route(self, peer: bytes) -> None:
        try:
            route = await self._means.tokens.route(peer)
        except (Unreachable, PeerError) as error:
            if isinstance(error, PeerError):
                self._means.node.network.blame(peer, error)
            self._routes[peer] = None
            self._ask_at[peer] = trio.current_time() + NO_ROUTE_SECONDS
        else:
            self._routes[peer] = route
            self._ask_at[peer] = route.until
        self._means.notice.notify()

    # --- what the child says ------------------------------------------------------------------------------------------

    def _receive(self, message: messages.FromTransfer, nursery: trio.Nursery) -> None:
        match message:
            case messages.TransferProgress(have=have):
                if have > self.progress.have:
                    self._moved = trio.current_time()
                    self._scope.deadline = self._moved + self._stall
                self.progress = message
                self._why = message.why
            case messages.TransferFailed(why=why):
                self._why = why  # and nothing comes: it fails for that in time, and is not begun again and again
            case messages.DiskRefused(number=number, text=text):
                self._refuse(number, text)
            case messages.HolderFault(node=node, text=text) if node in self._routes:
                self._means.node.network.blame(node, PeerError(f"weights: {text}"))
            case messages.RouteFailed(node=node, misled=misled) if node in self._routes:
                if misled:
                    self._means.tokens.misled(node)
                if self._ask_at.get(node, 0.0) < math.inf:
                    self._means.tokens.spoil(node)
                    self._ask_at[node] = 0.0
                    self._means.notice.notify()
            case messages.WantFallback(node=node, index=index) if node in self._routes:
                if 0 <= index < len(self._listing.chunks):
                    nursery.start_soon(self._relay_chunk, node, index)
                elif index < 0 and node not in self._asking:  # else it takes its time, and the child asks again
                    self._asking.add(node)
                    nursery.start_soon(self._relay_haves, node)

    def _refuse(self, number: int, text: str) -> None:
        """Our own disk takes no more."""
        full = number in (errno.ENOSPC, errno.EDQUOT)
        self._refused = NoRoom("the disk is full") if full else OSError(number, text)
        self._scope.cancel()

    # --- over libp2p, for the child -----------------------------------------------------------------------------------

    async def _relay_haves(self, peer: bytes) -> None:
        try:
            bitmap = await fetch_haves(self._means.node.network, peer, self._digest, len(self._listing.chunks))
        except (Unreachable, PeerError):
            bitmap = b""
        finally:
            self._asking.discard(peer)
        self._means.bulk.send(messages.GiveHaves(self._digest, peer, bitmap))

    async def _relay_chunk(self, peer: bytes, index: int) -> None:
        async with self._slots.setdefault(peer, trio.CapacityLimiter(RELAYED)):
            outcome: messages.Outcome = "ok"
            try:
                data = await fetch_chunk(self._means.node.network, peer, self._digest, index)
                await trio.to_thread.run_sync(self._means.versions.write_chunk, self._digest, index, data)
            except Busy:
                outcome = "busy"
            except Refused:
                outcome = "lacks"
            except Unreachable:
                outcome = "failed"
            except OSError as error:
                outcome = "unkept"
                self._refuse(error.errno or 0, error.strerror or str(error))
            except PeerError as error:
                outcome = "wrong"
                self._means.node.network.blame(peer, error)
            self._means.bulk.send(messages.GiveChunk(self._digest, peer, index, outcome))


class Fetching:
    """Brings objects to one node. ``rates`` learns how fast they come."""

    def __init__(self, means: WeightsMeans, held: HeldVersions) -> None:
        self._means = means
        self._held = held
        self.rates = Rates()
        self._begin = partial(ObjectTransfer, means, PeerSlots())
        self._transfers: dict[bytes, ObjectTransfer] = {}
        self._making: WeakValueDictionary[bytes, trio.Lock] = WeakValueDictionary()

    def progress(self, digest: bytes) -> messages.TransferProgress | None:
        """How far an object is that is on its way."""
        transfer = self._transfers.get(digest)
        return None if transfer is None else transfer.progress

    def alone(self, digest: bytes) -> trio.Lock:
        """What to hold while making an object whole: nobody else does then.

        A chunk that a delta has made right and another fetch still receives in place would be served meanwhile.
        """
        return self._making.setdefault(digest, trio.Lock())

    async def bring(self, listing: ChunkList, ask_holders: AskHolders, *, stall: float = STALL) -> None:
        """Make an object whole in the store, from those that ``ask_holders()`` names at each moment.

        Raises ``Unreachable`` where it does not arrive within ``stall`` seconds of the chunk before, ``NoRoom`` and
        other ``OSError`` where the disk refuses. Where it is on its way already this waits for that first.
        """
        digest = listing.digest
        while (other := self._transfers.get(digest)) is not None:
            await other.over.wait()  # what it leaves is in the store
        transfer = self._transfers[digest] = self._begin(listing, ask_holders, stall=stall)
        try:
            with self._means.versions.pin(digest):
                before, began = await self.make_room(listing), trio.current_time()
                await transfer.run()
        finally:
            del self._transfers[digest]
            transfer.over.set()
        came = (len(listing.chunks) - before) * CHUNK_BYTES
        self.rates.received(min(listing.size, came), trio.current_time() - began)

    async def make_room(self, listing: ChunkList) -> int:
        """Begin an object in the store, or take up what is there of it; how many of its chunks are.

        Raises ``NoRoom`` and other ``OSError`` where the disk refuses.
        """

        def inspect() -> tuple[list[bytes], int]:
            held = self._means.versions.open(listing.digest)
            return self._means.versions.held(), 0 if held is None else held.present()

        present, chunks = await trio.to_thread.run_sync(inspect)
        try:
            await trio.to_thread.run_sync(partial(self._means.versions.begin, listing, self._held.spare(present)))
        finally:
            await self._held.drop_gone()
        return chunks


def _row(peer: bytes, holding: Holding, route: Route | None) -> messages.HolderRow:
    address, token, foreign = ("", "", False) if route is None else (route.address, route.token, route.foreign)
    return messages.HolderRow(peer, address, token, foreign, holding.whole, holding.spared, holding.preference)
