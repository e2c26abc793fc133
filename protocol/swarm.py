"""Which holder is asked for which chunks next: the decisions of one transfer of one bulk object.

A *holder* has the whole object or a part of it. A *flow* is one connection to a holder, with one request at a time. A
*run* is what a request asks for: consecutive chunks. Whoever drives a swarm keeps ``flows`` flows to each holder, lets
each ask ``next`` for its runs, and tells what came of them.

1. A chunk is asked of one holder at a time, so it can be received where it belongs. No flow is given a run by somebody
   else: a fast holder's flows come back sooner and so carry more.
2. The chunks that the fewest holders have, or are fetching themselves, go first, at a random place among them. So those
   who start together fetch different ones and soon have something for each other. A holder that is to be spared (the
   author, where others hold the object too) is asked for what nobody else has or fetches, unless all others together
   bring less than half of what it does.
3. A run lasts ``RUN_SECONDS`` at its flow's rate, from one chunk to ``MAX_RUN``; shorter where little is left, and one
   chunk where nothing is known of the holder yet.
4. A holder is asked over at most ``MAX_FLOWS_PER_HOLDER`` flows, all over ``MAX_FLOWS``. It begins with one flow for
   every ``FLOW_RTT`` of its round trip, one where there are many holders. The flows are doubled as long as each of
   twice as many brings nearly as much: then loss or distance is what limits them, and not a link.
5. At most ``MAX_ACTIVE`` holders are asked at a time, drawn by their routes (``protocol.routes``), and most of them
   have something that is missing here. Every ``ROTATE_SECONDS`` the least useful gives way to another, and sooner
   where no active one has anything.
6. A run that falls far behind gives up what it has not begun. One that stands still for ``STALL_SECONDS`` is broken off
   and its holder left alone for a while, longer with each failure in a row. A holder that is busy is left alone for as
   long as it said, so nobody queues.
7. End game: where a flow finds nothing that nobody was asked for, it takes over from the run that will last longest:
   the half of it that was not begun, or, from one much slower than itself, the chunk that is on its way.
8. A holder that sent a wrong chunk is not asked again.
9. Holders that only libp2p reaches (``direct`` false) are asked for what no other holder at hand has.

Time is an argument (monotonic seconds), and so is chance. Chunks stand in integers used as sets: bit i is chunk i.
A decision costs microseconds, and in proportion to the object's chunks a few more (16 at 60 000).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from protocol.constants import CHUNK_BYTES
from protocol.routes import Chance, Routes

MAX_RUN: Final = 16
RUN_SECONDS: Final = 0.25
FLOW_RTT: Final = 0.04
FIRST_FLOWS: Final = 4
MAX_FLOWS_PER_HOLDER: Final = 32
MAX_FLOWS: Final = 64
MAX_FALLBACK_FLOWS: Final = 4
MAX_ACTIVE: Final = 10
FALLBACK_PREFERENCE: Final = 0.05
USEFUL: Final = 7
"""So many places among the active are for those who have something."""
ROTATE_SECONDS: Final = 10.0
STARVED_SECONDS: Final = 0.5

REVIEW_SECONDS: Final = 0.6
"""How long a number of flows is tried before the rate says whether it was worth it."""
WORTH: Final = 0.65
"""A flow must bring this share of what it brought when they were half as many."""
SETTLED_SECONDS: Final = 8.0
"""Until more flows are tried again after they brought nothing."""

STALL_SECONDS: Final = 5.0
FALLBACK_STALL_SECONDS: Final = 30.0
"""Over libp2p a chunk arrives whole or not at all."""
LATE: Final = 4.0
"""A run late by so many times its expected duration gives up what it has not begun."""
PAUSE_SECONDS: Final = 0.5
MAX_PAUSE: Final = 16.0
LACK_SECONDS: Final = 0.5
"""How long a holder is not asked for a chunk that it refused or that was taken from it."""

YOUNG_SECONDS: Final = 1.0
"""Age from which on a run's own speed says how long it will last."""
LOOK_SECONDS: Final = 0.03
"""Between two looks for a run to take over, where the last found none."""

ALPHA: Final = 0.3
LEVELS: Final = 12
"""Holders of a chunk are counted up to here; more are as good."""

_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def bits_of(bitmap: bytes, chunks: int) -> int:
    """The set that a bitmap (chunk i is bit i, the most significant of a byte first) stands for; spare bits are cut."""
    return int.from_bytes(bitmap.translate(_REVERSED), "little") & ((1 << chunks) - 1)


def bitmap_of(chunks: int, count: int) -> bytes:
    """The bitmap of a set of ``count`` chunks."""
    return chunks.to_bytes((count + 7) // 8, "little").translate(_REVERSED)


def bits(chunks: Iterable[int]) -> int:
    """The set of these chunks."""
    found = 0
    for chunk in chunks:
        found |= 1 << chunk
    return found


@dataclass(frozen=True, slots=True)
class Holding:
    """What is known of a holder from outside. ``preference`` weighs the draw of rule 5."""

    direct: bool = True
    whole: bool = True
    preference: float = 1.0
    spared: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """Chunks asked of ``node``: from ``first`` up to but without ``end``, which may shrink; ``at`` is on its way.

    Whoever drives the swarm sets ``received``, the bytes of this run that arrived so far, before each ``tick``.
    """

    node: bytes
    first: int
    end: int
    began: float
    at: int
    expected: float
    """Seconds that it should take, when it began."""
    moved: float
    """When bytes of it last arrived."""
    received: int = 0
    counted: int = 0
    speed: float = 0.0
    """Bytes a second of late."""
    broken_off: bool = False

    @property
    def count(self) -> int:
        """Its chunks."""
        return self.end - self.first


@dataclass(slots=True, eq=False)
class _Holder:
    node: bytes
    holding: Holding
    has: int
    coming: int = 0
    rtt: float = 0.0
    rate: float = 0.0
    """Bytes a second over all its flows, smoothed; 0 before the first."""
    current: float = 0.0
    """Bytes a second that arrive now, smoothed over about a second."""
    fresh: int = 0
    """Bytes since the last tick."""
    runs: list[Run] = field(default_factory=list)
    not_before: float = 0.0
    failures: int = 0
    most: int = MAX_FLOWS_PER_HOLDER
    lacks: int = 0
    lacks_until: float = 0.0
    lied: bool = False
    active: bool = False
    delivered: int = 0


class Swarm:
    """One transfer. ``chunks`` is the object's number of chunks, ``held`` the set of those that are here."""

    def __init__(self, chunks: int, held: int, *, routes: Routes, chance: Chance, now: float) -> None:
        self.chunks = chunks
        self.all = (1 << chunks) - 1
        self.missing = self.all & ~held
        self._free = self.missing
        """Missing, and nobody was asked for them."""
        self.routes = routes
        self.aborts: list[Run] = []
        """Runs to be broken off: whoever drives the swarm takes them and lets their requests fail."""
        self.rate = 0.0
        """Bytes a second from all holders, smoothed."""
        self.progress = now
        """When a chunk last arrived."""
        self._chance = chance
        self._holders: dict[bytes, _Holder] = {}
        self._levels: list[int] = []
        """Level k has the chunks that more than k holders have or fetch; empty where they are to be counted anew."""
        self._direct = 0
        self._active = 0
        self._factor = 1
        self._bytes = 0
        self._tick_at = now
        self._tick_bytes = 0
        self._review_at = now + REVIEW_SECONDS
        self._review_bytes = 0
        self._flow_seconds = 0.0
        self._before: float | None = None
        self._look_at = now
        self._rotate_at = now + ROTATE_SECONDS

    @property
    def done(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    # Who holds what

    def set_holders(self, holdings: Mapping[bytes, Holding], now: float) -> None:
        """Take these for the holders, and no others; the runs of those that are gone are broken off."""
        for node in [node for node in self._holders if node not in holdings]:
            for run in self._holders.pop(node).runs:
                self._break_off(run)
        for node, holding in holdings.items():
            known = self._holders.get(node)
            if known is None:
                self._holders[node] = _Holder(node, holding, self.all if holding.whole else 0)
            elif holding != known.holding:
                if holding.whole:
                    known.has = self.all
                known.holding = holding
        self._levels.clear()
        self._choose(now)

    def heard(self, node: bytes, has: int, coming: int, now: float) -> None:
        """A holder told which chunks it has, all of them, and which it is fetching."""
        holder = self._holders.get(node)
        if holder is not None and (has, coming) != (holder.has, holder.coming):
            lost = holder.has & ~has
            holder.has, holder.coming = has, coming
            self._levels.clear()
            if lost:
                self._choose(now)
            elif holder.active and holder.holding.direct:
                self._direct |= has

    @property
    def coming(self) -> int:
        """What is on its way to us."""
        return self.missing & ~self._free

    def has(self, node: bytes) -> int:
        """What a holder has, as far as it told."""
        holder = self._holders.get(node)
        return 0 if holder is None else holder.has

    def partial(self, now: float) -> list[bytes]:
        """The holders worth asking what they have: active ones that lack something that is missing here."""
        return [h.node for h in self._holders.values() if h.active and not h.lied and self.missing & ~h.has]

    def batch(self, node: bytes) -> int:
        """How many more chunks than now a partial holder should have before it tells: what arrives in about
        ``RUN_SECONDS`` at our own rate, for it may get them as fast as we do."""
        return max(1, min(4 * MAX_RUN, int(self.rate * RUN_SECONDS / CHUNK_BYTES / 2)))

    # Flows

    def flows(self, node: bytes, now: float) -> int:
        """How many flows to a holder there should be now."""
        holder = self._holders.get(node)
        if holder is None or not holder.active or holder.lied or holder.not_before > now or self.done:
            return 0
        if not holder.holding.direct:
            return MAX_FALLBACK_FLOWS
        active = max(1, self._active)
        first = max(1, min(round(holder.rtt / FLOW_RTT), FIRST_FLOWS, 2 * FIRST_FLOWS // active))
        return min(first * self._factor, holder.most, max(1, MAX_FLOWS // active), MAX_FLOWS_PER_HOLDER)

    def next(self, node: bytes, now: float) -> Run | None:
        """The next run to ask of a holder, or None where there is nothing for it to do now."""
        holder = self._holders.get(node)
        if holder is None or len(holder.runs) >= self.flows(node, now):
            return None
        if holder.lacks and holder.lacks_until <= now:
            holder.lacks = 0
        wanted = holder.has & ~holder.lacks
        if not holder.holding.direct:
            wanted &= ~self._direct
        if holder.holding.spared and not self._needed(holder, now):
            wanted &= ~self._counted()[0]
        free = self._free & wanted
        if free:
            first, count = self._rarest(free, self._length(holder, free, now))
            return self._start(holder, first, first + count, now)
        return self._take_over(holder, wanted, now)

    def connected(self, node: bytes, seconds: float) -> None:
        """A connection to a holder took so long to be made: about one round trip."""
        holder = self._holders.get(node)
        if holder is not None:
            holder.rtt = seconds if not holder.rtt else min(holder.rtt, seconds)

    def arrived(self, run: Run, now: float) -> bool:
        """The chunk ``run.at`` arrived and is right. False where the run ends with it: the request is to be ended."""
        bit = 1 << run.at
        self.missing &= ~bit
        self._free &= ~bit
        self.progress = now
        run.moved = now
        run.at += 1
        holder = self._holders.get(run.node)
        if holder is not None:
            holder.failures = 0
            holder.delivered += 1
        return run.at < run.end and not run.broken_off

    def finished(self, run: Run, now: float) -> None:
        """The request of a run has ended, and nobody writes to its chunks any more. Those that did not arrive are free.

        To be told of every run, exactly once, also after ``failed`` and its like.
        """
        self._account(run, now)
        if run.at < run.end:
            self._free |= _range(run.at, run.end) & self.missing
        holder = self._holders.get(run.node)
        if holder is not None and run in holder.runs:
            holder.runs.remove(run)
            seconds = now - run.began
            if run.at > run.first and seconds > 0:
                flows = len(holder.runs) + 1
                rate = run.received / seconds * flows
                holder.rate = rate if not holder.rate else (1 - ALPHA) * holder.rate + ALPHA * rate
                self.routes.delivered(run.node, rate, now)

    def failed(self, node: bytes, now: float) -> None:
        """A holder could not be reached, broke off or stood still: it is left alone for a while."""
        holder = self._holders.get(node)
        if holder is not None:
            holder.failures += 1
            pause = min(PAUSE_SECONDS * 2.0 ** (holder.failures - 1), MAX_PAUSE)
            holder.not_before = max(holder.not_before, now + pause * (0.75 + 0.5 * self._chance.random()))
            self.routes.failed(node, now)
            self._choose(now)

    def busy(self, node: bytes, seconds: float, now: float) -> None:
        """A holder said that it has no room for us for so long. It gets fewer flows afterwards."""
        holder = self._holders.get(node)
        if holder is not None:
            holder.not_before = max(
                holder.not_before, now + min(seconds, MAX_PAUSE) * (0.75 + 0.5 * self._chance.random())
            )
            holder.most = max(1, len(holder.runs) // 2)
            self._choose(now)

    def forgive(self, node: bytes, now: float) -> None:
        """A holder that failed is reached in another way from now on: it is not left alone for what was."""
        holder = self._holders.get(node)
        if holder is not None:
            holder.failures, holder.not_before = 0, now
            self._choose(now)

    def refused(self, run: Run, now: float) -> None:
        """A holder does not have the chunks of this run, whatever it told before."""
        holder = self._holders.get(run.node)
        if holder is not None:
            self._bar(holder, _range(run.at, run.end), now)

    def lied(self, run: Run, now: float) -> None:
        """The chunk ``run.at`` arrived with wrong bytes."""
        holder = self._holders.get(run.node)
        self.routes.lied(run.node, now)
        if holder is not None:
            holder.lied = True
            for other in holder.runs:
                if other is not run:
                    self._break_off(other)
            self._levels.clear()
            self._choose(now)

    def tick(self, now: float) -> None:
        """Look after rates, stalls and the number of flows: about ten times a second."""
        if any(self._tick_at < h.not_before <= now for h in self._holders.values()):
            self._choose(now)  # one that was left alone may be asked again
        seconds = max(now - self._tick_at, 1e-6)
        share = 1 - math.exp2(-2 * seconds)
        running = 0
        for holder in list(self._holders.values()):
            running += len(holder.runs)
            for run in holder.runs:
                before = run.counted
                self._account(run, now)
                run.speed += ((run.counted - before) / seconds - run.speed) * share
                self._watch(holder, run, now)
            holder.current += (holder.fresh / seconds - holder.current) * share
            holder.fresh = 0
        self.rate += ((self._bytes - self._tick_bytes) / seconds - self.rate) * share
        self._flow_seconds += running * seconds
        self._tick_at, self._tick_bytes = now, self._bytes
        if now >= self._review_at:
            self._review(now)
        if now >= self._rotate_at or (not running and now >= self._rotate_at - ROTATE_SECONDS + STARVED_SECONDS):
            self._rotate(now)

    @property
    def received(self) -> int:
        """Bytes that arrived in all, wrong and unwanted ones too."""
        return self._bytes

    def delivered(self) -> dict[bytes, int]:
        """Chunks by holder."""
        return {h.node: h.delivered for h in self._holders.values() if h.delivered}

    # Choosing chunks

    def _rarest(self, free: int, length: int) -> tuple[int, int]:
        """A random place among the rarest chunks of ``free``, and how many from there on are as rare, up to
        ``length``."""
        for level in self._counted():
            rare = free & ~level
            if rare:
                free = rare
                break
        start = self._chance.randrange(self.chunks) // length * length
        after = free >> start
        if not after:
            start, after = 0, free
        skip = (after & -after).bit_length() - 1
        window = (after >> skip) & ((1 << length) - 1)
        return start + skip, (~window & (window + 1)).bit_length() - 1

    def _length(self, holder: _Holder, free: int, now: float) -> int:
        rate = self._flow_rate(holder, now)
        if rate is None:
            return 1
        flows = sum(self.flows(h.node, now) for h in self._holders.values() if h.active)
        share = self._free.bit_count() // (2 * max(1, flows))
        return max(1, min(MAX_RUN, int(rate * RUN_SECONDS / CHUNK_BYTES), share))

    def _flow_rate(self, holder: _Holder, now: float) -> float | None:
        """Bytes a second to expect of one flow to a holder."""
        if holder.rate:
            return holder.rate / max(1, len(holder.runs))
        known = self.routes.rate(holder.node, now)
        return None if known is None else known / max(1, self.flows(holder.node, now))

    def _start(self, holder: _Holder, first: int, end: int, now: float) -> Run:
        self._free &= ~_range(first, end)
        rate = self._flow_rate(holder, now)
        expected = RUN_SECONDS if rate is None else (end - first) * CHUNK_BYTES / max(rate, 1.0)
        run = Run(holder.node, first, end, now, first, expected, now)
        holder.runs.append(run)
        return run

    def _take_over(self, holder: _Holder, wanted: int, now: float) -> Run | None:
        """Rule 7."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_SECONDS
        rate = self._flow_rate(holder, now)
        seconds = CHUNK_BYTES / rate if rate else RUN_SECONDS
        slowest, longest = None, 0.0
        for other in self._holders.values():
            if other is not holder:
                for run in other.runs:
                    if not run.broken_off:
                        left = self._left(other, run, now)
                        if left > longest and wanted & _range(run.at, run.end):
                            slowest, longest = run, left
        if slowest is None:
            return None
        begun = slowest.at + 1
        if slowest.end > begun and longest > 2 * seconds:
            end, slowest.end = slowest.end, begun + (slowest.end - begun) // 2
            given_up = _range(slowest.end, end)
            self._free |= given_up
            if free := given_up & wanted:
                first, count = self._rarest(free, end - slowest.end)
                self._look_at = now
                return self._start(holder, first, first + count, now)
        elif slowest.end == begun and longest > 2 * seconds + 2 * holder.rtt + 0.05:
            owner = self._holders[slowest.node]
            self._bar(owner, 1 << slowest.at, now)
            self._break_off(slowest)
        return None

    def _left(self, holder: _Holder, run: Run, now: float) -> float:
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
            holder = self._holders.get(run.node)
            if holder is not None:
                holder.fresh += fresh

    def _watch(self, holder: _Holder, run: Run, now: float) -> None:
        """Rule 6."""
        if run.broken_off:
            return
        if now - run.moved > (STALL_SECONDS if holder.holding.direct else FALLBACK_STALL_SECONDS):
            self._bar(holder, _range(run.at, run.end), now)
            self._break_off(run)
            self.failed(holder.node, now)
        elif run.end > run.at + 1 and now - run.began > LATE * max(run.expected, RUN_SECONDS):
            self._free |= _range(run.at + 1, run.end) & self.missing
            run.end = run.at + 1

    def _break_off(self, run: Run) -> None:
        if not run.broken_off:
            run.broken_off = True
            self.aborts.append(run)

    def _bar(self, holder: _Holder, chunks: int, now: float) -> None:
        holder.lacks |= chunks
        holder.lacks_until = now + LACK_SECONDS * (1 + self._chance.random())

    def _review(self, now: float) -> None:
        """Rule 4."""
        wait = REVIEW_SECONDS
        each = (self._bytes - self._review_bytes) / self._flow_seconds if self._flow_seconds else 0.0
        active = [h for h in self._holders.values() if h.active and h.holding.direct]
        wanted = sum(self.flows(h.node, now) for h in active)
        if self._before is not None and each < WORTH * self._before:
            self._factor = max(1, self._factor // 2)
            self._before = None
            wait = SETTLED_SECONDS
        elif each > 0 and sum(len(h.runs) for h in active) > wanted // 2 and wanted < MAX_FLOWS // 2:
            self._before = each
            self._factor = min(2 * self._factor, MAX_FLOWS)
        else:
            self._before = None
        self._review_at = now + wait
        self._review_bytes, self._flow_seconds = self._bytes, 0.0
        for holder in active:
            holder.most = min(MAX_FLOWS_PER_HOLDER, holder.most + 1)

    # Choosing holders

    def _usable(self, now: float) -> list[_Holder]:
        return [h for h in self._holders.values() if not h.lied and h.not_before <= now]

    def _choose(self, now: float) -> None:
        """Rule 5: keep the active ones that can go on, and draw as many others as there is room for."""
        usable = self._usable(now)
        chosen = {h.node for h in usable if h.active}
        for most, among in (
            (USEFUL, [h for h in usable if h.has & self.missing]),
            (MAX_ACTIVE, [h for h in usable if h.has & self.missing or not h.holding.whole]),
            (MAX_ACTIVE, usable),
        ):
            candidates = [
                (h.node, h.holding.preference * (1.0 if h.holding.direct else FALLBACK_PREFERENCE))
                for h in among
                if h.node not in chosen
            ]
            chosen.update(self.routes.draw(candidates, max(0, most - len(chosen)), now, self._chance))
        for holder in self._holders.values():
            holder.active = holder.node in chosen
        self._active = sum(h.active and h.holding.direct for h in self._holders.values())
        self._direct = 0
        for holder in self._holders.values():
            if holder.active and holder.holding.direct:
                self._direct |= holder.has

    def _rotate(self, now: float) -> None:
        self._rotate_at = now + ROTATE_SECONDS
        usable = self._usable(now)
        if len(usable) > MAX_ACTIVE:
            active = [h for h in usable if h.active]
            least = min(active, key=lambda h: (bool(h.has & self.missing), h.rate), default=None)
            if least is not None:
                least.not_before = now + PAUSE_SECONDS  # not drawn again at once
                self._choose(now)

    def _needed(self, holder: _Holder, now: float) -> bool:
        """Whether the others bring too little to spare this holder."""
        others = sum(h.current for h in self._holders.values() if h is not holder)
        own = holder.rate or self.routes.rate(holder.node, now) or 0.0
        return others < own / 2 or not any(h.runs for h in self._holders.values() if h is not holder)

    def _counted(self) -> list[int]:
        """The levels, with at least one."""
        if not self._levels:
            levels = [0] * LEVELS
            for holder in self._holders.values():
                gained = 0 if holder.has == self.all or holder.lied else holder.has | holder.coming
                for level in range(LEVELS):
                    if not gained:
                        break
                    before = levels[level]
                    levels[level] = before | gained
                    gained &= before
            self._levels = levels
        return self._levels


def _range(first: int, end: int) -> int:
    return ((1 << (end - first)) - 1) << first if end > first else 0
