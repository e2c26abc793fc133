"""The child that gives a node's metrics to one tracker: TensorBoard's event files, or Weights & Biases.

1. The tracker's library is imported here and nowhere else. One that is not installed is a ``UserError`` that says how
   to install it.
2. The axis is the row's version, and the time is the row's.
3. What was logged is on the disk, or in the library's hands, when ``log`` returns; ``finish`` closes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from node.errors import UserError
from node.workers import child_loop
from node.workers.child_messages import FinishTracker, LogRows, OpenTracker, TensorBoardFolder, TrackerRow, WandBRun


class TensorBoard:
    """Event files, written by TensorBoard's own writer, which needs no TensorFlow."""

    def __init__(self, wanted: TensorBoardFolder) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UserError(f"tensorboard cannot be used ({error}): pip install 'farflung[tensorboard]'") from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        try:
            Path(wanted.folder).mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(wanted.folder)
        except OSError as error:
            raise UserError(f"{wanted.folder}: cannot be written ({error.strerror})") from None

    def log(self, rows: Sequence[TrackerRow]) -> None:
        """Write and flush."""
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.scalars.items()]
            if values:
                summary = self._summary(value=values)
                event = self._event(wall_time=row.time, step=max(0, row.version), summary=summary)
                self._writer.add_event(event)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases. The library's own variables (WANDB_MODE, WANDB_API_KEY, …) count."""

    def __init__(self, wanted: WandBRun) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"wandb cannot be used ({error}): pip install 'farflung[wandb]'") from None
        online = os.environ.get("WANDB_MODE", "online") == "online"
        try:
            Path(wanted.folder).mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=wanted.project,
                dir=wanted.folder,
                name=wanted.name,
                id=wanted.run,
                resume="allow" if online else None,
                config=wanted.config,
                # Metrics and nothing else leave the machine: no output, no code, no list of packages, no git state.
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_git=True,
                    disable_code=True,
                    x_disable_meta=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                ),
            )
        except OSError as error:
            raise UserError(f"{wanted.folder}: cannot be written ({error.strerror})") from None
        except wandb.errors.UsageError as error:
            raise UserError(f"wandb: {error}: run wandb login, or set WANDB_MODE=offline") from None
        self._kinds: set[str] = set()

    def log(self, rows: Sequence[TrackerRow]) -> None:
        """Hand rows to the library, which has a process of its own write and send them."""
        for row in rows:
            kind = row.kind
            if kind not in self._kinds:
                self._kinds.add(kind)
                self._run.define_metric(f"{kind}/version")
                self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/version")
            self._run.log({**row.scalars, f"{kind}/version": row.version, f"{kind}/time": row.time})

    def finish(self) -> None:
        """Have everything written."""
        self._run.finish()


class TrackerChild:
    """The child's one tracker, which is not open at first; its public methods are operations."""

    def __init__(self) -> None:
        self._sink: TensorBoard | WandB | None = None

    def open(self, request: OpenTracker) -> None:
        """Open it."""
        wanted = request.tracker
        self._sink = TensorBoard(wanted) if isinstance(wanted, TensorBoardFolder) else WandB(wanted)

    def log(self, request: LogRows) -> None:
        """Give it rows; rule 3."""
        assert self._sink is not None
        self._sink.log(request.rows)

    def finish(self, request: FinishTracker) -> None:
        """Close it."""
        assert self._sink is not None
        self._sink.finish()


if __name__ == "__main__":
    child_loop.run(lambda: child_loop.methods(TrackerChild()))
