"""From the end of an optimizer step to "serving the new version" on a receiver, part by part.

A trainer with a relay and a receiver, real daemons, over loopback; versions 0 and 1 are a real model before and after
a real AdamW step (``tests.bench.steps``). The receiver has a real engine child, which holds version 0.

``serving_describe_ms``  the trainer's side: hashing the new version and encoding what changed
``serving_publish_ms``   from there to the signed entry (storing the version and its delta durably)
``serving_transfer_ms``  the receiver's: the delta arrives (and what it receives is hashed)
``serving_apply_ms``     the whole is made from it, with the start of the child that does and with hashing it all
``serving_hash_ms``      of that, what reading and hashing the whole alone takes (measured apart)
``serving_reload_ms``    the engine loads it and computes its checksum
``serving_total_ms``     from the end of the step until the engine is ready, with all that lies between the parts
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Final

from node.workers import delta_child as worker
from node.workers.child_messages import DescribeVersion
from protocol.weights.manifest import Manifest
from tests.bench import delta as deltas
from tests.bench.fleet import Fleet
from tests.bench.payload import Payload
from tests.bench.processes import Children, Missing

RATE: Final = "1e-6"
SHAPE: Final = ("trainer", "relay", "none")
RECEIVER: Final = 2


def versions_of(model: Path | None, cache: Path) -> Path:
    """The folder of the model's versions at ``RATE``; they are made where they are not there yet (minutes)."""
    if model is None:
        raise Missing("name a model's directory (--model)")
    folder = cache / "versions" / RATE
    if not (folder / "layout.json").exists() or not (folder / "1.bin").exists():
        deltas.make_versions(model, folder, RATE)
    return folder


def run(folder: Path, cache: Path, model: Path | None) -> dict[str, float]:
    """The figures of one version."""
    source = versions_of(model, cache)
    assert model is not None
    threads = len(os.sched_getaffinity(0))
    layout = json.loads((source / "layout.json").read_text())
    rows, checksum = layout["tensors"], layout["checksum"]
    base = folder / "base"
    base.mkdir()
    shutil.copy(source / "0.bin", base / worker.WHOLE)
    encoded = worker.describe(DescribeVersion(rows, checksum, str(base / worker.WHOLE), threads=threads)).manifest
    (base / worker.MANIFEST).write_bytes(encoded)
    first = Payload(folder / "version-0.bin", Manifest.parse(encoded))
    os.link(base / worker.WHOLE, first.path)
    first.path.with_suffix(".manifest").write_bytes(encoded)
    second = folder / "version-1.bin"
    shutil.copy(source / "1.bin", second)
    with Children(folder) as children:
        fleet = Fleet(children, folder / "nodes", SHAPE, first, None)
        try:
            receiver = fleet.members[RECEIVER].child
            receiver.tell("follow", (model / "config.json").absolute(), (model / "tokenizer.json").absolute())
            receiver.expect("following", 60)
            fleet.broadcast(first, timeout=120)
            receiver.expect("serving", 120)
            stepped = time.monotonic()
            delta = folder / "version-1.delta.bin"
            found = worker.describe(DescribeVersion(rows, checksum, str(second), str(base), str(delta), threads))
            described = time.monotonic()
            if found.delta_manifest is None:
                raise Missing("the versions are not alike enough for a delta")
            delta.with_suffix(".manifest").write_bytes(found.delta_manifest)
            second.with_suffix(".manifest").write_bytes(found.manifest)
            manifest = Manifest.parse(found.manifest)
            published = fleet.announce(Payload(second, manifest), delta)
            took = json.loads(receiver.expect("serving", 120)[0])
            hashing = min(deltas.hash_seconds(source / "1.bin", manifest, threads=threads) for _ in range(3))
        finally:
            children.end()
            fleet.remove()
    seconds = {
        "describe": described - stepped,
        "publish": published - described,
        "transfer": took.get("delta_transfer", 0.0),
        "apply": took.get("apply", 0.0),
        "whole_transfer": took.get("whole_transfer", 0.0),
        "hash": hashing,
        "reload": took["reload"],
        "total": took["at"] - stepped,
    }
    return {f"serving_{name}_ms": 1000 * value for name, value in seconds.items()}
