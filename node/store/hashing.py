"""BLAKE3 of bytes. Apart from the stores, for processes that are to load little."""

from __future__ import annotations

from typing import BinaryIO

from blake3 import blake3


def hash_bytes(data: bytes) -> bytes:
    """BLAKE3 of ``data``, 32 bytes."""
    digest: bytes = blake3(data).digest()
    return digest


def hash_file(file: BinaryIO) -> bytes:
    """BLAKE3 of a file from where it stands, a mebibyte at a time."""
    hasher = blake3()
    while piece := file.read(1 << 20):
        hasher.update(piece)
    digest: bytes = hasher.digest()
    return digest
