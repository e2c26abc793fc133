"""An elector's watch over the trainer's office: grants a term when there is none or its holder fell silent.

1. No first term before ``min_nodes`` are present, or ``founding_wait_ms`` after the first peer.
2. A holder is silent once it has not been there, training or willing to, for ``term_silence_ms``.
3. The base is the newest version of the lineage that this elector holds entries of.
"""

from __future__ import annotations

import trio

from node.context import Node
from node.log.elector import Elector
from protocol import roles
from protocol.errors import Error


class TermWatch:
    """Runs beside the elector's cuts."""

    def __init__(self, node: Node, elector: Elector) -> None:
        self._node = node
        self._elector = elector

    async def run(self) -> None:
        """Watch for ever."""
        node = self._node
        interval = node.domain.timings.presence_ms / 1000
        heard = trio.current_time()
        while True:
            await trio.sleep(interval)
            presences = node.presences.live()
            grant = node.log.ledger.grant()
            if grant is not None:
                trainer = presences.get(grant.trainer)
                if trainer is not None and ("trainer" in trainer.willing or trainer.role == "trainer"):
                    heard = trio.current_time()
                if trio.current_time() < heard + node.domain.timings.term_silence_ms / 1000:
                    continue
            elif not self._may_found(len(presences)):
                continue
            candidate = roles.trainer_candidate(presences, node.domain.policy, node.log.ledger.may_validate)
            if candidate is None:
                node.health.warn("term", "no node that is present is willing to train")
                continue
            try:
                await self._elector.grant_term(candidate)
            except (Error, OSError) as error:
                node.health.warn("term", f"no term can be granted: {error}")
                continue
            node.health.clear("term")
            node.logger.info("granted a term to %s", candidate.hex()[:8])
            heard = trio.current_time()

    def _may_found(self, present: int) -> bool:
        if not self._node.log.ready.is_set():
            return False
        waited = self._node.presences.founded_for()
        return present >= self._node.domain.policy.min_nodes or (
            present > 1 and waited >= self._node.domain.timings.founding_wait_ms / 1000
        )
