"""An elector's watch over everybody who holds an office: who is silent for too long is declared absent.

1. Whoever stands in one of the ``OFFICES`` by the log is heard by its presences. Time counts from when this elector
   began to watch: one that was away itself accuses nobody. Who infers keeps nothing from others by being silent, and an
   elector that is gone is replaced by an amendment.
2. After ``term_silence_ms`` of silence electors ask each other, one after the other in an order that the node's id
   gives. Each agrees to what it heard itself: so no elector alone, and no line that fails one of them, ends a standing.
3. A trainer's office is the business of ``node.roles.term_watch`` as well.
"""

from __future__ import annotations

from typing import Final

import trio

from node.context import Node
from node.log.elector import Elector
from node.peers.presences import Presences
from protocol.errors import Error

OFFICES: Final = ("trainer", "validator", "relay")

TURN: Final = 4
"""Presence intervals that the next elector waits for the one before to ask."""


class AbsenceWatch:
    """Runs beside the elector's cuts."""

    def __init__(self, node: Node, presences: Presences) -> None:
        self._node = node
        self._presences = presences
        self._interval = node.domain.timings.presence_ms / 1000
        self._silence = node.domain.timings.term_silence_ms / 1000
        self._heard: dict[bytes, float] = {}

    async def run(self, elector: Elector) -> None:
        """Watch for ever, and have ``elector`` ask the others."""
        node, voter = self._node, elector.voter
        while True:
            await trio.sleep(self._interval)
            self.look()
            if voter.away() is not None or node.log.own_seq < 0:
                self._heard.clear()  # what was missed meanwhile says nothing of others
                continue
            for gone in self._silent():
                heard = self._heard.get(gone)
                if heard is None or voter.away() is not None:
                    continue  # while another was asked about, things changed
                turn = (voter.place(voter.me) + gone[0]) % len(voter.electors)
                waited = trio.current_time() - heard - self._silence
                if waited < turn * TURN * self._interval:
                    continue
                try:
                    if await elector.declare_absent(gone):
                        self._heard[gone] = trio.current_time()  # said once; the next cut will show it
                        node.logger.info("declared absent: %s", gone.hex()[:8])
                except (Error, OSError) as error:
                    node.health.warn("absence", f"nobody can be declared absent: {error}")
                else:
                    node.health.clear("absence")

    def look(self) -> None:
        """Take notice of who is heard."""
        ledger, now = self._node.log.ledger, trio.current_time()
        watched = {author for author in ledger.authors() if ledger.standing_role(author) in OFFICES}
        present = self._presences.members()
        before = self._heard
        self._heard = {node: now if node in present else before.get(node, now) for node in watched - {self._node.id}}

    def _silent(self) -> list[bytes]:
        now, absent = trio.current_time(), self._node.log.replica.absences.since
        return sorted(n for n, heard in self._heard.items() if now - heard >= self._silence and n not in absent)

    def hears(self, node: bytes) -> str | None:
        """Why this elector does not say that a node is absent, None where it does. Its clock may be a little behind the
        asker's."""
        self.look()
        heard = self._heard.get(node)
        if heard is None:
            return "that node holds no office"
        slack = 2 * self._interval
        return None if trio.current_time() - heard >= self._silence - slack else "that node was heard lately"
