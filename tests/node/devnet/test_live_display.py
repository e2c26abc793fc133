"""What people see while a devnet runs."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from node.devnet.live_display import (
    LiveDisplay,
    NodeView,
    PlainDisplay,
    View,
    human_bytes,
    human_time,
    open_display,
    sparkline,
)
from node.devnet.summary import StepRow

ROW = StepRow(12, 0.4123, 0.8, 2, 256, 0, 200, 4.12, 3.0, 1.0, 0.12, 0.5)
NODE = NodeView("node-1", "running", "trainer", 12, 345, 4, 6789, 3_200_000, 1_000, ("the disk is nearly full",))
ADDRESS = "/ip4/127.0.0.1/tcp/12345/p2p/12D3KooWJ1MyKR3Gm9VKnKhU5cCXZN1CHmSQyNRFwcDVxkqHpBk9"
VIEW = View(60, "training", 61.0, 3_200_000, (ROW,), (NODE,), 7, ADDRESS)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120, color_system=None, legacy_windows=False), file


def test_the_plain_line_of_a_step() -> None:
    screen, file = console(terminal=False)
    display = PlainDisplay(screen)
    display.update(VIEW)
    first, phase = file.getvalue().splitlines()
    assert first == "step 12  reward 0.412  lag 0.8 (max 2)  accepted 256  rejected 0  4.1 s  3.2 MB"
    assert phase == "training"


def test_the_address_is_told_once_others_can_join() -> None:
    screen, file = console(terminal=False)
    display = PlainDisplay(screen)
    for phase in ("starting", "forming", "training"):
        display.update(replace(VIEW, phase=phase, steps=()))
    assert file.getvalue().splitlines() == ["starting", f"others join at {ADDRESS}", "forming", "training"]


def test_a_step_is_told_once_with_the_bytes_moved_since_the_last_one() -> None:
    screen, file = console(terminal=False)
    display = PlainDisplay(screen)
    display.update(VIEW)
    display.update(VIEW)
    display.update(replace(VIEW, bytes=4_000_000, steps=(ROW, replace(ROW, step=13))))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step")]
    assert len(lines) == 2
    assert lines[1].startswith("step 13 ")
    assert lines[1].endswith("800 kB")


def test_text_is_not_markup_and_not_wrapped() -> None:
    screen, file = console(terminal=False)
    PlainDisplay(screen).say("[bold]x[/bold] " + "y" * 300)
    assert file.getvalue() == "[bold]x[/bold] " + "y" * 300 + "\n"


def test_the_live_picture_shows_roles_credit_and_the_address_in_one_piece() -> None:
    screen, file = console(terminal=True)
    display = LiveDisplay(screen)
    display.say("node-2 died (signal SIGKILL)")
    display.update(VIEW)
    display.conclude("the result")
    assert "the result" not in file.getvalue()
    display.close()
    text = file.getvalue()
    assert text.rstrip().endswith("the result")
    for words in ("step 1/60", "trainer", "345", "6,789", "0.412", "3.2 MB", "cut 7", "the disk is nearly full"):
        assert words in text, words
    assert ADDRESS in text
    assert "node-2 died" in text


def test_the_live_picture_without_any_step() -> None:
    screen, file = console(terminal=True)
    display = LiveDisplay(screen)
    display.update(replace(VIEW, steps=(), nodes=(replace(NODE, version=-1),)))
    display.close()
    assert "no step yet" in file.getvalue()


def test_the_console_decides() -> None:
    live = open_display(console(terminal=True)[0])
    assert isinstance(live, LiveDisplay)
    live.close()
    assert isinstance(open_display(console(terminal=False)[0]), PlainDisplay)


def test_sparkline_runs_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 1.0, 0.5], 10) == "▁█▅"
    assert sparkline([0.3, 0.3], 10) == "▁▁"
    assert sparkline([1.0, 2.0, 3.0], 2) == "▁█"
    assert sparkline([], 10) == ""


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 800_000, 3_200_000, 2_500_000_000)] == ["0 kB", "800 kB", "3.2 MB", "2.50 GB"]
    assert [human_time(s) for s in (4.12, 59.4, 61, 252)] == ["4.1 s", "59.4 s", "1 min 1 s", "4 min 12 s"]
