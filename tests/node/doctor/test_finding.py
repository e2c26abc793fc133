"""Running checks: all at once, each with its deadline."""

from __future__ import annotations

import trio
import trio.testing

from node.doctor.finding import ERROR, OK, WARNING, Check, Finding, exit_code, gather


async def fine() -> list[Finding]:
    await trio.sleep(5)
    return [Finding("fine", OK, "well")]


async def broken() -> list[Finding]:
    raise OSError("no such thing")


async def slow() -> list[Finding]:
    await trio.sleep(1000)
    return []


async def test_all_at_once_in_order_and_in_time(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    found = await gather([Check("slow", slow), Check("fine", fine), Check("broken", broken)], deadline=10)
    assert trio.current_time() - began <= 10.1
    assert [(one.check, one.severity) for one in found] == [("slow", WARNING), ("fine", OK), ("broken", WARNING)]
    assert "no result within 10 s" in found[0].found
    assert "no such thing" in found[2].found


def test_only_an_error_fails() -> None:
    ok, warning, error = (Finding("x", severity, "") for severity in (OK, WARNING, ERROR))
    assert exit_code([]) == exit_code([ok, warning]) == 0
    assert exit_code([ok, error, warning]) == 1
