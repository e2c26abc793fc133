"""BLAKE3 of bytes. Apart from the stores, for processes that are to load little."""

from __future__ import annotations

from blake3 import blake3


def hash_bytes(data: bytes) -> bytes:
    """BLAKE3 of ``data``, 32 bytes."""
    digest: bytes = blake3(data).digest()
    return digest
