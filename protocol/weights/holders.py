"""Who holds a bulk object, and whom of them to ask: the holders of one transfer.

A *holder* has the whole object or a part of it. A *run* is what it is asked for: consecutive chunks.

1. At most ``MAX_ACTIVE`` holders are asked at a time, drawn by their routes (``protocol.weights.routes``), and most of
   them have something that is missing here. Every ``ROTATE_SECONDS`` the least useful gives way to another, and sooner
   where no active one has anything.
2. How rare a chunk is: how many holders have it or are fetching it, those apart that have the whole.
3. A holder that failed is left alone for a while, longer with each failure in a row. One that is busy is left alone for
   as long as it said, so nobody queues. One that sent a wrong chunk is out: it is not asked again.
4. One that refuses what it said it has is believed once: an object may be deleted between the two. From the second time
   on it is left alone as after a failure, and out after ``MAX_REFUSALS``. A chunk that it delivers makes up for one.
5. Holders that only libp2p reaches (``direct`` false) are drawn last.

Time is an argument (monotonic seconds), and so is chance. Chunks stand in sets (``protocol.weights.chunk_set``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from protocol.weights.chunk_set import span
from protocol.weights.routes import Chance, Routes

MAX_FLOWS_PER_HOLDER: Final = 32
MAX_ACTIVE: Final = 10
FALLBACK_PREFERENCE: Final = 0.05
USEFUL: Final = 7
"""So many places among the active are for those who have something."""
ROTATE_SECONDS: Final = 10.0
STARVED_SECONDS: Final = 0.5
PAUSE_SECONDS: Final = 0.5
MAX_PAUSE: Final = 16.0
MAX_REFUSALS: Final = 8
LACK_SECONDS: Final = 0.5
"""How long a holder is not asked for a chunk that it refused or that was taken from it."""
MAX_KNOWN: Final = 256
"""Holders that went, of which it is remembered that they refused or lied."""

LEVELS: Final = 12
"""Holders of a chunk are counted up to here; more are as good."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is known of a holder from outside. ``preference`` weighs the draw of rule 1."""

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
class Holder:
    """One holder of an object, as one transfer sees it."""

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
    """Flows that it bears."""
    lacks: int = 0
    """What it is not to be asked for until ``lacks_until``."""
    lacks_until: float = 0.0
    refusals: int = 0
    """How often it refused what it said it has, requests of one moment counted once."""
    refused_at: float = -math.inf
    out: bool = False
    """Not to be asked again in this transfer."""
    active: bool = False
    delivered: int = 0


class Holders:
    """All holders of an object of ``chunks`` chunks."""

    def __init__(self, chunks: int, missing: int, *, routes: Routes, chance: Chance, now: float) -> None:
        self.chunks = chunks
        self.all = (1 << chunks) - 1
        self.missing = missing
        """The set of the chunks that are not here."""
        self.routes = routes
        self.aborts: list[Run] = []
        """Runs to be broken off: whoever drives the swarm takes them and lets their requests fail."""
        self.direct = 0
        """What the active holders have that are reached directly."""
        self.active = 0
        """How many these are."""
        self._chance = chance
        self._by_node: dict[bytes, Holder] = {}
        self._known: dict[bytes, tuple[int, bool]] = {}
        """Refusals of holders that went, and whether they are out."""
        self._levels: list[int] = []
        """Level k has the chunks that more than k holders have or fetch; empty where they are to be counted anew."""
        self._rotate_at = now + ROTATE_SECONDS

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._by_node.values())

    def get(self, node: bytes) -> Holder | None:
        """The holder of this node id, if it is one."""
        return self._by_node.get(node)

    def set_holders(self, holdings: Mapping[bytes, Holding], now: float) -> None:
        """Take these for the holders, and no others; the runs of those that are gone are broken off."""
        for node in [node for node in self._by_node if node not in holdings]:
            gone = self._by_node.pop(node)
            if gone.refusals or gone.out:
                self._known[node] = gone.refusals, gone.out
                while len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
            for run in gone.runs:
                self.break_off(run)
        for node, holding in holdings.items():
            known = self._by_node.get(node)
            if known is None:
                refusals, out = self._known.pop(node, (0, False))
                has = self.all if holding.whole else 0
                self._by_node[node] = Holder(node, holding, has, refusals=refusals, out=out)
            elif holding != known.holding:
                if holding.whole:
                    known.has = self.all
                known.holding = holding
        self._levels.clear()
        self.choose(now)

    def learn(self, node: bytes, has: int, coming: int, now: float) -> None:
        """A holder told which chunks it has, all of them, and which it is fetching."""
        holder = self._by_node.get(node)
        if holder is not None and (has, coming) != (holder.has, holder.coming):
            lost = holder.has & ~has
            holder.has, holder.coming = has, coming
            self._levels.clear()
            if lost:
                self.choose(now)
            elif holder.active and holder.holding.direct:
                self.direct |= has

    def failed(self, node: bytes, now: float) -> None:
        """A holder could not be reached, broke off or stood still: it is left alone for a while."""
        if (holder := self._by_node.get(node)) is not None:
            holder.failures += 1
            self._pause(holder, holder.failures, now)

    def _pause(self, holder: Holder, times: int, now: float) -> None:
        pause = min(PAUSE_SECONDS * 2.0 ** (times - 1), MAX_PAUSE)
        holder.not_before = max(holder.not_before, now + pause * (0.75 + 0.5 * self._chance.random()))
        self.routes.failed(holder.node, now)
        self.choose(now)

    def refused(self, run: Run, now: float) -> None:
        """A holder does not have the chunks of this run, whatever it told before."""
        self.unkept(run, now)
        holder = self._by_node.get(run.node)
        if holder is None or now < holder.refused_at + LACK_SECONDS:
            return  # asked for before the other refusal was known
        holder.refused_at = now
        holder.refusals += 1
        if holder.refusals >= MAX_REFUSALS:
            self._strike(holder, now)
        elif holder.refusals > 1:
            self._pause(holder, holder.refusals - 1, now)

    def busy(self, node: bytes, seconds: float, now: float) -> None:
        """A holder said that it has no room for us for so long. It gets fewer flows afterwards."""
        if (holder := self._by_node.get(node)) is not None:
            pause = min(seconds, MAX_PAUSE) * (0.75 + 0.5 * self._chance.random())
            holder.not_before = max(holder.not_before, now + pause)
            holder.most = max(1, len(holder.runs) // 2)
            self.choose(now)

    def forgive(self, node: bytes, now: float) -> None:
        """A holder that failed is reached in another way from now on: it is not left alone for what was."""
        if (holder := self._by_node.get(node)) is not None:
            holder.failures, holder.not_before = 0, now
            self.choose(now)

    def lied(self, run: Run, now: float) -> None:
        """The chunk ``run.at`` arrived with wrong bytes."""
        self.routes.lied(run.node, now)
        if (holder := self._by_node.get(run.node)) is not None:
            for other in holder.runs:
                if other is not run:
                    self.break_off(other)
            self._strike(holder, now)

    def _strike(self, holder: Holder, now: float) -> None:
        """It is out."""
        holder.out = True
        self._levels.clear()
        self.choose(now)

    def unkept(self, run: Run, now: float) -> None:
        """What a holder sent could not be kept here, which is no fault of its: it is asked again a little later."""
        self.bar(run.node, span(run.at, run.end), now)

    def bar(self, node: bytes, chunks: int, now: float) -> None:
        """Do not ask a holder for these chunks for a while."""
        if (holder := self._by_node.get(node)) is not None:
            holder.lacks |= chunks
            holder.lacks_until = now + LACK_SECONDS * (1 + self._chance.random())

    def break_off(self, run: Run) -> None:
        """Have a run end before its time."""
        if not run.broken_off:
            run.broken_off = True
            self.aborts.append(run)

    def partial(self) -> list[bytes]:
        """The holders worth asking what they have: active ones that lack something that is missing here."""
        return [h.node for h in self if h.active and not h.out and self.missing & ~h.has]

    def needed(self, holder: Holder, now: float) -> bool:
        """Whether the others bring too little to spare this holder: less than half of what it does."""
        others = sum(h.current for h in self if h is not holder)
        own = holder.rate or self.routes.rate(holder.node, now) or 0.0
        return others < own / 2 or not any(h.runs for h in self if h is not holder)

    def counted(self) -> list[int]:
        """The levels of rule 2, with at least one: level k has the chunks that more than k holders have or fetch."""
        if not self._levels:
            levels = [0] * LEVELS
            for holder in self:
                gained = 0 if holder.has == self.all or holder.out else holder.has | holder.coming
                for level in range(LEVELS):
                    if not gained:
                        break
                    before = levels[level]
                    levels[level] = before | gained
                    gained &= before
            self._levels = levels
        return self._levels

    def choose(self, now: float) -> None:
        """Keep the active ones that can go on, and draw as many others as there is room for."""
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
        for holder in self:
            holder.active = holder.node in chosen
        self.active = sum(h.active and h.holding.direct for h in self)
        self.direct = 0
        for holder in self:
            if holder.active and holder.holding.direct:
                self.direct |= holder.has

    def review(self, running: int, now: float) -> None:
        """Let the least useful give way where it is time; ``running`` is the number of runs."""
        if now >= self._rotate_at or (not running and now >= self._rotate_at - ROTATE_SECONDS + STARVED_SECONDS):
            self._rotate_at = now + ROTATE_SECONDS
            usable = self._usable(now)
            active = [h for h in usable if h.active]
            if active and len(usable) > MAX_ACTIVE:
                least = min(active, key=lambda h: (bool(h.has & self.missing), h.rate))
                least.not_before = now + PAUSE_SECONDS  # not drawn again at once
                self.choose(now)

    def _usable(self, now: float) -> list[Holder]:
        return [h for h in self if not h.out and h.not_before <= now]
