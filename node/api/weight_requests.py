"""Weights over the control socket: what is on the disk and why, cleaning up, and fetching a version at once.

``{"op": "weights"}`` lists the objects, and tells how many versions were ``applied``: made from deltas since the start;
``{"op": "weights-gc", "dry_run": bool}`` deletes what nothing keeps and, where
the quota is exceeded or the reserve is not left, what may be spared, and tells what went (or would);
``{"op": "weights-pull", "version": N}`` (-1: the newest; as text the first digits of its entry's id) begins to fetch a
version, or tells how far it is: asked again and again by the command that shows the progress. Sizes are bytes, ids hex.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import trio

from node.api.control_requests import Answer, Panel, Request
from node.store.version_store import VersionStore
from node.weights import retention
from node.weights.held import payload
from protocol.constants import CHUNK_BYTES
from protocol.log.entry import Entry
from protocol.weights.delta import DeltaManifest


class ListWeights(Request, tag="weights"):
    """What is on the disk and why."""

    async def answer(self, panel: Panel) -> Answer:
        node = panel.node
        entries, lineage = node.log.ledger.lineage(), panel.weights.held.lineage()
        rows = await trio.to_thread.run_sync(objects, entries, panel.versions, lineage)
        room = await trio.to_thread.run_sync(retention.room, panel.versions)
        return {**room, "domain": node.domain.id.hex(), "applied": panel.weights.deltas.applied, "objects": rows}


class CleanWeights(Request, tag="weights-gc"):
    """Delete what nothing keeps."""

    dry_run: bool

    async def answer(self, panel: Panel) -> Answer:
        return {**await panel.weights.held.clean(dry_run=self.dry_run)}


class PullWeights(Request, tag="weights-pull"):
    """Begin to fetch a version, or tell how far it is."""

    version: int | str

    async def answer(self, panel: Panel) -> Answer:
        return await panel.pulls.answer(self.version)


def objects(entries: Iterable[Entry], store: VersionStore, lineage: retention.RetentionBasis) -> list[dict[str, Any]]:
    """Everything in the store, newest first: what it is, how much of it is here, and why it is kept."""
    named = _named(entries)
    present = store.held()
    kept = retention.reasons(lineage, present)
    rows = []
    for digest in present:
        held = store.open(digest)
        if held is None:
            continue
        unnamed = "delta" if isinstance(held.listing, DeltaManifest) else "version"
        kind, announced, term = named.get(digest, (unnamed, [], None))
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
