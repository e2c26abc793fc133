"""Versions that a person wants now: fetched at once, whatever the node would fetch by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import trio

from node.context import Node
from node.errors import innermost
from node.weights.following import WeightsService
from node.weights.held import payload
from protocol.errors import Error
from protocol.log.entry import Entry

ABANDONED: Final = 5.0
"""Seconds after which nobody waits for a pull any more: the command asks several times a second."""

MIN_ID_DIGITS: Final = 8
"""Fewer of an id's digits name no version: they would be taken for a number."""


@dataclass(slots=True)
class _Pull:
    """A version that somebody wants now."""

    entry: Entry
    asked: float
    """When somebody last asked (trio's clock)."""
    error: str | None = None


class Pulls:
    """Fetches versions that a person asked for."""

    def __init__(self, node: Node, weights: WeightsService) -> None:
        self._node = node
        self._weights = weights
        self._pulls: dict[bytes, _Pull] = {}
        self._send, self._receive = trio.open_memory_channel[_Pull](math.inf)

    async def run(self) -> None:
        """Fetch what is asked for, for ever."""
        async with trio.open_nursery() as nursery:
            async for pull in self._receive:
                nursery.start_soon(self._fetch, pull)

    async def _fetch(self, pull: _Pull) -> None:
        try:
            await self._weights.hold(pull.entry)
        except* (Error, OSError) as group:
            pull.error = str(innermost(group))
        else:
            del self._pulls[pull.entry.id]

    async def answer(self, version: int | str) -> dict[str, Any]:
        """Begin to fetch a version unless it is here or on its way, and tell how far it is.

        A text is what the id of its entry begins with; several that do so are refused.
        """
        await trio.lowlevel.checkpoint()
        weights = self._weights
        lineage = self._node.log.ledger.lineage()
        if isinstance(version, str):
            alike = [e for e in lineage if len(version) >= MIN_ID_DIGITS and e.id.hex().startswith(version)]
            if len(alike) > 1:
                return {"error": f"{len(alike)} versions have ids that begin with {version}"}
            entry = alike[0] if alike else None
        else:
            entry = next((e for e in lineage if payload(e).number == version), None)
        if version == -1:
            entry = self._node.log.ledger.newest_weights()
        if entry is None:
            return {"error": "no version was published yet" if version == -1 else f"there is no version {version}"}
        number, size = payload(entry).number, payload(entry).size
        if weights.held.outdated(entry.id):
            return {"error": f"version {number} is older than those that nodes keep"}
        row = {"version": number, "size": size}
        if entry.id in weights.held.ids():
            return {**row, "done": True, "have": size, "rate": 0, "peers": 0, "part": "whole"}
        pull = self._pulls.get(entry.id)
        now = trio.current_time()
        if pull is not None and pull.error is not None:
            del self._pulls[entry.id]
            if now - pull.asked < ABANDONED:
                return {"error": f"version {number} does not arrive: {pull.error}"}
            pull = None  # what somebody gave up on is no answer to this one
        if pull is None:
            self._pulls[entry.id] = pull = _Pull(entry, now)
            self._send.send_nowait(pull)
        pull.asked = now
        return {**row, "done": False, **weights.progress(entry)}
