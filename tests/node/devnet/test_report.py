"""report.html: whole, self-contained, safe, and the same for the same story."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.devnet import report
from node.devnet.report import Story, TrafficSample
from node.devnet.summary import EMPTY, EvaluationRow, NodeRow, Rejection, RunSummary, StepRow
from node.telemetry.plot import Series, plot, ticks
from proofs.checks import REASONS

VOID = {"meta", "line", "polyline", "circle", "rect", "br", "link"}


class Balance(HTMLParser):
    """Fails on tags that do not match, and collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.references: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def row(step: int, reward: float) -> StepRow:
    return StepRow(step, reward, 0.8, 2, 256, 16, 240, 4.1, 2.5, 1.5, 0.1, 0.7)


STEPS = tuple(row(i, 0.3 + i / 100) for i in range(1, 13))
NODES = (
    NodeRow("node-1", "ab" * 32, "trainer", 1200, ()),
    NodeRow("cheat-forged-reward", "cd" * 32, "inference", 0, (Rejection("reward", 7), Rejection("late", 1))),
)
SAMPLES = tuple(TrafficSample(float(i), i * 100, i * 50_000) for i in range(30))
STORY = Story(RunSummary(STEPS, NODES, 61.5, 1_500_000), SAMPLES, 12, "done", (("heads root", "ef" * 32),))


def test_the_page_needs_nothing_else() -> None:
    page = report.render(STORY)
    assert "it stood still for 39% of its time" in page
    parsed = parse(page)
    assert parsed.references == []
    assert not re.search(r"https?:|url\(|@import|<script", page)
    assert parsed.seen["svg"] == 6


def test_it_shows_the_run() -> None:
    text = " ".join(parse(report.render(STORY)).text)
    for words in ("0.33 → 0.40", "1.2 times", "of 12, in 1 min 2 s", "3,072", "192 rejected", "1.5 MB", "1,200"):
        assert words in text, words
    assert REASONS["reward"].words in text
    assert "ef" * 32 in text


def test_evaluations_have_a_panel_of_their_own() -> None:
    assert "Held-out" not in report.render(STORY)
    rows = tuple(
        EvaluationRow(version, task, 64, rate, rate - 0.1, rate + 0.1, rate)
        for version, rate in ((0, 0.25), (5, 0.5))
        for task in ("sums", "products", "all")
    )
    page = report.render(replace(STORY, summary=replace(STORY.summary, evaluations=rows)))
    parsed = parse(page)
    assert parsed.seen["svg"] == parse(report.render(STORY)).seen["svg"] + 1
    assert "passed of 64, the same each time" in " ".join(parsed.text)
    # Of several tasks the mean is drawn.
    assert page.count("passed: 0.25 at 0") == page.count("passed: 0.5 at 5") == 1


def test_it_is_a_pure_function() -> None:
    assert report.render(STORY) == report.render(replace(STORY))


def test_a_run_that_ended_before_it_began_has_a_page_too() -> None:
    text = " ".join(parse(report.render(Story(EMPTY, (), 60, "interrupted", ()))).text)
    assert "no step was made" in text
    assert "interrupted" in text


def test_names_and_reasons_are_text_and_never_markup() -> None:
    evil = '<img src="x" onerror="alert(1)">'
    nodes = (NodeRow(evil, evil, evil, 0, (Rejection(evil, 1),)),)
    page = report.render(replace(STORY, summary=replace(STORY.summary, nodes=nodes), facts=((evil, evil),), phase=evil))
    assert "img" not in parse(page).seen


def test_a_reason_of_a_later_version_is_shown_by_its_code() -> None:
    nodes = (NodeRow("node-1", "ab" * 32, "inference", 0, (Rejection("novel", 3),)),)
    assert "novel" in " ".join(parse(report.render(replace(STORY, summary=replace(STORY.summary, nodes=nodes)))).text)


def test_rates_are_differences_of_totals() -> None:
    samples = [TrafficSample(0, 0, 0), TrafficSample(1, 100, 0), TrafficSample(2, 100, 0), TrafficSample(4, 300, 0)]
    assert report.rates(samples, 1.0) == [(1, 100.0), (2, 0.0), (4, 100.0)]
    assert report.rates(samples[:1], 1.0) == []
    assert report.rates([TrafficSample(1, 0, 0), TrafficSample(1, 5, 0)], 1.0) == []


def test_the_moving_mean_starts_with_what_there_is() -> None:
    assert report.moving_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_cover_the_range_with_few_round_values(low: float, span: float) -> None:
    values = ticks(low, low + span)
    assert 2 <= len(values) <= 8
    assert values == sorted(set(values))
    tolerance = 1e-6 * max(1.0, abs(low), span)
    assert values[0] <= low + tolerance
    assert values[-1] >= low + span - tolerance


@pytest.mark.parametrize("bars", [False, True])
@pytest.mark.parametrize("points", [[], [(1.0, 0.0)], [(1.0, 5.0)], [(1.0, 0.1), (2.0, 0.2)]])
def test_plots_stay_within_their_frame(points: list[tuple[float, float]], bars: bool) -> None:
    series = [Series("one", points, "c1", dots=True), Series("two", points, "c2")]
    picture = plot(series, size=(400, 200), title="a & b", x_label="x", bars=bars)
    assert parse(picture).seen["svg"] == 1
    assert "nan" not in picture
    for name, limit in (("x", 400), ("cx", 400), ("x1", 400), ("y", 200), ("cy", 200), ("y1", 200)):
        for value in re.findall(rf'\b{name}="([-0-9.]+)"', picture):
            assert 0 <= float(value) <= limit
