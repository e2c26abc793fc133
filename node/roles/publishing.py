"""From a trained version to one that all may follow, while the trainer is at the next step already.

1. ``step`` and ``weights`` are one transaction, written before anybody can see the new version, and after another node
   holds it (``node.weights.second_holder``).
2. Versions are published one after the other. A step that is done when the term or the version that it started from is
   over is thrown away, and so is what was trained from it.
3. With a version goes what changed since its base, where that is clearly smaller. A delta that cannot be made is a
   warning: the version is published without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio

from node.context import Node
from node.roles.inference import lengths
from node.roles.rollout_pool import Gathered
from node.roles.workbench import Workbench
from node.store.durable_files import sync_directory
from node.weights import delta_chain, second_holder
from node.weights.held import payload as weights_payload
from node.workers.child_messages import Trained
from node.workers.child_process import Worker, WorkerError
from protocol.constants import MILLION
from protocol.credit.ledger import Ledger
from protocol.log.entry import Entry
from protocol.records import Blob, Step, StepBlob, Verdict, Weights
from protocol.work.rollout import Response

DELTA = "next.delta"
LEAST_WAIT: Final = 2.0
"""Seconds that a second holder has for a version at least, however short steps are."""
MAX_REJECTED = 2**31 - 1
"""The most that a step entry can say; anybody may announce a great many responses."""
LEARNER: Final = (
    *("loss", "grad_norm", "entropy", "reference_kl", "behaviour_kl", "clip_share", "ratio_mean", "importance_mean"),
    *("learning_rate", "updates", "groups_used", "groups_dropped"),
)
"""What is taken over from the trainer child's answer (``node.workers.learner``)."""


@dataclass(frozen=True, slots=True)
class Made:
    """What training made of ``base``, which is published: the child's answer, and when (``trained_at``, by trio's
    clock); the times are as in ``protocol.records.Step``."""

    trained: Trained
    base: Entry
    trained_at: float
    train_ms: int
    wait_ms: int
    blocked_ms: int


class Publication:
    """One version, numbered ``number``, on its way from the trainer into the log; ``batch`` is what made it. The child
    writes its files, ``whole`` and ``checkpoint``; what of them is not kept goes with it."""

    def __init__(self, bench: Workbench, number: int, batch: Sequence[Gathered]) -> None:
        self.number = number
        self.batch = batch
        self.checkpoints = bench.node.directory.trainer
        self.whole = bench.node.directory.work / f"{number}.bin"
        self.checkpoint = self.checkpoints / f"{number}.part"
        self.entry: Entry | None = None
        """The ``weights`` entry, once it is there; None at the end where the version was thrown away."""
        self.over = trio.Event()
        self.over_at = 0.0
        self._node = bench.node
        self._bench = bench
        self._made: Made | None = None
        self._ready = trio.Event()

    async def run(self) -> None:
        """Publish it once it is made. The child that describes it starts while it is trained."""
        try:
            async with delta_chain.open_child(self._bench.engines.open_worker) as differ:
                await self._ready.wait()
                if self._made is not None:
                    self.entry = await self._publish(differ, self._made)
        finally:
            if self._made is not None:
                self._discard()
            self.over_at = trio.current_time()
            self.over.set()

    def go(self, made: Made) -> None:
        """It was made."""
        self._made = made
        self._ready.set()

    def drop(self) -> None:
        """It was not made, or what it was made from is not to be."""
        self._discard()  # at once: the next one may have the same number
        self._ready.set()

    def _discard(self) -> None:
        for file in (self.whole, self.checkpoint):
            file.unlink(missing_ok=True)

    async def _publish(self, differ: Worker, made: Made) -> Entry | None:
        node, bench, base = self._node, self._bench, made.base
        if overtaken(bench, base):
            return None
        described = await self._describe(differ, made)
        manifest = described.manifest
        data = await trio.to_thread.run_sync(manifest.encode)
        digest = await bench.blobs.put(data)
        bench.weights.held.expect(manifest, described.delta)
        await trio.to_thread.run_sync(bench.versions.adopt, data, self.whole)
        delta = await self._adopt_delta(described)
        step_seconds = (made.train_ms + made.wait_ms) / 1000
        within = max(LEAST_WAIT, second_holder.TOTAL * step_seconds)
        described_by = Blob(digest, len(data))
        await second_holder.give(node, bench.presences, described_by, delta, manifest.size, within)
        grant = node.log.ledger.grant()
        if grant is None or overtaken(bench, base):
            return None
        self.checkpoint.replace(self.checkpoints / f"{digest.hex()}.safetensors")
        # Before the entry is: it makes the old checkpoint useless.
        await trio.to_thread.run_sync(sync_directory, self.checkpoints)
        blob = StepBlob(tuple((g.entry.id, self._accepting(g.entry)) for g in self.batch)).encode()
        step = self._step(made, grant.term, await bench.blobs.put(blob), len(blob))
        change = (None, 0) if delta is None else (delta.hash, delta.size)
        weights = partial(Weights, step.term, step.number, base.id, digest, len(data), manifest.whole, manifest.size)
        entries = await node.log.append(step, lambda before: weights(before[-1].id, *change))
        responses = [r for g in self.batch for group in g.submission.groups for r in group.responses]
        bench.metrics.record("step", **step_figures(step, made.trained.metrics, responses))
        bench.pool.add_step(entries[0], StepBlob.parse(blob))
        bench.weights.held.note(entries[1])
        for path in self.checkpoints.glob("*.safetensors"):
            if path.stem != digest.hex():
                path.unlink(missing_ok=True)
        return entries[1]

    def _step(self, made: Made, term: int, blob: bytes, blob_size: int) -> Step:
        responses = [(r, g.lag) for g in self.batch for group in g.submission.groups for r in group.responses]
        return Step(
            term=term,
            number=self.number,
            base=made.base.id,
            blob=blob,
            blob_size=blob_size,
            reward=sum(r.reward for r, _ in responses) // len(responses),
            lag_mean=sum(lag for _, lag in responses) * MILLION // len(responses),
            lag_max=max(lag for _, lag in responses),
            groups=sum(len(g.submission.groups) for g in self.batch),
            accepted=len(responses),
            rejected=in_a_step(rejected_since(self._node.log.ledger)),
            trained=made.trained.trained,
            tokens=made.trained.tokens,
            train_ms=made.train_ms,
            wait_ms=made.wait_ms,
            publish_ms=milliseconds(trio.current_time() - made.trained_at),
            blocked_ms=made.blocked_ms,
        )

    async def _describe(self, differ: Worker, made: Made) -> delta_chain.Described:
        """The new version's manifest, and its delta in ``work``."""
        node, trained, base = self._node, made.trained, made.base
        place = self._bench.weights.held.paths(base.id)[0].parent
        given = (trained.tensors, trained.checksum, self.whole, weights_payload(base).size)
        try:
            found = await delta_chain.describe(differ, *given, place, node.directory.work / DELTA)
        except WorkerError as error:
            node.health.warn("delta", f"no delta was made of the newest version: {error}")
            async with delta_chain.open_child(self._bench.engines.open_worker) as other:
                return await delta_chain.describe(other, *given, None, node.directory.work / DELTA)
        node.health.clear("delta")
        return found

    async def _adopt_delta(self, described: delta_chain.Described) -> Blob | None:
        """Keep the delta, to serve it; None where there is none."""
        if described.delta is None:
            return None
        data = await trio.to_thread.run_sync(described.delta.encode)
        digest = await self._bench.blobs.put(data)
        await trio.to_thread.run_sync(self._bench.versions.adopt, data, self._node.directory.work / DELTA)
        return Blob(digest, len(data))

    def _accepting(self, entry: Entry) -> tuple[bytes, ...]:
        verdicts = self._node.log.ledger.verdicts(entry.id).values()
        return tuple(v.id for v in verdicts if isinstance(v.payload, Verdict) and v.payload.outcome == "accepted")


def in_office(node: Node) -> bool:
    """Whether this node holds the newest term."""
    grant = node.log.ledger.grant()
    return grant is not None and grant.trainer == node.id


def overtaken(bench: Workbench, base: Entry) -> bool:
    """Whether the term or the version that a step began with is over meanwhile."""
    node, newest = bench.node, bench.node.log.ledger.newest_weights()
    over = not in_office(node) or newest is None or newest.id != base.id
    if over:
        number = weights_payload(base).number
        node.logger.warning("a step from version %d is thrown away: its term or version is over", number)
    return over


def rejected_since(ledger: Ledger) -> int:
    """Responses rejected or void by now, less those that earlier steps have counted."""
    fold = ledger.fold()
    return fold.rejected - fold.lineage.rejected


def in_a_step(rejected: int) -> int:
    """A count of responses as a step entry can say it."""
    return min(max(0, rejected), MAX_REJECTED)


def milliseconds(seconds: float) -> int:
    """Seconds as a step entry says them."""
    return max(0, int(seconds * 1000))


def step_figures(step: Step, learned: Mapping[str, Any], responses: Sequence[Response]) -> dict[str, Any]:
    """The row in ``metrics.jsonl`` of a step that was committed; ``learned`` are the trainer child's metrics."""
    train = step.train_ms / 1000
    return {
        "version": step.number,
        "term": step.term,
        "reward": step.reward / MILLION,
        "groups": step.groups,
        "responses": step.accepted,
        "responses_rejected": step.rejected,
        "responses_trained": step.trained,
        "tokens": step.tokens,
        "tokens_per_second": step.tokens / train if train else None,
        "lag_mean": step.lag_mean / MILLION,
        "lag_max": step.lag_max,
        **lengths(responses),
        "training_seconds": train,
        "waiting_seconds": step.wait_ms / 1000,
        "blocked_seconds": step.blocked_ms / 1000,
        "publishing_seconds": step.publish_ms / 1000,
        **{name: learned[name] for name in LEARNER if name in learned},
    }
