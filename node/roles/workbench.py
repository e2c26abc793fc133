"""What the roles of a node work with: a view of its parts (``node.daemon.Parts``), the same for each of them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from node.context import Node
from node.net.blob_exchange import BlobExchange
from node.peers.own_state import OwnState
from node.peers.presences import Presences
from node.roles.engines import Engines
from node.roles.rollout_pool import Pool
from node.store.version_store import VersionStore
from node.telemetry.metrics import Metrics
from node.weights.following import WeightsService

MAX_EVALUATIONS: Final = 1000
"""Evaluations that a running node remembers."""


@dataclass(slots=True)
class Evaluations:
    """What the trainer's evaluations found (rows as the control socket tells them), the newest last."""

    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVALUATIONS))
    under_way: bool = False
    """An evaluation of a version that is due is under way, or about to be."""


class Workbench(Protocol):
    """One node's."""

    node: Node
    own: OwnState
    presences: Presences
    blobs: BlobExchange
    versions: VersionStore
    weights: WeightsService
    pool: Pool
    engines: Engines
    metrics: Metrics
    evaluations: Evaluations
    failed_audits: Counter[bytes]
    """How often a child failed on a submission, by its ``rollout`` entry: the role may begin anew in between."""
