"""An inference node's engine that follows the versions, with a clock at each part of the way (for ``farnode``)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from node.daemon import Parts
from node.roles.engine_client import LOAD_TIMEOUT
from node.weights import delta_chain
from node.weights.fetching import Rates
from node.workers.child_messages import ConfigureEngine, LoadVersion
from node.workers.child_process import OpenWorker, open_worker
from protocol.records import Weights
from protocol.weights.manifest import ChunkList


class Following:
    """Loads each version into a real engine child as soon as it is held, and says what took how long.

    ``serving {…}`` comes for each: the version's ``number``; seconds that receiving its delta and its whole took
    (``delta_transfer``, ``whole_transfer``; a transfer hashes what it receives), applying the delta (``apply``, with
    the start of its child and with hashing), the engine's reload (``reload``), and when it was
    ready (``at``, the monotonic clock).
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._took: dict[str, float] = {}

    async def run(self, config: Path, tokenizer: Path) -> None:
        """Follow for ever."""
        node, weights = self._parts.node, self._parts.weights
        self._watch()
        async with open_worker("node.workers.engine_child", name="engine") as worker:
            request = ConfigureEngine(str(config), str(tokenizer), node.domain.recipe, threads=node.config.threads)
            await worker.call(request, timeout=LOAD_TIMEOUT)
            print("following", flush=True)
            loaded: bytes | None = None
            while True:
                held = weights.held.newest_held()
                if held is None or held.id == loaded:
                    await weights.notice.wait(60)
                    continue
                assert isinstance(held.payload, Weights)
                took, self._took = self._took, {}
                manifest, whole = weights.held.paths(held.id)
                began = time.monotonic()
                await worker.call(LoadVersion(str(manifest), str(whole)), timeout=LOAD_TIMEOUT)
                loaded, now = held.id, time.monotonic()
                found = took | {"reload": now - began, "number": held.payload.number, "at": now}
                print("serving", json.dumps(found, separators=(",", ":")), flush=True)

    def _watch(self) -> None:
        """Put clocks around what brings and what applies."""
        fetching, apply = self._parts.weights.fetching, delta_chain.apply
        bring = fetching.bring

        async def timed_bring(listing: ChunkList, *arguments: Any, **named: Any) -> None:
            began = time.monotonic()
            await bring(listing, *arguments, **named)
            part = "whole" if hasattr(listing, "tensors") else "delta"
            self._add(f"{part}_transfer", time.monotonic() - began)

        async def timed_apply(
            open_worker: OpenWorker, rates: Rates, delta: Path, base: Path, target: Path, size: int
        ) -> list[int]:
            began = time.monotonic()
            wrong = await apply(open_worker, rates, delta, base, target, size)
            self._add("apply", time.monotonic() - began)
            return wrong

        fetching.bring = timed_bring  # type: ignore[method-assign]
        delta_chain.apply = timed_apply

    def _add(self, part: str, seconds: float) -> None:
        self._took[part] = self._took.get(part, 0.0) + seconds
