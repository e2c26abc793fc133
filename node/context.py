"""What all parts of one running node share. What only some of them use they are handed by ``node.daemon``."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from node.config import Config
from node.health.warnings import Health
from node.log.replicated_log import LogService
from node.net.host import Network
from node.store.data_directory import DataDirectory
from protocol.domain import Domain
from protocol.identity import Identity


@dataclass(frozen=True, slots=True)
class Node:
    """Who a node is, what it takes part in, and what it reaches the world by."""

    identity: Identity
    domain: Domain
    config: Config
    directory: DataDirectory
    network: Network
    log: LogService
    health: Health
    logger: logging.Logger

    @property
    def id(self) -> bytes:
        """This node's id."""
        return self.identity.node
