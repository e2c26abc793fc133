"""What an elector answers the others.

1. Electors answer only electors. What breaks the protocol is a ``PeerError``; whatever else an elector does not do it
   refuses, and says how far it is.
2. Of a proposer that is ahead it fetches what it lacks, once, before it judges a proposal, a cut or a grant.
3. A proposer out of turn is not listened to (``protocol.log.turns``).
"""

from __future__ import annotations

import logging
from typing import Any, Final

import trio

from node.log import elector_messages as wire
from node.log.elector_messages import Reached, Refusal
from node.log.replication import LogSync
from node.log.voter import Voter, version_of
from node.net.requests import Refused, Unreachable
from protocol.errors import PeerError
from protocol.log import proposal, quorum
from protocol.log.proposal import proposer
from protocol.log.quorum import CertifiedCut, Cut, Grant, PreparedCut

logger = logging.getLogger(__name__)

ABSURD: Final = 2**40
"""No honest elector is so far ahead of the others."""


class ElectorAnswers:
    """Serves the protocol between electors, for ``voter``."""

    def __init__(self, voter: Voter, sync: LogSync) -> None:
        self._voter = voter
        self._sync = sync
        sync.transport.serve(voter.protocol, self.handle, max_request=wire.MAX_MESSAGE)

    async def handle(self, peer: bytes, data: bytes) -> bytes:
        """Answer one request. Raises ``PeerError`` for a malformed one, ``Refused`` for a stranger."""
        if peer not in self._voter.electors:
            raise Refused("electors answer only electors")
        op, argument = wire.parse_request(data)
        try:
            match op:
                case "status":
                    await trio.lowlevel.checkpoint()
                    return wire.status(Reached(*self._reached(), self._voter.evidence(peer)))
                case "report":
                    value = await self._on_report(peer, *argument)
                case "propose":
                    value = await self._on_proposal(peer, *wire.parse_proposal(argument))
                case "prepared":
                    value = await self._on_prepared(peer, PreparedCut.parse(argument))
                case "certified":
                    value = await self._on_certified(peer, argument)
                case "absent":
                    value = await self._on_absence(peer, *argument)
                case _:
                    value = await self._on_grant(peer, Grant.parse(argument), firm=op == "grant")
        except OSError as error:
            logger.error("an elector's state cannot be stored: %s", error)
            value = "its disk is full or broken"
        if isinstance(value, str):
            value = Refusal(value, *self._reached())
        return wire.answer(value)

    def _reached(self) -> tuple[int, int, int]:
        """The epoch, height and term of this elector."""
        voter = self._voter
        return voter.state.epoch, voter.height, max(voter.state.term, voter.known_term)

    async def _on_report(self, peer: bytes, epoch: int, height: int) -> Any:
        if (apart := await self._meet(peer, height, epoch)) is not None:
            return apart
        if not self._voter.turns.take(self._voter.place(peer), trio.current_time()):
            return "it is another elector's turn"
        if epoch <= self._voter.state.epoch:
            return f"it is at epoch {self._voter.state.epoch}"
        lock = self._voter.state.lock
        return self._voter.away() or [self._voter.report(epoch), None if lock is None else lock.encode()]

    async def _on_proposal(self, peer: bytes, epoch: int, cut: Cut, proof: PreparedCut | None) -> Any:
        if cut.domain != self._voter.service.domain.id:
            raise PeerError("proposal: it belongs to another domain")
        if (apart := await self._meet(peer, cut.height - 1, epoch)) is not None:
            return apart
        replica, ledger = self._voter.service.replica, self._voter.service.ledger
        if proposal.problem(replica, cut, prepared=proof is not None, work=ledger) is not None:
            await self._catch_up(peer)
        if not self._voter.turns.take(self._voter.place(peer), trio.current_time()):
            return "it is another elector's turn"
        return await self._voter.vote(cut, epoch, proof)

    async def _on_prepared(self, peer: bytes, prepared: PreparedCut) -> Any:
        if prepared.cut.domain != self._voter.service.domain.id:
            raise PeerError("prepared cut: it belongs to another domain")
        if (apart := await self._meet(peer, prepared.cut.height - 1, prepared.epoch)) is not None:
            return apart
        quorum.check_quorum(prepared.votes, self._voter.electors, "prepared cut")
        return await self._voter.commit(prepared)

    async def _on_certified(self, peer: bytes, data: bytes) -> Any:
        received = await self._voter.service.intake.receive(cuts=[data])
        if received.errors:
            raise received.errors[0]
        if received.waiting:
            await self._catch_up(peer)
        voter = self._voter
        if voter.away() is not None:
            return None
        # What is cosigned is stored: the log took the cut, with all that it covers.
        cut = CertifiedCut.parse(data, verify=False).cut
        return voter.service.checkpoints.cosign(voter.identity, cut.id)

    async def _on_absence(self, peer: bytes, node: bytes, seen: bytes) -> Any:
        if self._voter.service.replica.height(seen) is None:
            await self._catch_up(peer)
        return self._voter.sign_absence(node, seen)

    async def _on_grant(self, peer: bytes, grant: Grant, *, firm: bool) -> Any:
        if self._unfit(grant) is not None:
            await self._catch_up(peer)
        problem = self._unfit(grant) or self._voter.watch.objection(grant)
        if problem is not None:
            return problem
        if firm:
            return await self._voter.sign_grant(grant)
        outcome = self._voter.away() or self._voter.grantable(grant)
        return outcome if isinstance(outcome, str) else None

    def _unfit(self, grant: Grant) -> str | None:
        """Why a grant does not fit the own log."""
        replica, ledger = self._voter.service.replica, self._voter.service.ledger
        if grant.domain != self._voter.service.domain.id:
            raise PeerError("grant: it belongs to another domain")
        height = replica.height(grant.anchor)
        if height is None:
            return "its anchor is not held"
        if replica.electors_at(height + 1) != self._voter.electors:
            return "its anchor is of other electors"
        if grant.base == grant.domain:
            return None
        base = ledger.weights(grant.base) if ledger.version_number(grant.base) is not None else None
        if base is None:
            return "its base is not on the lineage"
        if version_of(base.payload) != (grant.base_term, grant.base_number):
            raise PeerError("grant: its base has another term or number")
        return None

    async def _meet(self, peer: bytes, height: int, epoch: int) -> str | None:
        """Catch up with a peer that holds ``height`` cuts; why there is nothing to decide together, or None. Raises
        ``PeerError`` for an epoch that is not the peer's, or that nobody needs.

        Without the same cuts the two may not know the same electors, so that nothing of a request can be called wrong.
        """
        if height > self._voter.height:
            await self._catch_up(peer)
        if height != self._voter.height:
            return f"it holds {self._voter.height} cuts"
        if proposer(epoch, self._voter.electors) != peer:
            raise PeerError(f"elector request: epoch {epoch} is another elector's")
        if epoch > self._voter.turns.limit(trio.current_time()) + ABSURD:
            raise PeerError(f"elector request: epoch {epoch} is too far ahead")
        return None

    async def _catch_up(self, peer: bytes) -> None:
        """Fetch what ``peer`` holds and this node does not, as far as time allows."""
        with trio.move_on_after(self._voter.turns.patience / 2):
            try:
                await self._sync.sync_with(peer)
            except PeerError as error:
                self._sync.transport.blame(peer, error)
            except Unreachable as error:
                logger.debug("catching up with %s: %s", peer.hex()[:8], error)
