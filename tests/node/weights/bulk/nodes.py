"""The part of a daemon that the data plane sees, around a real store, a real child and, where given, a real network."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from node.config import BulkConfig, Config
from node.health.warnings import Health
from node.peers.own_state import OwnState
from node.weights.bulk.bulk_process import BulkProcess, StartBulk, start_child
from node.weights.bulk.token_exchange import TokenExchange
from protocol.identity import Identity
from tests.node.weights.bulk.harness import DOMAIN

FREE = ("/ip4/127.0.0.1/tcp/0",)


class Announced(OwnState):
    """An own state that counts how often it is to be announced."""

    times = 0

    def announce(self) -> None:
        self.times += 1


class Some:
    """A node with ``bulk`` and ``tokens``; ``joined`` are the nodes that its log knows. ``pauses`` are the bulk
    process'."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        *,
        config: BulkConfig | None = None,
        network: Any = None,
        private: int = 0,
        joined: Collection[bytes] = (),
        listen: tuple[str, ...] = FREE,
        start: StartBulk = start_child,
        **pauses: float,
    ) -> None:
        self.identity = identity
        self.id = identity.node
        self.domain = SimpleNamespace(id=DOMAIN, private=private)
        self.config = Config(listen=listen, bulk=config or BulkConfig())
        self.directory = SimpleNamespace(versions=folder / "versions")
        self.logger = logging.getLogger("tests.bulk")
        self.health = Health(self.logger)
        self.network = network
        self.joined = set(joined)
        self.ended: set[bytes] = set()
        self.log = SimpleNamespace(
            ledger=SimpleNamespace(joined=self.joined.__contains__),
            replica=SimpleNamespace(frozen=self.ended.__contains__),
        )
        node: Any = self
        self.own = Announced(node)
        self.bulk = BulkProcess(node, self.own, start=start, **pauses)
        self.tokens = TokenExchange(node, self.bulk)


async def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until ``condition()`` holds."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # a process of its own is waited for
            await trio.sleep(0.01)
