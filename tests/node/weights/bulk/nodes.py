"""The part of a daemon that the data plane sees, around a real store, a real child and, where given, a real network."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from node.config import BulkConfig, Config
from node.context import Health
from node.weights.bulk.bulk_process import BulkProcess
from node.weights.bulk.token_exchange import TokenExchange
from protocol.identity import Identity
from tests.node.weights.bulk.harness import DOMAIN

FREE = ("/ip4/127.0.0.1/tcp/0",)


class Some:
    """A node with ``bulk`` and ``routes``; ``joined`` are the nodes that its log knows."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        *,
        config: BulkConfig | None = None,
        network: Any = None,
        private: int = 0,
        joined: Collection[bytes] = (),
    ) -> None:
        self.identity = identity
        self.id = identity.node
        self.domain = SimpleNamespace(id=DOMAIN, private=private)
        self.config = Config(listen=FREE, bulk=config or BulkConfig())
        self.directory = SimpleNamespace(versions=folder / "versions")
        self.versions: Any = None
        self.logger = logging.getLogger("tests.bulk")
        self.health = Health(self.logger)
        self.children: dict[str, int] = {}
        self.announced = 0
        self.presences = SimpleNamespace(announce_soon=self._announce)
        self.network = network
        self.joined = set(joined)
        self.ended: set[bytes] = set()
        self.log = SimpleNamespace(
            ledger=SimpleNamespace(joined=self.joined.__contains__),
            replica=SimpleNamespace(frozen=self.ended.__contains__),
        )
        self.bulk = Bulk(self)  # type: ignore[arg-type]
        self.routes = Routes(self, self.bulk) if network is not None else None  # type: ignore[arg-type]

    def _announce(self) -> None:
        self.announced += 1


async def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until ``condition()`` holds."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # a process of its own is waited for
            await trio.sleep(0.01)
