"""Weights over the control socket: what is on the disk and why, cleaning up, and fetching a version at once.

``{"op": "weights"}`` lists the objects, and tells how many versions were ``applied``: made from deltas since the start;
``{"op": "weights-gc", "dry_run": bool}`` deletes what nothing keeps and, where
the quota is exceeded or the reserve is not left, what may be spared, and tells what went (or would);
``{"op": "weights-pull", "version": N}`` (-1: the newest; as text the first digits of its entry's id) begins to fetch a
version, or tells how far it is: asked again and again by the command that shows the progress. Sizes are bytes, ids hex.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import trio

from node.context import Node, innermost
from node.store.version_store import VersionStore
from node.weights import retention
from node.weights.following import payload
from protocol.constants import CHUNK_BYTES
from protocol.errors import Error
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest

ABANDONED: Final = 5.0
"""Seconds after which nobody waits for a pull any more: the command asks several times a second."""

MIN_ID_DIGITS: Final = 8
"""Fewer of an id's digits name no version: they would be taken for a number."""

OPS: Final = ("weights", "weights-gc", "weights-pull")


async def answer(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one of ``OPS``."""
    match request:
        case {"op": "weights"}:
            entries, lineage = node.log.ledger.lineage(), node.weights.lineage()
            rows = await trio.to_thread.run_sync(objects, entries, node.versions, lineage)
            room = await trio.to_thread.run_sync(retention.room, node.versions)
            told = {"domain": node.domain.id.hex(), "applied": node.weights.catching_up.applied}
            return {**room, **told, "objects": rows}
        case {"op": "weights-gc", "dry_run": bool(dry_run)}:
            return await node.weights.clean(dry_run=dry_run)
        case {"op": "weights-pull", "version": int(version) | str(version)} if not isinstance(version, bool):
            return await node.pulls.answer(version)
    await trio.lowlevel.checkpoint()
    return {"error": "unknown request"}


def objects(entries: Iterable[Entry], store: VersionStore, lineage: retention.Lineage) -> list[dict[str, Any]]:
    """Everything in the store, newest first: what it is, how much of it is here, and why it is kept."""
    named = _named(entries)
    present = store.held()
    kept = retention.reasons(lineage, present)
    rows = []
    for digest in present:
        held = store.open(digest)
        if held is None:
            continue
        kind, announced, term = named.get(digest, (_kind(held.listing), [], None))
        numbers = [payload(entry).number for entry in announced]
        if digest == lineage.genesis and not numbers:  # not published yet
            numbers = [0]
        rows.append(
            {
                "digest": digest.hex(),
                "kind": kind,
                "numbers": numbers,
                "ids": [entry.id.hex() for entry in announced],
                "term": term,
                "size": held.listing.size,
                "here": min(held.listing.size, held.present() * CHUNK_BYTES),
                "kept": kept.get(digest),
            }
        )
    return sorted(rows, key=lambda row: (-max(row["numbers"], default=-1), row["kind"] != "version", row["digest"]))


def _kind(listing: object) -> str:
    return "delta" if isinstance(listing, DeltaManifest) else "version"


def _named(lineage: Iterable[Entry]) -> dict[bytes, tuple[str, list[Entry], int]]:
    """Kind, entries and term by digest. Weights that were announced again have several entries, and numbers."""
    found: dict[bytes, tuple[str, list[Entry], int]] = {}
    for entry in lineage:
        made = payload(entry)
        for digest, kind in ((made.manifest, "version"), (made.delta, "delta")):
            if digest is not None:
                entries = found[digest][1] if digest in found else []
                found[digest] = (kind, [*entries, entry], made.term)
    return found


@dataclass(slots=True)
class _Pull:
    """A version that somebody wants now."""

    entry: Entry
    asked: float
    """When somebody last asked (trio's clock)."""
    error: str | None = None


class Pulls:
    """Fetches versions that a person asked for."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pulls: dict[bytes, _Pull] = {}
        self._send, self._receive = trio.open_memory_channel[_Pull](math.inf)

    async def run(self) -> None:
        """Fetch what is asked for, for ever."""
        async with trio.open_nursery() as nursery:
            async for pull in self._receive:
                nursery.start_soon(self._fetch, pull)

    async def _fetch(self, pull: _Pull) -> None:
        try:
            await self._node.weights.hold(pull.entry)
        except* (Error, OSError) as group:
            pull.error = str(innermost(group))
        else:
            del self._pulls[pull.entry.id]

    async def answer(self, version: int | str) -> dict[str, Any]:
        """Begin to fetch a version unless it is here or on its way, and tell how far it is.

        A text is what the id of its entry begins with; several that do so are refused.
        """
        await trio.lowlevel.checkpoint()
        weights = self._node.weights
        lineage = self._node.log.ledger.lineage()
        if isinstance(version, str):
            alike = [e for e in lineage if len(version) >= MIN_ID_DIGITS and e.id.hex().startswith(version)]
            if len(alike) > 1:
                return {"error": f"{len(alike)} versions have ids that begin with {version}"}
            entry = alike[0] if alike else None
        else:
            entry = next((e for e in lineage if payload(e).number == version), None)
        if version == -1:
            entry = weights.newest()
        if entry is None:
            return {"error": "no version was published yet" if version == -1 else f"there is no version {version}"}
        number, size = payload(entry).number, payload(entry).size
        if weights.outdated(entry.id):
            return {"error": f"version {number} is older than those that nodes keep"}
        told = {"version": number, "size": size}
        if entry.id in weights.held():
            return {**told, "done": True, "have": size, "rate": 0, "peers": 0, "part": "whole"}
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
        return {**told, "done": False, **weights.progress(entry)}
