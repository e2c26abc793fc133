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
from typing import Final

from node.store.bulk_object import BulkObject
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.holder_connection import HolderConnection
from protocol.weights.chunk_set import bits_of
from protocol.weights.holders import Holding
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

log = logging.getLogger(__name__)

TRIES: Final = 2
HIDDEN_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Means:
    """What all transfers of a child are done with; all may be called from any thread.

    ``connect`` makes a connection to a holder, of its multiaddress, its node id and a token; it dials nothing yet, and
    raises ``PeerError`` or ``Unreachable``. ``send`` speaks to the daemon, ``more_chunks`` wakes those who wait for
    chunks.
    """

    connect: Callable[[str, bytes, str], HolderConnection]
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

    @property
    def strange(self) -> bool:
        """Whether nobody knows whose address it is."""
        return self.row.foreign and not self.proven

    def direct(self, now: float) -> bool:
        """Whether the holder is to be connected to now."""
        return bool(self.row.address) and self.hidden_until <= now

    def met(self) -> None:
        """Weights came from there."""
        self.failures, self.proven = 0, True


class TransferState:
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

        def guarded() -> None:
            try:
                work()
            except Exception:
                log.exception("bulk: a transfer's thread failed")

        try:
            threading.Thread(target=guarded, daemon=True, name="bulk-fetch").start()
        except RuntimeError as error:  # no more threads to be had: the flows that there are go on
            log.warning("bulk: %s", error)
            return False
        return True

    def set_holders(self, rows: Sequence[messages.HolderRow]) -> None:
        """Take these for the holders."""
        with self.changed:
            before, self.places = self.places, {}
            for row in rows:
                place = self.places[row.node] = before.get(row.node) or HolderPlace(row)
                if place.row.address != row.address:
                    place.failures, place.hidden_until, place.proven = 0, 0.0, False
                place.row = row
            self.update_holders()
            self.soon.set()

    def direct(self, node: bytes, now: float) -> HolderPlace | None:
        """Where a holder is, if it is to be connected to now."""
        place = self.places.get(node)
        return None if self.over or place is None or not place.direct(now) else place

    def flows(self, node: bytes, now: float) -> int:
        """How many flows to a holder there should be now."""
        place = self.places.get(node)
        wanted = self.swarm.flows(node, now)
        return min(wanted, 1) if place is not None and place.strange else wanted

    def update_holders(self) -> None:
        """Have the swarm know who holds what, and how each is reached."""
        now = time.monotonic()
        holdings = {}
        for node, place in self.places.items():
            if 0 < place.hidden_until <= now:
                place.hidden_until, place.failures = 0.0, TRIES - 1
            row = place.row
            whole = row.whole and not place.doubted
            holdings[node] = Holding(place.direct(now), whole, row.preference, row.spared)
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
        if place.failures >= TRIES and place.direct(now):
            place.hidden_until = now + HIDDEN_SECONDS
            self.means.send(messages.RouteFailed(self.digest, node, place.strange))
            self.update_holders()
            self.swarm.forgive(node, now)

    def fault(self, node: bytes, text: str) -> None:
        """Have the daemon know what a holder did wrong."""
        self.means.send(messages.HolderFault(self.digest, node, text))

    def denied(self, node: bytes, now: float) -> None:
        """A holder did not take the token: ask the daemon for another."""
        self.swarm.busy(node, 1.0, now)
        self.means.send(messages.RouteFailed(self.digest, node))
