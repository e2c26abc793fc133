"""Warnings that strangers can cause: so many at once and then so many a second, and the rest is counted.

Keys are free, so a bound for each peer is none. What is left out is told with the next line that is not.
"""

from __future__ import annotations

import logging
from typing import Final

from node.net.token_buckets import Buckets

LINES: Final = 10
LINES_PER_SECOND: Final = 1.0


class SparingLog:
    """Warnings to ``logger``; times are seconds of any monotonic clock."""

    def __init__(self, logger: logging.Logger, lines: float = LINES, per_second: float = LINES_PER_SECOND) -> None:
        self._logger = logger
        self._bucket = Buckets(lines, per_second, 1)
        self._left_out = 0

    def warning(self, now: float, text: str, *values: object) -> None:
        """Log one line, or count it as left out."""
        if not self._bucket.take("", 1, now):
            self._left_out += 1
            return
        if self._left_out:
            text += f" ({self._left_out} other warnings about peers were left out)"
            self._left_out = 0
        self._logger.warning(text, *values)
