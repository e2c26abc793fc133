"""What a delta costs: its size against the whole and against the entropy of the change, and applying it.

``python -m tests.bench.delta MODEL [--json]`` takes real optimizer steps on the Hugging Face directory MODEL
(``tests.bench.steps``) and measures the delta of one step and of eight steps for each learning rate:

``share``          bytes of the delta and its manifest over those of the whole
``entropy_ratio``  the same bytes over the entropy of which values changed and how: for each tensor that of independent
                   positions with the tensor's own rate of change, and of differences with their own frequencies
``apply_ratio``    seconds to make the whole from its predecessor and the delta, verified, over seconds to read and hash
                   the whole; both in the same number of threads, the best of several rounds each
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from node.workers import delta_child as worker
from node.workers.child_messages import ApplyDelta, DescribeVersion
from node.workers.delta_blocks import value_type
from protocol.constants import CHUNK_BYTES
from protocol.weights.delta import DeltaManifest
from protocol.weights.manifest import DTYPES, Manifest, chunk_count

RATES: Final = ("1e-6", "3e-7")
ROUNDS: Final = 7
REPOSITORY: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Cost:
    """What the delta from one version to another costs; sizes in bytes, times in seconds."""

    whole_size: int
    delta_size: int
    changed_share: float
    entropy_bytes: float
    encode_seconds: float
    hash_seconds: float
    apply_seconds: float

    @property
    def share(self) -> float:
        """The delta's part of the whole."""
        return self.delta_size / self.whole_size

    @property
    def entropy_ratio(self) -> float:
        """The delta over the entropy of what changed."""
        return self.delta_size / self.entropy_bytes

    @property
    def apply_ratio(self) -> float:
        """Applying over hashing the whole."""
        return self.apply_seconds / self.hash_seconds

    def values(self) -> dict[str, float]:
        """All of it, by name."""
        ratios = {"share": self.share, "entropy_ratio": self.entropy_ratio, "apply_ratio": self.apply_ratio}
        return asdict(self) | ratios


def make_versions(model: Path, out: Path, rate: str) -> None:
    """Versions 0, 1 and 8 of ``model`` at this learning rate, in a process of its own that gives its memory back."""
    command = [sys.executable, "-m", "tests.bench.steps", str(model), str(out), "--rate", rate]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=True)


def measure(folder: Path, base: Path, target: Path, layout: dict[str, Any], *, threads: int) -> Cost:
    """Encode, apply and compare; ``folder`` is for scratch files."""
    folders = [folder / name for name in ("base", "target", "delta")]
    for place in folders:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    (folders[0] / worker.WHOLE).symlink_to(base.absolute())
    rows, checksum = layout["tensors"], layout["checksum"]
    before = worker.describe(DescribeVersion(rows, checksum, str(base), threads=threads))
    (folders[0] / worker.MANIFEST).write_bytes(before.manifest)
    delta = folders[2] / worker.WHOLE
    found = worker.describe(DescribeVersion(rows, checksum, str(target), str(folders[0]), str(delta), threads))
    if found.delta_manifest is None:
        raise SystemExit("the difference is not worth a delta")
    (folders[1] / worker.MANIFEST).write_bytes(found.manifest)
    (folders[2] / worker.MANIFEST).write_bytes(found.delta_manifest)
    manifest, listing = Manifest.parse(found.manifest), DeltaManifest.parse(found.delta_manifest)
    hashing, applying = [], []
    output = folders[1] / worker.WHOLE
    for _ in range(ROUNDS):
        hashing.append(hash_seconds(target, manifest, threads=threads))
        with output.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, manifest.size)
        (folders[1] / worker.MARKS).write_bytes(bytes(len(manifest.chunks)))
        result = worker.apply(ApplyDelta(str(folders[2]), str(folders[0]), str(folders[1]), threads))
        applying.append(result.seconds)
        if result.wrong or hash_of(output) != manifest.whole:
            raise SystemExit("the delta did not make the version")
    return Cost(
        whole_size=manifest.size,
        delta_size=listing.size + len(found.delta_manifest),
        changed_share=listing.changed / (manifest.size // listing.unit),
        entropy_bytes=entropy(base, target, manifest) / 8,
        encode_seconds=found.seconds,
        hash_seconds=min(hashing),
        apply_seconds=min(applying),
    )


def hash_seconds(path: Path, manifest: Manifest, *, threads: int) -> float:
    """Seconds that reading a file (from memory, as it was just written) and hashing its chunks takes."""
    began = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)

    def some(first: int) -> bool:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        right = True
        for index in range(first, len(manifest.chunks), threads):
            view = buffer[: manifest.chunk_size(index)]
            os.preadv(descriptor, [view], index * CHUNK_BYTES)
            right &= blake3(view).digest() == manifest.chunks[index]
        return right

    try:
        with ThreadPoolExecutor(threads) as pool:
            assert all(pool.map(some, range(threads)))
    finally:
        os.close(descriptor)
    return time.perf_counter() - began


def hash_of(path: Path) -> bytes:
    """The hash of the whole in a file."""
    with path.open("rb") as file:
        count = chunk_count(os.fstat(file.fileno()).st_size)
        return blake3(b"".join(blake3(file.read(CHUNK_BYTES)).digest() for _ in range(count))).digest()


def entropy(base: Path, target: Path, manifest: Manifest) -> float:
    """Bits that it takes to say which values changed and how, tensor by tensor."""
    old, new = np.memmap(base, np.uint8, "r"), np.memmap(target, np.uint8, "r")
    bits = 0.0
    offsets = manifest.tensor_offsets()
    for tensor in manifest.tensors:
        start, size = offsets[tensor.name]
        kind = value_type(DTYPES[tensor.dtype])
        before, after = (whole[start : start + size].view(kind) for whole in (old, new))
        differences = (after - before)[before != after]
        changed = len(differences)
        if changed:
            bits += len(before) * _entropy(np.array([changed, len(before) - changed]))
            bits += changed * _entropy(np.unique(differences, return_counts=True)[1])
    return bits


def _entropy(counts: Any) -> float:
    """Bits an event, of events with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def run(model: Path, *, threads: int, versions: Path | None = None) -> dict[str, Any]:
    """All measurements; ``versions`` keeps the versions of each rate for the next time."""
    found: dict[str, Any] = {"threads": threads}
    with tempfile.TemporaryDirectory(prefix="farflung-bench-") as name:
        scratch = Path(name)
        for rate in RATES:
            folder = (versions or scratch) / rate
            if not (folder / "8.bin").exists():
                make_versions(model, folder, rate)
            layout = json.loads((folder / "layout.json").read_text())
            for steps in (1, 8):
                cost = measure(scratch, folder / "0.bin", folder / f"{steps}.bin", layout, threads=threads)
                found[f"lr {rate}, {steps} step{'s' if steps > 1 else ''}"] = cost.values()
    single = [found[f"lr {rate}, 1 step"] for rate in RATES]
    found["delta_bytes_share"] = max(cost["share"] for cost in single)
    found["delta_entropy_ratio"] = max(cost["entropy_ratio"] for cost in single)
    found["delta_apply_ratio"] = max(cost["apply_ratio"] for cost in single)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure deltas of real optimizer steps.")
    parser.add_argument("model", type=Path, help="a Hugging Face directory with bf16 weights")
    parser.add_argument("--versions", type=Path, help="keep the versions here for the next time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.model, threads=arguments.threads, versions=arguments.versions)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(name)
            for key, number in value.items():
                print(f"  {key:16} {number:.6g}")
        else:
            print(f"{name:20} {value:.4g}")


if __name__ == "__main__":
    main()
