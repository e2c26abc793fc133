"""Whether this node may append: a restored backup must not fork its own feed.

1. A node whose key may ever have published waits until ``f + 1`` other electors, or three of the peers it knew at
   start (all, where it knew fewer), told it its own head, and until it holds the furthest head it was told. One that
   knows nobody waits for the electors: its folder may be a backup from before it met anybody. Only where it is itself
   the only elector is there nobody to ask.
2. What a peer tells is the signed entry itself, so nobody can make a feed look longer than it is.
3. A node with a key made in this very start has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from protocol.log.quorum import faults

PEERS_TO_ASK: Final = 3


class OwnHead:
    """Collects what peers say about the own feed. Seqs are -1 where there is no entry."""

    def __init__(self, node: bytes, electors: Collection[bytes], known: Iterable[bytes], *, fresh: bool) -> None:
        self._electors = frozenset(electors) - {node}
        self._electors_needed = faults(len(electors)) + 1
        self._known = frozenset(known) - {node}
        self._fresh = fresh
        self._confirmed: set[bytes] = set()
        self._furthest = -1

    def seen(self, seq: int) -> None:
        """Somebody showed a signed entry of the own feed at ``seq``."""
        self._furthest = max(self._furthest, seq)

    def confirm(self, peer: bytes) -> None:
        """``peer`` said which head it holds (``seen`` was called first), and everything it offered was fetched."""
        self._confirmed.add(peer)

    def confirmed(self, seq: int) -> bool:
        """Whether a feed that ends at ``seq`` may be continued."""
        if seq < self._furthest:
            return False
        if self._fresh:
            return True
        if self._electors and len(self._confirmed & self._electors) >= self._electors_needed:
            return True
        if self._electors and not self._known:
            return False
        return len(self._confirmed & self._known) >= min(PEERS_TO_ASK, len(self._known))

    def missing(self) -> str:
        """What is still waited for, for people."""
        if self._electors and not self._known:
            count = len(self._confirmed & self._electors)
            return f"{count} of {self._electors_needed} electors told this node where its feed ends"
        needed = min(PEERS_TO_ASK, len(self._known))
        return f"{len(self._confirmed & self._known)} of {needed} known peers told this node where its feed ends"
