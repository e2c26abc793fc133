"""Weights on disk: ``versions/<manifest hash>/`` holds ``manifest``, ``whole.bin`` and ``chunks``.

1. ``whole.bin`` has its full size from the start; ``chunks`` has one byte a chunk, 1 once the chunk was verified and
   written. So a partial download survives a restart.
2. Marks of an earlier run are hearsay (the machine may have lost power between two writes): a chunk is verified again
   when it is first needed. Nothing is served or called complete that this process has not verified.
3. A chunk may be served as soon as it is verified, long before the version is whole.

Every method is synchronous, does disk work and may be called from any thread.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import Final

from node.store.blobs import hash_bytes
from node.store.files import sync_directory, write_atomic
from protocol.constants import CHUNK_BYTES, MAX_MANIFEST_BYTES
from protocol.errors import LocalError, PeerError
from protocol.manifest import Manifest, verify_chunk

_DONE: Final = b"\x01"
_MISSING: Final = b"\x00"


class _Version:
    """One version's files. ``verified`` is what this process knows, ``claimed`` what the marks say."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.lock = Lock()
        self.durable = False
        self.verified = bytearray(len(manifest.chunks))
        marks = (folder / "chunks").read_bytes()
        self.claimed = bytearray(marks[: len(manifest.chunks)].ljust(len(manifest.chunks), _MISSING))

    def holds(self, index: int) -> bool:
        """Whether the chunk is here and right; verifies it where only the marks say so."""
        if not self.verified[index] and self.claimed[index]:
            self.read(index)
        return bool(self.verified[index])

    def read(self, index: int) -> bytes | None:
        if not self.claimed[index]:
            return None
        try:
            with (self.folder / "whole.bin").open("rb") as file:
                data = os.pread(file.fileno(), CHUNK_BYTES, index * CHUNK_BYTES)
        except FileNotFoundError:  # retention deleted the version meanwhile
            return None
        if not self.verified[index]:
            try:
                verify_chunk(self.manifest, index, data)
            except PeerError:
                self.claimed[index] = 0
                self.mark(index, _MISSING)
                return None
            self.verified[index] = 1
        return data

    def write(self, index: int, data: bytes) -> None:
        verify_chunk(self.manifest, index, data)
        if self.holds(index):
            return
        with (self.folder / "whole.bin").open("r+b") as file:
            file.seek(index * CHUNK_BYTES)
            file.write(data)
        self.claimed[index] = self.verified[index] = 1
        self.mark(index, _DONE)

    def mark(self, index: int, mark: bytes) -> None:
        with (self.folder / "chunks").open("r+b") as file:
            file.seek(index)
            file.write(mark)

    def missing(self) -> list[int]:
        return [index for index in range(len(self.manifest.chunks)) if not self.holds(index)]

    def sync(self) -> None:
        if not self.durable:
            for name in ("whole.bin", "chunks"):
                with (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())
            self.durable = True


class VersionStore:
    """The versions below one folder, by the BLAKE3 hash of their manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in folder.glob(".*"):
            shutil.rmtree(leftover)
        self._open: dict[bytes, _Version] = {}
        self._begun: bytes | None = None
        self._lock = Lock()

    def begin(self, manifest: Manifest) -> bytes:
        """Make room for a version, or take up what an earlier run left of it; returns the manifest's hash.

        Raises ``OSError``, for one where the disk has no room for the whole.
        """
        data = manifest.encode()
        digest = hash_bytes(data)
        with self._lock:
            self._begun = digest
            if self._find(digest) is None:
                temporary = self.folder / f".{secrets.token_hex(8)}"
                self._make(temporary, data, len(manifest.chunks))
                try:
                    with (temporary / "whole.bin").open("wb") as file:
                        if manifest.size:
                            os.posix_fallocate(file.fileno(), 0, manifest.size)
                    self._place(temporary, digest)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
        return digest

    def adopt(self, manifest: bytes, whole: Path) -> bytes:
        """Move in a version that this node made itself: the encoded manifest and the file of all its weights.

        ``whole`` must be on the same file system; it is verified and made durable first. Raises ``LocalError``
        where file and manifest do not belong together.
        """
        parsed = Manifest.parse(manifest)
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
        with self._lock:
            self._drop(digest)
            temporary = self.folder / f".{secrets.token_hex(8)}"
            self._make(temporary, manifest, len(parsed.chunks), mark=_DONE)
            os.replace(whole, temporary / "whole.bin")
            self._place(temporary, digest)
            version = self._find(digest)
            assert version is not None
            version.verified = bytearray(_DONE * len(parsed.chunks))
        return digest

    def write_chunk(self, digest: bytes, index: int, data: bytes) -> None:
        """Verify and store one chunk. Raises ``PeerError`` for wrong bytes, ``LocalError`` for a version that was
        not begun, ``OSError`` where the disk fails."""
        version = self._version(digest)
        if version is None:
            raise LocalError(f"version {digest.hex()} was not begun")
        if not 0 <= index < len(version.manifest.chunks):
            raise PeerError(f"the version has no chunk {index}")
        with version.lock:
            version.write(index, data)

    def missing(self, digest: bytes) -> list[int]:
        """Indices of the chunks still to be fetched, ascending. Raises ``LocalError`` where it was not begun."""
        version = self._version(digest)
        if version is None:
            raise LocalError(f"version {digest.hex()} was not begun")
        with version.lock:
            return version.missing()

    def complete(self, digest: bytes) -> bool:
        """Whether the whole version is here, verified and durable."""
        version = self._version(digest)
        if version is None:
            return False
        with version.lock:
            if version.missing():
                return False
            version.sync()
            return True

    def read_chunk(self, digest: bytes, index: int) -> bytes | None:
        """A chunk that is here and right, of a whole or a partial version; None for anything else."""
        version = self._version(digest)
        if version is None or not 0 <= index < len(version.manifest.chunks):
            return None
        with version.lock:
            return version.read(index)

    def paths(self, digest: bytes) -> tuple[Path, Path]:
        """Where the manifest and the whole of the version are."""
        folder = self.folder / digest.hex()
        return folder / "manifest", folder / "whole.bin"

    def held(self) -> list[bytes]:
        """Manifest hashes of all versions here, whole or partial, ascending."""
        return sorted(bytes.fromhex(item.name) for item in self.folder.iterdir() if not item.name.startswith("."))

    def retain(self, keep: Collection[bytes]) -> None:
        """Delete every version but ``keep`` and the one begun last, which may still be on its way."""
        with self._lock:
            for digest in self.held():
                if digest not in keep and digest != self._begun:
                    self._drop(digest)

    def _version(self, digest: bytes) -> _Version | None:
        with self._lock:
            return self._find(digest)

    def _find(self, digest: bytes) -> _Version | None:
        known = self._open.get(digest)
        if known is not None:
            return known
        folder = self.folder / digest.hex()
        try:
            with (folder / "manifest").open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
            if hash_bytes(data) != digest:
                raise PeerError("the manifest is damaged")
            version = _Version(folder, Manifest.parse(data))
            (folder / "whole.bin").stat()
        except (FileNotFoundError, PeerError):
            # Absent, or damaged by the disk: what is left of it is of no use.
            self._drop(digest)
            return None
        self._open[digest] = version
        return version

    def _make(self, temporary: Path, manifest: bytes, chunks: int, mark: bytes = _MISSING) -> None:
        temporary.mkdir(mode=0o700)
        write_atomic(temporary / "manifest", manifest)
        write_atomic(temporary / "chunks", mark * chunks)

    def _place(self, temporary: Path, digest: bytes) -> None:
        sync_directory(temporary)
        os.replace(temporary, self.folder / digest.hex())
        sync_directory(self.folder)

    def _drop(self, digest: bytes) -> None:
        self._open.pop(digest, None)
        shutil.rmtree(self.folder / digest.hex(), ignore_errors=True)
