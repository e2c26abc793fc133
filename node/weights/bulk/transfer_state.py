"""What the threads of one transfer share: the object, who holds it where, and the decisions
(``protocol.weights.swarm``).

1. ``changed`` guards all of it; it is told when there may be work for an idle flow.
2. A holder that cannot be connected to ``TRIES`` times is one that only libp2p reaches, for a while.
3. Tokens are the daemon's business: it is told of one that was refused, and meanwhile its holder is left alone.
4. At a foreign address (``node.weights.bulk.token_exchange``) there is one connection until weights came from it, and
   whatever else is answered there counts as none.
5. A holder that lacks what it was said to have is not believed to be whole any more: it is to tell what it has.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from node.store.bulk_object import Held
from protocol.weights.chunk_set import bits_of
from protocol.weights.holders import Holding
from protocol.weights.routes import Routes
from protocol.weights.swarm import Swarm

if TYPE_CHECKING:
    from node.weights.bulk.bulk_child import Child

log = logging.getLogger(__name__)

TRIES: Final = 2
HIDDEN_SECONDS: Final = 60.0


@dataclass(slots=True)
class Place:
    """Where a holder is, as the daemon says."""

    address: str
    token: str
    holding: Holding
    failures: int = 0
    hidden_until: float = 0.0
    foreign: bool = False
    proven: bool = False
    """Whether weights came from the address."""
    doubted: bool = False
    """It said that it has the whole, and had not."""


class Shared:
    """The state of one transfer. All but ``thread`` and ``set_holders`` is for those who hold ``changed``."""

    def __init__(self, child: Child, digest: bytes, held: Held, routes: Routes) -> None:
        self.digest = digest
        self.child = child
        self.held = held
        self.changed = threading.Condition()
        have = bits_of(held.bitmap(), held.count)
        self.swarm = Swarm(held.count, have, routes=routes, chance=random.Random(), now=time.monotonic())  # noqa: S311
        self.places: dict[bytes, Place] = {}
        self.why = "nobody holds it"
        """Why it does not get on, for people."""
        self.fresh = False
        """Whether chunks have arrived that nobody was told of."""
        self.soon = threading.Event()
        """Set where the transfer is to be looked after at once."""
        self.over = False
        """Whether all threads are to end."""

    def thread(self, work: Callable[..., None], *arguments: Any) -> bool:
        """Run ``work`` in a thread of its own; False where none can be had."""
        try:
            threading.Thread(target=self._guarded, args=(work, *arguments), daemon=True, name="bulk-fetch").start()
        except RuntimeError as error:  # no more threads to be had: the flows that there are go on
            log.warning("bulk: %s", error)
            return False
        return True

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:
            log.exception("bulk: a transfer's thread failed")

    def set_holders(self, rows: Sequence[Sequence[Any]]) -> None:
        """Rows of node id, multiaddress or "", token, whole 0|1, preference in thousandths, spared 0|1, foreign
        0|1."""
        with self.changed:
            places: dict[bytes, Place] = {}
            for node, address, token, whole, preference, spared, foreign in rows:
                holding = Holding(bool(address), bool(whole), max(preference, 1) / 1000, bool(spared))
                place = self.places.get(node)
                if place is None:
                    place = Place(address, token, holding)
                elif place.address != address:
                    place.address, place.failures, place.hidden_until, place.proven = address, 0, 0.0, False
                place.token, place.foreign = token, bool(foreign)
                place.holding = holding
                places[node] = place
            self.places = places
            self.hold()
            self.soon.set()

    def direct(self, place: Place, now: float) -> bool:
        """Whether a holder is to be connected to now."""
        return bool(place.address) and place.hidden_until <= now

    def flows(self, node: bytes, now: float) -> int:
        """How many flows to a holder there should be now."""
        place = self.places.get(node)
        wanted = self.swarm.flows(node, now)
        return min(wanted, 1) if place is not None and self.strange(place) else wanted

    def strange(self, place: Place) -> bool:
        """Whether nobody knows whose address it is."""
        return place.foreign and not place.proven

    def met(self, place: Place) -> None:
        """Weights came from there."""
        place.failures, place.proven = 0, True

    def hold(self) -> None:
        """Tell the swarm who holds what, and how each is reached."""
        now = time.monotonic()
        holdings = {}
        for node, place in self.places.items():
            if 0 < place.hidden_until <= now:
                place.hidden_until, place.failures = 0.0, TRIES - 1
            known = place.holding
            whole = known.whole and not place.doubted
            holdings[node] = Holding(self.direct(place, now), whole, known.preference, known.spared)
        self.swarm.set_holders(holdings, now)
        self.changed.notify_all()

    def tell(self, node: bytes, bitmap: bytes) -> int:
        """Take in what a holder has, and perhaps what is on its way there; how many it has."""
        count = self.held.count
        size = (count + 7) // 8
        has = bits_of(bitmap[:size], count)
        self.swarm.heard(node, has, bits_of(bitmap[size : 2 * size], count), time.monotonic())
        self.changed.notify_all()
        return has.bit_count()

    def unreached(self, node: bytes, place: Place, error: Exception, now: float) -> None:
        """No connection to a holder came about; after a few times libp2p is to carry its chunks."""
        self.why = str(error)
        place.failures += 1
        self.swarm.failed(node, now)
        if place.failures >= TRIES and self.direct(place, now):
            place.hidden_until = now + HIDDEN_SECONDS
            self.child.daemon.say("misled" if self.strange(place) else "token", digest=self.digest, node=node)
            self.hold()
            self.swarm.forgive(node, now)

    def fault(self, node: bytes, text: str) -> None:
        """Tell the daemon what a holder did wrong."""
        self.child.daemon.say("fault", digest=self.digest, node=node, text=text)

    def disk(self, error: OSError) -> None:
        """Our own disk did not take a chunk: the daemon decides what becomes of the transfer."""
        text = error.strerror or str(error)
        self.child.daemon.say("disk", digest=self.digest, number=error.errno or 0, text=text)

    def denied(self, node: bytes, now: float) -> None:
        """A holder did not take the token: ask the daemon for another."""
        self.swarm.busy(node, 1.0, now)
        self.child.daemon.say("token", digest=self.digest, node=node)

    def doubt(self, node: bytes) -> None:
        """It lacks what it was said to have: it is to tell what it has."""
        place = self.places.get(node)
        if place is not None and place.holding.whole and not place.doubted:
            place.doubted = True
            self.hold()
            self.swarm.heard(node, 0, 0, time.monotonic())
