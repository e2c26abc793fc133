"""What a check finds, and running all checks at once.

1. Every check has a deadline; one that misses it, or fails itself, is a warning and holds up nobody.
2. The order of the findings is that of the checks, whichever is done first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

OK: Final = "ok"
WARNING: Final = "warning"
ERROR: Final = "error"
DEADLINE: Final = 13.0
"""Seconds that a check may take: with the start of the program all is done within about fifteen."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: its ``severity`` (ok, warning, error), what was ``found``, and the ``remedy``."""

    check: str
    severity: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check's name and what does it; it returns at least one finding."""

    name: str
    run: Callable[[], Awaitable[list[Finding]]]


async def gather(checks: Sequence[Check], deadline: float = DEADLINE) -> list[Finding]:
    """Run all checks at once and return what they found."""
    found: list[list[Finding]] = [[] for _ in checks]

    async def run(index: int, check: Check) -> None:
        try:
            with trio.move_on_after(deadline) as scope:
                found[index] = await check.run()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            found[index] = [Finding(check.name, WARNING, f"could not be checked: {reason}")]
        if scope.cancelled_caught:
            remedy = "try again when the machine is less busy"
            found[index] = [Finding(check.name, WARNING, f"no result within {deadline:g} s", remedy)]

    async with trio.open_nursery() as nursery:
        for index, check in enumerate(checks):
            nursery.start_soon(run, index, check)
    return [finding for findings in found for finding in findings]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where there is an error, else 0."""
    return int(any(finding.severity == ERROR for finding in findings))
