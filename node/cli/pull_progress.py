"""Having a running node fetch a version, and showing how far it is."""

from __future__ import annotations

import time
from typing import Any, Final

from node.cli import options, tables
from node.errors import UserError
from node.store.data_directory import DataDirectory

LOOK: Final = 0.25
"""Seconds between two looks at a version that is on its way."""


def pull(directory: DataDirectory, version: int | str) -> dict[str, Any]:
    """Return once the directory's daemon holds a version: its number, -1 for the newest, or its id's first digits.

    The answer has its number (``version``) and ``size``. Raises ``Declined`` where it does not arrive, and
    ``UserError`` where no daemon answers.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from node.api.control_client import Declined, Unavailable
    from node.cli.node_reading import ask, lock_holder

    columns = (
        TextColumn("version {task.fields[version]}"),
        TextColumn("{task.fields[part]}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[peers]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, version="?", part="", rate="", peers="")
        part = None
        while True:
            try:
                found = ask(directory, "weights-pull", version=version)
            except Declined:
                raise
            except Unavailable as error:
                if lock_holder(directory) is None:
                    raise UserError(
                        f"{directory.path}: no daemon runs, and only a running one can fetch",
                        f"farflung run --data-dir {directory.path}",
                    ) from None
                raise UserError(str(error), "wait until the daemon answers") from None
            if found["done"]:
                return found
            if found["part"] != part:
                part = found["part"]
                bar.reset(task, total=found["total"])
            bar.update(
                task,
                total=found["total"],
                completed=found["have"],
                version=found["version"],
                part=part,
                rate=f"{tables.size(found['rate'])}/s",
                peers=f"from {options.counted(found['peers'], 'peer')}",
            )
            time.sleep(LOOK)
