"""What is kept and why, what may go where room is short, and cleaning up."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.store.version_store import VersionStore
from node.weights.retention import RetentionBasis, clean, reasons, spare
from protocol.constants import CHUNK_BYTES
from protocol.records import Weights
from protocol.weights.manifest import Manifest
from tests.protocol.builders import digest


def version(number: int, *, delta: bool = True, manifest: bytes | None = None) -> Weights:
    has = delta and number > 0
    return Weights(
        term=1,
        number=number,
        predecessor=digest(f"entry {number - 1}") if number else None,
        manifest=manifest or digest(f"manifest {number}"),
        manifest_size=100,
        whole=digest("whole"),
        size=CHUNK_BYTES,
        step=None,
        delta=digest(f"delta {number}") if has else None,
        delta_size=10 if has else 0,
    )


def names(found: object) -> list[str]:
    known = {digest(f"{kind} {n}"): f"{kind[0]}{n}" for kind in ("manifest", "delta") for n in range(12)}
    return [known[item] for item in found]  # type: ignore[attr-defined]


def lineage(count: int = 9, expected: tuple[bytes, ...] = ()) -> RetentionBasis:
    return RetentionBasis([version(n) for n in range(count)], digest("manifest 0"), expected, 2)


ALL = [digest(f"{kind} {n}") for kind in ("manifest", "delta") for n in range(9)]


def test_the_newest_versions_their_deltas_and_bases_and_version_0_are_kept() -> None:
    kept = reasons(lineage(), ALL)
    assert sorted(names(kept)) == ["d5", "d6", "d7", "d8", "m0", "m4", "m5", "m6", "m7", "m8"]
    assert kept[digest("manifest 8")] == "the newest version"
    assert kept[digest("delta 8")] == "what changed to the newest version"
    assert kept[digest("manifest 4")] == "one of the newest 5 versions"
    assert kept[digest("manifest 0")] == "version 0, which new nodes begin with"


def test_a_node_that_is_behind_keeps_what_it_has() -> None:
    present = [digest(f"manifest {n}") for n in (0, 1, 2)]
    assert sorted(names(reasons(lineage(), present)))[-4:] == ["m0", "m1", "m2", "m8"]


def test_the_base_of_a_delta_in_use_is_kept() -> None:
    # Weights that were announced again take up the newest five numbers with one object.
    versions = [version(n) for n in range(5)] + [version(n, delta=False, manifest=digest("manifest 4")) for n in (5,)]
    versions += [version(n) for n in (6, 7, 8)]
    present = [*ALL, digest("manifest 4")]
    kept = reasons(RetentionBasis(versions, digest("manifest 0"), (), 2), present)
    assert digest("manifest 3") in kept
    few = [digest("manifest 8"), digest("delta 8"), digest("manifest 7")]
    assert reasons(lineage(), few)[digest("manifest 7")] == "one of the newest 5 versions"


def test_what_was_entrusted_is_kept() -> None:
    ours = (digest("manifest 9"), digest("delta 9"))
    kept = reasons(lineage(expected=ours), [*ALL, *ours])
    assert kept[ours[0]] == kept[ours[1]] == "entrusted by the trainer"
    assert not set(ours) & set(spare(lineage(expected=ours), [*ALL, *ours]))


def test_deltas_go_first_and_what_is_in_use_never() -> None:
    present = [digest(f"manifest {n}") for n in (0, 3, 4, 5, 6, 7, 8)] + [digest(f"delta {n}") for n in (6, 7, 8)]
    assert names(spare(lineage(), present)) == ["m3", "d6", "d7", "d8", "m0", "m4", "m5"]
    assert names(spare(lineage(), [digest("manifest 8")])) == []


def test_without_a_version_there_is_little_to_say() -> None:
    nothing = RetentionBasis([], digest("manifest 0"), (), 2)
    assert names(reasons(nothing, ALL)) == ["m0"]
    assert set(spare(nothing, ALL)) == {*ALL}


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "versions")


def fill(store: VersionStore, count: int) -> RetentionBasis:
    """``count`` versions of a mebibyte each."""
    versions = []
    for number in range(count):
        data = bytes([number]) * CHUNK_BYTES
        manifest = Manifest.of_file([("a", "F32", (CHUNK_BYTES // 4,))], data, 1)
        file = store.folder.parent / "file"
        file.write_bytes(data)
        versions.append(version(number, delta=False, manifest=store.adopt(manifest.encode(), file)))
    return RetentionBasis(versions, versions[0].manifest, (), 2)


def gone(found: dict[str, object]) -> int:
    rows = found["gone"]
    assert isinstance(rows, list)
    return len(rows)


def test_cleaning_deletes_what_nothing_keeps_and_a_dry_run_nothing(store: VersionStore) -> None:
    lineage = fill(store, 8)
    before = store.held()
    found = clean(store, lineage, dry_run=True)
    assert gone(found) == 2
    assert store.held() == before
    assert clean(store, lineage, dry_run=False)["gone"] == found["gone"]
    assert len(store.held()) == 6
    assert gone(clean(store, lineage, dry_run=False)) == 0


def test_cleaning_makes_room_down_to_what_is_in_use(store: VersionStore) -> None:
    lineage = fill(store, 8)
    store.quota = 4 * CHUNK_BYTES
    found = clean(store, lineage, dry_run=False)
    assert gone(found) == 4
    assert found["shortage"] is None
    store.quota = 2 * CHUNK_BYTES
    found = clean(store, lineage, dry_run=False)
    assert len(store.held()) == 3
    assert found["shortage"] == "1 MiB more are needed than may be spared"


def test_what_comes_while_it_cleans_stays(tmp_path: Path) -> None:
    late, came = Manifest.of_file([("late", "F32", (4,))], bytes(16), 1), list[bytes]()

    def free_bytes(folder: Path) -> int:
        if not came:
            came.append(late.digest)
            cleaned.begin(late)  # on another thread
        return 1 << 40

    cleaned = VersionStore(tmp_path / "versions", free_bytes=free_bytes)
    clean(cleaned, lineage(), dry_run=False)
    assert cleaned.held() == came


def test_the_reserve_counts_as_well(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "versions", free_bytes=lambda folder: CHUNK_BYTES)
    lineage = fill(store, 6)
    store.reserve = 2 * CHUNK_BYTES
    assert gone(clean(store, lineage, dry_run=False)) == 1


def test_what_is_on_its_way_stays(store: VersionStore) -> None:
    lineage = fill(store, 8)
    with store.pin(lineage.versions[1].manifest):
        assert gone(clean(store, lineage, dry_run=False)) == 1
    assert gone(clean(store, lineage, dry_run=False)) == 1
