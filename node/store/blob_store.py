"""Content-addressed files: ``blobs/ab/<hex>`` holds the bytes whose BLAKE3 hash is ``<hex>`` (``ab…``).

1. A file of that name is always whole: it is written elsewhere, synced and renamed.
2. A blob that is put again counts as new: its file's time says when it was put last, and what is deleted for its age is
   not the one that somebody put a moment before. Which blobs go is decided elsewhere (``node.log.blob_retention``).
3. The plain methods may be called from any thread; the ``_async`` ones do the same work off the trio loop.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final

import trio

from node.store.durable_files import sync_directory, write_synced
from node.store.hashing import hash_bytes, hash_file
from protocol.constants import MAX_BLOB_BYTES

MAX_SOUND: Final = 4096
"""Blobs of which it is remembered that they are sound."""

_BLOB: Final = re.compile("[0-9a-f]{64}")


class BlobStore:
    """The blobs below one folder. Where ``owner`` is false another process owns the store, and may be writing: this one
    only reads what is there."""

    def __init__(self, folder: Path, *, owner: bool = True) -> None:
        self.folder = folder
        self._temporary = folder / "tmp"
        self._sound: dict[bytes, tuple[int, int, int]] = {}
        """Blobs that were hashed since the start, as the file system knows their files."""
        self._changing = Lock()
        """Held for moments: while a file's time is set or looked at, and it is put in its place or deleted."""
        if owner:
            self._temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in self._temporary.iterdir():
                leftover.unlink()

    def path(self, digest: bytes) -> Path:
        """Where the blob is or would be."""
        name = digest.hex()
        return self.folder / name[:2] / name

    def has(self, digest: bytes) -> bool:
        """Whether the blob is here."""
        return self.path(digest).is_file()

    def size(self, digest: bytes) -> int | None:
        """Bytes of the blob, or None where it is not here."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def put(self, data: bytes) -> bytes:
        """Store ``data`` durably and return its hash. Raises ``OSError``, for one where the disk is full."""
        digest = hash_bytes(data)
        if not self._renew(digest):
            temporary = self._temporary / secrets.token_hex(16)
            try:
                write_synced(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), data)
                self._place(temporary, digest)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        return digest

    def _renew(self, digest: bytes) -> bool:
        """Whether the blob is here; it counts as put now."""
        with self._changing:
            try:
                os.utime(self.path(digest))
            except FileNotFoundError:
                return False
            return True

    def _place(self, temporary: Path, digest: bytes) -> None:
        target = self.path(digest)
        if not target.parent.is_dir():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            sync_directory(self.folder)
        os.replace(temporary, target)
        sync_directory(target.parent)

    def get(self, digest: bytes, *, max_bytes: int = MAX_BLOB_BYTES, verify: bool = True) -> bytes | None:
        """The blob, or None where it is not here or larger than ``max_bytes``.

        With ``verify`` its hash is computed again; a blob that a failing disk damaged is deleted: it is not here.
        """
        try:
            with self.path(digest).open("rb") as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            return None
        if verify and hash_bytes(data) != digest:
            self.delete(digest)
            return None
        return data

    def get_range(self, digest: bytes, offset: int, length: int) -> bytes | None:
        """``length`` bytes of the blob from ``offset`` on, fewer where it ends before; None where it is not here.

        Before the first range of it is given a blob is hashed, a piece at a time: one that a failing disk damaged is
        not here. Later ones cost no more than themselves.
        """
        try:
            with self.path(digest).open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_ino, status.st_size, status.st_mtime_ns)
                if status.st_size > MAX_BLOB_BYTES:
                    return None
                if self._sound.get(digest) != identity:
                    if hash_file(file) != digest:
                        self.delete(digest)
                        return None
                    if len(self._sound) >= MAX_SOUND:
                        self._sound.clear()
                    self._sound[digest] = identity
                return os.pread(file.fileno(), length, offset)
        except FileNotFoundError:
            return None

    def delete(self, digest: bytes, *, before: float | None = None) -> bool:
        """Forget the blob, unless it was put since ``before`` (seconds since the epoch); whether it went."""
        path = self.path(digest)
        with self._changing:
            try:
                if before is not None and path.stat().st_mtime >= before:
                    return False
                path.unlink()
            except FileNotFoundError:
                return False
        self._sound.pop(digest, None)
        return True

    def held(self) -> Iterator[bytes]:
        """The hashes of all blobs, in no particular order."""
        for folder in self.folder.iterdir():
            if len(folder.name) == 2:
                for file in folder.iterdir():
                    if _BLOB.fullmatch(file.name):
                        yield bytes.fromhex(file.name)

    def sizes(self) -> Iterator[tuple[bytes, int]]:
        """All blobs and their bytes, in no particular order."""
        for digest in self.held():
            size = self.size(digest)
            if size is not None:
                yield digest, size

    async def put_async(self, data: bytes) -> bytes:
        """``put`` in a thread."""
        return await trio.to_thread.run_sync(self.put, data)

    async def get_async(self, digest: bytes, *, max_bytes: int = MAX_BLOB_BYTES, verify: bool = True) -> bytes | None:
        """``get`` in a thread."""
        return await trio.to_thread.run_sync(lambda: self.get(digest, max_bytes=max_bytes, verify=verify))
