"""An elector at work: it proposes cuts when its turn comes and asks for term grants.

1. With one elector a cut is one step and one transaction, in the formats that several use.
2. With several the proposer asks all for reports, then for votes, then for commits, each with a deadline; what a quorum
   agreed on it stores, publishes and hands to the others. Whoever is silent or refuses costs time, nothing else.
3. An attempt that fails leaves nothing behind but votes and locks, which the next one takes up; it is made again at
   longer and longer intervals (``protocol.log.turns``).
4. A grant is asked for informally first, so that nobody signs one that no quorum wants.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import trio

from node.errors import UserError
from node.log import elector_messages as wire
from node.log.elector_answers import ElectorAnswers
from node.log.other_electors import OtherElectors
from node.log.replicated_log import LogService, Own
from node.log.replication import LogSync
from node.log.ticket_heap import TicketHeap
from node.log.voter import META, Blind, Voter, Watch
from protocol.errors import Error, LocalError, PeerError
from protocol.identity import ABSENT, Identity, verify
from protocol.log import absence
from protocol.log import elector_state as rules
from protocol.log.elector_state import ElectorState
from protocol.log.proposal import choose, propose
from protocol.log.quorum import (
    CertifiedCut,
    CertifiedGrant,
    Cut,
    Grant,
    PreparedCut,
    Report,
    certify,
    certify_grant,
    check_quorum,
    commit,
    grant_vote,
    prepare,
    quorum,
    verify_commit,
    verify_grant_vote,
    verify_vote,
    vote,
)

logger = logging.getLogger(__name__)

TRIES: Final = 3
"""Attempts of one turn, each in an epoch above what the others said they had reached."""
REMEDY: Final = "delete the folder log in the data directory: peers give it back, and the elector abstains for a while"

BLIND: Final = Blind()


class NotGranted(Error):
    """No quorum signed a term grant."""


class Elector:
    """The elector of ``voter``'s node. Make it with ``open_elector``."""

    def __init__(self, voter: Voter) -> None:
        self.voter = voter
        self._others = OtherElectors(voter)
        self._service = voter.service
        self._identity = voter.identity
        self._pace = voter.service.domain.timings.epoch_ms / 1000
        self._uncovered: float | None = None
        self._asking: Grant | None = None

    async def run(self) -> None:
        """Propose when it is this elector's turn, for ever."""
        while True:
            try:
                await self._live()
            except* OSError as group:
                logger.error("no cut: the disk refuses it (%s)", group.exceptions[0])
            except* LocalError:
                # The log goes on growing without a cut; a daemon that ends would stop everything else too.
                logger.exception("no cut: a bug")
            await trio.sleep(self._pace)

    async def _live(self) -> None:
        voter = self.voter
        while True:
            if voter.me not in voter.electors:
                seen = self._service.generation
                await self._service.wait_change(seen, timeout=60)
                continue
            if not voter.asked or voter.state.abstains is not None:
                await self.ask_past()
            if voter.away() is not None or not voter.holds_news():
                self._uncovered = None
                seen = self._service.generation
                await self._service.wait_change(seen, self._pace)
                await trio.sleep(self._pace / 10)
                continue
            now = trio.current_time()
            self._uncovered = self._uncovered or now
            due = voter.turns.due(self._uncovered)
            if now < due:
                await trio.sleep(min(due - now, self._pace / 4))
                continue
            if await self.cut() is None:
                await trio.sleep(voter.turns.patience / 4)

    async def ask_past(self) -> None:
        """Ask all others how far they are and what they know of this elector."""
        voter = self.voter

        async def ask(peer: bytes) -> None:
            answer = await self._others.request(peer, wire.request("status", None))
            await voter.learn(peer, wire.parse_status(answer))

        await self._others.gather(ask, len(voter.electors))

    # Cuts

    async def cut(self) -> CertifiedCut | None:
        """Try to make the next cut now; None where nothing changed, this elector is away, or no quorum took part.

        Raises ``OSError`` where the disk refuses.
        """
        voter = self.voter
        if voter.away() is not None:
            await trio.lowlevel.checkpoint()
            return None
        if len(voter.electors) == 1:
            made = await self._service.commit(self._make_alone)
            assert made is None or isinstance(made, CertifiedCut)
            checkpoints = self._service.checkpoints
            if made is not None and (own := checkpoints.cosign(self._identity, made.cut.id)) is not None:
                await checkpoints.gather(made.cut.id, {voter.me: own})
            return made
        voter.turns.take(voter.place(voter.me), trio.current_time())
        for _ in range(TRIES):
            epoch = self._next_epoch()
            made = await self._attempt(epoch)
            if made is not None or voter.floor < epoch:
                return made
        return None

    def _make_alone(self) -> Own | None:
        voter, replica = self.voter, self._service.replica
        electors, epoch = voter.electors, self._next_epoch()
        cut = self._fresh([Report.parse(voter.report(epoch), electors)])
        if cut is None:
            return None
        state = voter.state
        voted = rules.vote(state, cut, epoch, None, electors, limit=epoch)
        if isinstance(voted, str):
            raise LocalError(f"the own cut cannot be voted for: {voted}")
        prepared = prepare(cut, epoch, dict([vote(self._identity, cut, epoch)]), electors)
        committed = rules.commit(voted, prepared, electors)
        if isinstance(committed, str):
            raise LocalError(f"the own cut cannot be committed to: {committed}")
        certified = certify(cut, epoch, dict([commit(self._identity, cut, epoch)]), electors)
        state = rules.follow(committed, certified, voter.me, replica.electors_at(cut.height))
        return Own(certified, {META: state.encode()}, stored=lambda: voter.resume(state))

    def _fresh(self, reports: Sequence[Report]) -> Cut | None:
        replica = self._service.replica
        return propose(
            self._service.domain.id,
            len(replica.cuts) + 1,
            replica.newest_cut_id,
            replica.certified,
            reports,
            self.voter.electors,
            replica.head_at,
            tickets=self.voter.tickets.admissible(),
            work=self._service.ledger,
        )

    def _next_epoch(self) -> int:
        """The lowest epoch that is this elector's and that it has not passed."""
        voter = self.voter
        n, place = len(voter.electors), voter.place(voter.me)
        lowest = max(voter.state.epoch, voter.floor) + 1
        return lowest + (place - lowest) % n

    async def _attempt(self, epoch: int) -> CertifiedCut | None:
        voter, electors = self.voter, self.voter.electors
        need = quorum(len(electors))
        if voter.away() is not None:
            return None
        found = await self._reports(epoch)
        if len(found) < need:
            return None
        chosen = choose([lock for _, lock in found], lambda: self._fresh([report for report, _ in found]))
        if chosen is None:
            return None
        cut, proof = chosen
        if proof is not None and proof.epoch >= epoch:
            voter.floor = max(voter.floor, proof.epoch)
            return None
        own = await voter.vote(cut, epoch, proof)
        if isinstance(own, str):
            logger.debug("no vote for the own proposal: %s", own)
            return None
        votes = await self._others.signatures(
            "propose",
            wire.proposal(epoch, cut, proof),
            lambda peer, signature: verify_vote(cut, epoch, peer, signature, electors),
        )
        voter.note(False, epoch, cut, votes.items())
        votes[voter.me] = own
        if len(votes) < need:
            return None
        prepared = prepare(cut, epoch, votes, electors)
        own = await voter.commit(prepared)
        if isinstance(own, str):
            logger.debug("no commit to the own proposal: %s", own)
            return None
        commits = await self._others.signatures(
            "prepared",
            prepared.encode(),
            lambda peer, signature: verify_commit(cut, epoch, peer, signature, electors),
        )
        voter.note(True, epoch, cut, commits.items())
        commits[voter.me] = own
        if len(commits) < need:
            return None
        return await self._finish(certify(cut, epoch, commits, electors))

    async def _reports(self, epoch: int) -> list[tuple[Report, PreparedCut | None]]:
        """All reports that came in time, the own one first, each with its author's lock."""
        voter, electors = self.voter, self.voter.electors
        newest, height = self._service.replica.newest_cut_id, voter.height

        def read(peer: bytes, value: Any) -> tuple[Report, PreparedCut | None]:
            report = Report.parse(value[0], electors)
            if (report.elector, report.epoch, report.newest_cut) != (peer, epoch, newest):
                raise PeerError("report: it is not what was asked for")
            if value[1] is None:
                return report, None
            lock = PreparedCut.parse(value[1])
            check_quorum(lock.votes, electors, "lock")
            if lock.cut.height != height + 1:
                raise PeerError("report: its lock is of another height")
            return report, lock

        own = Report.parse(voter.report(epoch), electors), voter.state.lock
        return [own, *(await self._others.ask("report", [epoch, height], read)).values()]

    async def _finish(self, certified: CertifiedCut) -> CertifiedCut | None:
        """Store and publish what was certified, and hand it to the other electors."""
        taken: list[bool] = []

        def make() -> Own | None:
            # It may have come from elsewhere meanwhile: whoever committed may have it from another proposer.
            if certified.cut.height != len(self._service.replica.cuts) + 1:
                return None
            taken.append(True)
            return Own(certified, {})

        await self._service.commit(make)
        checkpoints = self._service.checkpoints
        own = checkpoints.cosign(self._identity, certified.cut.id)

        def read(peer: bytes, cosignature: bytes | None) -> bytes | None:
            if cosignature is not None and self._service.replica.newest_cut_id == certified.cut.id:
                checkpoints.check(peer, cosignature)
            return cosignature

        cosignatures = await self._others.ask("certified", certified.encode(), read)
        if own is not None:
            await checkpoints.gather(certified.cut.id, {**cosignatures, self.voter.me: own})
        return certified if taken else None

    # Absence

    async def declare_absent(self, node: bytes) -> bool:
        """Have a quorum say that a node is gone, and carry its word into the log; whether a quorum did.

        Raises ``OSError`` where the disk refuses, ``NotReady`` where the own feed takes nothing.
        """
        voter, service = self.voter, self._service
        electors, seen = voter.electors, service.replica.newest_cut_id
        own = voter.sign_absence(node, seen)
        if isinstance(own, str):
            return False
        message = absence.statement(service.domain.id, node, seen)
        votes = await self._others.signatures(
            "absent",
            [node, seen],
            lambda peer, signature: verify(peer, ABSENT, message, signature, "absent"),
        )
        votes[voter.me] = own
        if len(votes) < quorum(len(electors)):
            return False
        await service.append(absence.make(service.domain.id, node, seen, votes), timeout=self._pace)
        return True

    # Terms

    async def grant_term(self, trainer: bytes) -> CertifiedGrant:
        """Give the next term to ``trainer``, from the newest version of the lineage on.

        Raises ``OSError`` where the disk refuses, ``NotGranted`` where no quorum agrees.
        """
        voter = self.voter
        await self._service.ready.wait()
        if len(voter.electors) == 1:
            made = await self._service.commit(lambda: self._grant_alone(trainer))
            assert isinstance(made, CertifiedGrant)
            return made
        electors, need = voter.electors, quorum(len(voter.electors))
        grant = self._next_grant(trainer)
        refusals: set[str] = set()
        if len(await self._others.ask("would", grant.body, lambda peer, value: True, refusals)) + 1 < need:
            raise NotGranted(f"too few electors agree ({', '.join(sorted(refusals)) or 'no answer'})")
        own = await voter.sign_grant(grant)
        if isinstance(own, str):
            raise NotGranted(own)
        votes = await self._others.signatures(
            "grant", grant.body, lambda peer, signature: verify_grant_vote(grant, peer, signature, electors)
        )
        votes[voter.me] = own
        if len(votes) < need:
            raise NotGranted("too few electors signed")
        certified = certify_grant(grant, votes, electors)
        await self._service.commit(lambda: None if grant.term in self._service.replica.grants else Own(certified, {}))
        return certified

    def _next_grant(self, trainer: bytes) -> Grant:
        """A grant of the next term; the one that this elector signed already, as long as it fits."""
        voter, service = self.voter, self._service
        newest = service.ledger.newest_weights()
        base = service.domain.id if newest is None else newest.id
        asked = self._asking
        fits = asked is not None and (asked.trainer, asked.base) == (trainer, base)
        if asked is not None and fits and asked.term > max(voter.known_term, self._others.term_floor):
            return asked
        term = max(voter.state.term, voter.known_term, self._others.term_floor) + 1
        anchor = service.replica.newest_cut_id
        self._asking = Grant.make(service.domain.id, term, trainer, base, *voter.highest(), anchor)
        return self._asking

    def _grant_alone(self, trainer: bytes) -> Own:
        voter = self.voter
        grant = self._next_grant(trainer)
        state = rules.sign_grant(voter.state, grant, voter.known_term, limit=grant.term)
        if isinstance(state, str):
            raise LocalError(f"the own grant cannot be signed: {state}")
        certified = certify_grant(grant, dict([grant_vote(self._identity, grant)]), voter.electors)
        return Own(certified, {META: state.encode()}, stored=lambda: voter.resume(state))


async def open_elector(
    service: LogService,
    identity: Identity,
    sync: LogSync | None = None,
    *,
    watch: Watch = BLIND,
    tickets: TicketHeap | None = None,
) -> Elector:
    """The elector whose state is in ``service``'s store; among several it needs ``sync`` to speak to the others.
    ``watch`` is what ``Voter`` sees of the others, ``tickets`` are those of outsiders.

    Raises ``UserError`` where that state is damaged or cannot be read, ``LocalError`` where this node is no elector.
    """
    electors = service.replica.electors_at(len(service.replica.cuts) + 1)
    if identity.node not in electors:
        raise LocalError("this node is no elector")
    if len(electors) > 1 and sync is None:
        raise LocalError("one of several electors needs a way to the others")
    try:
        data = await service.store.meta(META)
        state = ElectorState() if data is None else ElectorState.decode(data)
    except (PeerError, OSError) as error:
        raise UserError(f"the stored state of the elector is damaged: {error}", REMEDY) from None
    heap = TicketHeap(service.replica) if tickets is None else tickets
    voter = Voter(service, identity, state, sync, watch, heap)
    if sync is not None:
        ElectorAnswers(voter, sync)
    return Elector(voter)
