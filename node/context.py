"""What the parts of one running node share: identity, domain, stores, network and the counters that people see."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from node.config import Config
from node.log.replicated_log import LogService
from node.net.blob_exchange import fetch_blob
from node.net.host import Network
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from node.telemetry.metrics import Metrics
from protocol.constants import MAX_DUE_VALIDATORS
from protocol.domain import Domain
from protocol.identity import Identity
from protocol.log.entry import Entry

if TYPE_CHECKING:
    from node.api.weight_requests import Pulls
    from node.log.elector import Elector
    from node.peers.presences import Presences
    from node.roles.rollout_pool import Pool
    from node.weights.bulk.bulk_process import Bulk
    from node.weights.bulk.token_exchange import Routes
    from node.weights.following import Weights


MAX_EVALUATIONS: Final = 1000
"""Evaluations that a running node remembers."""


@dataclass(slots=True)
class Health:
    """Standing warnings by topic: set while a condition lasts, cleared when it ends, each logged once."""

    log: logging.Logger
    warnings: dict[str, str] = field(default_factory=dict)

    def warn(self, topic: str, text: str) -> None:
        """Let ``text`` stand under ``topic``."""
        if self.warnings.get(topic) != text:
            self.log.warning("%s", text)
        self.warnings[topic] = text

    def clear(self, topic: str) -> None:
        """The condition is over."""
        if self.warnings.pop(topic, None) is not None:
            self.log.info("%s: in order again", topic)


def innermost(error: BaseException) -> BaseException:
    """What happened, without the groups that trio wraps it in: the first of several."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(slots=True)
class Node:
    """One daemon's shared state. Roles read it; only the part that owns a field writes to it."""

    identity: Identity
    domain: Domain
    config: Config
    directory: DataDirectory
    network: Network
    log: LogService
    blobs: BlobStore
    versions: VersionStore
    health: Health
    logger: logging.Logger
    stop: Callable[[], None]
    pause_at_step: int = 0
    role: str = "none"
    tokens_generated: int = 0
    tokens_per_second: int = 0
    generating: bool = False
    unfit: dict[str, float] = field(default_factory=dict)
    """Roles that failed too often, and until when (trio's clock) they are not taken again."""
    leaving: bool = False
    """Its operator wants it to leave: it takes no role any more."""
    left: bool = False
    """Its feed ends in a leave entry."""
    children: dict[str, int] = field(default_factory=dict)
    failed_audits: Counter[bytes] = field(default_factory=Counter)
    metrics: Metrics = field(default_factory=Metrics)
    evaluating: bool = False
    """An evaluation of a version that is due is under way, or about to be."""
    evaluations: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVALUATIONS))
    """What this node's evaluations found, the newest last: see ``node.roles.trainer_evaluation``."""
    elector: Elector | None = None
    """Where this node is, or once was, one of the domain's electors."""
    bulk: Bulk = field(init=False)
    routes: Routes = field(init=False)
    presences: Presences = field(init=False)
    weights: Weights = field(init=False)
    pulls: Pulls = field(init=False)
    pool: Pool = field(init=False)

    @property
    def id(self) -> bytes:
        """This node's id."""
        return self.identity.node

    def willing(self) -> tuple[str, ...]:
        """The roles that this node would take now."""
        if self.leaving or self.log.over() is not None:
            return ()
        return tuple(role for role in self.config.willing if role not in self.unfit)

    def paused(self) -> bool:
        """Whether work on another step is to wait: a devnet ends after so many steps.

        Steps are counted, not versions: weights that are announced again have a new number and no step.
        """
        return 0 < self.pause_at_step <= self.log.ledger.step_count()

    def will_judge(self, validators: Collection[bytes]) -> bool:
        """Whether so many of these validators are here and at it that they can decide about a submission."""
        present = self.presences.live()
        at_it = sum(validator in present and present[validator].role == "validator" for validator in validators)
        return at_it > min(len(validators), MAX_DUE_VALIDATORS) // 2

    def will_be_judged(self, rollout: Entry) -> bool:
        """Whether enough of those who are due to judge a submission are here and at it."""
        return self.will_judge(self.log.ledger.due(rollout))

    async def blob_path(self, digest: bytes, size: int) -> Path:
        """The local file of a blob that the domain names, fetched from any peer where it is not held yet."""
        if not self.blobs.has(digest):
            await self.fetch_blob(digest, size, list(self.network.peers), timeout=60)
        return self.blobs.path(digest)

    async def fetch_blob(self, digest: bytes, size: int, peers: list[bytes], *, timeout: float) -> bytes:
        """The bytes of a blob: from the store, else from the first of ``peers`` that has it, and then kept."""
        data = await self.blobs.get_async(digest)
        if data is None:
            data = await fetch_blob(self.network, peers, digest, size, timeout=timeout)
            await self.blobs.put_async(data)
        return data
