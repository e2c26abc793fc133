"""Question sets as files of JSON lines: what the kinds of tasks that have one share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from node.errors import UserError
from protocol.constants import MAX_BLOB_BYTES
from protocol.taskset import MAX_ITEM

MAX_QUESTION: Final = 1 << 16
"""Characters of a question."""
MAX_LINES: Final = 1_000_000

Line = TypeVar("Line")
"""What a kind of tasks makes of a line."""


def lines(name: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbers (from 1) and objects of the lines that are not blank, at least one.

    Raises ``UserError`` that names the first bad line.
    """
    try:
        if path.stat().st_size > MAX_BLOB_BYTES:
            raise UserError(f"{name} ({path}) is larger than {MAX_BLOB_BYTES >> 20} MiB", "split it")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {name} ({path}): {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} ({path}) is not UTF-8 at byte {error.start}") from None
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        count += 1
        if count > MAX_LINES:
            raise UserError(f"{name} ({path}) has more than {MAX_LINES} lines", "split it")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"line {number} of {name} is not JSON: {error}") from None
        yield number, value if isinstance(value, dict) else {}
    if not count:
        raise UserError(f"{name} ({path}) has no line", 'write one {"question": …, "answer": …} a line')


def line_of(lines: Sequence[Line], item: int) -> Line:
    """What item 0…2³¹−1 is: the lines repeat. Raises ``ValueError`` for another number."""
    if not 0 <= item <= MAX_ITEM:
        raise ValueError(f"there is no item {item}")
    return lines[item % len(lines)]
