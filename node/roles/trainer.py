"""The trainer role: gathers accepted rollouts, trains, and commits step and weights together.

1. It trains on submissions that the majority of the due validators accepted, each once, with a policy lag from 0 to
   ``async_level``, whatever their senders did.
2. A batch is full once it holds ``groups_per_step`` groups, those without signal too; the oldest versions go first.
   The child drops groups without signal; where none has any, the version that follows has unchanged weights.
3. ``step`` and ``weights`` are one transaction, written before anybody can see the new version.
4. The first trainer announces version 0 once a cut covers a validator and an inference node, because that cut decides
   who may audit and generate.
5. Where the validators due for the newest version are gone, or all who may generate with it, the same weights are
   announced again, so that those who are here now are due or may.
6. A step that is done when the term or the version that it started from is over is thrown away.
7. A step whose loss or gradient was not finite is thrown away with its batch, and the last good version loaded again:
   training goes on from there with other rollouts, and the health warning "training" says why.
8. With a version goes what changed since its base, where that is clearly smaller. A delta that cannot be made is a
   warning: the version is published without.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from node import deltas
from node.context import Node
from node.entrusting import entrust
from node.net.rpc import Unreachable
from node.roles import evaluation, figures
from node.roles.engine import LOAD_TIMEOUT, configuration
from node.weights import payload as weights_payload
from node.workers import launch
from node.workers.client import Worker, WorkerError, open_worker
from protocol.constants import MILLION
from protocol.entry import Entry
from protocol.errors import PeerError
from protocol.manifest import Manifest
from protocol.records import Blob, Rollout, Step, StepBlob, Verdict, Weights
from protocol.rollout import Submission

TRAIN_TIMEOUT = 3600.0
DELTA = "next.delta"
REFERENCE_TIMEOUT = 3600.0
"""Seconds that version 0 may take to arrive, where the recipe needs it."""
START_TIMEOUT = 300.0
"""Seconds that the child may take to start: several processes on a busy machine need their time."""
MAX_REJECTED = 2**31 - 1
"""The most that a step entry can say; anybody may announce a great many responses."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """One accepted submission on its way into a batch."""

    entry: Entry
    lag: int
    path: Path
    submission: Submission


async def run(node: Node) -> None:
    """Train until cancelled or until another term begins."""
    async with _open_trainer(node) as worker:
        node.children["trainer"] = worker.pid
        try:
            settings = {
                **await configuration(node),
                "dtype": node.domain.model.compute_dtype,
                "recompute": node.config.trainer.recompute,
            }
            await worker.call("configure", timeout=START_TIMEOUT, **settings)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(evaluation.run, node)
                await _Life(node, worker).run()
        finally:
            node.children.pop("trainer", None)
            node.health.clear("office")
            node.health.clear("founding")
            node.health.clear("training")


@asynccontextmanager
async def _open_trainer(node: Node) -> AsyncIterator[Worker]:
    """The trainer child: one process, or as many as the configuration says, started through torchrun."""
    processes = node.config.trainer.processes
    if processes == 1:
        async with open_worker("node.workers.trainer", name="trainer") as worker:
            yield worker
        return
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=node.directory.work) as folder:
        launcher = launch.command(sys.executable, processes, Path(folder))
        async with open_worker(
            "node.workers.trainer", name="trainer", prefix=launcher, launched=True, arguments=[folder]
        ) as worker:
            yield worker


class _Life:
    def __init__(self, node: Node, worker: Worker) -> None:
        self._node = node
        self._worker = worker
        self._recipe = node.domain.recipe
        self._checkpoints = node.directory.trainer
        self._batch: dict[bytes, Gathered] = {}
        self._refused: set[bytes] = set()
        self._progress_at = trio.current_time()

    async def run(self) -> None:
        node = self._node
        seen = 0
        loaded: bytes | None = None
        began = time.monotonic()
        while True:
            if not self._in_office():
                node.health.warn("office", "another trainer was granted a term")
            elif node.weights.newest() is None:
                await self._announce_version_0()
            else:
                base = await self._base()
                if base is not None:
                    if loaded != base.id:
                        await self._load(base)
                        loaded = base.id
                        began = time.monotonic()  # what came before was no wait for rollouts
                    full = False if node.paused() else await self._gather(base)
                    if full:
                        made = await self._step(base, wait_ms=int((time.monotonic() - began) * 1000))
                        loaded = None if made is None else made.id
                        began = time.monotonic()
                        self._progress_at = trio.current_time()
                        continue
                    await self._announce_again_if_stuck(base)
            seen = await node.log.wait_change(seen, timeout=0.5)

    def _in_office(self) -> bool:
        grant = self._node.log.ledger.grant()
        return grant is not None and grant.trainer == self._node.id

    async def _base(self) -> Entry | None:
        """The version that the next step starts from, held whole; None while it has not arrived."""
        newest = self._node.weights.newest()
        held = self._node.weights.newest_held()
        return held if held is not None and newest is not None and held.id == newest.id else None

    async def _announce_version_0(self) -> None:
        node = self._node
        cut = node.log.replica.newest_cut_id
        if not node.log.ready.is_set():
            return
        roles = {node.log.ledger.standing_role(author, cut) for author in node.log.ledger.authors()}
        if "validator" not in roles or "inference" not in roles:
            node.health.warn("founding", "waiting for a validator and an inference node before version 0")
            return
        node.health.clear("founding")
        grant = node.log.ledger.grant()
        assert grant is not None
        blob = node.domain.model.manifest
        data = await node.fetch_blob(blob.hash, blob.size, list(node.network.peers), timeout=30)
        manifest = Manifest.parse(data)
        await node.log.append(Weights(grant.term, 0, None, blob.hash, blob.size, manifest.whole, manifest.size, None))

    async def _announce_again_if_stuck(self, base: Entry) -> None:
        node = self._node
        patience = node.domain.timings.term_silence_ms / 1000
        if trio.current_time() < self._progress_at + patience or node.paused():
            return
        why = self._deserted(base)
        if why is None:
            return
        old = weights_payload(base)
        grant = node.log.ledger.grant()
        assert grant is not None
        node.logger.warning("%s version %d: announcing its weights again", why, old.number)
        entries = await node.log.append(
            Weights(grant.term, old.number + 1, base.id, old.manifest, old.manifest_size, old.whole, old.size, None)
        )
        node.weights.adopt(entries[-1])
        self._progress_at = trio.current_time()

    def _deserted(self, base: Entry) -> str | None:
        """Who is missing for ``base`` and would be there for weights announced now; None where that is nobody."""
        node = self._node
        ledger, replica = node.log.ledger, node.log.replica
        cut = replica.newest_cut_id
        if not node.will_judge(ledger.validators_of(base.id)) and node.will_judge(
            [author for author in ledger.authors() if ledger.standing_role(author, cut) == "validator"]
        ):
            return "too few are here who are due to audit"
        infers = {n for n, p in node.presences.live().items() if p.role == "inference"}
        if not any(ledger.may_infer(n, base.id) for n in infers) and any(ledger.joined_at(n, cut) for n in infers):
            return "nobody here may generate with"
        return None

    async def _load(self, base: Entry) -> None:
        manifest, whole = self._node.weights.paths(base.id)
        checkpoint = self._checkpoint(base)
        await self._worker.call(
            "load",
            timeout=LOAD_TIMEOUT,
            manifest=str(manifest),
            weights=str(whole),
            checkpoint=str(checkpoint) if checkpoint.exists() else None,
            reference=await self._reference(),
        )

    async def _reference(self) -> list[str] | None:
        """The manifest's and the whole file's path of version 0, where the recipe has a KL term."""
        node = self._node
        if self._recipe.kl == 0:
            return None
        digest = node.domain.model.manifest.hash  # retention keeps it
        if not await trio.to_thread.run_sync(node.versions.complete, digest):
            await node.weights.hold(node.log.ledger.lineage()[0], timeout=REFERENCE_TIMEOUT)
        return [str(path) for path in node.versions.paths(digest)]

    def _checkpoint(self, base: Entry) -> Path:
        """Where the optimizer state that belongs to a version lies; named by the weights, so never mixed up."""
        return self._checkpoints / f"{weights_payload(base).manifest.hex()}.safetensors"

    async def _gather(self, base: Entry) -> bool:
        """Take in what was accepted since the last look; True once the batch is full."""
        await self._node.pool.update()
        usable = self._node.pool.usable(weights_payload(base).number)
        # What was gathered before a step that another trainer made may be too old or used by now.
        self._batch = {i: replace(g, lag=usable[i][1]) for i, g in self._batch.items() if i in usable}
        for entry, lag in usable.values():
            if self._groups() >= self._recipe.groups_per_step:
                break
            await self._take(entry, lag)
        return self._groups() >= self._recipe.groups_per_step

    def _groups(self) -> int:
        return sum(len(g.submission.groups) for g in self._batch.values())

    async def _take(self, entry: Entry, lag: int) -> None:
        node = self._node
        if entry.id in self._batch or entry.id in self._refused:
            return
        rollout = entry.payload
        assert isinstance(rollout, Rollout)
        try:
            # The validators fetched it to judge it, and hold it; its author may be busy or gone.
            peers = [*node.log.ledger.verdicts(entry.id), entry.author]
            data = await node.fetch_blob(rollout.submission, rollout.size, peers, timeout=10)
            submission = Submission.parse(data, self._recipe)
        except PeerError as error:
            self._refused.add(entry.id)
            node.network.blame(entry.author, error)
            return
        except Unreachable:
            return
        self._batch[entry.id] = Gathered(entry, lag, node.blobs.path(rollout.submission), submission)

    async def _step(self, base: Entry, wait_ms: int) -> Entry | None:
        """Train on the batch and commit what came of it; None where the term or the base was over by then."""
        node = self._node
        batch = list(self._batch.values())
        old = weights_payload(base)
        scratch = node.directory.work / "next.bin"
        began = time.monotonic()
        checkpoint = self._checkpoints / "next.part"
        async with deltas.open_child() as differ:  # it starts while the other child trains
            answer = await self._worker.call(
                "train",
                timeout=TRAIN_TIMEOUT,
                submissions=[str(g.path) for g in batch],
                output=str(scratch),
                checkpoint=str(checkpoint),
            )
            trained_at = time.monotonic()
            if "stopped" in answer:
                words = f"a step from version {old.number} was thrown away: {answer['stopped']}"
                node.health.warn("training", words)
                self._refused |= self._batch.keys()
                self._batch.clear()
                return None
            if self._overtaken(base):
                return None
            described = await self._describe(differ, answer, scratch, base)
        manifest = described.manifest
        data = manifest.encode()
        digest = await node.blobs.put_async(data)
        node.weights.expect(manifest, described.delta)
        await trio.to_thread.run_sync(node.versions.adopt, data, scratch)
        delta = await self._adopt_delta(described)
        await entrust(node, Blob(digest, len(data)), delta, manifest.size)
        grant = node.log.ledger.grant()
        if grant is None or self._overtaken(base):
            return None
        checkpoint.replace(self._checkpoints / f"{digest.hex()}.safetensors")
        blob = StepBlob(tuple((g.entry.id, self._accepting(g.entry)) for g in batch)).encode()
        blob_hash = await node.blobs.put_async(blob)
        metrics = answer["metrics"]
        responses = [(r, g.lag) for g in batch for group in g.submission.groups for r in group.responses]
        step = Step(
            term=grant.term,
            number=old.number + 1,
            base=base.id,
            blob=blob_hash,
            blob_size=len(blob),
            reward=sum(r.reward for r, _ in responses) // len(responses),
            lag_mean=sum(lag for _, lag in responses) * MILLION // len(responses),
            lag_max=max(lag for _, lag in responses),
            groups=self._groups(),
            accepted=len(responses),
            rejected=self._rejected_since(),
            trained=metrics["trained"],
            tokens=metrics["tokens"],
            train_ms=int((trained_at - began) * 1000),
            wait_ms=wait_ms,
            publish_ms=int((time.monotonic() - trained_at) * 1000),
        )
        number, size = old.number + 1, manifest.size
        entries = await node.log.append(
            step,
            lambda made: Weights(
                grant.term,
                number,
                base.id,
                digest,
                len(data),
                manifest.whole,
                size,
                made[-1].id,
                None if delta is None else delta.hash,
                0 if delta is None else delta.size,
            ),
        )
        node.metrics.record("step", **figures.of_step(step, metrics, [response for response, _ in responses]))
        node.pool.add_step(entries[0], StepBlob.parse(blob))
        node.weights.adopt(entries[1])
        self._batch.clear()
        node.health.clear("training")
        self._drop_old_checkpoints(keep=digest)
        return entries[1]

    async def _describe(self, differ: Worker, answer: dict[str, Any], whole: Path, base: Entry) -> deltas.Described:
        """The new version's manifest, and its delta in ``work``."""
        node = self._node
        place = node.weights.paths(base.id)[0].parent
        made = (answer["tensors"], answer["checksum"], whole, weights_payload(base).size)
        try:
            found = await deltas.describe(differ, *made, place, node.directory.work / DELTA)
        except WorkerError as error:
            node.health.warn("delta", f"no delta was made of the newest version: {error}")
            async with deltas.open_child() as other:
                return await deltas.describe(other, *made, None, node.directory.work / DELTA)
        node.health.clear("delta")
        return found

    async def _adopt_delta(self, described: deltas.Described) -> Blob | None:
        """Keep the delta, to serve it; None where there is none."""
        if described.delta is None:
            return None
        data = described.delta.encode()
        digest = await self._node.blobs.put_async(data)
        await trio.to_thread.run_sync(self._node.versions.adopt, data, self._node.directory.work / DELTA)
        return Blob(digest, len(data))

    def _overtaken(self, base: Entry) -> bool:
        """Whether the term or the version that a step began with is over meanwhile."""
        newest = self._node.weights.newest()
        over = not self._in_office() or newest is None or newest.id != base.id
        if over:
            number = weights_payload(base).number
            self._node.logger.warning("a step from version %d is thrown away: its term or version is over", number)
        return over

    def _accepting(self, entry: Entry) -> tuple[bytes, ...]:
        verdicts = self._node.log.ledger.verdicts(entry.id).values()
        return tuple(v.id for v in verdicts if isinstance(v.payload, Verdict) and v.payload.outcome == "accepted")

    def _rejected_since(self) -> int:
        """Responses rejected or void by now, less those that earlier steps have counted."""
        ledger = self._node.log.ledger
        return min(max(0, ledger.rejected() - ledger.rejected_in_steps()), MAX_REJECTED)

    def _drop_old_checkpoints(self, keep: bytes) -> None:
        for path in self._checkpoints.glob("*.safetensors"):
            if path.stem != keep.hex():
                path.unlink(missing_ok=True)
