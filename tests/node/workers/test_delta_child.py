"""``node.workers.delta_child``: describing a version with its difference, and making it from them, wrong input
included."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from node.errors import UserError
from node.store.version_store import VersionStore
from node.workers import delta_child as worker
from node.workers.child_messages import AppliedDelta, ApplyDelta, DescribedVersion, DescribeVersion, TensorRow
from node.workers.child_process import WorkerError, open_worker
from protocol.constants import CHUNK_BYTES, DELTA_BLOCK_BYTES
from protocol.weights.delta import DeltaManifest
from protocol.weights.manifest import Manifest

VALUES = (2 * DELTA_BLOCK_BYTES + CHUNK_BYTES + 4) // 2
BF16: list[TensorRow] = [("a", "BF16", (VALUES - 4,)), ("b", "BF16", (4,))]
F32: list[TensorRow] = [("a", "F32", (VALUES // 2,))]
MIXED: list[TensorRow] = [("b", "F16", (3,)), ("a", "F32", (VALUES // 2 - 3,)), ("c", "BF16", (3,))]


def some(seed: int = 0) -> Any:
    """Bytes of a version, as values of two."""
    return np.random.default_rng(seed).integers(0, 2**16, VALUES, dtype=np.uint16)


def step(values: Any, share: float = 0.003, seed: int = 1) -> Any:
    """The values with a few moved to a neighbour, none of them in the middle block."""
    random = np.random.default_rng(seed)
    moves = np.where(random.random(VALUES) < share, random.choice(np.array([1, -1], np.int16), VALUES), 0)
    moves[DELTA_BLOCK_BYTES // 2 : DELTA_BLOCK_BYTES] = 0
    return values + moves.astype(np.uint16)


class Setting:
    """A store with a base, and what it takes to make its successor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = VersionStore(folder / "versions")

    def describe(
        self, values: Any, base: bytes | None = None, rows: list[TensorRow] = BF16, threads: int = 1
    ) -> DescribedVersion:
        whole = self.folder / "next.bin"
        values.tofile(whole)
        place = None if base is None else str(self.place(base))
        return worker.describe(DescribeVersion(rows, 1, str(whole), place, str(self.folder / "delta.bin"), threads))

    def place(self, digest: bytes) -> Path:
        return self.store.paths(digest)[0].parent

    def adopt(self, values: Any, base: bytes | None = None, rows: list[TensorRow] = BF16) -> tuple[bytes, bytes | None]:
        """Describe a version and put it, and the delta, into the store."""
        found = self.describe(values, base, rows)
        digest = self.store.adopt(found.manifest, self.folder / "next.bin")
        if found.delta_manifest is None:
            return digest, None
        return digest, self.store.adopt(found.delta_manifest, self.folder / "delta.bin")

    def pair(self, rows: list[TensorRow] = BF16) -> tuple[bytes, Manifest, bytes]:
        """A base, the manifest of its successor (whose bytes are gone), and the delta."""
        base, _ = self.adopt(some(), rows=rows)
        target, delta = self.adopt(step(some()), base, rows)
        held = self.store.open(target)
        assert delta is not None
        assert held is not None
        assert isinstance(held.listing, Manifest)
        self.store.retain(lambda present: [base, delta])
        return base, held.listing, delta

    def apply(self, delta: bytes, base: bytes, target: Manifest, threads: int = 1) -> AppliedDelta:
        place = self.place(self.store.begin(target))
        return worker.apply(ApplyDelta(str(self.place(delta)), str(self.place(base)), str(place), threads))

    def whole(self, target: Manifest) -> bytes:
        return self.store.paths(target.digest)[1].read_bytes()


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [BF16, F32, MIXED])
def test_a_delta_makes_the_version_and_marks_it_verified(setting: Setting, rows: list[TensorRow], threads: int) -> None:
    base, target, delta = setting.pair(rows)
    found = setting.apply(delta, base, target, threads)
    assert (found.written, found.wrong) == (len(target.chunks), [])
    assert setting.whole(target) == step(some()).tobytes()
    assert setting.store.complete(target.digest)
    # Once more, from nothing and from all: the same.
    assert setting.apply(delta, base, target).written == 0
    setting.store.retain(lambda present: [base, delta])
    assert setting.apply(delta, base, target).written == len(target.chunks)


def test_the_delta_is_small_and_skips_what_did_not_change(setting: Setting) -> None:
    _, target, delta = setting.pair()
    held = setting.store.open(delta)
    assert held is not None
    listing = held.listing
    assert isinstance(listing, DeltaManifest)
    assert [segment.block for segment in listing.segments] == [0, 2]
    assert listing.size < target.size / 100


def test_the_manifest_is_the_one_of_the_file(setting: Setting) -> None:
    values = some()
    expected = Manifest.of_file(BF16, values.tobytes(), 1)
    for threads in (1, 3):
        assert Manifest.parse(setting.describe(values, threads=threads).manifest) == expected


def test_there_is_no_delta_where_it_would_not_be_clearly_smaller(setting: Setting) -> None:
    base, _ = setting.adopt(some())
    for other in (some(seed=9), some()):  # all new, and nothing new
        found = setting.describe(other, base)
        assert found.delta_manifest is None
        assert found.changed == 0
        assert not (setting.folder / "delta.bin").exists()
    # What looks small in the samples is given up as soon as it is not.
    mostly = some()
    mostly[1000 : DELTA_BLOCK_BYTES // 2] = some(seed=3)[1000 : DELTA_BLOCK_BYTES // 2]
    mostly[DELTA_BLOCK_BYTES // 2 :] ^= np.uint16(0x5A5A)
    found = setting.describe(mostly, base)
    assert Manifest.parse(found.manifest).size == 2 * VALUES


def test_there_is_no_delta_between_different_layouts(setting: Setting) -> None:
    base, _ = setting.adopt(some())
    assert setting.describe(step(some()), base, rows=MIXED).delta_manifest is None


def test_a_delta_on_the_wrong_base_is_refused(setting: Setting) -> None:
    base, target, delta = setting.pair()
    other, _ = setting.adopt(some(seed=4))
    with pytest.raises(UserError, match="other versions"):
        setting.apply(delta, other, target)
    with pytest.raises(UserError, match="another kind"):
        setting.apply(base, base, target)
    held = setting.store.open(target.digest)
    assert held is not None
    assert len(held.missing()) == len(target.chunks)


def test_chunks_that_come_out_wrong_are_named_and_not_written(setting: Setting) -> None:
    base, target, delta = setting.pair()
    with setting.store.paths(base)[1].open("r+b") as file:  # the disk altered the base
        file.seek(CHUNK_BYTES + 7)
        file.write(b"?")
    found = setting.apply(delta, base, target, threads=2)
    assert found.wrong == [1]
    held = setting.store.open(target.digest)
    assert held is not None
    assert held.missing() == [1]
    start = CHUNK_BYTES
    setting.store.write_chunk(target.digest, 1, step(some()).tobytes()[start : start + CHUNK_BYTES])
    assert setting.store.complete(target.digest)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_damaged_delta_is_refused(setting: Setting, threads: int) -> None:
    base, target, delta = setting.pair()
    path = setting.store.paths(delta)[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + bytes(20) + whole[70:])  # other gaps: a delta like any other, but the wrong one
    assert setting.apply(delta, base, target, threads).wrong
    path.write_bytes(bytes(20) + whole[20:])
    with pytest.raises(UserError, match="not compressed as it should be"):
        setting.apply(delta, base, target, threads)
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="bytes, not"):
        setting.apply(delta, base, target, threads)
    path.unlink()
    with pytest.raises(UserError, match="cannot read"):
        setting.apply(delta, base, target, threads)
    path.write_bytes(whole)
    setting.apply(delta, base, target, threads)
    assert setting.store.complete(target.digest)


def test_what_is_verified_already_is_left_alone(setting: Setting) -> None:
    base, target, delta = setting.pair()
    setting.store.begin(target)
    setting.store.write_chunk(target.digest, 3, step(some()).tobytes()[3 * CHUNK_BYTES : 4 * CHUNK_BYTES])
    assert setting.apply(delta, base, target).written == len(target.chunks) - 1
    assert setting.store.complete(target.digest)


async def test_the_child_does_both_and_loads_no_torch(setting: Setting) -> None:
    base, target, delta = setting.pair()
    places = [setting.place(digest) for digest in (delta, base, setting.store.begin(target))]
    async with open_worker("node.workers.delta_child", name="delta") as child:
        found = await child.call(ApplyDelta(str(places[0]), str(places[1]), str(places[2])), timeout=60)
        assert found.wrong == []
        assert setting.store.complete(target.digest)
        with pytest.raises(WorkerError, match="other versions") as refused:
            await child.call(ApplyDelta(str(places[0]), str(places[2]), str(places[2])), timeout=60)
        assert refused.value.kind == "user"
        maps = await trio.Path(f"/proc/{child.pid}/maps").read_text()
        assert "numpy" in maps
        assert "torch" not in maps


def test_memory_does_not_grow_with_the_model(setting: Setting) -> None:
    """A sparse model of 192 MiB (all zeros): hashed and compared within 64 MiB more than at first."""
    size = 192 << 20
    rows: list[TensorRow] = [("a", "F32", (size // 4,))]
    for name in ("base.bin", "next.bin"):
        os.truncate(os.open(setting.folder / name, os.O_CREAT | os.O_RDWR), size)
    with (setting.folder / "next.bin").open("r+b") as file:
        file.seek(100 << 20)
        file.write(b"\1" * 64)
    peaks: list[int] = []

    def watch() -> None:
        while not done.wait(0.01):
            peaks.append(resident())

    done = threading.Event()
    before = resident()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        first = worker.describe(DescribeVersion(rows, 1, str(setting.folder / "base.bin"), threads=2))
        base = setting.folder / "versions" / "base"
        base.mkdir()
        (base / "manifest").write_bytes(first.manifest)
        (setting.folder / "base.bin").rename(base / "whole.bin")
        whole, delta = str(setting.folder / "next.bin"), str(setting.folder / "delta.bin")
        found = worker.describe(DescribeVersion(rows, 1, whole, str(base), delta, threads=2))
        assert found.changed == 16
    finally:
        done.set()
        thread.join()
    assert max(peaks) - before < 64 << 20


def resident() -> int:
    """Bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
