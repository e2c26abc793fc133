"""The tickets of outsiders that wait for a cut to admit them (``protocol.log.admission``).

1. Of each node the newest ticket that is better counts: more work, or an invitation.
2. At most ``MAX_TICKETS`` wait, and of one invitation as many as it has uses left. Invitations and the most work stay;
   so whoever floods the rest out pays for it.
3. The work is checked once, when a ticket comes, off the loop: a hash takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol.errors import PeerError
from protocol.log.admission import Ticket, work_of
from protocol.log.replica import Replica

MAX_TICKETS: Final = 4096
MAX_CHECKS: Final = 8
"""Tickets whose work is checked at the same time; what comes on top of that is dropped, and comes again."""
INVITED: Final = 2**62
"""The work that an invitation stands for."""


class TicketHeap:
    """Tickets for the domain of ``replica``."""

    def __init__(
        self, replica: Replica, check: Callable[[Callable[[], int]], Awaitable[int]] = trio.to_thread.run_sync
    ) -> None:
        self._replica = replica
        self._check = check
        self._checking = 0
        self._waiting: dict[bytes, tuple[int, Ticket]] = {}

    async def offer(self, ticket: Ticket) -> bool:
        """Take a ticket; whether it waits now. Raises ``PeerError`` for one that could admit nobody today."""
        wrong = self._problem(ticket)
        if wrong is not None:
            raise PeerError(f"ticket: {wrong}")
        known = self._waiting.get(ticket.node)
        if known is not None and known[1] == ticket:
            return True
        if ticket.invitation is not None:
            others = sum(one.invitation == ticket.invitation for _, one in self._waiting.values())
            if known is None and others >= self._replica.admissions.invitations[ticket.invitation].uses:
                return False
            work = INVITED
        elif self._replica.admissions.work <= 1:
            work = 1
        elif self._checking >= MAX_CHECKS:
            return False
        else:
            self._checking += 1
            try:
                work = await self._check(lambda: work_of(self._replica.domain.id, ticket))
            finally:
                self._checking -= 1
        if work < self._replica.admissions.work or (known is not None and known[0] > work and self._fresh(known[1])):
            return False
        self._waiting[ticket.node] = (work, ticket)
        if len(self._waiting) > MAX_TICKETS:
            del self._waiting[min(self._waiting, key=lambda node: (self._waiting[node][0], node))]
        return ticket.node in self._waiting

    def admissible(self) -> list[Ticket]:
        """Those that the next cut may admit by, ascending by node, as many as it may."""
        replica = self._replica
        for node in [node for node, (_, ticket) in self._waiting.items() if not self._fresh(ticket)]:
            del self._waiting[node]
        if not self._waiting:
            return []
        asked = replica.admissions.work
        order = sorted(self._waiting.values(), key=lambda item: (-item[0], item[1].node))
        tickets = [ticket for work, ticket in order if work >= asked]
        return replica.admissions.choose(tickets, len(replica.cuts) + 1, replica.height)

    def __len__(self) -> int:
        return len(self._waiting)

    def _fresh(self, ticket: Ticket) -> bool:
        return self._problem(ticket) is None

    def _problem(self, ticket: Ticket) -> str | None:
        return self._replica.admissions.problem(ticket, len(self._replica.cuts) + 1, self._replica.height)
