"""Which role this node plays now: runs ``protocol.roles.assign`` on what it hears and acts on its own row only.

1. No role before the domain's first term; then a change is acted on once it stood for three presence intervals.
2. A change is one ``role`` entry, then the old role's task ends and the new one's begins.
3. A role that fails is started again after a pause that doubles up to ``MAX_PAUSE``; its failure is a health warning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from node.context import Node
from node.errors import UserError
from node.roles import inference, relay, trainer, validator
from protocol import roles
from protocol.errors import Error
from protocol.records import Role

_LIVES: Final[dict[str, Callable[[Node], Awaitable[None]]]] = {
    "trainer": trainer.run,
    "relay": relay.run,
    "validator": validator.run,
    "inference": inference.run,
}
MAX_PAUSE: Final = 30.0


class RoleManager:
    """Owns the current role's task."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._interval = node.domain.timings.presence_ms / 1000
        self._stability = roles.Stability(3 * self._interval)
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Follow the assignment for ever."""
        node = self._node
        async with trio.open_nursery() as nursery:
            standing = node.log.ledger.standing_role(node.id)
            if standing in _LIVES:
                # A restart goes on with what it was doing; the assignment may change that like any other role.
                await self._play(standing, nursery)
            while True:
                await trio.sleep(self._interval)
                grant = node.log.ledger.grant()
                if grant is None or not node.log.ready.is_set():
                    continue
                rows = roles.assign(node.presences.live(), node.domain.policy, grant.trainer)
                wanted = rows.get(node.id, "none")
                if self._stability.settled(wanted, trio.current_time()) and wanted != node.role:
                    await node.log.append(Role(wanted))
                    await self._play(wanted, nursery)

    async def _play(self, role: str, nursery: trio.Nursery) -> None:
        self._scope.cancel()
        self._scope = trio.CancelScope()
        self._node.role = role
        self._node.logger.info("role: %s", role)
        self._node.presences.announce_soon()
        if role in _LIVES:
            nursery.start_soon(self._live, role, self._scope)

    async def _live(self, role: str, scope: trio.CancelScope) -> None:
        pause = 1.0
        with scope:
            while True:
                try:
                    await _LIVES[role](self._node)
                except* (Error, trio.TooSlowError, OSError) as group:
                    error = _first(group)
                    if isinstance(error, UserError):
                        pause = MAX_PAUSE
                    self._node.health.warn(
                        "role", f"the {role} role stopped: {error}; it starts again in {pause:.0f} s"
                    )
                await trio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
