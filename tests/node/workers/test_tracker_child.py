"""The tracker child with the real libraries: what it wrote is read back with their own readers."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.errors import UserError
from node.workers.child_messages import (
    FinishTracker,
    LogRows,
    OpenTracker,
    TensorBoardFolder,
    TrackerRow,
    WandBRun,
)
from node.workers.child_process import WorkerError, open_worker
from node.workers.tracker_child import TrackerChild

BLOCK = 32768
ROWS = [
    TrackerRow("step", 1000.5, 1, {"step/loss": 0.5, "step/reward": 0.25}),
    TrackerRow("step", 1002.5, 2, {"step/loss": 0.25, "step/reward": 0.5}),
    TrackerRow("eval", 1003.0, 2, {"eval/sums/pass_rate": 0.75, "eval/sums/greedy": 0.0}),
    TrackerRow("node", 1004.0, -1, {"node/peers": 3.0}),
]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("wandb", "tensorboard", "tensorboard.compat.proto", "tensorboard.summary.writer.event_file_writer"):
        monkeypatch.setitem(sys.modules, module, None)
    folder = str(tmp_path / "out")
    wanted = TensorBoardFolder(folder) if name == "tensorboard" else WandBRun(folder, "p", "n", "r", {})
    with pytest.raises(UserError, match=rf"{name} cannot be used .*: pip install 'farflung\[{name}\]'"):
        TrackerChild().open(OpenTracker(wanted))
    assert not (tmp_path / "out").exists()


async def test_tensorboards_own_reader_finds_every_scalar(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    async with open_worker("node.workers.tracker_child", name="tensorboard") as worker:
        await worker.call(OpenTracker(TensorBoardFolder(str(tmp_path / "a" / "b"))), timeout=60)
        await worker.call(LogRows(ROWS), timeout=60)
        # It is on the disk already: a child that is killed now has lost nothing.
    found = reader.EventAccumulator(str(tmp_path / "a" / "b"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        *("step/loss", "step/reward", "eval/sums/pass_rate", "eval/sums/greedy", "node/peers")
    }
    losses = [(event.wall_time, event.step, event.value) for event in found.Scalars("step/loss")]
    assert losses == [(1000.5, 1, 0.5), (1002.5, 2, 0.25)]
    (rate,), (peers,) = found.Scalars("eval/sums/pass_rate"), found.Scalars("node/peers")
    assert (rate.step, rate.value, peers.step, peers.value) == (2, 0.75, 0, 3.0)


async def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    async with open_worker("node.workers.tracker_child", name="tensorboard") as worker:
        with pytest.raises(WorkerError, match=r"file/b: cannot be written \(Not a directory\)") as caught:
            await worker.call(OpenTracker(TensorBoardFolder(str(tmp_path / "file" / "b"))), timeout=60)
        assert caught.value.kind == "user"


def records(data: bytes) -> Iterator[bytes]:
    """The records of a run's file: LevelDB's log format behind a header of seven bytes. The library reads it in Go."""
    assert data[:4] == b":W&B"
    place, found = 7, b""
    while place < len(data):
        if BLOCK - place % BLOCK < 7:  # too little for a record's header
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        found += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield found
            found = b""


async def test_weights_and_biases_offline_has_every_row(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    environment = {"WANDB_MODE": "offline", "HOME": str(tmp_path / "home")}
    async with open_worker("node.workers.tracker_child", name="wandb", environment=environment) as worker:
        run = WandBRun(str(tmp_path / "out"), "far flung", "domain node", "abc-def", {"agent": "farflung/1"})
        await worker.call(OpenTracker(run), timeout=120)
        await worker.call(LogRows(ROWS), timeout=60)
        await worker.call(FinishTracker(), timeout=60)
    (file,) = (tmp_path / "out").rglob("*.wandb")
    history: list[dict[str, Any]] = []
    project = set()
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            project.add((record.run.project, record.run.run_id, record.run.display_name))
        if record.HasField("history"):
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert project == {("far flung", "abc-def", "domain node")}
    assert [row["step/loss"] for row in history if "step/loss" in row] == [0.5, 0.25]
    assert [row["step/version"] for row in history if "step/loss" in row] == [1, 2]
    assert [row["eval/sums/pass_rate"] for row in history if "eval/version" in row] == [0.75]
    assert len(history) == len(ROWS)
