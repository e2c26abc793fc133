"""Output for people: rich tables in a terminal, aligned plain lines elsewhere, never cut off or folded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress

ACCOUNT: Final = ("credit", "generated", "audited", "trained", "accepted", "rejected", "void", "pending")
"""Columns of whole numbers in an account."""
NUMBERS: Final = frozenset({"version", *ACCOUNT, "reputation", "seconds"})
"""Columns that are set to the right."""


@contextmanager
def progress(*columns: str, clock: Callable[[], float] | None = None) -> Iterator[Progress]:
    """A progress bar on standard error, where that is a terminal. A column is "bar", "bytes", "count", "rate", "left"
    (the time), or a text."""
    from rich import progress as rich_progress
    from rich.console import Console

    kinds = {
        "bar": rich_progress.BarColumn,
        "bytes": rich_progress.DownloadColumn,
        "count": rich_progress.MofNCompleteColumn,
        "rate": rich_progress.TransferSpeedColumn,
        "left": rich_progress.TimeRemainingColumn,
    }
    drawn = [kinds[column]() if column in kinds else rich_progress.TextColumn(column) for column in columns]
    console = Console(stderr=True)
    with rich_progress.Progress(
        *drawn, console=console, transient=True, disable=not console.is_terminal, get_time=clock
    ) as bar:
        yield bar


@contextmanager
def counting(*columns: str) -> Iterator[Callable[[int, int], None]]:
    """The same for one piece of work: what is yielded takes how much of it is done, and how much it is."""
    with progress(*columns) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print ``rows``, made texts, under ``columns``."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _plain([list(columns), *cells])
        return
    # Imported here: in a pipe it is not needed.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=title or None, title_justify="left")
    for column in columns:
        drawn.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell, style=role_style(cell)) for cell in row))
    Console().print(drawn)


def facts(
    pairs: Iterable[tuple[str, str]],
    *,
    title: str = "",
    styles: dict[str, str] | None = None,
    drawn: bool | None = None,
) -> None:
    """Print named values, one a line; ``styles`` are rich styles by name. ``drawn``: as in a terminal, or not."""
    pairs = list(pairs)
    if not (sys.stdout.isatty() if drawn is None else drawn):
        if title:
            print(title)
        width = max((len(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            print(f"{name:<{width}}  {value}".rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=max((len(name) for name, _ in pairs), default=0))
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name, style="dim"), Text(value, style=(styles or {}).get(name, ""), overflow="fold"))
    console = Console()
    if title:
        console.print(Text(title, style="bold"))
    console.print(grid)


def role_style(role: str) -> str:
    """The rich style of a role's name, none of another text."""
    from node.devnet.live_display import ROLE_STYLES

    return ROLE_STYLES.get(role, "")


def _plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def size(count: float) -> str:
    """A number of bytes: "16 B", "2.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
