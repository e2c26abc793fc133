"""How a devnet's cheating nodes cheat. Refused outside a devnet: ``node.daemon`` checks the genesis.

``wrong-weights``  generates with noise of 5 % of each tensor's standard deviation on the weights it claims to use.
``forged-reward``  claims full marks for every response.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import trio

from protocol.weights.manifest import Manifest

WRONG_WEIGHTS: Final = "wrong-weights"
FORGED_REWARD: Final = "forged-reward"
CHEATS: Final = (WRONG_WEIGHTS, FORGED_REWARD)

_NOISE = 0.05


async def perturbed(folder: Path, weights: bytes, manifest: Path, whole: Path) -> Path:
    """A file in ``folder`` with the version's tensors plus noise, made once a version."""
    path = folder / f"cheat-{weights.hex()[:16]}.bin"
    await trio.to_thread.run_sync(_write, manifest, whole, path)
    return path


def _write(manifest_path: Path, whole: Path, path: Path) -> None:
    if path.exists():
        return
    for old in path.parent.glob("cheat-*.bin"):
        old.unlink()
    manifest = Manifest.parse(manifest_path.read_bytes())
    data = bytearray(whole.read_bytes())
    generator = np.random.default_rng(0)
    for offset, size in manifest.tensor_offsets().values():
        values = np.frombuffer(data, dtype="<f4", count=size // 4, offset=offset)
        noise = generator.standard_normal(values.size, dtype=np.float32)
        values += np.float32(_NOISE) * values.std() * noise
    path.write_bytes(data)
