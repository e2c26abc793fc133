"""How many flows to keep to each holder of a bulk object. A *flow* is a connection with one request at a time.

1. A holder is asked over at most ``MAX_FLOWS_PER_HOLDER`` flows, all over ``MAX_FLOWS``. It begins with one flow for
   every ``FLOW_RTT`` of its round trip, one where there are many holders.
   One that is near (its round trip says so) is asked over few: neither loss nor distance limits a flow to it.
2. The flows are doubled as long as each of twice as many brings nearly as much: then loss or distance is what limits
   them, and not a link.
3. A holder that was busy begins with half of its flows, and gets one more with each review.
"""

from __future__ import annotations

from typing import Final

from protocol.weights.holders import MAX_FLOWS_PER_HOLDER, Holder, Holders

FLOW_RTT: Final = 0.04
FIRST_FLOWS: Final = 4
NEAR_RTT: Final = 0.001
"""For each of these in a holder's round trip there may be a flow."""
NEAR_FLOWS: Final = 4
"""To all holders together, however near they are."""
MAX_FLOWS: Final = 64
MAX_FALLBACK_FLOWS: Final = 4
REVIEW_SECONDS: Final = 0.6
"""How long a number of flows is tried before the rate says whether it was worth it."""
WORTH: Final = 0.65
"""A flow must bring this share of what it brought when they were half as many."""
MANY: Final = 16
WORTH_OF_MANY: Final = 0.8
"""The same where there are ``MANY`` flows: the luck of each evens out, and nodes that double theirs against each other
only send more that is lost."""
RETRY_SECONDS: Final = 8.0
"""Until more flows are tried again after they brought nothing."""


class Flows:
    """The number of flows to each of ``holders``."""

    def __init__(self, holders: Holders, now: float) -> None:
        self._holders = holders
        self._factor = 1
        self._seconds = 0.0
        """Of all flows together since the last review."""
        self._before: float | None = None
        """Bytes a second of each when they were half as many."""
        self._review_at = now + REVIEW_SECONDS
        self._review_bytes = 0

    def to(self, holder: Holder, now: float) -> int:
        """How many flows to a holder there should be now."""
        if not holder.active or holder.out or holder.not_before > now or not self._holders.missing:
            return 0
        if not holder.holding.direct:
            return MAX_FALLBACK_FLOWS
        active = max(1, self._holders.active)
        first = max(1, min(round(holder.rtt / FLOW_RTT), FIRST_FLOWS, 2 * FIRST_FLOWS // active))
        near = max(1, NEAR_FLOWS // active, round(holder.rtt / NEAR_RTT))
        return min(first * self._factor, near, holder.most, max(1, MAX_FLOWS // active), MAX_FLOWS_PER_HOLDER)

    def tick(self, running: int, seconds: float, received: int, now: float) -> None:
        """``running`` flows had work for so many seconds, and so many bytes arrived over all flows since the start."""
        self._seconds += running * seconds
        if now >= self._review_at:
            self._review(received, now)

    def _review(self, received: int, now: float) -> None:
        wait = REVIEW_SECONDS
        each = (received - self._review_bytes) / self._seconds if self._seconds else 0.0
        active = [h for h in self._holders if h.active and h.holding.direct]
        wanted = sum(self.to(h, now) for h in active)
        worth = WORTH_OF_MANY if wanted >= MANY else WORTH
        if self._before is not None and each < worth * self._before:
            self._factor = max(1, self._factor // 2)
            self._before = None
            wait = RETRY_SECONDS
        elif each > 0 and sum(len(h.runs) for h in active) > wanted // 2 and wanted < MAX_FLOWS // 2:
            self._before = each
            self._factor = min(2 * self._factor, MAX_FLOWS)
        else:
            self._before = None
        self._review_at = now + wait
        self._review_bytes, self._seconds = received, 0.0
        for holder in active:
            holder.most = min(MAX_FLOWS_PER_HOLDER, holder.most + 1)
