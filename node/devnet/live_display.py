"""What a devnet shows while it runs: a live table in a terminal, one plain line a step elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.devnet.summary import StepRow

BARS: Final = "▁▂▃▄▅▆▇█"
EVENTS: Final = 5
ROLE_STYLES: Final = {"trainer": "magenta", "relay": "cyan", "validator": "yellow", "inference": "green"}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node now. ``sent`` and ``received`` in bytes, ``version`` -1 before it holds one."""

    name: str
    state: str
    role: str
    version: int
    credit: int
    peers: int
    tokens: int
    sent: int
    received: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """The whole network now. ``bytes`` were sent by all nodes together."""

    goal: int
    phase: str
    seconds: float
    bytes: int
    steps: tuple[StepRow, ...]
    nodes: tuple[NodeView, ...]
    cut_height: int
    address: str


class Display(Protocol):
    """Where a devnet tells people how it goes."""

    def update(self, view: View) -> None:
        """Show the present state."""

    def say(self, text: str) -> None:
        """Tell one event."""

    def conclude(self, text: str) -> None:
        """Tell one line of the result, to be read at the end."""

    def close(self) -> None:
        """Nothing more comes."""


def human_bytes(count: int) -> str:
    """``count`` bytes for people: "3.2 MB"."""
    return (
        f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
    )


def human_time(seconds: float) -> str:
    """``seconds`` for people: "4 min 12 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars between the smallest and the largest of them."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def step_line(row: StepRow, moved: int) -> str:
    """The plain line of one step; ``moved`` is the bytes that all nodes sent since the line before."""
    return (
        f"step {row.step}  reward {row.reward:.3f}  lag {row.lag_mean:.1f} (max {row.lag_max})  "
        f"accepted {row.accepted}  rejected {row.rejected}  {row.seconds:.1f} s  {human_bytes(moved)}"
    )


class PlainDisplay:
    """One line a step and one an event: for files, pipes and continuous integration."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0
        self._bytes = 0
        self._phase = ""

    def update(self, view: View) -> None:
        """Print the steps that are new, and the phase where it changed."""
        new = [row for row in view.steps if row.step > self._shown]
        for row in new:
            self.say(step_line(row, (view.bytes - self._bytes) // len(new)))
            self._shown = row.step
        if new:
            self._bytes = view.bytes
        if view.phase != self._phase:
            if self._phase == "starting":
                self.say(f"others join at {view.address}")
            self._phase = view.phase
            self.say(view.phase)

    def say(self, text: str) -> None:
        """Print ``text`` at once, unwrapped."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def conclude(self, text: str) -> None:
        """Print ``text``."""
        self.say(text)

    def close(self) -> None:
        """Nothing is held back."""


class LiveDisplay:
    """A picture of the network that is drawn anew in place."""

    def __init__(self, console: Console) -> None:
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._result: list[str] = []
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._console = console
        self._live.start()

    def update(self, view: View) -> None:
        """Draw ``view``."""
        self._live.update(self.picture(view), refresh=True)

    def say(self, text: str) -> None:
        """Keep ``text`` among the last events under the table."""
        self._events.append(text)

    def conclude(self, text: str) -> None:
        """Keep ``text`` for the end."""
        self._result.append(text)

    def close(self) -> None:
        """Leave the last picture on the screen, with the result below it."""
        self._live.stop()
        for text in self._result:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def picture(self, view: View) -> RenderableType:
        """The whole picture."""
        parts: list[RenderableType] = [_headline(view), _steps(view, max(20, self._console.width - 60)), _nodes(view)]
        warnings = [f"{node.name}: {text}" for node in view.nodes for text in node.warnings]
        parts += [Text(f"! {text}", style="yellow", no_wrap=True, overflow="ellipsis") for text in warnings[:EVENTS]]
        parts += [Text(f"· {text}", style="dim") for text in self._events]
        # Never broken over lines by us, so that it can be copied whole.
        parts.append(Text(f"others join at {view.address}", style="dim", no_wrap=True, overflow="fold"))
        return Padding(Group(*parts), (1, 0, 0, 0))


def _headline(view: View) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    done = len(view.steps)
    grid.add_row(
        Text("farflung devnet", style="bold"),
        Text(f"step {done}/{view.goal}"),
        ProgressBar(total=view.goal, completed=min(done, view.goal), width=24),
        Text(human_time(view.seconds)),
        Text(f"{human_bytes(view.bytes)} moved"),
        Text(f"cut {view.cut_height}"),
        Text(view.phase, style="italic"),
    )
    return grid


def _steps(view: View, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    rows = view.steps
    if not rows:
        return Text("no step yet", style="dim")
    last = rows[-1]
    grid.add_row("reward", Text(sparkline([r.reward for r in rows], width), style="green"), f"{last.reward:.3f}")
    lag = f"{last.lag_mean:.1f} (max {last.lag_max})"
    grid.add_row("policy lag", Text(sparkline([r.lag_mean for r in rows], width), style="blue"), lag)
    accepted, rejected = sum(r.accepted for r in rows), sum(r.rejected for r in rows)
    rollouts = f"{accepted} accepted, {rejected} rejected"
    grid.add_row("rollouts", Text(sparkline([float(r.accepted) for r in rows], width), style="cyan"), rollouts)
    return Padding(grid, (1, 0))


def _nodes(view: View) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("node", "role", "state"):
        table.add_column(title)
    for title in ("version", "credit", "peers", "tokens", "sent", "received"):
        table.add_column(title, justify="right")
    for node in view.nodes:
        table.add_row(
            node.name,
            Text(node.role, style=ROLE_STYLES.get(node.role, "dim")),
            Text(node.state, style="" if node.state == "running" else "yellow"),
            str(node.version) if node.version >= 0 else "–",
            str(node.credit),
            str(node.peers),
            f"{node.tokens:,}",
            human_bytes(node.sent),
            human_bytes(node.received),
        )
    return table


def open_display(console: Console) -> Display:
    """The display that fits ``console``: live in a terminal, plain elsewhere."""
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(console)
