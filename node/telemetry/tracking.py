"""Giving a node's metrics to TensorBoard or Weights & Biases, and measuring the node itself once a minute.

1. Each tracker has a child of its own (``node.workers.tracker_child``): the daemon imports none of their libraries, and
   what they do to their process is no matter of the node's.
2. A tracker that fails, is slow or is not installed is a health warning, and is tried again after a pause. Rows wait
   for it meanwhile (``node.telemetry.metrics.Queue``); ``metrics.jsonl`` has them in any case.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from node import __version__
from node.context import Node
from node.health import supervisor
from node.health.supervisor import Failure, RestartPolicy
from node.peers.own_state import OwnState
from node.telemetry.metrics import Metrics, Queue, Row
from node.weights.following import WeightsService
from node.weights.held import payload
from node.workers.child_messages import FinishTracker, LogRows, OpenTracker, TensorBoardFolder, TrackerRow, WandBRun
from node.workers.child_process import OpenWorker, open_worker

MODULE: Final = "node.workers.tracker_child"
OPEN_TIMEOUT: Final = 180.0
"""Weights & Biases waits up to 90 s for its server."""
LOG_TIMEOUT: Final = 60.0
FINISH_TIMEOUT: Final = 0.8
"""What a daemon that stops has left for it (``node.daemon.STOP_SECONDS``)."""
POLICY: Final = RestartPolicy(pause=5.0, longest=300.0)
SAMPLE_EVERY: Final = 60.0

PASSED: Final = ("HOME", "NETRC", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""What a child that speaks to a server needs of the environment, beside proxies and the library's own variables."""
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class Tracker:
    """One tracker: its ``name``, what it is opened with, and more ``environment`` for its child."""

    name: str
    wanted: TensorBoardFolder | WandBRun
    environment: Mapping[str, str]


def trackers(node: Node, environment: Mapping[str, str] = os.environ) -> list[Tracker]:
    """What the configuration asks for."""
    config, found = node.config.tracking, []
    if config.tensorboard:
        name = config.tensorboard if isinstance(config.tensorboard, str) else "tensorboard"
        found.append(Tracker("tensorboard", TensorBoardFolder(str(node.directory.path / name)), {}))
    if config.wandb:
        passed = {
            name: value
            for name, value in environment.items()
            if name in PASSED or name.lower() in _PROXIES or name.startswith("WANDB_")
        }
        about = {"domain": node.domain.id.hex(), "domain_name": node.domain.name, "agent": f"farflung/{__version__}"}
        wanted = WandBRun(
            folder=str(node.directory.path / "wandb"),
            project=config.wandb,
            name=f"{node.domain.name} {node.config.name}",
            run=f"{node.domain.id.hex()[:12]}-{node.id.hex()[:12]}",
            config=about | {"node": node.id.hex()},
        )
        found.append(Tracker("wandb", wanted, passed))
    return found


def tracked(row: Row) -> TrackerRow:
    """A row of metrics as trackers take it: its numbers by ``<kind>/<field>``, an evaluation's by
    ``eval/<task>/<field>``."""
    prefix = f"{row['kind']}/{row['task']}" if "task" in row else str(row["kind"])
    scalars = {
        f"{prefix}/{name}": float(value)
        for name, value in row.items()
        if name not in ("time", "version") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return TrackerRow(str(row["kind"]), row["time"], row.get("version") or 0, scalars)


async def run(
    node: Node, own: OwnState, metrics: Metrics, weights: WeightsService, *, open_worker: OpenWorker = open_worker
) -> None:
    """Feed the trackers and measure the node, for ever."""
    with ExitStack() as stack:
        # All follow before anything is measured, so that none lacks the first row.
        queues = [(tracker, stack.enter_context(metrics.follow())) for tracker in trackers(node)]
        async with trio.open_nursery() as nursery:
            for tracker, queue in queues:
                name, feed = f"tracking {tracker.name}", partial(_track, node, tracker, queue, open_worker)
                words = partial(_words, tracker.name)
                keep = partial(supervisor.keep, name, feed, node.health, policy=POLICY, words=words)
                nursery.start_soon(keep)
            nursery.start_soon(_sample, node, own, metrics, weights)


def _words(name: str, failure: Failure) -> str:
    why = failure.why.removeprefix(f"{name}: open: ")
    return f"{name} gets no metrics, metrics.jsonl has them: {why}"


async def _track(node: Node, tracker: Tracker, queue: Queue, open_worker: OpenWorker) -> None:
    """Hand rows over until the child fails; what it did not take stays in the queue."""
    async with open_worker(MODULE, name=tracker.name, environment=tracker.environment) as worker:
        await worker.call(OpenTracker(tracker.wanted), timeout=OPEN_TIMEOUT)
        node.health.clear(f"tracking {tracker.name}")
        try:
            while True:
                async with queue.oldest() as rows:
                    await worker.call(LogRows(list(map(tracked, rows))), timeout=LOG_TIMEOUT)
        finally:
            if worker.alive:
                with trio.CancelScope(shield=True):
                    await worker.call(FinishTracker(), timeout=FINISH_TIMEOUT)


async def _sample(node: Node, own: OwnState, metrics: Metrics, weights: WeightsService) -> None:
    """What a node is, whatever its role."""
    while True:
        held = weights.held.newest_held()
        sent, received = node.network.traffic
        account = node.log.ledger.accounts(final=True).get(node.id)
        metrics.record(
            "node",
            version=-1 if held is None else payload(held).number,
            role=own.role,
            newest_version=weights.held.newest_number(),
            peers=len(node.network.peers),
            bytes_sent=sent,
            bytes_received=received,
            credit=0 if account is None else account.credit,
            tokens_generated=own.tokens_generated,
            warnings=len(node.health.warnings),
        )
        await trio.sleep(SAMPLE_EVERY)
