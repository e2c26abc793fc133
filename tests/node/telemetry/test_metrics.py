"""metrics.jsonl: what is written, how the file is bounded, and what a bad disk does."""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
import trio.testing

from node.health.warnings import Health
from node.telemetry import metrics
from node.telemetry.metrics import Metrics, Queue, append
from tests.node.fake_children import Faults


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def health() -> Health:
    return Health(logging.getLogger("test"))


async def test_rows_are_lines_with_time_and_kind(tmp_path: Path) -> None:
    path = tmp_path / metrics.NAME
    found = Metrics(clock=lambda: 1234.56789)
    found.record("step", version=3, loss=0.5, task="sums", gone=None, broken=math.nan, endless=-math.inf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run, path, health())
        with trio.fail_after(10):
            while not path.exists() or not path.read_text().endswith("\n"):  # noqa: ASYNC110  a thread writes it
                await trio.sleep(0.01)
        # What comes in the moment the node ends is written too.
        found.record("node", peers=4)
        nursery.cancel_scope.cancel()
    assert rows_of(path) == [
        {
            "time": 1234.568,
            "kind": "step",
            "version": 3,
            "loss": 0.5,
            "task": "sums",
            "gone": None,
            "broken": None,
            "endless": None,
        },
        {"time": 1234.568, "kind": "node", "peers": 4},
    ]


def test_a_full_file_moves_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / metrics.NAME
    for number in range(30):
        append(path, [{"n": number}], most=40)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [metrics.NAME, *(f"{metrics.NAME}.{n}" for n in (1, 2, 3))]
    assert all(file.stat().st_size <= 40 for file in files)
    kept = [row["n"] for file in (*files[:0:-1], files[0]) for row in rows_of(file)]
    assert kept == list(range(kept[0], 30))
    assert len(kept) > 9


def test_a_line_that_a_crash_tore_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / metrics.NAME
    append(path, [{"n": 1}])
    with path.open("a") as file:
        file.write('{"n": 2, "lo')
    append(path, [{"n": 3}])
    lines = path.read_text().splitlines()
    assert (json.loads(lines[0]), json.loads(lines[2])) == ({"n": 1}, {"n": 3})


async def test_a_disk_that_fails_is_a_warning_and_nothing_is_lost(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    path, told = tmp_path / metrics.NAME, health()
    path.mkdir()
    found = Metrics()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run, path, told)
        found.record("step", version=1)
        await trio.sleep(1)
        assert told.warnings == {"metrics": f"{path}: cannot be written (Is a directory); metrics wait"}
        found.record("step", version=2)
        path.rmdir()
        await trio.sleep(2 * metrics.RETRY)
        assert [row["version"] for row in rows_of(path)] == [1, 2]
        assert told.warnings == {}
        nursery.cancel_scope.cancel()


async def test_a_queue_is_bounded_and_keeps_the_newest() -> None:
    queue = Queue(most=5, batch=3)
    for number in range(7):
        queue.put({"n": number})
    assert queue.lost == 2
    with suppress(OSError):
        async with queue.oldest() as taken:
            assert [row["n"] for row in taken] == [2, 3, 4]
            queue.put({"n": 7})
            raise OSError("full")
    assert queue.lost == 3
    async with queue.oldest() as taken:
        assert [row["n"] for row in taken + queue.take()] == [3, 4, 5, 6, 7]
    with trio.move_on_after(0.01) as waiting:
        async with queue.oldest():
            pass
    assert waiting.cancelled_caught


def test_who_follows_gets_every_row_from_then_on() -> None:
    found = Metrics(clock=lambda: 1.0)
    found.record("a")
    with found.follow() as queue:
        found.record("b", x=1)
    found.record("c")
    assert queue.take() == [{"time": 1.0, "kind": "b", "x": 1}]
