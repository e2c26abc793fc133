"""Task sets as people have them: a text file with the number of an item on each line.

1. Blank lines and what follows a ``#`` mean nothing; the order of the lines does not either.
2. Founding a domain turns the file into its canonical form (``protocol.taskset``), which the genesis pins.

``farflung tasks profile`` writes such files; they can be written by hand as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from node.errors import UserError
from protocol.errors import LocalError
from protocol.taskset import MAX_ITEM, TaskSet

MAX_TEXT: Final = 32 << 20
"""Bytes of a file: a million items with a short comment each."""


def read(path: Path) -> TaskSet:
    """The set in a text file. Raises ``UserError`` that names the first bad line."""
    try:
        if path.stat().st_size > MAX_TEXT:
            raise UserError(f"the task set {path} is larger than {MAX_TEXT >> 20} MiB", "leave some items out")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the task set {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"the task set {path} is not text", "write the number of an item on each line") from None
    where: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        # int() would take other alphabets' digits and underscores.
        item = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
        if not 0 <= item <= MAX_ITEM:
            raise UserError(
                f"line {number} of the task set {path} is not the number of an item: {text[:40]!r}",
                f"write a whole number from 0 to {MAX_ITEM}",
            )
        if item in where:
            raise UserError(
                f"the task set {path} names item {item} in lines {where[item]} and {number}", "name it once"
            )
        where[item] = number
    if not where:
        raise UserError(f"the task set {path} names no item", "write the number of an item on each line")
    try:
        made = TaskSet.of(where)
        made.encode()
    except LocalError as error:
        raise UserError(f"{path}: {error}", "leave some items out") from None
    return made


def text(items: Iterable[int], about: Iterable[str]) -> str:
    """A file with these items, and ``about`` in comments above them."""
    return "".join([*(f"# {line}\n" for line in about), *(f"{item}\n" for item in sorted(items))])
