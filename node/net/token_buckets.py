"""Token buckets by key: so many at once, and then so many a second."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_KEYS: Final = 4096


class Buckets:
    """Each key's bucket holds ``burst`` tokens and gains ``per_second``. At most ``most`` keys are kept, the least
    recently used goes first; times are seconds of any monotonic clock."""

    def __init__(self, burst: float, per_second: float, most: int = MAX_KEYS) -> None:
        self._burst = burst
        self._per_second = per_second
        self._most = most
        self._buckets: OrderedDict[bytes | str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: bytes | str, tokens: float, now: float) -> bool:
        """Take ``tokens`` of ``key``'s bucket if it holds them."""
        held, updated = self._buckets.pop(key, (self._burst, now))
        held = min(self._burst, held + (now - updated) * self._per_second)
        enough = held >= tokens
        self._buckets[key] = (held - tokens if enough else held, now)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return enough

    def fill(self, key: bytes | str) -> None:
        """Let ``key`` have a full bucket again."""
        self._buckets.pop(key, None)
