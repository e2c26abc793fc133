"""Files to broadcast: random bytes, which nothing can compress, with the manifest that describes them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.constants import CHUNK_BYTES
from protocol.weights.manifest import Manifest

TENSORS = 16


@dataclass(frozen=True, slots=True)
class Payload:
    """A version's two files; ``manifest`` describes ``path``."""

    path: Path
    manifest: Manifest

    def equals(self, other: Path) -> bool:
        """Whether another file has the same bytes."""
        with other.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            rows = [(t.name, t.dtype, t.shape) for t in self.manifest.tensors]
            return Manifest.of_file(rows, memoryview(data), 1).chunks == self.manifest.chunks


def make(path: Path, size: int, seed: int) -> Payload:
    """``size`` bytes (a multiple of 32) of noise at ``path``, as bfloat16 tensors, and their manifest beside it."""
    noise = np.random.default_rng(seed)
    with path.open("wb") as out:
        for start in range(0, size, CHUNK_BYTES):
            out.write(noise.bytes(min(CHUNK_BYTES, size - start)))
    rows = [(f"layer.{number}.weight", "BF16", (size // TENSORS // 2,)) for number in range(TENSORS)]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        manifest = Manifest.of_file(rows, memoryview(data), 1)
    path.with_suffix(".manifest").write_bytes(manifest.encode())
    return Payload(path, manifest)
