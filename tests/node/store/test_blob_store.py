"""Content-addressed files: whole or absent, and what they say they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from node.store.blob_store import BlobStore


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_put_and_get(blobs: BlobStore) -> None:
    digest = blobs.put(b"hello")
    assert digest == blake3(b"hello").digest()
    assert blobs.put(b"hello") == digest
    assert blobs.has(digest)
    assert blobs.size(digest) == 5
    assert blobs.path(digest).read_bytes() == b"hello"
    assert blobs.get(digest, max_bytes=5) == b"hello"
    assert blobs.get(digest, max_bytes=4) is None
    assert list(blobs.held()) == [digest]
    blobs.delete(digest)
    blobs.delete(digest)
    assert not blobs.has(digest)
    assert blobs.size(digest) is None
    assert blobs.get(digest, max_bytes=5) is None
    assert list(blobs.held()) == []


def test_a_damaged_blob_is_not_here(blobs: BlobStore) -> None:
    digest = blobs.put(b"hello")
    blobs.path(digest).write_bytes(b"hellO")
    assert blobs.get(digest, max_bytes=5, verify=False) == b"hellO"
    assert blobs.get(digest, max_bytes=5) is None
    assert not blobs.has(digest)
    assert blobs.get(blobs.put(b"hello"), max_bytes=5) == b"hello"


def test_ranges_are_of_a_sound_blob(blobs: BlobStore) -> None:
    digest = blobs.put(b"hello")
    assert blobs.get_range(digest, 1, 3) == b"ell"
    assert blobs.get_range(digest, 4, 3) == b"o"
    assert blobs.get_range(bytes(32), 0, 1) is None
    blobs.path(digest).write_bytes(b"hellO!")
    assert blobs.get_range(digest, 0, 5) is None
    assert not blobs.has(digest)


def test_a_failed_write_leaves_nothing(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            blobs.put(b"hello")
    assert list(blobs.held()) == []
    assert list((blobs.folder / "tmp").iterdir()) == []


def test_leftovers_of_a_crash_are_removed(blobs: BlobStore) -> None:
    (blobs.folder / "tmp" / "half").write_bytes(b"he")
    BlobStore(blobs.folder)
    assert list((blobs.folder / "tmp").iterdir()) == []


def test_another_process_reads_and_cleans_nothing_up(blobs: BlobStore) -> None:
    digest = blobs.put(b"hello")
    half = blobs.folder / "tmp" / "half"
    half.write_bytes(b"he")
    assert BlobStore(blobs.folder, owner=False).get(digest) == b"hello"
    assert half.exists()  # its owner is writing it


def test_one_that_was_put_lately_is_not_deleted_for_its_age(blobs: BlobStore) -> None:
    digest = blobs.put(b"hello")
    os.utime(blobs.path(digest), (1000, 1000))
    assert blobs.put(b"hello") == digest  # it counts as new
    assert not blobs.delete(digest, before=2000)
    os.utime(blobs.path(digest), (1000, 1000))
    assert not blobs.delete(digest, before=1000)
    assert list(blobs.sizes()) == [(digest, 5)]
    assert blobs.delete(digest, before=2000)
    assert not blobs.delete(digest)
    assert list(blobs.sizes()) == []


def test_what_is_no_blob_is_left_alone(blobs: BlobStore) -> None:
    digest = blobs.put(b"hello")
    (blobs.path(digest).parent / "notes.txt").write_text("not ours")
    assert list(blobs.held()) == [digest]


async def test_async(blobs: BlobStore) -> None:
    digest = await blobs.put_async(b"hello")
    assert await blobs.get_async(digest, max_bytes=5) == b"hello"
