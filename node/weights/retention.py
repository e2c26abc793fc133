"""Which bulk objects a node keeps, and why; the same for the daemon, ``weights ls`` and ``weights gc``.

1. Kept are the newest ``KEPT_VERSIONS`` versions of the lineage that are here, whole or partial; version 0, which every
   new node begins with; what the trainer entrusted; and what belongs to the newest version, here or not.
2. Kept are the deltas to the newest ``MAX_CHAIN`` versions, so that those who missed some can catch up, and the base of
   each of these.
3. Where room is short, deltas go first, then versions, oldest first, version 0 among them; never one that submissions
   may still be made, audited or trained with, nor one that was entrusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from node.store.version_store import VersionStore
from protocol.constants import KEPT_VERSIONS
from protocol.domain import Domain
from protocol.log.entry import Entry
from protocol.records import Weights
from protocol.weights.delta import MAX_CHAIN

Cleaned = dict[str, Any]
"""What cleaning up did, ready for JSON: ``gone`` (rows of digest and size), ``shortage`` (why room is still short, or
None), and the room that is left."""


@dataclass(frozen=True, slots=True)
class RetentionBasis:
    """What retention goes by: the payloads of the lineage's newest versions, oldest first, the manifest of version 0,
    manifests and deltas that are expected to be published, and the domain's ``async_level``."""

    versions: Sequence[Weights]
    genesis: bytes
    expected: Collection[bytes]
    async_level: int


def lineage_of(entries: Sequence[Entry], domain: Domain, expected: Collection[bytes] = ()) -> RetentionBasis:
    """What retention goes by, from the weights entries of the lineage, oldest first."""
    versions = [entry.payload for entry in entries if isinstance(entry.payload, Weights)]
    return RetentionBasis(versions, domain.model.manifest.hash, expected, domain.recipe.async_level)


def reasons(lineage: RetentionBasis, present: Collection[bytes]) -> dict[bytes, str]:
    """Why each object to keep is kept, by digest; ``present`` are the digests of those on the disk."""
    versions = lineage.versions
    found: dict[bytes, str] = {}

    def keep(digest: bytes | None, why: str) -> None:
        if digest is not None:
            found.setdefault(digest, why)

    if versions:
        keep(versions[-1].manifest, "the newest version")
        keep(versions[-1].delta, "what changed to the newest version")
    here = list(dict.fromkeys(v.manifest for v in reversed(versions) if v.manifest in present))
    for manifest in here[:KEPT_VERSIONS]:
        keep(manifest, f"one of the newest {KEPT_VERSIONS} versions")
    for digest in lineage.expected:
        keep(digest, "entrusted by the trainer")
    for version in reversed(versions[-MAX_CHAIN:]):
        keep(version.delta, f"what changed to version {version.number}")
    numbered = {version.number: version for version in versions}
    for version in reversed(versions[-MAX_CHAIN:]):
        if version.delta in present and version.number - 1 in numbered:
            keep(numbered[version.number - 1].manifest, f"the base of the delta to version {version.number}")
    keep(lineage.genesis, "version 0, which new nodes begin with")
    return found


def spare(lineage: RetentionBasis, present: Collection[bytes]) -> Iterator[bytes]:
    """What may go where room is short, the first to go first."""
    versions = lineage.versions
    needed = {v.manifest for v in versions[-1 - lineage.async_level :]} | set(lineage.expected)
    kept = reasons(lineage, present)
    yield from (digest for digest in present if digest not in kept)
    seen: set[bytes] = set()
    for digest in (*(v.delta for v in versions), lineage.genesis, *(v.manifest for v in versions)):
        if digest is not None and digest in present and digest in kept and digest not in needed and digest not in seen:
            seen.add(digest)
            yield digest


def room(store: VersionStore) -> dict[str, int]:
    """The room that weights take and may take, in bytes."""
    return {"used": store.used(), "quota": store.quota, "free": store.free(), "reserve": store.reserve}


def clean(store: VersionStore, lineage: RetentionBasis, *, dry_run: bool) -> Cleaned:
    """Delete what nothing keeps and, while the quota is exceeded or the reserve is not left, what may be spared.

    What is on its way stays. With ``dry_run`` nothing is deleted.
    """
    present = store.held()
    kept = reasons(lineage, present)
    sizes = {digest: store.size(digest) for digest in present}
    gone = [digest for digest in present if digest not in kept and not store.pinned(digest)]

    def excess() -> int:
        freed = sum(sizes[digest] for digest in gone)
        over_quota = store.used() - freed - store.quota if store.quota else 0
        return max(over_quota, store.reserve - store.free() - freed)

    for digest in spare(lineage, present):
        if excess() <= 0:
            break
        if digest not in gone and not store.pinned(digest):
            gone.append(digest)
    lacking = excess()
    if not dry_run:
        store.delete(gone)  # by name: the trainer may have put a new version here meanwhile
    return {
        **room(store),
        "gone": [{"digest": digest.hex(), "size": sizes[digest]} for digest in gone],
        "shortage": f"{lacking >> 20} MiB more are needed than may be spared" if lacking > 0 else None,
    }
