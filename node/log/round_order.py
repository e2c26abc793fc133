"""With whom the next round of anti-entropy is: fair to all, whatever a few of them promise or hold up.

1. Rounds alternate between peers that were asked for and the rest, and within these whoever waits longest is next.
2. Half of the rounds are for nodes of the domain, half of those for electors, as long as such are there. Strangers hold
   ``ROOM`` rounds at once at most, and members never all of them.
3. A peer whose round was of no use falls behind: it lets the others pass twice, then four times, up to 2**MAX_FAULTS,
   or for ``HOLD`` seconds, twice as many each time; each good round halves that. Only others go ahead of it: where
   nobody is better it is asked as ever, and an elector that is asked for does not wait.
4. What is known of peers is bounded. Faults outlast a connection, or one would come back for a clean slate.

Order is counted in rounds that were begun; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import trio

MAX_FAULTS: Final = 4
"""Sixteen turns of all others for one of its own; a peer that is well again is back after five good rounds."""

HOLD: Final = 20.0
"""Seconds, doubled for each fault: in a quiet domain a round is begun twice a minute, and who recovered waits less."""

REMEMBERED: Final = 1024
"""Peers with faults that are gone and yet remembered; as many may be asked for."""


class Rank(IntEnum):
    """What a peer is to the domain."""

    STRANGER = 0
    MEMBER = 1
    ELECTOR = 2


ROOM: Final = {Rank.STRANGER: 3, Rank.MEMBER: 6, Rank.ELECTOR: 8}
"""Rounds side by side of peers up to that rank: what stalls leaves room to whoever is more trusted."""

RESERVED: Final = (Rank.STRANGER, Rank.MEMBER, Rank.ELECTOR, Rank.STRANGER)
"""The least rank of each round in turn. With the alternation of rule 1 every pairing occurs."""


@dataclass(slots=True)
class _Place:
    faults: int = 0
    last: int = -1
    """The round since which it waits; a newcomer waits longest."""
    due: int = -1
    """What stands for ``last`` before the time ``until``."""
    until: float = 0.0


class RoundOrder:
    """The peers of one node in the order of their rounds. ``ranks`` are those that are connected now."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._turn = 0
        self._wanted: dict[bytes, None] = {}
        self._busy: dict[bytes, Rank] = {}
        self._places: dict[bytes, _Place] = {}
        self._connected = 0
        self._least_faults = 0

    def want(self, peer: bytes) -> None:
        """``peer`` is asked for."""
        if len(self._wanted) < REMEMBERED:
            self._wanted[peer] = None

    def restart(self) -> None:
        """No round runs any more."""
        self._busy.clear()

    def faults(self, peer: bytes) -> int:
        """How many times a round of ``peer`` was of no use, less its good ones since."""
        place = self._places.get(peer)
        return 0 if place is None else place.faults

    def pressing(self, ranks: Mapping[bytes, Rank]) -> bool:
        """Whether somebody who was asked for, and is not behind, could have a round now."""
        return any(self._asked_for(peer, rank) for peer, rank in self._free(ranks).items())

    def begin(self, ranks: Mapping[bytes, Rank]) -> bytes | None:
        """Begin the next round; returns with whom, None where there is nobody or no room."""
        self._forget(ranks)
        free = self._free(ranks)
        if not free:
            return None
        least = min(RESERVED[self._turn % len(RESERVED)], max(free.values()))
        free = {peer: rank for peer, rank in free.items() if rank >= least}
        wanted = [peer for peer in self._wanted if peer in free and self._asked_for(peer, free[peer])]
        rest = sorted(free.keys() - wanted, key=lambda peer: (self._due(peer), peer))
        peer = (wanted or rest)[0] if self._turn % 2 == 0 else (rest or wanted)[0]
        self._turn += 1
        self._wanted.pop(peer, None)
        self._busy[peer] = free[peer]
        self._places.setdefault(peer, _Place()).last = self._turn
        return peer

    def end(self, peer: bytes, good: bool | None) -> None:
        """The round with ``peer`` is over; ``good`` None leaves it where it is."""
        self._busy.pop(peer, None)
        place = self._places.setdefault(peer, _Place())
        if good is not None:
            place.faults = max(0, place.faults - 1) if good else min(MAX_FAULTS, place.faults + 1)
        behind = 2 ** max(0, place.faults - self._least_faults)
        place.due = self._turn + (behind - 1) * self._connected
        place.until = self._clock() + HOLD * behind if behind > 1 else 0.0

    def _asked_for(self, peer: bytes, rank: Rank) -> bool:
        return peer in self._wanted and (rank is Rank.ELECTOR or self._due(peer) <= self._turn)

    def _due(self, peer: bytes) -> int:
        place = self._places.get(peer)
        if place is None:
            return -1
        return place.due if self._clock() < place.until else place.last

    def _free(self, ranks: Mapping[bytes, Rank]) -> dict[bytes, Rank]:
        held = {rank: sum(other <= rank for other in self._busy.values()) for rank in Rank}
        open_to = {rank for rank in Rank if all(held[above] < ROOM[above] for above in Rank if above >= rank)}
        return {peer: rank for peer, rank in ranks.items() if peer not in self._busy and rank in open_to}

    def _forget(self, ranks: Mapping[bytes, Rank]) -> None:
        self._connected = len(ranks)
        self._least_faults = min((self.faults(peer) for peer in ranks), default=0)
        self._wanted = {peer: None for peer in self._wanted if peer in ranks}
        gone = [peer for peer in self._places if peer not in ranks and peer not in self._busy]
        faulty = [peer for peer in gone if self._places[peer].faults]
        for peer in {*gone} - {*faulty[-REMEMBERED:]}:
            del self._places[peer]
