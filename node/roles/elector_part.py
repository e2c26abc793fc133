"""An elector's part of a node: its cuts and its watch over the trainer's office, from the moment on when it is one."""

from __future__ import annotations

from functools import partial

import trio

from node.context import Node
from node.health import supervisor
from node.log.elector import Elector, open_elector
from node.log.replication import LogSync
from node.roles.term_watch import TermWatch


class ElectorPart:
    """``elector`` is there where this node is, or once was, one of the domain's electors."""

    def __init__(self, node: Node, sync: LogSync, watch: TermWatch) -> None:
        self._node = node
        self._sync = sync
        self._watch = watch
        self.elector: Elector | None = None

    def elected(self) -> bool:
        """Whether this node is an elector of the next cut."""
        replica = self._node.log.replica
        return self._node.id in replica.electors_at(len(replica.cuts) + 1)

    async def open(self) -> None:
        """Make the elector where this node is one. Raises ``UserError`` where its stored state is damaged."""
        if self.elector is None and self.elected():
            node = self._node
            self.elector = await open_elector(node.log, node.identity, self._sync, objection=self._watch.objection)

    async def run(self) -> None:
        """Do an elector's work once this node is one, for ever."""
        node, seen = self._node, 0
        await self.open()
        while self.elector is None:
            seen = await node.log.wait_change(seen, timeout=60)
            await self.open()
        async with trio.open_nursery() as nursery:
            for name, part in (("cuts", self.elector.run), ("terms", partial(self._watch.run, self.elector))):
                nursery.start_soon(supervisor.keep, name, part, node.health, node.logger)
