"""Following the lineage: every node fetches the newest version, keeps the newest few, and serves their chunks.

What happens to a version, top to bottom: ``run`` chooses it, ``hold`` has it fetched once, ``_fetch`` refuses what must
not be followed, lets others know that it arrives, takes it by its deltas where that is quicker and whatever lacks then
as a whole, each chunk verified on arrival; then it is noted as held, which announces it.
"""

from __future__ import annotations

import math

import trio

from node.weights.delta_chain import DeltaChain
from node.weights.fetching import Fetching
from node.weights.held import HeldVersions, WeightsMeans, payload
from node.weights.holders_of import HoldersOf
from protocol.constants import CHUNK_BYTES
from protocol.errors import Error
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest
from protocol.weights.holders import Holding
from protocol.weights.manifest import Manifest


class WeightsService:
    """One node's weights: ``held`` says what is here, ``holders_of`` who else has what, ``hold`` gets a version."""

    def __init__(self, means: WeightsMeans) -> None:
        self._means = means
        self._node = means.node
        self._own = means.own
        self.notice = means.notice
        self.held = HeldVersions(means)
        self.holders_of = HoldersOf(means, self.held)
        self.fetching = Fetching(means, self.held)
        self.deltas = DeltaChain(means, self.held, self.holders_of, self.fetching)

    async def run(self) -> None:
        """Hold the newest version, for ever; a relay its delta as well, for others."""
        seen = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.held.tidy)
            while True:
                newest = self._node.log.ledger.newest_weights()
                if newest is not None and newest.id not in self.held:
                    await self._try(newest)
                    if newest.id in self.held and self._own.role == "relay":
                        nursery.start_soon(self.deltas.hold_delta, newest)
                seen = await self._node.log.wait_change(seen, timeout=1)

    async def _try(self, entry: Entry) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_once_gone, entry, nursery.cancel_scope)
            try:
                await self.hold(entry)
                self._node.health.clear("weights")
            except (Error, OSError) as error:
                self._node.health.warn("weights", f"version {payload(entry).number} has not arrived: {error}")
                interval = self._node.domain.timings.presence_ms / 1000
                await trio.sleep(interval / 5)
                await self.notice.wait(interval * 4 / 5)  # an offer may be what was missing
            nursery.cancel_scope.cancel()

    async def _cancel_once_gone(self, entry: Entry, scope: trio.CancelScope) -> None:
        """End the fetch of a version that newer ones have displaced everywhere: nobody is left to give it. Or nobody
        has to be: one holder that trickles would keep this node from all newer ones."""
        seen = 0
        while True:
            newest = self._node.log.ledger.newest_weights()
            displaced = newest is not None and newest.id != entry.id and newest.id not in self.held
            if displaced and (self.holders_of.dropped(entry) or self.held.outdated(entry.id)):
                scope.cancel()
            seen = await self._node.log.wait_change(seen, timeout=1)

    async def hold(self, entry: Entry, *, timeout: float = math.inf) -> None:
        """Fetch one version unless it is held.

        Raises ``PeerError`` for one that must not be followed, ``Unreachable`` where it does not arrive,
        ``trio.TooSlowError`` after ``timeout`` seconds, ``NoRoom`` and other ``OSError`` where the disk refuses.
        """
        with trio.fail_after(timeout):
            if entry.id in self.held:
                await trio.lowlevel.checkpoint()
                return
            digest = payload(entry).manifest
            async with self.fetching.alone(digest):
                if entry.id in self.held:
                    return
                if not await trio.to_thread.run_sync(self._means.versions.complete, digest):
                    await self._fetch(entry)
                self.held.note(entry)

    async def _fetch(self, entry: Entry) -> None:
        await self.holders_of.check_entry(entry)
        await self._leave_head_start(entry)
        manifest = await self.holders_of.manifest(entry)
        with self.holders_of.arrives(entry):
            await self.deltas.take(entry, manifest)
            await self.fetching.bring(manifest, lambda: self.holders_of.version(entry))

    async def _leave_head_start(self, entry: Entry) -> None:
        """Leave the trainer's uplink to the relays for one presence interval, where there is a relay."""
        relays = self.holders_of.relays()
        if self._own.role == "relay" or not relays:
            return
        deadline = trio.current_time() + self._node.domain.timings.presence_ms / 1000
        while trio.current_time() < deadline and not relays.intersection(self.holders_of.version(entry)):
            await self.notice.wait(0.05)

    async def keep_unpublished(self, manifest: Manifest, delta: DeltaManifest | None, trainer: bytes) -> None:
        """Fetch a version that ``trainer`` has not published yet, durably, and keep it until the next one. Where its
        delta serves, it is taken first.

        Raises ``PeerError`` or ``Unreachable``, and ``OSError`` where the disk refuses.
        """
        self.held.expect(manifest, delta)
        await self.holders_of.check_model(manifest)

        def ask_holders() -> dict[bytes, Holding]:
            return {trainer: Holding()}

        async with self.fetching.alone(manifest.digest):
            if delta is not None:
                await self.deltas.take_unpublished(delta, manifest, ask_holders)
            await self.fetching.bring(manifest, ask_holders)
        if delta is not None:
            await self.fetching.bring(delta, ask_holders)
        await trio.to_thread.run_sync(self._means.versions.sync, manifest.digest)

    def progress(self, entry: Entry) -> dict[str, int | str]:
        """How far a version is: of the ``part`` that arrives now (its delta, or the whole) the bytes that are here and
        in all, the rate in bytes a second, and how many peers send."""
        wanted = payload(entry)
        for part, digest in (("delta", wanted.delta), ("whole", wanted.manifest)):
            found = None if digest is None else self.fetching.progress(digest)
            if found is not None:
                have, total = found.have * CHUNK_BYTES, found.total * CHUNK_BYTES
                return {"part": part, "have": have, "total": total, "rate": found.rate, "peers": found.peers}
        return {"part": "whole", "have": 0, "total": wanted.size, "rate": 0, "peers": 0}
