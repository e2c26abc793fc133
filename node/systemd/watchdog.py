"""What the service manager hears of a running daemon: that it makes progress, and how it is, in a line.

Progress is three things: the loop runs (it asks), the log could take an entry (nobody holds it for ever, and its
store answers), and the role manager's own loop turns. A role that fails or waits is no reason to end a daemon.
"""

from __future__ import annotations

from typing import Final

import trio

from node.context import Node
from node.log.replicated_log import LogService
from node.peers.own_state import OwnState
from node.roles.role_manager import RoleManager
from node.weights.following import WeightsService
from node.weights.held import payload

ROLES_LIMIT: Final = 60.0
"""Seconds between two turns of the role manager's loop beyond which it stands still: ending a role takes some."""


async def progress(log: LogService, roles: RoleManager, patience: float) -> str | None:
    """None where the daemon makes progress, else what stands still; answers within ``patience`` seconds."""
    with trio.move_on_after(patience) as scope:
        await log.answer()
    if scope.cancelled_caught:
        return f"the log took no entry for {patience:.0f} s"
    still = trio.current_time() - roles.turned_at
    if still > ROLES_LIMIT:
        return f"the role manager did nothing for {still:.0f} s"
    return None


def status_line(node: Node, own: OwnState, weights: WeightsService) -> str:
    """The node's state for ``systemctl status``."""
    held = weights.held.newest_held()
    version = "no weights yet" if held is None else f"version {payload(held).number}"
    count = len(node.network.peers)
    line = f"{own.role}, {version}, {count} {'peer' if count == 1 else 'peers'}"
    return "; ".join([line, *node.health.warnings.values()])
