"""Which role this node plays now: runs ``protocol.work.assignment.assign`` on what it hears and acts on its own row
only.

1. No role before the domain's first term; then a change is acted on once it stood for three presence intervals.
2. A change is one ``role`` entry, then the old role's life ends, with its children, and the new one's begins.
3. A role that fails, of whatever, is started again as any service is (``node.health.supervisor``). One that fails
   ``MAX_FAILURES`` times in a row is left to others for ``UNFIT`` seconds: meanwhile the node is not willing to hold
   it, and a trainer's term goes to another.
4. A restarted node goes on with its standing role, once its log is level with the log of a member (or nobody else has
   one); the assignment may change that like any other role.
5. A node that is to leave ends its role and appends ``leave`` instead of another role. Its next start comes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import trio

from node.context import Node
from node.health import supervisor
from node.health.supervisor import Failure
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from protocol.errors import Error
from protocol.records import Leave, Role
from protocol.work import assignment

Lives = Mapping[str, Callable[[], Awaitable[None]]]
"""What a node does in each role, until it is cancelled."""

POLICY: Final = supervisor.RestartPolicy(pause=1.0, longest=30.0, steady=30.0)
MAX_FAILURES: Final = 5
UNFIT: Final = 300.0
SERVICE: Final = "the {} role"
APPEND_TIMEOUT: Final = 10.0
"""Seconds that a change of role waits for the log to take it; then it is considered anew."""


class RoleManager:
    """Owns the current role's task."""

    def __init__(self, node: Node, own: OwnState, presences: Presences, lives: Lives) -> None:
        self._node = node
        self._own = own
        self._presences = presences
        self._lives = lives
        self._interval = node.domain.timings.presence_ms / 1000
        self._stability = assignment.Stability(3 * self._interval)
        self.turned_at = trio.current_time()
        """When the loop last turned: it does so each presence interval, whatever the role does."""

    async def run(self) -> None:
        """Follow the assignment for ever."""
        node = self._node
        await self._catch_up()
        role = node.log.ledger.standing_role(node.id)
        while True:
            self._own.role = role
            node.logger.info("role: %s", role)
            self._own.announce()
            async with trio.open_nursery() as nursery:
                if role in self._lives:
                    nursery.start_soon(self._live, role)
                role = await self._next()
                nursery.cancel_scope.cancel()
            node.health.clear(SERVICE.format(role))

    async def _catch_up(self) -> None:
        """Take no role before the own log is level with a member's: an old one says that one still holds an office."""
        node = self._node
        while not (node.log.ready.is_set() and node.log.level()):
            self.turned_at = trio.current_time()
            await node.log.wait_change(node.log.generation, self._interval)

    async def _next(self) -> str:
        """Wait until another role is this node's, and announce it."""
        node, own = self._node, self._own
        while True:
            self.turned_at = trio.current_time()
            await trio.sleep(self._interval)
            for role in [role for role, until in own.unfit.items() if until <= trio.current_time()]:
                del own.unfit[role]
                node.health.clear(f"{role} role")
                if role == own.role:  # it could not be laid down meanwhile
                    return role
            if node.log.over() is not None:
                # It can say nothing any more, so nothing that it did would count.
                if own.role != "none":
                    return "none"
                continue
            if own.leaving:
                can = not own.left and node.log.ready.is_set() and node.log.own_seq >= 0
                if can and await self._append(Leave(), "the leave entry cannot be made"):
                    own.left = True
                    return "none"
                continue
            grant = node.log.ledger.grant()
            if grant is None or not node.log.ready.is_set():
                continue
            ledger = node.log.ledger
            present = self._presences.members()
            standing = self._presences.standing()
            rows = assignment.assign(present, node.domain.policy, grant.trainer, standing, ledger.may_validate)
            wanted = rows.get(node.id, "none")
            if wanted not in ("none", *own.willing()):
                wanted = "none"
            if not self._stability.stable(wanted, trio.current_time()):
                continue
            if wanted == own.role and (ledger.standing_role(node.id) == wanted or not self._may_return()):
                continue
            # Where others declared this node absent, the same role is taken again, and its life goes on.
            if await self._append(Role(wanted), f"the role {wanted} cannot be taken") and wanted != own.role:
                return wanted

    def _may_return(self) -> bool:
        """Whether a role entry on the newest cut would count."""
        log = self._node.log
        return len(log.replica.cuts) >= log.ledger.returns_at(self._node.id)

    async def _append(self, record: Role | Leave, problem: str) -> bool:
        """Whether the log took it; ``problem`` says what is the matter where it did not."""
        try:
            await self._node.log.append(record, timeout=APPEND_TIMEOUT)
        except (Error, OSError) as error:
            self._node.health.warn("role entry", f"{problem}: {error}")
            return False
        self._node.health.clear("role entry")
        return True

    async def _live(self, role: str) -> None:
        """Play a role; begin again where it fails (rule 3)."""
        node, own = self._node, self._own

        def leave_it(failure: Failure) -> bool:
            if failure.times < MAX_FAILURES:
                return False
            own.unfit[role] = trio.current_time() + UNFIT
            text = f"the {role} role failed {failure.times} times in a row ({failure.why}) and is left to others"
            node.health.warn(f"{role} role", f"{text} for a while")
            return True

        service = self._lives[role]
        await supervisor.keep(SERVICE.format(role), service, node.health, policy=POLICY, give_up=leave_it)
