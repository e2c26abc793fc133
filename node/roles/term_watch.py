"""An elector's watch over the trainer's office: asks for a grant when there is none or its holder fell silent.

1. No first term before ``min_nodes`` are present, or ``founding_wait_ms`` after the first peer.
2. The office is vacant once its holder has not been there, training or willing to, for ``term_silence_ms``, or makes
   nothing of what there is (``node.roles.holder_progress``). Members count, who are named or have standing.
3. The base is the newest version of the lineage that this elector holds entries of.
4. Electors ask one after the other, in an order that the term gives. Each agrees to what it sees itself: so no elector
   alone deposes a trainer that is there.
5. A grant that some signed and no quorum makes them keep back their holder's newer versions. After ``term_silence_ms``
   all may renew the holder's term, on the newest version: that gives nothing away, and frees them.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import trio

from node.context import Node
from node.health import supervisor
from node.log.elector import Elector, open_elector
from node.log.replication import LogSync
from node.log.ticket_heap import TicketHeap
from node.peers.presences import Presences
from node.roles.absence_watch import AbsenceWatch
from node.roles.holder_progress import HolderProgress
from protocol.errors import Error
from protocol.log import elector_state as rules
from protocol.log.quorum import Grant
from protocol.work import assignment

LAST_FOR: Final = 8
"""Terms for which who lost the office comes last."""

TURN: Final = 2
"""Presence intervals that the next elector waits for the one before to ask."""


class TermWatch:
    """Runs beside the elector's cuts."""

    def __init__(self, node: Node, presences: Presences, progress: HolderProgress) -> None:
        self._node = node
        self._presences = presences
        self._progress = progress
        self._interval = node.domain.timings.presence_ms / 1000
        self._silence = node.domain.timings.term_silence_ms / 1000
        self._term = 0
        self._since = self._seen_at = trio.current_time()
        self._wanted: float | None = None

    async def run(self, elector: Elector) -> None:
        """Watch for ever, and have ``elector`` ask for grants."""
        node, voter = self._node, elector.voter
        while True:
            await trio.sleep(self._interval)
            self._note_holder()
            candidate = self._wanted_trainer(voter.state)
            if candidate is None:
                self._wanted = None
                continue
            now = trio.current_time()
            self._wanted = now if self._wanted is None else self._wanted
            turn = (voter.place(voter.me) - self._term - 1) % len(voter.electors) if voter.me in voter.electors else 0
            if now < self._wanted + turn * TURN * self._interval:
                continue
            try:
                await elector.grant_term(candidate)
            except (Error, OSError) as error:
                node.health.warn("term", f"no term can be granted: {error}")
                continue
            node.health.clear("term")
            node.logger.info("granted a term to %s", candidate.hex()[:8])

    def objection(self, grant: Grant) -> str | None:
        """Why this elector does not want a term granted so, None where it agrees. Its clock may be a little behind the
        asker's."""
        self._note_holder()
        slack = TURN * self._interval
        now = trio.current_time()
        holder = self._node.log.ledger.grant()
        newest = self._node.log.ledger.newest_weights()
        renewed = (
            holder is not None
            and grant.trainer == holder.trainer
            and not self._progress.idle()
            and now >= self._since + self._silence - slack
            and grant.base == (grant.domain if newest is None else newest.id)
        )
        if not renewed and not self._vacant(slack):
            return "the office is not vacant"
        if not self._there(grant.trainer):
            return "that trainer is not there"
        if not renewed and not self._node.log.ledger.may_train(grant.trainer):
            return "that node may not train: it is neither named nor has it standing"
        return None

    def _there(self, trainer: bytes) -> bool:
        """Whether a member is present, training or willing to."""
        presence = self._presences.members().get(trainer)
        trains = self._node.log.ledger.standing_role(trainer) == "trainer"
        return presence is not None and (trains or "trainer" in presence.willing)

    def _note_holder(self) -> None:
        """Take notice of who holds the office and whether it is there."""
        grant = self._node.log.ledger.grant()
        if grant is None:
            return
        now = trio.current_time()
        if grant.term != self._term:
            self._term, self._since, self._seen_at = grant.term, now, now
        if self._there(grant.trainer):
            self._seen_at = now

    def _vacant(self, slack: float = 0.0) -> bool:
        now = trio.current_time()
        if self._node.log.ledger.grant() is not None:
            return now >= self._seen_at + self._silence - slack or self._progress.idle()
        present = len(self._presences.members())
        waited = self._presences.founded_for()
        return self._node.log.ready.is_set() and (
            present >= self._node.domain.policy.min_nodes
            or (present > 1 and waited >= self._node.domain.timings.founding_wait_ms / 1000 - slack)
        )

    def _wanted_trainer(self, state: rules.ElectorState) -> bytes | None:
        """Whom a term should be granted to now; None for nobody."""
        node = self._node
        ledger, replica = node.log.ledger, node.log.replica
        holder = node.log.ledger.grant()
        if not self._vacant():
            contested = rules.contested(state, self._term)
            waited = trio.current_time() >= self._since + self._silence
            return holder.trainer if holder is not None and contested and waited else None
        candidate = assignment.trainer_candidate(
            self._presences.members(),
            node.domain.policy,
            self._presences.standing(),
            ledger.may_train,
            ledger.may_validate,
            replica.amendments.trainers_at(len(replica.cuts) + 1),
            self._deposed(),
        )
        if candidate is None:
            node.health.warn("term", "no member that is present is willing to train and may")
        return candidate

    def _deposed(self) -> set[bytes]:
        """Who held the office in one of the last ``LAST_FOR`` terms and lost it."""
        grants = self._node.log.replica.grants
        newest = max(grants, default=0)
        return {grants[term].grant.trainer for term in grants if newest - LAST_FOR < term <= newest}


class ElectorPart:
    """An elector's part of a node, from the moment on when it is one: its cuts and its watch over the trainer's office.

    ``elector`` is there where this node is, or once was, one of the domain's electors.
    """

    def __init__(
        self, node: Node, sync: LogSync, presences: Presences, tickets: TicketHeap, progress: HolderProgress
    ) -> None:
        self._node = node
        self._sync = sync
        self._tickets = tickets
        self._progress = progress
        self.watch = TermWatch(node, presences, progress)
        self.absences = AbsenceWatch(node, presences)
        self.elector: Elector | None = None

    def objection(self, grant: Grant) -> str | None:
        """See ``TermWatch.objection``."""
        return self.watch.objection(grant)

    def hears(self, node: bytes) -> str | None:
        """See ``AbsenceWatch.hears``."""
        return self.absences.hears(node)

    async def open(self) -> None:
        """Make the elector where this node is one. Raises ``UserError`` where its stored state is damaged."""
        node, replica = self._node, self._node.log.replica
        if self.elector is None and node.id in replica.electors_at(len(replica.cuts) + 1):
            self.elector = await open_elector(node.log, node.identity, self._sync, watch=self, tickets=self._tickets)

    async def run(self) -> None:
        """Do an elector's work once this node is one, for ever."""
        node, seen = self._node, 0
        await self.open()
        while self.elector is None:
            seen = await node.log.wait_change(seen, timeout=60)
            await self.open()
        async with trio.open_nursery() as nursery:
            for name, part in (
                ("cuts", self.elector.run),
                ("terms", partial(self.watch.run, self.elector)),
                ("the trainer's progress", self._progress.run),
                ("absences", partial(self.absences.run, self.elector)),
            ):
                nursery.start_soon(supervisor.keep, name, part, node.health)
