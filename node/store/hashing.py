"""BLAKE3 of bytes and files. Apart from the stores, for processes that are to load little."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3


def hash_bytes(data: bytes) -> bytes:
    """BLAKE3 of ``data``, 32 bytes."""
    digest: bytes = blake3(data).digest()
    return digest


def hash_file(path: Path) -> tuple[bytes, int]:
    """BLAKE3 and size of a file, read in pieces. Raises ``OSError``."""
    state = blake3()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
            size += len(piece)
    return bytes(state.digest()), size
