"""Which holder is asked for which chunks next: the decisions of one transfer of one bulk object.

Whom to ask is settled by ``protocol.weights.holders``, over how many flows by ``protocol.weights.flows``. Whoever
drives a swarm keeps ``flows`` flows to each holder, lets each ask ``next`` for its runs, and tells what came of them.

1. A chunk is asked of one holder at a time, so it can be received where it belongs. No flow is given a run by somebody
   else: a fast holder's flows come back sooner and so carry more.
2. The chunks that the fewest holders have, or are fetching themselves, go first, at a random place among them; a run
   goes on with what follows there. So those who start together fetch different ones and soon have something for each
   other. A holder that is to be spared (the
   author, where others hold the object too) is asked for what nobody else has or fetches, unless all others together
   bring less than half of what it does.
3. A run lasts ``RUN_SECONDS`` at its flow's rate, from one chunk to ``MAX_RUN``; shorter where little is left, and one
   chunk where nothing is known of the holder yet. Its length is a power of two and it ends at a multiple of it, so that
   runs leave no odd pieces to others.
4. A run that falls far behind gives up what it has not begun. One that stands still for ``STALL_SECONDS`` is broken
   off, and counts as a failure of its holder.
5. End game: where a flow finds nothing that nobody was asked for, it takes over from the run that will last longest:
   the half of it that was not begun, or, from one much slower than itself, the chunk that is on its way.
6. Holders that only libp2p reaches (``direct`` false) are asked for what no other holder at hand has.

Time is an argument (monotonic seconds), and so is chance. Chunks stand in sets (``protocol.weights.chunk_set``).
A decision costs microseconds, and in proportion to the object's chunks a few more (16 at 60 000).
"""

from __future__ import annotations

import math
from typing import Final

from protocol.constants import CHUNK_BYTES
from protocol.weights.chunk_set import following, lowest, span
from protocol.weights.flows import Flows
from protocol.weights.holders import Holder, Holders, Run
from protocol.weights.routes import Chance, Routes

MAX_RUN: Final = 16
RUN_SECONDS: Final = 0.25
STALL_SECONDS: Final = 5.0
FALLBACK_STALL_SECONDS: Final = 30.0
"""Over libp2p a chunk arrives whole or not at all."""
LATE: Final = 4.0
"""A run late by so many times its expected duration gives up what it has not begun."""
YOUNG_SECONDS: Final = 1.0
"""Age from which on a run's own speed says how long it will last."""
SEARCH_SECONDS: Final = 0.03
"""Between two searches for a run to take over, where the last found none."""
ALPHA: Final = 0.3


class Swarm(Holders):
    """One transfer. ``chunks`` is the object's number of chunks, ``held`` the set of those that are here."""

    def __init__(self, chunks: int, held: int, *, routes: Routes, chance: Chance, now: float) -> None:
        super().__init__(chunks, ((1 << chunks) - 1) & ~held, routes=routes, chance=chance, now=now)
        self.rate = 0.0
        """Bytes a second from all holders, smoothed."""
        self._flows = Flows(self, now)
        self._free = self.missing
        """Missing, and nobody was asked for them."""
        self._bytes = 0
        self._tick_at = now
        self._tick_bytes = 0
        self._search_at = now

    @property
    def done(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    @property
    def coming(self) -> int:
        """What is on its way to us."""
        return self.missing & ~self._free

    def batch(self, node: bytes) -> int:
        """How many more chunks than now a partial holder should have before it tells: what arrives in about
        ``RUN_SECONDS`` at our own rate, for it may get them as fast as we do."""
        return max(1, min(4 * MAX_RUN, int(self.rate * RUN_SECONDS / CHUNK_BYTES)))

    # Flows

    def flows(self, node: bytes, now: float) -> int:
        """How many flows to a holder there should be now."""
        holder = self.get(node)
        return 0 if holder is None else self._flows.to(holder, now)

    def next(self, node: bytes, now: float) -> Run | None:
        """The next run to ask of a holder, or None where there is nothing for it to do now."""
        holder = self.get(node)
        if holder is None or len(holder.runs) >= self._flows.to(holder, now):
            return None
        if holder.lacks and holder.lacks_until <= now:
            holder.lacks = 0
        wanted = holder.has & ~holder.lacks
        if not holder.holding.direct:
            wanted &= ~self.direct
        if holder.holding.spared and not self.needed(holder, now):
            wanted &= ~self.counted()[0]
        free = self._free & wanted
        if free:
            first, count = self._rarest(free, self._length(holder, free, now))
            return self._start(holder, first, first + count, now)
        return self._take_over(holder, wanted, now)

    def connected(self, node: bytes, seconds: float) -> None:
        """A connection to a holder took so long to be made: about one round trip."""
        holder = self.get(node)
        if holder is not None:
            holder.rtt = seconds if not holder.rtt else min(holder.rtt, seconds)

    def arrived(self, run: Run, now: float) -> bool:
        """The chunk ``run.at`` arrived and is right. False where the run ends with it: the request is to be ended."""
        bit = 1 << run.at
        self.missing &= ~bit
        self._free &= ~bit
        run.moved = now
        run.at += 1
        holder = self.get(run.node)
        if holder is not None:
            holder.failures = 0
            holder.refusals = max(0, holder.refusals - 1)
            holder.delivered += 1
        return run.at < run.end and not run.broken_off

    def finished(self, run: Run, now: float) -> None:
        """The request of a run has ended, and nobody writes to its chunks any more. Those that did not arrive are free.

        To be told of every run, exactly once, also after ``failed`` and its like.
        """
        self._account(run, now)
        if run.at < run.end:
            self._free |= span(run.at, run.end) & self.missing
        holder = self.get(run.node)
        if holder is not None and run in holder.runs:
            holder.runs.remove(run)
            seconds = now - run.began
            if run.at > run.first and seconds > 0:
                flows = len(holder.runs) + 1
                rate = run.received / seconds * flows
                holder.rate = rate if not holder.rate else (1 - ALPHA) * holder.rate + ALPHA * rate
                self.routes.delivered(run.node, rate, now)

    def tick(self, now: float) -> None:
        """Look after rates, stalls and the number of flows: about ten times a second."""
        if any(self._tick_at < h.not_before <= now for h in self):
            self.choose(now)  # one that was left alone may be asked again
        seconds = max(now - self._tick_at, 1e-6)
        share = 1 - math.exp2(-2 * seconds)
        running = 0
        for holder in list(self):
            running += len(holder.runs)
            for run in holder.runs:
                before = run.counted
                self._account(run, now)
                run.speed += ((run.counted - before) / seconds - run.speed) * share
                self._watch(holder, run, now)
            holder.current += (holder.fresh / seconds - holder.current) * share
            holder.fresh = 0
        self.rate += ((self._bytes - self._tick_bytes) / seconds - self.rate) * share
        self._tick_at, self._tick_bytes = now, self._bytes
        self._flows.tick(running, seconds, self._bytes, now)
        self.review(running, now)

    def delivered(self) -> dict[bytes, int]:
        """Chunks by holder."""
        return {h.node: h.delivered for h in self if h.delivered}

    # Choosing chunks

    def _rarest(self, free: int, length: int) -> tuple[int, int]:
        """A random place among the rarest chunks of ``free``, and how many of ``free`` follow from there on, up to the
        next multiple of ``length``."""
        rare = free
        for level in self.counted():
            if free & ~level:
                rare = free & ~level
                break
        start = self._chance.randrange(self.chunks) // length * length
        after = rare >> start
        if not after:
            start, after = 0, rare
        first = start + lowest(after)
        return first, following(free, first, length - first % length)

    def _length(self, holder: Holder, free: int, now: float) -> int:
        rate = self._flow_rate(holder, now)
        if rate is None:
            return 1
        flows = sum(self._flows.to(h, now) for h in self if h.active)
        share = self._free.bit_count() // (2 * max(1, flows))
        length = min(MAX_RUN, int(rate * RUN_SECONDS / CHUNK_BYTES), share)
        return 1 << max(0, length.bit_length() - 1)

    def _flow_rate(self, holder: Holder, now: float) -> float | None:
        """Bytes a second to expect of one flow to a holder."""
        if holder.rate:
            return holder.rate / max(1, len(holder.runs))
        known = self.routes.rate(holder.node, now)
        return None if known is None else known / max(1, self._flows.to(holder, now))

    def _start(self, holder: Holder, first: int, end: int, now: float) -> Run:
        self._free &= ~span(first, end)
        rate = self._flow_rate(holder, now)
        expected = RUN_SECONDS if rate is None else (end - first) * CHUNK_BYTES / max(rate, 1.0)
        run = Run(holder.node, first, end, now, first, expected, now)
        holder.runs.append(run)
        return run

    def _take_over(self, holder: Holder, wanted: int, now: float) -> Run | None:
        """Rule 5."""
        if now < self._search_at:
            return None
        self._search_at = now + SEARCH_SECONDS
        rate = self._flow_rate(holder, now)
        seconds = CHUNK_BYTES / rate if rate else RUN_SECONDS
        slowest, longest = None, 0.0
        for other in self:
            if other is not holder:
                for run in other.runs:
                    if not run.broken_off:
                        left = self._left(other, run, now)
                        if left > longest and wanted & span(run.at, run.end):
                            slowest, longest = run, left
        if slowest is None:
            return None
        begun = slowest.at + 1
        if slowest.end > begun and longest > 2 * seconds:
            end, slowest.end = slowest.end, begun + (slowest.end - begun) // 2
            given_up = span(slowest.end, end)
            self._free |= given_up
            if free := given_up & wanted:
                first = lowest(free)
                self._search_at = now
                return self._start(holder, first, first + following(free, first, end - first), now)
        elif slowest.end == begun and longest > 2 * seconds + 2 * holder.rtt + 0.05:
            self.bar(slowest.node, 1 << slowest.at, now)
            self.break_off(slowest)
        return None

    def _left(self, holder: Holder, run: Run, now: float) -> float:
        """Seconds that a run may still last: by its speed of late, by its holder's rate while it is young."""
        rest = max(0, run.count * CHUNK_BYTES - run.received)
        age = now - run.began
        if age > YOUNG_SECONDS:
            return rest / max(run.speed, 1.0)
        rate = self._flow_rate(holder, now)
        return rest / rate if rate else run.expected

    # Watching flows

    def _account(self, run: Run, now: float) -> None:
        if run.received > run.counted:
            fresh = run.received - run.counted
            run.counted = run.received
            run.moved = now
            self._bytes += fresh
            holder = self.get(run.node)
            if holder is not None:
                holder.fresh += fresh

    def _watch(self, holder: Holder, run: Run, now: float) -> None:
        """Rule 4."""
        if run.broken_off:
            return
        if now - run.moved > (STALL_SECONDS if holder.holding.direct else FALLBACK_STALL_SECONDS):
            self.unkept(run, now)
            self.break_off(run)
            self.failed(holder.node, now)
        elif run.end > run.at + 1 and now - run.began > LATE * max(run.expected, RUN_SECONDS):
            self._free |= span(run.at + 1, run.end) & self.missing
            run.end = run.at + 1
