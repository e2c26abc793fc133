"""An elector's part in the log: cuts and term grants, for a domain with one elector.

1. Each epoch in which a head moved, the elector reports its heads, proposes, votes and certifies: with one elector
   that is one step, in the formats that several will use.
2. Cut, vote and epoch are stored in one transaction before the cut is published, and so is a grant: what was signed
   once is never signed differently.
3. An elector that may have lost a part of its log waits until peers gave it back (``LogService.ready``).
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from node.errors import UserError
from node.log.service import LogService, Own
from protocol import codec
from protocol.codec import Array, Bytes, Int, Optional
from protocol.constants import FORMAT, MAX_CUT_BYTES
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.quorum import (
    CertifiedCut,
    CertifiedGrant,
    Cut,
    Grant,
    Report,
    certify,
    certify_grant,
    commit,
    grant_vote,
    prepare,
    propose,
    vote,
    vote_problem,
)
from protocol.records import Weights

logger = logging.getLogger(__name__)

META: Final = "elector"
_STATE: Final = Array(
    (
        ("format", Int(FORMAT, FORMAT)),
        ("epoch", Int()),
        ("term", Int()),
        ("vote", Optional(Bytes(most=MAX_CUT_BYTES))),
    )
)


class Elector:
    """The only elector of ``service``'s domain. Make it with ``open_elector``."""

    def __init__(self, service: LogService, identity: Identity, epoch: int, term: int, last: Cut | None) -> None:
        self._service = service
        self._identity = identity
        self._epoch = epoch
        self._term = term
        self._last = last

    async def run(self) -> None:
        """Try to cut each epoch, for ever."""
        seconds = self._service.domain.timings.epoch_ms / 1000
        while True:
            await trio.sleep(seconds)
            try:
                await self.cut()
            except OSError as error:
                logger.error("no cut: the disk refuses it (%s)", error)
            except LocalError:
                # The log goes on growing without a cut; a daemon that ends would stop everything else too.
                logger.exception("no cut: a bug")

    async def cut(self) -> CertifiedCut | None:
        """Make the next cut; None where nothing changed or the own log is not known to be whole."""
        if not self._service.ready.is_set():
            await trio.lowlevel.checkpoint()
            return None
        made = await self._service.commit(self._make_cut)
        if made is None:
            return None
        assert isinstance(made, CertifiedCut)
        self._epoch, self._last = made.epoch, made.cut
        return made

    def _make_cut(self) -> Own | None:
        replica, domain = self._service.replica, self._service.domain
        moved = replica.reportable()
        if not moved:
            return None
        newest = replica.newest_cut
        height, newest_epoch = (0, 0) if newest is None else (newest.cut.height, newest.epoch)
        epoch = max(self._epoch, newest_epoch) + 1
        term, number = self._highest()
        report = Report(domain.id, self._identity.node, epoch, replica.newest_cut_id, tuple(moved), term, number)
        signed = Report.parse(report.sign(self._identity), domain.electors)
        cut = propose(
            domain.id,
            height + 1,
            replica.newest_cut_id,
            replica.certified,
            [signed],
            domain.electors,
            replica.head_at,
        )
        if cut is None:
            return None
        problem = vote_problem(
            cut,
            domain=domain.id,
            height=height,
            newest=replica.newest_cut_id,
            certified=replica.certified,
            held=replica.head_at,
            forked=replica.frozen,
            granted=replica.granted,
        )
        if problem is not None:
            raise LocalError(f"the own cut is not fit to be voted for: {problem}")
        prepared = prepare(cut, epoch, dict([vote(self._identity, cut, epoch)]), domain.electors)
        certified = certify(prepared.cut, epoch, dict([commit(self._identity, cut, epoch)]), domain.electors)
        return Own(certified, {META: _encode(epoch, self._term, cut)})

    async def grant_term(self, trainer: bytes) -> CertifiedGrant:
        """Give the next term to ``trainer``, from the newest version of the lineage on.

        Raises ``OSError`` where the disk refuses.
        """
        await self._service.ready.wait()

        def make() -> Own:
            domain = self._service.domain
            newest = self._service.ledger.newest_weights()
            term = max(self._term, max(self._service.replica.grants, default=0)) + 1
            base = domain.id if newest is None else newest.id
            grant = Grant.make(domain.id, term, trainer, base, *self._highest(), self._service.replica.newest_cut_id)
            certified = certify_grant(grant, dict([grant_vote(self._identity, grant)]), domain.electors)
            return Own(certified, {META: _encode(self._epoch, term, self._last)})

        made = await self._service.commit(make)
        assert isinstance(made, CertifiedGrant)
        self._term = made.grant.term
        return made

    def _highest(self) -> tuple[int, int]:
        newest = self._service.ledger.newest_weights()
        if newest is None:
            return 0, 0
        assert isinstance(newest.payload, Weights)
        return newest.payload.term, newest.payload.number


def _encode(epoch: int, term: int, last: Cut | None) -> bytes:
    return codec.encode([FORMAT, epoch, term, None if last is None else last.body])


async def open_elector(service: LogService, identity: Identity) -> Elector:
    """The elector whose state is in ``service``'s store.

    Raises ``UserError`` for a domain with several electors, ``LocalError`` where this node is none.
    """
    electors = service.domain.electors
    if identity.node not in electors:
        raise LocalError("this node is no elector")
    if len(electors) > 1:
        raise UserError("the domain has several electors", "they need a newer Farflung: upgrade it")
    data = await service.store.meta(META)
    if data is None:
        return Elector(service, identity, 0, 0, None)
    try:
        _, epoch, term, body = codec.parse(data, _STATE, max_bytes=2 * MAX_CUT_BYTES, what="elector state")
        return Elector(service, identity, epoch, term, None if body is None else Cut.parse(body))
    except PeerError as error:
        raise LocalError(f"the stored state of the elector is damaged: {error}") from None
