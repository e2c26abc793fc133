"""``report.html`` of a devnet's run: one file that needs nothing else, light or dark as its reader prefers.

``render`` is a pure function of a ``Story``: the same story gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any, Final

from node import __version__
from node.devnet.live_display import human_bytes, human_time
from node.devnet.summary import NodeRow, RunSummary, StepRow
from node.telemetry.plot import Point, Series, legend, page, plot
from proofs.checks import REASONS

WINDOW: Final = 5
"""Steps of the moving mean of the reward, and of the means that the headline compares."""
RATE_WINDOW: Final = 5.0
"""Seconds over which rates are taken: generation comes in bursts of about a second."""


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """Totals over all nodes, ``seconds`` after the run began: response tokens generated and bytes sent."""

    seconds: float
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Story:
    """All that the report shows. ``goal`` is the number of steps asked for; ``facts`` are (name, value) rows."""

    summary: RunSummary
    samples: tuple[TrafficSample, ...]
    goal: int
    phase: str
    facts: tuple[tuple[str, str], ...]


def render(story: Story) -> str:
    """The whole HTML document."""
    body = [_head(story), _tiles(story), _plots(story), _nodes(story.summary.nodes), _foot(story)]
    return page(f"Farflung devnet: {len(story.summary.steps)} of {story.goal} steps, {story.phase}", "\n".join(body))


def _head(story: Story) -> str:
    nodes = len(story.summary.nodes)
    text = (
        f"{nodes} separate processes on one machine found each other, took roles and trained one model together."
        if nodes
        else "The run ended before its nodes had a log."
    )
    badge = "good" if story.phase.startswith(("done", "running")) else "bad"
    return (
        f'<header><h1>Farflung devnet <span class="badge {badge}">{escape(story.phase)}</span></h1>'
        f"<p>{text}</p></header>"
    )


def means(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Mean reward of the first and of the last ``WINDOW`` steps, or None before there are any."""
    return (fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])) if rewards else None


def _tiles(story: Story) -> str:
    summary = story.summary
    both = means([row.reward for row in summary.steps])
    reward, ratio = "–", "no step was made"
    if both is not None:
        reward = f"{both[0]:.2f} → {both[1]:.2f}"
        grown = f", {both[1] / both[0]:.1f} times" if both[0] > 0 else ""
        ratio = f"mean of the first and last {WINDOW} steps{grown}"
    accepted, rejected = sum(r.accepted for r in summary.steps), sum(r.rejected for r in summary.steps)
    tiles = [
        ("reward", reward, ratio),
        ("steps", f"{len(summary.steps)}", f"of {story.goal}, in {human_time(summary.seconds)}"),
        ("rollouts accepted", f"{accepted:,}", f"{rejected:,} rejected"),
        ("bytes moved", human_bytes(summary.bytes), "over libp2p, each counted once"),
    ]
    cells = "".join(
        f'<div class="tile"><h2>{escape(name)}</h2><strong>{escape(value)}</strong><p>{escape(note)}</p></div>'
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Each point's y replaced by the mean of the last ``window`` of them up to it."""
    heights = [y for _, y in points]
    return [(x, fmean(heights[max(0, end - window) : end])) for end, (x, _) in enumerate(points, 1)]


def rates(samples: Sequence[TrafficSample], window: float) -> list[Point]:
    """(seconds, tokens a second over the ``window`` seconds before) for each sample but the first."""
    points, start = [], 0
    for i in range(1, len(samples)):
        while start + 1 < i and samples[i].seconds - samples[start + 1].seconds >= window:
            start += 1
        span = samples[i].seconds - samples[start].seconds
        if span > 0:
            points.append((samples[i].seconds, (samples[i].tokens - samples[start].tokens) / span))
    return points


def _minutes(minutes: float) -> str:
    whole, seconds = divmod(round(minutes * 60), 60)
    return f"{whole}:{seconds:02d}"


def _panel(
    name: str, note: str, series: Sequence[Series], title: str, *, key: Sequence[Series] = (), wide: int = 0, **how: Any
) -> str:
    """A figure with a plot of ``series`` that is ``wide`` pixels high and takes the whole width, or half of it.

    ``key`` are the series of the legend; ``how`` are arguments of ``node.telemetry.plot.plot``.
    """
    picture = plot(series, size=(960, wide) if wide else (470, 210), title=title, **how)
    return (
        f'<figure class="{"wide" if wide else ""}"><figcaption><h2>{escape(name)}</h2><span>{escape(note)}</span>'
        f"{legend(key) if key else ''}</figcaption>{picture}</figure>"
    )


def _plots(story: Story) -> str:
    steps, samples = story.summary.steps, story.samples

    def of(name: str) -> list[Point]:
        return [(float(row.step), float(getattr(row, name))) for row in steps]

    rewards = [
        Series("reward", of("reward"), "c1 faint", dots=True),
        Series(f"mean of {WINDOW}", moving_mean(of("reward"), WINDOW), "c1"),
    ]
    lags = [Series("largest", of("lag_max"), "c2 faint"), Series("mean", of("lag_mean"), "c2", dots=True)]
    counts = [Series("accepted", of("accepted"), "c3"), Series("rejected", of("rejected"), "c5")]
    times = [
        Series("training", of("training"), "c1"),
        Series("waiting for rollouts", of("waiting"), "c4"),
        Series("waiting for its version", of("blocked"), "c2"),
        Series("publishing, meanwhile", of("publishing"), "c1 faint"),
    ]
    tokens = [Series("tokens a second", [(x / 60, y) for x, y in rates(samples, RATE_WINDOW)], "c4")]
    moved = [Series("MB", [(s.seconds / 60, s.bytes / 1e6) for s in samples], "c2")]
    by_step: dict[str, Any] = {"x_label": "step", "whole_x": True}
    by_time: dict[str, Any] = {"x_label": "minutes", "x_format": _minutes}
    note = "mean over all accepted rollouts of a step"
    idle = f"seconds a step; it stood still for {_idle(steps)}"
    panels = [
        _panel("Reward", note, rewards, "reward by step", key=rewards, wide=280, **by_step),
        _panel("Policy lag", "versions behind the trainer", lags, "policy lag by step", key=lags, **by_step),
        _panel("Rollouts", "responses a step", counts, "rollouts by step", key=counts, bars=True, **by_step),
        _panel("The trainer's time", idle, times, "the trainer's time by step", key=times, wide=210, **by_step),
        _panel("Tokens a second", "generated by all inference nodes", tokens, "tokens a second", **by_time),
        *_evaluations(story),
        _panel("Bytes moved", "MB sent by all nodes since the start", moved, "bytes moved", **by_time),
    ]
    return f'<section class="plots">{"".join(panels)}</section>'


def _evaluations(story: Story) -> list[str]:
    """A panel of what the trainer measured on held-out questions, where it did."""
    rows = story.summary.evaluations
    rows = tuple(row for row in rows if row.task == "all") or rows  # several tasks have a mean as well
    if not rows:
        return []
    low, high, rate = (
        [(float(row.version), getattr(row, name)) for row in rows]
        for name in ("pass_rate_low", "pass_rate_high", "pass_rate")
    )
    limits = [Series("95 % interval", low, "c3 faint"), Series("", high, "c3 faint")]
    passed = Series("passed", rate, "c3", dots=True)
    note = f"passed of {rows[-1].questions}, the same each time"
    title, key = "held-out questions by version", [passed, limits[0]]
    return [_panel("Held-out questions", note, [*limits, passed], title, key=key, x_label="version", whole_x=True)]


def _idle(steps: Sequence[StepRow]) -> str:
    """The share of the trainer's time in which it did not train."""
    total = sum(row.seconds for row in steps)
    return f"{sum(row.waiting + row.blocked for row in steps) / total:.0%} of its time" if total else "no time yet"


def _nodes(nodes: Sequence[NodeRow]) -> str:
    rows = []
    for node in nodes:
        rejections = "".join(
            f"<li><b>{row.count}</b> {escape(REASONS[row.reason].words if row.reason in REASONS else '')} "
            f"<code>{escape(row.reason)}</code></li>"
            for row in node.rejections
        )
        rows.append(
            f"<tr><td>{escape(node.name)}</td><td><code>{escape(node.id[:16])}…</code></td>"
            f'<td><span class="role {escape(node.role)}">{escape(node.role)}</span></td>'
            f'<td class="number">{node.credit:,}</td><td>{f"<ul>{rejections}</ul>" if rejections else "–"}</td></tr>'
        )
    return (
        '<section class="card"><h2>Nodes</h2><table><thead><tr><th>name</th><th>id</th><th>role</th>'
        '<th class="number">credit</th><th>submissions rejected</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></section>"
    )


def _foot(story: Story) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in story.facts)
    return (
        f"<footer><dl>{rows}</dl><p>Farflung {escape(__version__)}. Steps, credit and rejections were read from a "
        "node's own log; check it with <code>farflung log verify &lt;data directory&gt;</code>.</p></footer>"
    )
