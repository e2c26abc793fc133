"""How an outsider gets in: it gossips its ticket until a cut admits it; everybody keeps those of others.

1. With an invitation (in the address that it joined by) the ticket is signed by that key. Otherwise work is done, in a
   thread and a little at a time, for the newest cut, and again once that is old or more work is asked.
2. A ticket is told again every ``epoch_ms``: gossip is a hint, and electors may have restarted.
"""

from __future__ import annotations

from itertools import count, islice
from typing import Final

import trio

from node.context import Node
from node.log.ticket_heap import TicketHeap
from protocol.constants import TICKET_CUTS
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.log.admission import Ticket, search

TOPIC: Final = "ticket"
BATCH: Final = 64
"""Hashes between two looks: some fifty milliseconds."""


class TicketSeeker:
    """Hands others' tickets to ``heap``, and asks for this node's admission."""

    def __init__(self, node: Node, heap: TicketHeap) -> None:
        self._node = node
        self._heap = heap
        self._pace = node.domain.timings.epoch_ms / 1000
        self._ticket: Ticket | None = None
        self._asked = 0

    def listen(self) -> None:
        """Take in what others publish."""
        self._node.network.subscribe(TOPIC, self._receive)

    def admitted(self) -> bool:
        """Whether a cut admitted this node."""
        replica = self._node.log.replica
        return replica.admissions.by(self._node.id, len(replica.cuts))

    async def run(self) -> None:
        """Ask until this node is admitted."""
        node = self._node
        while not self.admitted():
            await node.log.wait_change(node.log.generation, self._pace)
            if self.admitted() or node.log.height_claimed > len(node.log.replica.cuts) + TICKET_CUTS // 4:
                continue  # a ticket for an old cut would be of no use
            ticket = await self._own()
            if ticket is None:
                continue
            try:
                await self._heap.offer(ticket)
            except PeerError as error:
                node.health.warn("admission", f"this node is not let in: {error}")
                continue
            await node.network.publish(TOPIC, ticket.encode())
        node.health.clear("admission")
        await trio.sleep_forever()

    async def _own(self) -> Ticket | None:
        """This node's ticket, renewed where it has to be."""
        node, replica = self._node, self._node.log.replica
        seed = node.directory.invitation()
        if seed is not None:
            return Ticket.invited(node.domain.id, Identity(seed), node.id)
        if node.domain.admission.mode == "invited":
            node.health.warn("admission", "this domain is for the invited: join by an address with invite= in it")
            return None
        known = self._ticket
        if known is not None and self._good(known):
            return known
        cut, asked, nonces = replica.newest_cut_id, replica.admissions.work, count()
        found: Ticket | None = None
        while found is None and self._near(cut) and replica.admissions.work == asked:
            batch = list(islice(nonces, BATCH))
            found = await trio.to_thread.run_sync(search, node.domain.id, node.id, cut, asked, batch)
        self._ticket = found
        self._asked = asked
        return found

    def _good(self, ticket: Ticket) -> bool:
        return self._near(ticket.cut) and self._node.log.replica.admissions.work <= self._asked

    def _near(self, cut: bytes) -> bool:
        """Whether a ticket for this cut will be good for a while."""
        replica = self._node.log.replica
        height = replica.height(cut)
        return height is not None and height > len(replica.cuts) - TICKET_CUTS // 2

    async def _receive(self, origin: bytes, data: bytes) -> None:
        ticket = Ticket.parse(data)
        if ticket.node != origin:
            raise PeerError("ticket: it is told by another than its owner")
        try:
            await self._heap.offer(ticket)
        except PeerError:
            return  # this node may be behind, or the ticket a little old: nobody's fault
