"""Which role this node plays now: runs ``protocol.work.assignment.assign`` on what it hears and acts on its own row
only.

1. No role before the domain's first term; then a change is acted on once it stood for three presence intervals.
2. A change is one ``role`` entry, then the old role's life ends, with its children, and the new one's begins.
3. A role that fails, of whatever, is started again after a pause that doubles up to ``MAX_PAUSE``; its failure is a
   health warning until it has been well for that long. One that fails ``MAX_FAILURES`` times in a row is left to
   others for ``UNFIT`` seconds: meanwhile the node is not willing to hold it, and a trainer's term goes to another.
4. A restarted node goes on with its standing role; the assignment may change that like any other role.
5. A node that is to leave ends its role and appends ``leave`` instead of another role. Its next start comes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from node.context import Node, innermost
from node.errors import UserError
from node.roles import inference, relay, trainer, validator
from protocol.errors import Error
from protocol.records import Leave, Role
from protocol.work import assignment

_LIVES: Final[dict[str, Callable[[Node], Awaitable[None]]]] = {
    "trainer": trainer.run,
    "relay": relay.run,
    "validator": validator.run,
    "inference": inference.run,
}
FIRST_PAUSE: Final = 1.0
MAX_PAUSE: Final = 30.0
MAX_FAILURES: Final = 5
UNFIT: Final = 300.0
APPEND_TIMEOUT: Final = 10.0
"""Seconds that a change of role waits for the log to take it; then it is considered anew."""


class RoleManager:
    """Owns the current role's task."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._interval = node.domain.timings.presence_ms / 1000
        self._stability = assignment.Stability(3 * self._interval)
        self.turned_at = trio.current_time()
        """When the loop last turned: it does so each presence interval, whatever the role does."""

    async def run(self) -> None:
        """Follow the assignment for ever."""
        node = self._node
        role = node.log.ledger.standing_role(node.id)
        while True:
            node.role = role
            node.logger.info("role: %s", role)
            node.presences.announce_soon()
            async with trio.open_nursery() as nursery:
                if role in _LIVES:
                    nursery.start_soon(self._live, role)
                role = await self._next()
                nursery.cancel_scope.cancel()
            node.health.clear("role")

    async def _next(self) -> str:
        """Wait until another role is this node's, and announce it."""
        node = self._node
        while True:
            self.turned_at = trio.current_time()
            await trio.sleep(self._interval)
            for role in [role for role, until in node.unfit.items() if until <= trio.current_time()]:
                del node.unfit[role]
                node.health.clear(f"{role} role")
                if role == node.role:  # it could not be laid down meanwhile
                    return role
            if node.log.over() is not None:
                # It can say nothing any more, so nothing that it did would count.
                if node.role != "none":
                    return "none"
                continue
            if node.leaving:
                if await self._leave():
                    return "none"
                continue
            grant = node.log.ledger.grant()
            if grant is None or not node.log.ready.is_set():
                continue
            ledger = node.log.ledger
            rows = assignment.assign(node.presences.live(), node.domain.policy, grant.trainer, ledger.may_validate)
            wanted = rows.get(node.id, "none")
            if wanted not in ("none", *node.willing()):
                wanted = "none"
            if not self._stability.settled(wanted, trio.current_time()) or wanted == node.role:
                continue
            try:
                await node.log.append(Role(wanted), timeout=APPEND_TIMEOUT)
            except (Error, OSError) as error:
                node.health.warn("role entry", f"the role {wanted} cannot be taken: {error}")
                continue
            node.health.clear("role entry")
            return wanted

    async def _leave(self) -> bool:
        """Append ``leave``, once; False where the log does not take it yet."""
        node = self._node
        if node.left or not node.log.ready.is_set() or node.log.own_seq < 0:
            return False
        try:
            await node.log.append(Leave(), timeout=APPEND_TIMEOUT)
        except (Error, OSError) as error:
            node.health.warn("role entry", f"the leave entry cannot be made: {error}")
            return False
        node.health.clear("role entry")
        node.left = True
        return True

    async def _live(self, role: str) -> None:
        """Play a role; begin again where it fails."""
        pause, failures = FIRST_PAUSE, 0
        while True:
            began = trio.current_time()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._recover)
                    await _LIVES[role](self._node)
                    nursery.cancel_scope.cancel()
            except* Exception as group:
                if trio.current_time() - began > MAX_PAUSE:
                    pause, failures = FIRST_PAUSE, 0
                failures += 1
                error = innermost(group)
                if isinstance(error, UserError):
                    pause = MAX_PAUSE
                if not isinstance(error, Error | OSError | trio.TooSlowError):
                    self._node.logger.error("the %s role: a bug", role, exc_info=error)
                why = str(error) or type(error).__name__
                if failures == MAX_FAILURES:
                    self._node.unfit[role] = trio.current_time() + UNFIT
                    text = f"the {role} role failed {failures} times in a row ({why}) and is left to others for a while"
                    self._node.health.warn(f"{role} role", text)
                else:
                    self._node.health.warn("role", f"the {role} role stopped: {why}; it starts again in {pause:.0f} s")
            if role in self._node.unfit:
                return
            await trio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _recover(self) -> None:
        await trio.sleep(MAX_PAUSE)
        self._node.health.clear("role")
