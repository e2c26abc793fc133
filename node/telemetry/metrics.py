"""What a node measures, as lines of JSON: ``metrics.jsonl`` in its data directory.

1. A row is one JSON object a line: ``time`` (UNIX seconds), ``kind``, and flat figures. What is not a finite number is
   null. docs/OPERATING.md has the kinds and their fields; a field keeps its meaning, new ones may come.
2. Recording neither waits nor fails: rows are written by a task of their own. What the disk does not take waits in
   memory, at most ``MAX_WAITING`` rows; then the oldest are lost, and a health warning says so.
3. The file is bounded: at ``FILE_BYTES`` it becomes ``metrics.jsonl.1`` and so on, of which ``KEPT`` stay.
4. Trackers (``node.telemetry.tracking``) get the same rows through queues of their own.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import trio

from node.health.warnings import Health

NAME: Final = "metrics.jsonl"
FILE_BYTES: Final = 8 << 20
KEPT: Final = 3
MAX_WAITING: Final = 10_000
BATCH: Final = 1_000
RETRY: Final = 5.0
"""Seconds until the disk is tried again."""

Row = dict[str, Any]


class Queue:
    """Rows on their way to one reader, at most ``most``: the oldest give way. ``batch`` are handed out at once."""

    def __init__(self, most: int = MAX_WAITING, batch: int = BATCH) -> None:
        self._most = most
        self._batch = batch
        self._rows: deque[Row] = deque()
        self._filled = trio.Event()
        self.lost = 0

    def put(self, row: Row) -> None:
        """Add the newest row."""
        self._rows.append(row)
        self._bound()
        self._filled.set()

    @asynccontextmanager
    async def oldest(self) -> AsyncIterator[list[Row]]:
        """The oldest rows, at most a batch, once there are any; they come back where the block fails."""
        await self._filled.wait()
        rows = self.take()
        try:
            yield rows
        except BaseException:
            self._rows.extendleft(reversed(rows))
            self._bound()
            self._filled.set()
            raise

    def take(self) -> list[Row]:
        """The oldest rows, at most a batch."""
        rows = [self._rows.popleft() for _ in range(min(self._batch, len(self._rows)))]
        if not self._rows:
            self._filled = trio.Event()
        return rows

    def _bound(self) -> None:
        while len(self._rows) > self._most:
            self._rows.popleft()
            self.lost += 1


class Metrics:
    """The rows of one node. ``clock`` tells UNIX seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._own = Queue()
        self._readers: list[Queue] = []

    def record(self, kind: str, **figures: Any) -> None:
        """Note ``figures`` (numbers, texts, None) under a ``kind``."""
        row: Row = {"time": round(self._clock(), 3), "kind": kind}
        for name, value in figures.items():
            row[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        for queue in (self._own, *self._readers):
            queue.put(row)

    @contextmanager
    def follow(self) -> Iterator[Queue]:
        """A queue that gets every row from now on, as long as the block lasts."""
        queue = Queue()
        self._readers.append(queue)
        try:
            yield queue
        finally:
            self._readers.remove(queue)

    async def run(self, path: Path, health: Health) -> None:
        """Write rows to ``path``, for ever; what is left when it ends as well."""
        queue, lost = self._own, 0
        try:
            while True:
                try:
                    async with queue.oldest() as rows:
                        await trio.to_thread.run_sync(append, path, rows)
                except OSError as error:
                    gone = f", {queue.lost} lost so far" if queue.lost > lost else ""
                    health.warn("metrics", f"{path}: cannot be written ({error.strerror}); metrics wait{gone}")
                    await trio.sleep(RETRY)
                else:
                    health.clear("metrics")
                    lost = queue.lost
        finally:
            with suppress(OSError):
                while rows := queue.take():  # a few lines at most, unless the disk is full
                    append(path, rows)


def append(path: Path, rows: Sequence[Row], most: int = FILE_BYTES) -> None:
    """Append rows to the file, after moving one aside that would have more than ``most`` bytes. Raises ``OSError``."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "rb+", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        if size and size + len(text) <= most:
            if os.pread(descriptor, 1, size - 1) != b"\n":  # a crash tore the last line
                text = b"\n" + text
        elif size:
            for number in range(KEPT - 1, -1, -1):
                older = path.with_name(f"{path.name}.{number}") if number else path
                with suppress(FileNotFoundError):
                    os.replace(older, path.with_name(f"{path.name}.{number + 1}"))
            append(path, rows, most)
            return
        view = memoryview(text)
        while view:
            view = view[file.write(view) :]
