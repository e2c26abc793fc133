"""Asking the other electors, all at once, each with a deadline.

An answer that breaks the rules is blamed, silence costs time, and of a refusal notice is taken: how far whoever refuses
is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import trio

from node.log import elector_messages as wire
from node.log.elector_messages import Refusal
from node.log.voter import Voter
from node.net.requests import Unreachable
from protocol import codec
from protocol.errors import PeerError
from protocol.log.quorum import quorum

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TIMEOUT: Final = 1.0
"""Seconds that others have for an answer at least."""


class OtherElectors:
    """The other electors, as ``voter`` asks them. ``term_floor`` is a term that one of them is said to have reached."""

    def __init__(self, voter: Voter) -> None:
        self._voter = voter
        self._pace = voter.service.domain.timings.epoch_ms / 1000
        self.term_floor = 0

    async def signatures(
        self, op: str, argument: codec.Value, verify: Callable[[bytes, bytes], None]
    ) -> dict[bytes, bytes]:
        """The right signatures that the others answered ``op`` with, by elector."""

        def read(peer: bytes, signature: bytes) -> bytes:
            verify(peer, signature)
            return signature

        return await self.ask(op, argument, read)

    async def ask(
        self, op: str, argument: codec.Value, read: Callable[[bytes, Any], T | None], refusals: set[str] | None = None
    ) -> dict[bytes, T]:
        """What the others answered to ``op``, by elector, as ``read(peer, value)`` has it; with the own part a quorum
        is enough. None does not count. Of refusals notice is taken; their reasons are added to ``refusals``."""
        payload = wire.request(op, argument)

        async def one(peer: bytes) -> T | None:
            value = wire.parse_answer(op, await self.request(peer, payload))
            if not isinstance(value, Refusal):
                return read(peer, value)
            logger.debug("%s refuses %s: %s", peer.hex()[:8], op, value.reason)
            self._note(peer, value)
            if refusals is not None:
                refusals.add(value.reason)
            return None

        return await self.gather(one, quorum(len(self._voter.electors)) - 1)

    def _note(self, peer: bytes, refusal: Refusal) -> None:
        """Take notice of how far whoever refuses is."""
        voter = self._voter
        if refusal.epoch < voter.turns.limit(trio.current_time()):
            voter.floor = max(voter.floor, refusal.epoch)
        if refusal.term < voter.term_limit:
            self.term_floor = max(self.term_floor, refusal.term)
        if refusal.height > voter.height and voter.sync is not None:
            voter.sync.soon(peer)

    async def request(self, peer: bytes, payload: bytes) -> bytes:
        """One request of one elector. Raises ``Unreachable`` or ``PeerError``."""
        voter = self._voter
        assert voter.sync is not None
        return await voter.sync.transport.request(
            peer,
            voter.protocol,
            payload,
            timeout=max(MIN_TIMEOUT, voter.turns.patience),
            max_response=wire.MAX_MESSAGE,
        )

    async def gather(self, ask: Callable[[bytes], Awaitable[T | None]], enough: int) -> dict[bytes, T]:
        """What the other electors answer, by elector; once ``enough`` did, the rest have a fifth of an epoch left.

        ``ask`` gives None for an answer that does not count. What breaks the rules is blamed.
        """
        voter = self._voter
        others = [elector for elector in voter.electors if elector != voter.me]
        answers: dict[bytes, T] = {}
        with trio.CancelScope() as scope:

            async def one(peer: bytes) -> None:
                try:
                    value = await ask(peer)
                except PeerError as error:
                    assert voter.sync is not None
                    voter.sync.transport.blame(peer, error)
                    return
                except Unreachable as error:
                    logger.debug("elector %s: %s", peer.hex()[:8], error)
                    return
                if value is not None:
                    answers[peer] = value
                    if len(answers) == enough:
                        scope.deadline = trio.current_time() + self._pace / 5

            async with trio.open_nursery() as nursery:
                for peer in others:
                    nursery.start_soon(one, peer)
        return answers
