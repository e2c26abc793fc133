"""What this node is and does at the moment: its parts write it, its presence publishes it, the control socket shows it.

Each field has one writer, named with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from node.context import Node


@dataclass(slots=True)
class OwnState:
    """See each field. ``announce`` after a change that others are to know of before the next interval."""

    node: Node
    role: str = "none"
    """The role that it plays (role manager)."""
    unfit: dict[str, float] = field(default_factory=dict)
    """Roles that failed too often, and until when (trio's clock) they are not taken again (role manager)."""
    leaving: bool = False
    """Its operator wants it to leave: it takes no role any more (control socket)."""
    left: bool = False
    """Its feed ends in a leave entry (role manager)."""
    pause_at_step: int = 0
    """Work ends at this step, 0 for never: a devnet ends so (control socket)."""
    versions: Sequence[bytes] = ()
    """Ids of the ``weights`` entries that are held whole, newest first (weights)."""
    arriving: Sequence[bytes] = ()
    """Ids of those that are on their way, newest first (weights)."""
    bulk: Sequence[str] = ()
    """Multiaddresses of the data plane; none while nothing is served (bulk process)."""
    children: dict[str, int] = field(default_factory=dict)
    """Process ids of running children by what they do (whoever starts them)."""
    gpu_mb: int = 0
    """Graphics memory of this machine, in MiB (hardware)."""
    generating: bool = False
    """It writes rollouts (inference)."""
    tokens_generated: int = 0
    """Since it started (inference)."""
    tokens_per_second: int = 0
    """Of the newest groups (inference)."""
    changed: trio.Event = field(default_factory=trio.Event)
    """Set once something is to be announced (presences wait for it and renew it)."""

    def announce(self) -> None:
        """Have the presence published soon: a version arrived, or the role changed."""
        self.changed.set()

    def willing(self) -> tuple[str, ...]:
        """The roles that this node would take now."""
        if self.leaving or self.node.log.over() is not None:
            return ()
        return tuple(role for role in self.node.config.willing if role not in self.unfit)

    def paused(self) -> bool:
        """Whether work on another step is to wait.

        Steps are counted, not versions: weights that are announced again have a new number and no step.
        """
        return 0 < self.pause_at_step <= self.node.log.ledger.step_count()
