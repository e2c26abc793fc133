"""What the threads of one transfer share: the object, who holds it where, and the decisions
(``protocol.weights.swarm``).

1. ``changed`` guards all of it; it is notified when there may be work for an idle flow.
2. A holder that cannot be connected to ``TRIES`` times is one that only libp2p reaches, for a while.
3. Tokens are the daemon's business: it hears of one that was refused, and meanwhile its holder is left alone.
4. At a foreign address (``node.weights.bulk.token_exchange``) there is one connection until weights came from it, and
   whatever else is answered there counts as none.
5. A holder that lacks what it was said to have is not believed to be whole any more: it is to say what it has.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from node.store.bulk_object import BulkObject
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.holder_connection import CHUNK_SECONDS, HolderConnection
from protocol.weights.chunk_set import bits_of
from protocol.weights.holders import Holding
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

log = logging.getLogger(__name__)

TRIES: Final = 2
HIDDEN_SECONDS: Final = 60.0


class Connect(Protocol):
    """Makes connections to holders."""

    def __call__(
        self, address: str, node: bytes, token: str, *, chunk_timeout: float = CHUNK_SECONDS
    ) -> HolderConnection:
        """A connection to a holder at a multiaddress; nothing is dialled yet. Raises ``PeerError`` or
        ``Unreachable``."""


@dataclass(frozen=True, slots=True)
class Means:
    """What all transfers of a child are done with. ``send`` speaks to the daemon, ``more_chunks`` wakes those who wait
    for chunks; all may be called from any thread."""

    connect: Connect
    send: Callable[[messages.FromChild], None]
    more_chunks: Callable[[], None]


@dataclass(slots=True)
class HolderPlace:
    """Where a holder is, as the daemon says."""

    row: messages.HolderRow
    failures: int = 0
    hidden_until: float = 0.0
    proven: bool = False
    """Whether weights came from the address."""
    doubted: bool = False
    """It said that it has the whole, and had not."""


class Shared:
    """The state of one transfer. All but ``thread`` and ``set_holders`` is for those who hold ``changed``."""

    def __init__(self, means: Means, digest: bytes, held: BulkObject, routes: Routes) -> None:
        self.digest = digest
        self.means = means
        self.held = held
        self.changed = threading.Condition()
        have = bits_of(held.bitmap(), held.count)
        self.swarm = Swarm(held.count, have, routes=routes, chance=random.Random(), now=time.monotonic())  # noqa: S311
        self.places: dict[bytes, HolderPlace] = {}
        self.why = "nobody holds it"
        """Why it does not get on, for people."""
        self.fresh = False
        """Whether chunks have arrived that nobody was woken for."""
        self.soon = threading.Event()
        """Set where the transfer is to be looked after at once."""
        self.over = False
        """Whether all threads are to end."""

    def thread(self, work: Callable[[], None]) -> bool:
        """Run ``work`` in a thread of its own; False where none can be had."""
        try:
            threading.Thread(target=self._guarded, args=(work,), daemon=True, name="bulk-fetch").start()
        except RuntimeError as error:  # no more threads to be had: the flows that there are go on
            log.warning("bulk: %s", error)
            return False
        return True

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("bulk: a transfer's thread failed")

    def set_holders(self, rows: Sequence[messages.HolderRow]) -> None:
        """Take these for the holders."""
        with self.changed:
            places: dict[bytes, HolderPlace] = {}
            for row in rows:
                place = self.places.get(row.node)
                if place is None:
                    place = HolderPlace(row)
                elif place.row.address != row.address:
                    place.failures, place.hidden_until, place.proven = 0, 0.0, False
                place.row = row
                places[row.node] = place
            self.places = places
            self.update_holders()
            self.soon.set()

    def direct(self, place: HolderPlace, now: float) -> bool:
        """Whether a holder is to be connected to now."""
        return bool(place.row.address) and place.hidden_until <= now

    def flows(self, node: bytes, now: float) -> int:
        """How many flows to a holder there should be now."""
        place = self.places.get(node)
        wanted = self.swarm.flows(node, now)
        return min(wanted, 1) if place is not None and self.strange(place) else wanted

    def strange(self, place: HolderPlace) -> bool:
        """Whether nobody knows whose address it is."""
        return place.row.foreign and not place.proven

    def met(self, place: HolderPlace) -> None:
        """Weights came from there."""
        place.failures, place.proven = 0, True

    def update_holders(self) -> None:
        """Have the swarm know who holds what, and how each is reached."""
        now = time.monotonic()
        holdings = {}
        for node, place in self.places.items():
            if 0 < place.hidden_until <= now:
                place.hidden_until, place.failures = 0.0, TRIES - 1
            row = place.row
            whole = row.whole and not place.doubted
            holdings[node] = Holding(self.direct(place, now), whole, row.preference, row.spared)
        self.swarm.set_holders(holdings, now)
        self.changed.notify_all()

    def take_haves(self, node: bytes, bitmap: bytes) -> int:
        """Take in what a holder has, and perhaps what is on its way there; how many it has."""
        count = self.held.count
        size = (count + 7) // 8
        has = bits_of(bitmap[:size], count)
        self.swarm.learn(node, has, bits_of(bitmap[size : 2 * size], count), time.monotonic())
        self.changed.notify_all()
        return has.bit_count()

    def unreached(self, node: bytes, place: HolderPlace, error: Exception, now: float) -> None:
        """No connection to a holder came about; after a few times libp2p is to carry its chunks."""
        self.why = str(error)
        place.failures += 1
        self.swarm.failed(node, now)
        if place.failures >= TRIES and self.direct(place, now):
            place.hidden_until = now + HIDDEN_SECONDS
            strange = self.strange(place)
            self.means.send(
                messages.HolderMisled(self.digest, node) if strange else messages.TokenRefused(self.digest, node)
            )
            self.update_holders()
            self.swarm.forgive(node, now)

    def fault(self, node: bytes, text: str) -> None:
        """Have the daemon know what a holder did wrong."""
        self.means.send(messages.HolderFault(self.digest, node, text))

    def disk(self, error: OSError) -> None:
        """Our own disk did not take a chunk."""
        self.means.send(messages.DiskRefused(self.digest, error.errno or 0, error.strerror or str(error)))

    def denied(self, node: bytes, now: float) -> None:
        """A holder did not take the token: ask the daemon for another."""
        self.swarm.busy(node, 1.0, now)
        self.means.send(messages.TokenRefused(self.digest, node))

    def doubt(self, node: bytes) -> None:
        """It lacks what it was said to have: it is to say itself what it has."""
        place = self.places.get(node)
        if place is not None and place.row.whole and not place.doubted:
            place.doubted = True
            self.update_holders()
            self.swarm.learn(node, 0, 0, time.monotonic())
