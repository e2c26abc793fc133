"""Deltas end to end: real daemons over a slow link train a model of which a step changes little."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from blake3 import blake3
from safetensors.numpy import load_file, save_file

from node.api.control_client import Unavailable, request
from node.cli import main
from node.config import write
from node.devnet.fleet import Member
from node.devnet.setup import Options, prepare
from node.domain import founding
from node.log.offline_verification import verify
from protocol.constants import CHUNK_BYTES
from protocol.records import Weights
from protocol.weights.manifest import Manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[1]
NODES = 4
STEPS = 2
PATIENCE = 400.0
RATE = 40
"""Megabits a second that a node gives to each peer: two seconds for the whole of the model below."""
WIDE = 4096


def widened(folder: Path) -> None:
    """The starter model in ten megabytes: its networks get many more units that do nothing and are never trained."""
    shutil.copytree(founding.MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "mlp." in name:
            rows, columns = tensor.shape
            wide = np.zeros((rows, WIDE) if "down_proj" in name else (WIDE, columns), tensor.dtype)
            wide[:rows, :columns] = tensor
            tensors[name] = wide
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": WIDE}))


def ask(member: Member, op: str, **arguments: Any) -> dict[str, Any]:
    async def call() -> dict[str, Any]:
        return await request(member.directory, op, timeout=20, **arguments)

    try:
        return trio.run(call)
    except Unavailable:
        return {}


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.5)


@contextmanager
def running(members: list[Member], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The daemons: the founder first, whom the others ask for the genesis."""
    patch.setenv("PYTHONPATH", str(ROOT))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for some in (members[:1], members[1:]):
            started += [member.start() for member in some]
            wait(lambda some=some: all(ask(m, "status") for m in some), "the daemons to answer")  # type: ignore[misc]
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(30)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    """Four nodes that have made two steps, and still run."""
    folder = tmp_path_factory.mktemp("deltas")
    widened(folder / "model")
    members = prepare(Options(folder=folder, nodes=NODES, steps=STEPS))
    for member in members:
        config = member.directory.config()
        write(replace(config, bulk=replace(config.bulk, peer_rate=RATE)), member.directory.config_file)
    ids = tuple(member.directory.read_identity().node for member in members)
    asked = founding.devnet(name="deltas", nodes=NODES, tasks=None)
    asked = replace(asked, model=folder / "model", validators=ids, electors=ids)
    trio.run(founding.found, members[0].directory, asked)
    with pytest.MonkeyPatch.context() as patch, running(members, patch):
        wait(
            lambda: all(
                (found := ask(member, "status")) and found["step"] >= STEPS and found["version"] >= STEPS
                for member in members
            ),
            "two steps and their versions",
        )
        yield members


def version_of(member: Member, number: int) -> tuple[bytes, Manifest]:
    """A version's bytes on a node's disk, and its manifest."""
    (row,) = (r for r in ask(member, "weights")["objects"] if r["kind"] == "version" and number in r["numbers"])
    folder = member.directory.versions / row["digest"]
    return (folder / "whole.bin").read_bytes(), Manifest.parse((folder / "manifest").read_bytes())


def test_receivers_made_versions_from_deltas_and_have_the_right_bytes(members: list[Member]) -> None:
    applied = {member.name: ask(member, "weights")["applied"] for member in members}
    trainer = next(member.name for member in members if ask(member, "status")["role"] == "trainer")
    assert sum(applied.values()) >= NODES - 1, applied
    assert applied[trainer] == 0
    newest = max(number for row in ask(members[0], "weights")["objects"] for number in row["numbers"])
    digests = set()
    for member in members:
        data, manifest = version_of(member, newest)
        chunks = [blake3(data[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES)]
        assert tuple(chunks) == manifest.chunks
        digests.add(manifest.digest)
        assert not [warning for warning in ask(member, "status")["health"] if "delta" in warning]
    assert len(digests) == 1
    # What the log says.
    ledger = verify(members[1].directory, keep=True).ledger
    made = [entry.payload for entry in ledger.lineage() if isinstance(entry.payload, Weights)]
    assert made[newest].manifest in digests
    assert made[newest].delta is not None


def test_weights_are_listed_pulled_and_cleaned(members: list[Member], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(members[1].directory.path)
    assert main.main(["weights", "ls", "--data-dir", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["what", "number", "size", "here", "digest", "kept"]
    assert any(line.startswith("delta") and "whole" in line for line in lines)
    assert any("version 0, which new nodes begin with" in line or " 0 " in line for line in lines)
    assert main.main(["weights", "pull", "--data-dir", folder]) == 0
    assert "is here, whole and verified" in capsys.readouterr().err
    assert main.main(["weights", "pull", "99", "--data-dir", folder]) == 1
    assert "there is no version 99" in capsys.readouterr().err
    assert main.main(["weights", "gc", "--dry-run", "--data-dir", folder]) == 0


def test_an_export_loads_as_it_is(members: list[Member], tmp_path: Path) -> None:
    # A relay needs neither configuration nor tokenizer, so it need not hold them.
    member = next(member for member in members if ask(member, "status")["role"] != "relay")
    out = tmp_path / "model"
    done = subprocess.run(
        [sys.executable, "-m", "node.cli.main", "weights", "export", str(out), "--data-dir", member.directory.path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    newest = max(number for row in ask(member, "weights")["objects"] for number in row["numbers"])
    data, manifest = version_of(member, newest)
    tensors = load_file(out / "model.safetensors")
    for name, (start, size) in manifest.tensor_offsets().items():
        assert tensors[name].tobytes() == data[start : start + size]
