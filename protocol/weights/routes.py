"""How well peers delivered so far, and whom to try next: kept from one transfer to the next.

1. Of each peer a rate (bytes a second that arrived from it) and a success (0 … 1) are known, both moving averages that
   give what is new the share ``ALPHA``.
2. What is not renewed heals: with every ``HEAL_SECONDS`` half of a success's distance to 1, and of a rate's distance to
   the typical one, is gone. So a peer that failed, or was slow, is tried again later.
3. A peer is drawn with a probability in proportion to rate x success x its preference, and nobody's is zero: one that
   nothing is known of counts as typical.
4. Wrong bytes take all success away.

Time is an argument (monotonic seconds), and so is chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

ALPHA: Final = 0.3
HEAL_SECONDS: Final = 60.0
FLOOR: Final = 0.02
"""The least weight: a share of a typical peer's."""

TYPICAL: Final = 4 << 20
"""Bytes a second that count as typical before any peer has delivered."""

MAX_KNOWN: Final = 4096
"""Peers remembered; beyond it those not used for longest are forgotten."""


class Chance(Protocol):
    """Where chance comes from: ``random.Random`` is one."""

    def random(self) -> float:
        """From 0 up to but without 1."""

    def randrange(self, stop: int, /) -> int:
        """An integer from 0 up to but without ``stop``."""


@dataclass(slots=True)
class _Route:
    rate: float | None
    success: float
    seen: float


class Routes:
    """What is known of all peers, by node id."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._known: dict[bytes, _Route] = {}
        self._typical = float(TYPICAL)

    def delivered(self, node: bytes, rate: float, now: float) -> None:
        """``node`` delivered lately at ``rate`` bytes a second."""
        route = self._healed(node, now)
        route.rate = rate if route.rate is None else (1 - ALPHA) * route.rate + ALPHA * rate
        route.success += ALPHA * (1 - route.success)
        self._typical += 0.05 * (rate - self._typical)

    def failed(self, node: bytes, now: float) -> None:
        """It could not be reached, broke off or stood still."""
        self._healed(node, now).success *= 1 - ALPHA

    def lied(self, node: bytes, now: float) -> None:
        """It sent wrong bytes."""
        self._healed(node, now).success = 0.0

    def rate(self, node: bytes, now: float) -> float | None:
        """Bytes a second to expect of it; None where it never delivered."""
        route = self._known.get(node)
        if route is None or route.rate is None:
            return None
        return self._typical + (route.rate - self._typical) * _left(now - route.seen)

    def success(self, node: bytes, now: float) -> float:
        """From 0 to 1."""
        route = self._known.get(node)
        return 1.0 if route is None else 1 - (1 - route.success) * _left(now - route.seen)

    def weight(self, node: bytes, now: float) -> float:
        """How likely it is drawn, in units of a typical peer; never below ``FLOOR``."""
        rate = self.rate(node, now)
        speed = 1.0 if rate is None else rate / max(self._typical, 1.0)
        return max(FLOOR, speed * self.success(node, now))

    def draw(self, candidates: Iterable[tuple[bytes, float]], count: int, now: float, chance: Chance) -> list[bytes]:
        """``count`` different ones of ``candidates`` (node, preference > 0), or all where there are fewer."""
        # The smallest of exponential variables with these rates: a draw without replacement.
        keys = [
            (-math.log(1.0 - chance.random()) / (self.weight(node, now) * preference), node)
            for node, preference in candidates
        ]
        return [node for _, node in sorted(keys)[:count]]

    def _healed(self, node: bytes, now: float) -> _Route:
        """The route, brought to ``now`` and moved to the end of those that may be forgotten."""
        rate, success = self.rate(node, now), self.success(node, now)
        self._known.pop(node, None)
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        route = self._known[node] = _Route(rate, success, now)
        return route


def _left(seconds: float) -> float:
    return math.exp2(-max(seconds, 0.0) / HEAL_SECONDS)
