"""Weights on disk: ``versions/<digest>/`` holds a bulk object, a whole version or a delta: ``node.store.bulk_object``.

1. The daemon owns the store, its bulk child opens the same folder. Marks of an earlier run become claims when the owner
   opens the store, which is before it starts the child.
2. A chunk may be served as soon as it is verified, long before the object is whole. Nothing is served or called
   complete that was not verified since the daemon started.
3. Room is taken when an object is begun: where it would exceed the quota, or leave less free space than the reserve,
   what may be spared goes first, and then ``NoRoom`` is raised; nothing that is kept is lost for it. The same where
   others have filled the disk since, so that what lacks of objects on their way has no room any more.
4. ``retain`` deletes what is neither kept nor pinned. What is on its way is pinned.
5. What is deleted is moved aside in a moment, and then taken apart: nobody waits for that but who asked for it.

Every method is synchronous and may be called from any thread. All but ``pin``, ``pinned`` and ``paths`` do disk work,
and may take seconds.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

from node.store.bulk_object import MISSING, VERIFIED, BulkObject
from node.store.durable_files import sync_directory, write_atomic
from node.store.hashing import hash_bytes
from protocol.constants import CHUNK_BYTES, MAX_MANIFEST_BYTES
from protocol.errors import LocalError, PeerError
from protocol.weights.delta import parse_chunk_list
from protocol.weights.manifest import ChunkList, verify_chunk

MAX_MAPPED: Final = 16
"""Objects kept open, three descriptors each."""

_OBJECT: Final = re.compile("[0-9a-f]{64}")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{16}")


class NoRoom(OSError):
    """The quota or the reserve forbids it, or the disk is full. Waiting, or deleting something, helps."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOSPC, text)

    def __str__(self) -> str:
        return str(self.strerror)


def free_bytes(folder: Path) -> int:
    """The bytes free for this user on a folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


class VersionStore:
    """The bulk objects below one folder, by the BLAKE3 hash of their chunk lists.

    ``quota`` is the most bytes that all may take, ``reserve`` the free bytes that are left to others; 0 is no limit.
    Where ``owner`` is false another process owns the store, and this one only opens what is there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quota: int = 0,
        reserve: int = 0,
        owner: bool = True,
        max_mapped: int = MAX_MAPPED,
        free_bytes: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.folder = folder
        self._max_mapped = max_mapped
        self._free_bytes = free_bytes
        self.quota = quota
        self.reserve = reserve
        self._open: dict[bytes, BulkObject] = {}
        self._pinned: Counter[bytes] = Counter()
        self._lock = Lock()
        """Guards the two above, and that nothing is moved aside while it is pinned: held for moments only."""
        self._changing = Lock()
        """Of those who make, adopt and delete objects, one after the other."""
        if owner:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in folder.glob(".*"):
                if _TEMPORARY.fullmatch(leftover.name):
                    shutil.rmtree(leftover)
            for digest in self.held():
                found = self.open(digest)
                if found is None:
                    self._delete(digest)  # damaged by the disk: what is left of it is of no use
                else:
                    found.demote()
            self._open.clear()

    def open(self, digest: bytes) -> BulkObject | None:
        """The object of this name, whole or partial; None where it is not here."""
        with self._lock:
            known = self._open.get(digest)
        if known is not None and self._is_here(digest, known):
            return known
        held = self._load(digest)
        with self._lock:
            now = self._open.pop(digest, None)
            if held is None:
                return None
            if now is not None and now is not known and now.identity == held.identity:
                held = now  # another thread was quicker
            while len(self._open) >= self._max_mapped:
                del self._open[next(iter(self._open))]
            self._open[digest] = held
        return held

    def begin(self, listing: ChunkList, spare: Sequence[bytes] = ()) -> bytes:
        """Make room for an object, or take up what an earlier run left of it; returns its digest. ``spare`` are objects
        that may go where room is short, the first to go first.

        Raises ``NoRoom``, and ``OSError`` for other failures of the disk.
        """
        data = listing.encode()
        digest = hash_bytes(data)
        with self._changing:
            if self.open(digest) is None:
                self._delete(digest)
                self._make_room(lambda: self._shortage(listing.size), digest, spare)
                temporary = self.folder / f".{secrets.token_hex(8)}"
                try:
                    self._make(temporary, data, len(listing.chunks), MISSING)
                    with (temporary / "whole.bin").open("wb") as file:
                        # Not allocated at once: some file systems write zeros for it. ``free`` keeps the room for it.
                        os.ftruncate(file.fileno(), listing.size)
                    self._place(temporary, digest)
                except BaseException as error:
                    shutil.rmtree(temporary, ignore_errors=True)
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise NoRoom(f"the disk has no room for {listing.size >> 20} MiB of weights") from None
                    raise
            elif self._unwritten(digest):
                self._make_room(self._overfull, digest, spare)
        return digest

    def adopt(self, manifest: bytes, whole: Path) -> bytes:
        """Move in an object that this node made itself: the encoded chunk list and the file of all its bytes.

        ``whole`` must be on the same file system; it is verified and made durable first. Raises ``LocalError``
        where file and list do not belong together. The quota does not count: the bytes are on the disk already.
        """
        parsed = parse_chunk_list(manifest)
        digest = hash_bytes(manifest)
        if whole.stat().st_size != parsed.size:
            raise LocalError(f"{whole}: the file has {whole.stat().st_size} bytes, its manifest says {parsed.size}")
        with whole.open("rb") as file:
            for index in range(len(parsed.chunks)):
                try:
                    verify_chunk(parsed, index, file.read(CHUNK_BYTES))
                except PeerError as error:
                    raise LocalError(f"{whole}: {error}") from None
            os.fsync(file.fileno())
        with self._changing:
            self._delete(digest)
            temporary = self.folder / f".{secrets.token_hex(8)}"
            self._make(temporary, manifest, len(parsed.chunks), VERIFIED)
            os.replace(whole, temporary / "whole.bin")
            self._place(temporary, digest)
        return digest

    def write_chunk(self, digest: bytes, index: int, data: bytes) -> None:
        """Verify and store one chunk. Raises ``PeerError`` for wrong bytes, ``LocalError`` for an object that was not
        begun, ``OSError`` where the disk fails."""
        held = self._begun(digest)
        if not 0 <= index < held.count:
            raise PeerError(f"the version has no chunk {index}")
        verify_chunk(held.listing, index, data)
        held.write(index, data)

    def complete(self, digest: bytes) -> bool:
        """Whether the whole object is here and verified."""
        held = self.open(digest)
        return held is not None and not held.missing()

    def sync(self, digest: bytes) -> None:
        """Make what is here of an object durable. Raises ``LocalError`` where it was not begun, and ``OSError``."""
        self._begun(digest).sync()

    def read_chunk(self, digest: bytes, index: int) -> bytes | None:
        """A chunk that is here and right, of a whole or a partial object; None for anything else."""
        held = self.open(digest)
        return None if held is None or not 0 <= index < held.count else held.read(index)

    def bitmap(self, digest: bytes) -> bytes | None:
        """Which chunks of an object were verified so far (see ``BulkObject.bitmap``); None where it is not here."""
        held = self.open(digest)
        return None if held is None else held.bitmap()

    def paths(self, digest: bytes) -> tuple[Path, Path]:
        """Where the chunk list and the bytes of the object are."""
        folder = self.folder / digest.hex()
        return folder / "manifest", folder / "whole.bin"

    def held(self) -> list[bytes]:
        """Digests of all objects here, whole or partial, ascending."""
        names = [item.name for item in self.folder.iterdir() if _OBJECT.fullmatch(item.name)]  # no lost+found
        return sorted(map(bytes.fromhex, names))

    # Room

    def size(self, digest: bytes) -> int:
        """The bytes that an object takes on the disk; 0 where it is not here."""
        status = self._status(digest)
        return 0 if status is None else status.st_size

    def used(self) -> int:
        """The bytes that all objects take."""
        return sum(self.size(digest) for digest in self.held())

    def free(self) -> int:
        """The bytes free for this user on the file system, without those that objects on their way will take."""
        return self._free_bytes(self.folder) - sum(map(self._unwritten, self.held()))

    def _unwritten(self, digest: bytes) -> int:
        status = self._status(digest)
        return 0 if status is None else max(0, status.st_size - status.st_blocks * 512)

    @contextmanager
    def pin(self, digest: bytes) -> Iterator[None]:
        """Keep an object, whatever ``retain`` is told and however short room is."""
        with self._lock:
            self._pinned[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pinned[digest] -= 1
                if not self._pinned[digest]:
                    del self._pinned[digest]

    def pinned(self, digest: bytes) -> bool:
        """Whether somebody keeps an object pinned."""
        with self._lock:
            return bool(self._pinned[digest])

    def retain(self, keep: Callable[[Collection[bytes]], Collection[bytes]]) -> list[bytes]:
        """Delete every object but the pinned ones and those that ``keep`` names; returns what went.

        ``keep`` is told what is here, and nothing is added before what it does not name is gone.
        """
        with self._changing:
            present = self.held()
            kept = keep(present)
            return [digest for digest in present if digest not in kept and self._delete(digest, pinned=False)]

    def delete(self, digests: Iterable[bytes]) -> None:
        """Delete these objects but for the pinned ones, and no other, whatever came here meanwhile."""
        with self._changing:
            for digest in digests:
                self._delete(digest, pinned=False)

    def _make_room(self, short: Callable[[], str | None], digest: bytes, spare: Sequence[bytes]) -> None:
        shortage = short()
        if shortage is None:
            return
        for other in spare:
            if other != digest and self._delete(other, pinned=False):
                shortage = short()
                if shortage is None:
                    return
        raise NoRoom(shortage)

    def _shortage(self, size: int) -> str | None:
        used, free = self.used(), self.free()
        if self.quota and used + size > self.quota:
            return f"{size >> 20} MiB more of weights would exceed the quota ({used >> 20} of {self.quota >> 20} MiB)"
        if free - size < self.reserve:
            return (
                f"{size >> 20} MiB of weights would not leave the reserve of {self.reserve >> 20} MiB "
                f"({free >> 20} MiB are free)"
            )
        return None

    def _overfull(self) -> str | None:
        free = self.free()
        return f"the disk is full: weights on their way lack {-free >> 20} MiB" if free < 0 else None

    # Files

    def _begun(self, digest: bytes) -> BulkObject:
        held = self.open(digest)
        if held is None:
            raise LocalError(f"version {digest.hex()} was not begun")
        return held

    def _is_here(self, digest: bytes, known: BulkObject) -> bool:
        """Whether an open object is the one on the disk: another process may have put a new one in its place."""
        status = self._status(digest)
        return status is not None and known.identity == (status.st_dev, status.st_ino)

    def _status(self, digest: bytes) -> os.stat_result | None:
        """What the file system knows of an object's bytes; None where it is not here."""
        try:
            return os.stat(f"{self.folder}/{digest.hex()}/whole.bin")  # for each request for chunks: without a Path
        except FileNotFoundError:
            return None

    def _load(self, digest: bytes) -> BulkObject | None:
        folder = self.folder / digest.hex()
        try:
            with (folder / "manifest").open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
            if hash_bytes(data) != digest:
                raise PeerError("the manifest is damaged")
            return BulkObject(folder, parse_chunk_list(data))
        except (FileNotFoundError, PeerError):
            return None

    def _make(self, temporary: Path, manifest: bytes, chunks: int, mark: int) -> None:
        temporary.mkdir(mode=0o700)
        write_atomic(temporary / "manifest", manifest)
        write_atomic(temporary / "chunks", bytes([mark]) * chunks)

    def _place(self, temporary: Path, digest: bytes) -> None:
        sync_directory(temporary)
        os.replace(temporary, self.folder / digest.hex())
        sync_directory(self.folder)

    def _delete(self, digest: bytes, *, pinned: bool = True) -> bool:
        """Delete an object, a pinned one only where ``pinned`` says so; whether it went."""
        with self._lock:
            if self._pinned[digest] and not pinned:
                return False
            aside = self._move_aside(digest)
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _move_aside(self, digest: bytes) -> Path:
        self._open.pop(digest, None)
        folder, aside = self.folder / digest.hex(), self.folder / f".{secrets.token_hex(8)}"
        try:
            os.rename(folder, aside)
        except OSError:  # not here; or what is left of it is taken apart where it is
            return folder
        return aside
