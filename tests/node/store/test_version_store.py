"""Weights on disk: verified chunks, cut-through, restarts, adoption and retention."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.store.version_store import NoRoom, VersionStore
from protocol.constants import CHUNK_BYTES
from protocol.errors import LocalError, PeerError
from protocol.weights.manifest import Manifest, TensorInfo, chunk_hashes

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


def missing(store: VersionStore, digest: bytes) -> list[int]:
    held = store.open(digest)
    assert held is not None
    return held.missing()


def test_download(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    assert digest == MANIFEST.digest
    assert missing(store, digest) == [0, 1, 2]
    store.write_chunk(digest, 2, chunk(DATA, 2))
    assert missing(store, digest) == [0, 1]
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
        store.sync(bytes(32))
    assert missing(store, digest) == [0, 1, 2]
    assert store.read_chunk(bytes(32), 0) is None
    assert not store.complete(bytes(32))


def test_a_partial_download_survives_a_restart(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    store.write_chunk(digest, 1, chunk(DATA, 1))
    again = VersionStore(store.folder)
    assert again.held() == [digest]
    assert again.read_chunk(digest, 1) == chunk(DATA, 1)
    assert again.begin(MANIFEST) == digest
    assert missing(again, digest) == [0, 2]
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
    assert missing(again, digest) == [1]
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
    assert missing(again, digest) == [0, 1, 2]
    manifest, _ = again.paths(digest)
    manifest.write_bytes(OTHER.encode())
    assert not VersionStore(store.folder).complete(digest)


def test_leftovers_of_a_crash_are_removed(store: VersionStore) -> None:
    (store.folder / f".{bytes(8).hex()}").mkdir()
    assert VersionStore(store.folder).held() == []
    assert not (store.folder / f".{bytes(8).hex()}").exists()


def test_what_others_put_there_is_left_alone(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    (store.folder / "lost+found").mkdir()
    (store.folder / ".nfs0001").write_text("")
    (store.folder / "notes").write_text("")
    again = VersionStore(store.folder)
    assert again.held() == [digest]
    assert (again.folder / ".nfs0001").exists()


def test_deleting_by_name_spares_all_else(store: VersionStore) -> None:
    gone, stays = store.begin(MANIFEST), store.begin(OTHER)
    with store.pin(stays):
        store.delete([gone, stays, bytes(32)])
    assert store.held() == [stays]


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
    with store.pin(OTHER.digest):
        begun = store.begin(OTHER)
        with store.pin(OTHER.digest):
            assert store.retain(lambda present: {whole}) == []
        assert store.retain(lambda present: {whole}) == []  # still on its way
        assert store.held() == sorted([whole, begun])
        assert store.retain(lambda present: {begun}) == [whole]
    assert store.held() == [begun]
    assert store.read_chunk(whole, 0) is None
    assert not store.complete(whole)
    assert store.retain(lambda present: ()) == [begun]


def test_nobody_waits_for_a_deletion(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = store.begin(MANIFEST), store.begin(OTHER)
    begun, end = threading.Event(), threading.Event()

    def slow(folder: Path, ignore_errors: bool) -> None:
        begun.set()
        assert end.wait(30)
        rmtree(folder, ignore_errors=ignore_errors)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", slow)
    gone: list[bytes] = []
    thread = threading.Thread(target=lambda: gone.extend(store.retain(lambda present: [new])))
    thread.start()
    try:
        assert begun.wait(30)
        with store.pin(new):
            assert store.pinned(new)
        assert store.open(old) is None
        assert store.bitmap(new) == b"\0"
        assert store.held() == [new]
    finally:
        end.set()
        thread.join(30)
    assert gone == [old]
    assert [item.name for item in store.folder.iterdir()] == [new.hex()]


def test_what_is_kept_is_asked_when_nothing_can_be_added(store: VersionStore) -> None:
    begun = store.begin(MANIFEST)
    seen: list[bytes] = []
    threads: list[threading.Thread] = []

    def keep(present: Collection[bytes]) -> Collection[bytes]:
        seen.extend(present)
        threads.append(threading.Thread(target=store.begin, args=(OTHER,)))
        threads[0].start()
        threads[0].join(0.1)
        assert store.held() == [begun]  # the other waits
        return ()

    assert store.retain(keep) == [begun]
    threads[0].join(30)
    assert seen == [begun]
    assert store.held() == [OTHER.digest]


def test_what_is_open_outlives_its_deletion(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    store.write_chunk(digest, 2, chunk(DATA, 2))
    held = store.open(digest)
    assert held is not None
    store.retain(lambda present: ())
    assert store.open(digest) is None
    assert held.read(2) == chunk(DATA, 2)
    assert os.pread(held.fd, 12, 2 * CHUNK_BYTES) == chunk(DATA, 2)


def test_a_disk_without_room(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    kept = store.begin(OTHER)
    store.write_chunk(kept, 0, chunk(OTHER_DATA, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(NoRoom, match="the disk has no room for 2 MiB"):
            store.begin(MANIFEST)
    assert store.held() == [kept]
    assert [item.name for item in store.folder.iterdir()] == [kept.hex()]
    assert missing(store, kept) == [1, 2]
    assert store.begin(MANIFEST) == MANIFEST.digest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel takes no more of a file than so many bytes: what is beyond is not written, as on a disk that fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_other_failures_of_the_disk_leave_nothing_behind(store: VersionStore) -> None:
    with largest_file(SIZE - 1), pytest.raises(OSError, match="File too large"):
        store.begin(MANIFEST)
    assert list(store.folder.iterdir()) == []


def test_the_quota_holds_and_what_may_be_spared_goes_for_it(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "versions", quota=2 * SIZE + 5)
    old, pinned, new = store.begin(MANIFEST), store.begin(OTHER), build(b"3rd.")[0]
    assert store.used() == 2 * SIZE
    with pytest.raises(NoRoom, match="would exceed the quota"):
        store.begin(new)
    assert store.held() == sorted([old, pinned])
    with store.pin(pinned):
        assert store.begin(new, [pinned, old]) == new.digest
    assert store.held() == sorted([pinned, new.digest])
    assert store.begin(new) == new.digest  # it has its room already


class Disk:
    """How many bytes are free, as others leave them."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.free = free

    def __call__(self, folder: Path) -> int:
        return self.free


def test_the_reserve_is_left_free(tmp_path: Path) -> None:
    assert VersionStore(tmp_path / "versions").free() > 0
    disk = Disk((100 << 20) + SIZE - 1)
    store = VersionStore(tmp_path / "versions", reserve=100 << 20, free_bytes=disk)
    with pytest.raises(NoRoom, match="would not leave the reserve of 100 MiB"):
        store.begin(MANIFEST)
    disk.free += 1
    assert store.begin(MANIFEST) == MANIFEST.digest


def test_room_is_kept_for_what_is_on_its_way(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "versions", free_bytes=Disk())
    before = store.free()
    digest = store.begin(MANIFEST)
    assert before - SIZE <= store.free() < before - SIZE + 4096  # whole blocks
    store.write_chunk(digest, 0, chunk(DATA, 0))
    store.sync(digest)
    assert before - SIZE < store.free() <= before - SIZE + CHUNK_BYTES + 4096


def test_a_disk_that_others_filled_meanwhile_is_noticed_before_more_is_fetched(tmp_path: Path) -> None:
    disk = Disk()
    store = VersionStore(tmp_path / "versions", free_bytes=disk)
    digest = store.begin(MANIFEST)
    store.write_chunk(digest, 0, chunk(DATA, 0))
    store.sync(digest)
    lacks = disk.free - store.free()
    spare = store.begin(OTHER)
    disk.free -= store.free() + (5 << 20)
    with pytest.raises(NoRoom, match="the disk is full: weights on their way lack 5 MiB"):
        store.begin(MANIFEST)
    assert store.held() == sorted([digest, spare])
    disk.free = lacks
    assert store.begin(MANIFEST, [spare]) == digest
    assert store.held() == [digest]
    assert missing(store, digest) == [1, 2]


def test_two_processes_share_the_marks(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    child = VersionStore(store.folder, owner=False)
    theirs, ours = child.open(digest), store.open(digest)
    assert theirs is not None
    assert ours is not None
    assert theirs.bitmap() == b"\0"
    theirs.buffer(1)[:] = chunk(DATA, 1)
    assert not ours.has(1)
    assert theirs.check(1)
    assert ours.has(1)
    assert (ours.verified(), ours.bitmap()) == (1, b"\x40")
    assert store.read_chunk(digest, 1) == chunk(DATA, 1)
    store.write_chunk(digest, 2, chunk(DATA, 2))
    assert theirs.missing() == [0]
    assert theirs.bitmap() == b"\x60"
    theirs.buffer(0)[:] = chunk(OTHER_DATA, 0)
    assert not theirs.check(0)
    assert not ours.has(0)
    with pytest.raises(LocalError):
        theirs.buffer(3)
    # Nothing of what it finds damaged does the child delete: that is the owner's.
    store.paths(digest)[0].write_bytes(b"rubbish")
    assert VersionStore(store.folder, owner=False).open(digest) is None
    assert store.paths(digest)[1].exists()


def test_the_owner_takes_marks_of_an_earlier_run_for_claims(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    for index in range(3):
        store.write_chunk(digest, index, chunk(DATA, index))
    store.sync(digest)
    VersionStore(store.folder)
    held = VersionStore(store.folder, owner=False).open(digest)
    assert held is not None
    assert (held.verified(), held.bitmap()) == (0, b"\0")
    assert held.has(2)
    assert held.bitmap() == b"\x20"


def test_an_object_that_was_replaced_is_opened_anew(store: VersionStore, tmp_path: Path) -> None:
    digest = store.begin(MANIFEST)
    child = VersionStore(store.folder, owner=False)
    partial = child.open(digest)
    assert partial is not None
    scratch = tmp_path / "next.bin"
    scratch.write_bytes(DATA)
    store.adopt(MANIFEST.encode(), scratch)
    whole = child.open(digest)
    assert whole is not None
    assert whole is not partial
    assert whole.missing() == []


def test_many_objects_do_not_hold_as_many_descriptors(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "versions", max_mapped=2)
    for fill in range(6):
        listing, data = build(bytes([fill]))
        store.write_chunk(store.begin(listing), 0, chunk(data, 0))
    descriptors = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _exists(name)]
    assert sum(str(store.folder) in target for target in descriptors) == 3 * 2  # bytes, their map, the marks
    assert all(store.read_chunk(digest, 0) is not None for digest in store.held())


def _exists(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_a_chunk_that_arrived_is_written_only_where_it_is_right(store: VersionStore) -> None:
    held = store.open(store.begin(MANIFEST))
    assert held is not None
    assert not held.take(0, memoryview(chunk(OTHER_DATA, 0)))
    assert not held.has(0)
    assert held.read(0) is None
    assert bytes(held.buffer(0)) == bytes(len(chunk(DATA, 0)))
    assert held.take(2, memoryview(chunk(DATA, 2)))  # the last one, which is shorter
    assert held.read(2) == chunk(DATA, 2)
    assert held.missing() == [0, 1]


def test_a_disk_that_takes_a_part_of_a_chunk(store: VersionStore) -> None:
    digest = store.begin(MANIFEST)
    held = store.open(digest)
    assert held is not None
    with largest_file(2 * CHUNK_BYTES + 5):
        assert held.take(0, memoryview(chunk(DATA, 0)))
        store.write_chunk(digest, 1, chunk(DATA, 1))
        with pytest.raises(OSError, match="File too large"):
            held.take(2, memoryview(chunk(DATA, 2)))
        assert bytes(held.buffer(2)[:6]) == chunk(DATA, 2)[:5] + b"\0"
    assert held.missing() == [2]
    assert held.take(2, memoryview(chunk(DATA, 2)))
    assert store.paths(digest)[1].read_bytes() == DATA
