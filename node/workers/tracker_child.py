"""The child that gives a node's metrics to one tracker: TensorBoard's event files, or Weights & Biases.

1. The tracker's library is imported here and nowhere else. One that is not installed is a ``UserError`` that says how
   to install it.
2. A row's numbers become scalars ``<kind>/<field>``, an evaluation's ``eval/<task>/<field>``; the axis is the row's
   version, and the time is the row's.
3. What was logged is on the disk, or in the library's hands, when ``log`` returns; ``finish`` closes it.

The operations are open, log and finish.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.workers import child_loop
from node.workers.child_loop import UserError

Row = Mapping[str, Any]


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The names and numbers of a row; rule 2."""
    prefix = f"{row['kind']}/{row['task']}" if "task" in row else str(row["kind"])
    for name, value in row.items():
        if name not in ("time", "version") and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


class Sink(abc.ABC):
    """One tracker."""

    @abc.abstractmethod
    def log(self, rows: Sequence[Row]) -> None:
        """Give it rows."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Close it."""


class TensorBoard(Sink):
    """An event file in ``folder``, written by TensorBoard's own writer, which needs no TensorFlow."""

    def __init__(self, folder: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UserError(f"tensorboard cannot be used ({error}): pip install 'farflung[tensorboard]'") from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(folder)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from None

    def log(self, rows: Sequence[Row]) -> None:
        """Write and flush."""
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(row)]
            if values:
                summary = self._summary(value=values)
                event = self._event(wall_time=row["time"], step=max(0, row.get("version") or 0), summary=summary)
                self._writer.add_event(event)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Sink):
    """A run of Weights & Biases in ``project``; its files lie in ``folder``. ``run`` is the run's id, so that a node
    that starts again goes on with it. The library's own variables (WANDB_MODE, WANDB_API_KEY, …) count."""

    def __init__(self, folder: str, project: str, name: str, run: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"wandb cannot be used ({error}): pip install 'farflung[wandb]'") from None
        online = os.environ.get("WANDB_MODE", "online") == "online"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=project,
                dir=folder,
                name=name,
                id=run,
                resume="allow" if online else None,
                config=config,
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
            raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
        except wandb.errors.UsageError as error:
            raise UserError(f"wandb: {error}: run wandb login, or set WANDB_MODE=offline") from None
        self._kinds: set[str] = set()

    def log(self, rows: Sequence[Row]) -> None:
        """Hand rows to the library, which has a process of its own write and send them."""
        for row in rows:
            kind = str(row["kind"])
            if kind not in self._kinds:
                self._kinds.add(kind)
                self._run.define_metric(f"{kind}/version")
                self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/version")
            values = {**dict(scalars(row)), f"{kind}/version": row.get("version") or 0, f"{kind}/time": row["time"]}
            self._run.log(values)

    def finish(self) -> None:
        """Have everything written."""
        self._run.finish()


SINKS: dict[str, type[TensorBoard] | type[WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


def operations() -> dict[str, child_loop.Operation]:
    """The child's operations over one sink that is not open yet."""
    opened: list[Sink] = []

    def start(tracker: str, **options: Any) -> dict[str, Any]:
        opened.append(SINKS[tracker](**options))
        return {}

    def log(rows: list[dict[str, Any]]) -> dict[str, Any]:
        opened[0].log(rows)
        return {}

    def finish() -> dict[str, Any]:
        opened.pop().finish()
        return {}

    return {"open": start, "log": log, "finish": finish}


if __name__ == "__main__":
    child_loop.run(operations)
