"""An elector's memory and its decisions; ``node.log.elector_answers`` tells them, ``node.log.elector`` proposes.

1. What the rules (``protocol.log.elector_state``) decide is stored before it is signed and sent. The decision is made
   while nothing else changes the log.
2. It takes no part before its own feed is confirmed (``LogService.ready``) and q−1 others told it how far they are and
   whether they hold signatures of it that it does not know. Their questions it answers at once.
3. Whether a term may be granted at all, and whether somebody is gone, it asks its ``Watch``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, Protocol

import trio

from node.log.elector_messages import Reached, SignedBallot
from node.log.replicated_log import LogNews, LogService, Own
from node.log.replication import LogSync
from node.log.ticket_heap import TicketHeap
from protocol import identity as keys
from protocol.constants import TICKET_CUTS
from protocol.identity import Identity
from protocol.log import absence, proposal, quorum
from protocol.log import elector_state as rules
from protocol.log.amendment import Amendment
from protocol.log.elector_state import ElectorState, Version
from protocol.log.heads import Head
from protocol.log.quorum import CertifiedCut, CertifiedGrant, Cut, Grant, PreparedCut, Report
from protocol.log.turns import Turns, reach
from protocol.records import Weights

logger = logging.getLogger(__name__)

META: Final = "elector"


class Watch(Protocol):
    """What an elector sees of the others, for its decisions."""

    def objection(self, grant: Grant) -> str | None:
        """Why the trainer's office should not be given as a grant says, None where it may."""

    def hears(self, node: bytes) -> str | None:
        """Why no word is given that a node is absent; None where nothing was heard of it for too long."""


class Blind:
    """The ``Watch`` of an elector that looks at nobody."""

    def objection(self, grant: Grant) -> str | None:
        return "it does not watch the office"

    def hears(self, node: bytes) -> str | None:
        return "it does not watch anybody"


class Voter:
    """One elector's state, for ``node.log.elector``. ``sync`` is None where it is the only elector. ``watch`` is
    what it sees of the others; ``tickets`` are those of outsiders
    who wait."""

    def __init__(
        self,
        service: LogService,
        identity: Identity,
        state: ElectorState,
        sync: LogSync | None,
        watch: Watch,
        tickets: TicketHeap,
    ) -> None:
        self.service = service
        self.identity = identity
        self.sync = sync
        self.watch = watch
        self.tickets = tickets
        self.floor = 0
        """An epoch that others are said to have reached."""
        self._in_force = self.electors
        self.asked = len(self.electors) == 1
        """Whether enough others said how far they are."""
        self.claims: dict[bytes, Reached] = {}
        self._seen: dict[bytes, SignedBallot] = {}
        self._proven = 0
        self._granted_at = trio.current_time()
        final = service.ledger.newest_weights(final=True)
        if final is not None:
            state = replace(state, highest=max(state.highest, version_of(final.payload)))
        self.state = state
        replica = service.replica
        newest = replica.newest_cut
        self.turns = self._new_turns(0 if newest is None else newest.epoch)
        self._take_notice(LogNews(tuple(replica.cuts[state.height - 1 :])))
        if replica.grants:
            self._take_notice(LogNews((replica.grants[max(replica.grants)],)))
        service.subscribe(self._take_notice)
        self.protocol = f"/farflung/{service.domain.id.hex()[:16]}/elector/1"

    @property
    def me(self) -> bytes:
        """The own node id."""
        return self.identity.node

    @property
    def height(self) -> int:
        """That of the newest cut held."""
        return len(self.service.replica.cuts)

    @property
    def electors(self) -> tuple[bytes, ...]:
        """Those in force for the next cut."""
        return self.service.replica.electors_at(self.height + 1)

    @property
    def elected(self) -> bool:
        """Whether this node is an elector of the next cut."""
        return self.me in self.electors

    @property
    def known_term(self) -> int:
        """The highest term that was ever granted."""
        return self.service.replica.terms.highest

    def place(self, node: bytes) -> int:
        """A node's place among the electors."""
        return self.electors.index(node)

    def away(self) -> str | None:
        """Why it takes no part now; None where it does."""
        if not self.elected:
            return "it is no elector any more"
        if not self.service.ready.is_set():
            return "its own feed is not confirmed"
        if self.state.height != self.height + 1:
            # Cuts that were taken and not told of yet, or a log that was lost behind the elector's back.
            return f"it decides height {self.state.height} and holds {self.height} cuts"
        if not self.asked:
            return "it waits for the others to tell how far they are"
        return "it abstains, for a part of its past is lost" if self.state.abstains is not None else None

    # Deciding

    async def keep(self, decide: Callable[[], ElectorState | str]) -> str | None:
        """Store what ``decide`` makes of the state before anything is signed; why it does not, or None.

        Raises ``OSError`` where the disk refuses.
        """
        problem: list[str] = []

        def make() -> Own | None:
            state = decide()
            if isinstance(state, str):
                problem.append(state)
            elif state is not self.state:
                return Own(None, {META: state.encode()}, stored=lambda: self.resume(state))
            return None

        await self.service.commit(make)
        return problem[0] if problem else None

    def resume(self, state: ElectorState) -> None:
        """Go on with a state that is stored."""
        self.state = state

    async def vote(self, cut: Cut, epoch: int, proof: PreparedCut | None) -> bytes | str:
        """The signature of a vote, or why there is none."""

        def decide() -> ElectorState | str:
            lock = self.state.lock
            prepared = proof is not None or (lock is not None and lock.cut.id == cut.id)
            problem = self.away() or proposal.problem(
                self.service.replica, cut, prepared=prepared, work=self.service.ledger
            )
            limit = self.turns.limit(trio.current_time())
            return problem or rules.vote(self.state, cut, epoch, proof, self.electors, self._versions(cut), limit=limit)

        problem = await self.keep(decide)
        return quorum.vote(self.identity, cut, epoch)[1] if problem is None else problem

    async def commit(self, prepared: PreparedCut) -> bytes | str:
        """The signature of a commit, or why there is none."""
        problem = await self.keep(lambda: self.away() or rules.commit(self.state, prepared, self.electors))
        return quorum.commit(self.identity, prepared.cut, prepared.epoch)[1] if problem is None else problem

    async def sign_grant(self, grant: Grant) -> bytes | str:
        """The own part of a grant, or why there is none."""
        problem = await self.keep(lambda: self.away() or self.grantable(grant))
        return quorum.grant_vote(self.identity, grant)[1] if problem is None else problem

    def grantable(self, grant: Grant) -> ElectorState | str:
        """What signing a grant makes of the state, or why it is not signed."""
        return rules.sign_grant(self.state, grant, self.known_term, limit=self.term_limit)

    @property
    def term_limit(self) -> int:
        """The highest term that may be granted now."""
        pace = self.service.domain.timings.term_silence_ms / 1000
        return reach(self.known_term, trio.current_time() - self._granted_at, pace)

    def sign_absence(self, node: bytes, seen: bytes) -> bytes | str:
        """The own word that a node is absent as of a cut that is held, or why there is none."""
        replica = self.service.replica
        height = replica.height(seen)
        problem = self.away() or self.watch.hears(node)
        if problem is not None:
            return problem
        if height is None or height < len(replica.cuts) - TICKET_CUTS // 2:
            return "that cut is not one of the newest"
        return absence.sign(self.identity, self.service.domain.id, node, seen)[1]

    async def sign_amendment(self, amendment: Amendment) -> bytes | str:
        """The own signature of an amendment, or why there is none; its operator asks for it."""
        number = self.service.replica.amendments.number
        problem = await self.keep(lambda: rules.sign_amendment(self.state, amendment, number))
        return amendment.sign(self.identity) if problem is None else problem

    def report(self, epoch: int) -> bytes:
        """What the own replica holds, signed."""
        newest = self.service.replica.newest_cut_id
        rows = tuple(self._rows())
        report = Report(self.service.domain.id, self.me, epoch, newest, rows, *self.highest())
        return report.sign(self.identity)

    def holds_news(self) -> bool:
        """Whether there is something to cut."""
        return self.state.lock is not None or bool(self.tickets.admissible()) or bool(self._rows())

    def _rows(self) -> list[Head]:
        ends: dict[bytes, int] = {}
        if self.state.bars:
            for entry in self.service.ledger.lineage():
                if rules.barred(self.state, version_of(entry.payload)):
                    ends[entry.author] = min(entry.seq, ends.get(entry.author, entry.seq))
        return self.service.replica.reportable(ends, self.service.ledger)

    def highest(self) -> Version:
        """The newest version of the lineage."""
        newest = self.service.ledger.newest_weights()
        return (0, 0) if newest is None else version_of(newest.payload)

    def _versions(self, cut: Cut) -> list[Version]:
        """The versions on the lineage that a cut makes final."""
        ledger = self.service.ledger
        found = self.service.replica.versions_in(cut)
        return [version_of(entry.payload) for entry in found if ledger.version_number(entry.id) is not None]

    def _take_notice(self, news: LogNews) -> None:
        for certified in news.of(CertifiedCut):
            electors = self.service.replica.electors_at(certified.cut.height)
            versions = self._versions(certified.cut)
            self._lose(rules.follow(self.state, certified, self.me, electors, versions, asked=self.asked))
            self.turns.cut(certified.epoch, trio.current_time())
            if self.electors != self._in_force:
                self._in_force = self.electors
                self.turns = self._new_turns(certified.epoch)
        if news.of(CertifiedGrant) and (known := self.service.ledger.grant()) is not None:
            self.state = rules.know_grant(self.state, known)
            self._granted_at = trio.current_time()

    def _new_turns(self, epoch: int) -> Turns:
        place = self.place(self.me) if self.me in self.electors else 0
        pace = self.service.domain.timings.epoch_ms / 1000
        return Turns(len(self.electors), place, pace, trio.current_time(), epoch)

    def _lose(self, state: ElectorState) -> None:
        """Take the next state; where that says that something was lost, the others must be asked."""
        if state.abstains is not None and state.abstains != self.state.abstains:
            if self.state.abstains is None:
                logger.error("a part of this elector's past is lost: it abstains until the others went on without it")
            self.asked = False
            self.claims.clear()
            self._proven = max(self._proven, state.abstains)
        elif state.abstains is None and self.state.abstains is not None:
            logger.warning("the others went on: this elector takes part again")
        self.state = state

    # The past

    def note(self, committed: bool, epoch: int, cut: Cut, signatures: Iterable[tuple[bytes, bytes]]) -> None:
        """Remember the votes, or the commits, that electors signed, in case one of them forgets."""
        for elector, signature in signatures:
            known = self._seen.get(elector)
            if known is None or (known.epoch, known.committed) < (epoch, committed):
                self._seen[elector] = SignedBallot(int(committed), epoch, cut.id, signature)

    async def learn(self, peer: bytes, reached: Reached) -> None:
        """Take notice of how far another elector says it is. Raises ``PeerError`` for evidence that is none."""
        shown = reached.evidence
        if shown is not None:
            context = keys.COMMIT if shown.committed else keys.VOTE
            ballot = quorum.ballot_of(self.service.domain.id, shown.epoch, shown.cut)
            keys.verify(self.me, context, ballot, shown.signature, "evidence")
            if rules.unknown(self.state, shown.epoch, shown.cut, committed=bool(shown.committed)):
                self._lose(rules.abstain(self.state, shown.epoch, self.electors))
        self.claims[peer] = reached
        if self.service.behind:
            self.service.behind = False
            self._lose(rules.abstain(self.state, self.state.epoch, self.electors))
            self.claims[peer] = reached
        claims = [claim.epoch for elector, claim in self.claims.items() if elector in self.electors]
        epoch = rules.reached(claims, len(self.electors))
        if epoch is None:
            return
        if self.state.abstains is not None:
            # What a liar claimed may be lowered by what the rest say, what was proven stays.
            await self.keep(lambda: replace(self.state, abstains=max(epoch, self._proven)))
        self.asked = True

    def evidence(self, elector: bytes) -> SignedBallot | None:
        """The highest ballot of an elector that this one knows."""
        lock, newest = self.state.lock, self.service.replica.newest_cut
        if lock is not None:
            self.note(False, lock.epoch, lock.cut, lock.votes)
        if newest is not None:
            self.note(True, newest.epoch, newest.cut, newest.votes)
        return self._seen.get(elector)


def version_of(payload: object) -> Version:
    """The (term, number) of a ``weights`` payload."""
    assert isinstance(payload, Weights)
    return payload.term, payload.number
