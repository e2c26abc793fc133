"""Weights on disk: verified chunks, cut-through, restarts, adoption and retention."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node.store.versions import VersionStore
from protocol.constants import CHUNK_BYTES
from protocol.errors import LocalError, PeerError
from protocol.manifest import Manifest, TensorInfo, chunk_hashes

SIZE = 2 * CHUNK_BYTES + 12


def chunk(data: bytes, index: int) -> bytes:
    return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def build(fill: bytes) -> tuple[Manifest, bytes]:
    data = (fill * SIZE)[:SIZE]
    return Manifest(SIZE, (TensorInfo("w", "F32", (SIZE // 4,)),), tuple(chunk_hashes(data)), 1), data


MANIFEST, DATA = build(b"one ")
OTHER, OTHER_DATA = build(b"two!")


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "versions")


def test_download(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    assert digest == MANIFEST.digest
    assert store.missing(digest) == [0, 1, 2]
    store.write_chunk(digest, 2, chunk(DATA, 2))
    assert store.missing(digest) == [0, 1]
    assert not store.complete(digest)
    assert store.read_chunk(digest, 2) == chunk(DATA, 2)  # before the version is whole
    assert store.read_chunk(digest, 0) is None
    assert store.read_chunk(digest, 3) is None
    assert store.read_chunk(digest, -1) is None
    for index in (0, 1, 1):
        store.write_chunk(digest, index, chunk(DATA, index))
    assert store.complete(digest)
    manifest, whole = store.paths(digest)
    assert manifest.read_bytes() == MANIFEST.encode()
    assert whole.read_bytes() == DATA
    assert store.held() == [digest]


def test_wrong_chunks_are_refused(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    flipped = bytearray(chunk(DATA, 0))
    flipped[7] ^= 1
    with pytest.raises(PeerError):
        store.write_chunk(digest, 0, bytes(flipped))
    with pytest.raises(PeerError):
        store.write_chunk(digest, 0, chunk(DATA, 0)[:-1])
    with pytest.raises(PeerError):
        store.write_chunk(digest, 3, b"")
    with pytest.raises(LocalError):
        store.write_chunk(bytes(32), 0, b"")
    with pytest.raises(LocalError):
        store.missing(bytes(32))
    assert store.missing(digest) == [0, 1, 2]
    assert store.read_chunk(bytes(32), 0) is None
    assert not store.complete(bytes(32))


def test_a_partial_download_survives_a_restart(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    store.write_chunk(digest, 1, chunk(DATA, 1))
    again = VersionStore(store.folder)
    assert again.held() == [digest]
    assert again.read_chunk(digest, 1) == chunk(DATA, 1)
    assert again.begin(MANIFEST) == digest
    assert again.missing(digest) == [0, 2]
    for index in (0, 2):
        again.write_chunk(digest, index, chunk(DATA, index))
    assert VersionStore(store.folder).complete(digest)


def test_marks_of_an_earlier_run_are_verified(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    for index in range(3):
        store.write_chunk(digest, index, chunk(DATA, index))
    _, whole = store.paths(digest)
    with whole.open("r+b") as file:  # the power went before this page reached the disk
        file.seek(CHUNK_BYTES + 5)
        file.write(b"\0")
    again = VersionStore(store.folder)
    assert again.read_chunk(digest, 1) is None
    assert again.missing(digest) == [1]
    again.write_chunk(digest, 1, chunk(DATA, 1))
    assert again.complete(digest)
    assert whole.read_bytes() == DATA


@pytest.mark.parametrize("name", ["manifest", "whole.bin", "chunks"])
def test_damaged_versions_are_begun_anew(store: VersionStore, name: str) -> None:
    digest = store.begin(MANIFEST)
    for index in range(3):
        store.write_chunk(digest, index, chunk(DATA, index))
    (store.folder / digest.hex() / name).unlink()
    again = VersionStore(store.folder)
    assert again.read_chunk(digest, 0) is None
    assert again.begin(MANIFEST) == digest
    assert again.missing(digest) == [0, 1, 2]
    manifest, _ = again.paths(digest)
    manifest.write_bytes(OTHER.encode())
    assert not VersionStore(store.folder).complete(digest)


def test_leftovers_of_a_crash_are_removed(store: VersionStore) -> None:
    (store.folder / ".half").mkdir()
    assert VersionStore(store.folder).held() == []
    assert not (store.folder / ".half").exists()


def test_adopt(store: VersionStore, tmp_path: Path) -> None:
    scratch = tmp_path / "next.bin"
    scratch.write_bytes(DATA)
    digest = store.adopt(MANIFEST.encode(), scratch)
    assert digest == MANIFEST.digest
    assert not scratch.exists()
    assert store.complete(digest)
    assert store.read_chunk(digest, 0) == chunk(DATA, 0)
    assert VersionStore(store.folder).complete(digest)
    scratch.write_bytes(DATA)  # the same weights once more
    assert store.adopt(MANIFEST.encode(), scratch) == digest
    assert store.complete(digest)


def test_adopt_refuses_what_does_not_belong_together(store: VersionStore, tmp_path: Path) -> None:
    scratch = tmp_path / "next.bin"
    scratch.write_bytes(DATA[:-1])
    with pytest.raises(LocalError, match="bytes"):
        store.adopt(MANIFEST.encode(), scratch)
    scratch.write_bytes(OTHER_DATA)
    with pytest.raises(LocalError, match="hash"):
        store.adopt(MANIFEST.encode(), scratch)
    assert store.held() == []


def test_retention(store: VersionStore, tmp_path: Path) -> None:
    scratch = tmp_path / "next.bin"
    scratch.write_bytes(DATA)
    whole = store.adopt(MANIFEST.encode(), scratch)
    begun = store.begin(OTHER)
    store.retain({whole})
    assert store.held() == sorted([whole, begun])  # still on its way
    store.retain({begun})
    assert store.held() == [begun]
    assert store.read_chunk(whole, 0) is None
    assert not store.complete(whole)


def test_a_disk_without_room(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError, match="No space"):
            store.begin(MANIFEST)
    assert list(store.folder.iterdir()) == []
    assert store.missing(store.begin(MANIFEST)) == [0, 1, 2]
