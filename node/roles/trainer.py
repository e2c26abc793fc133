"""The trainer role: gathers accepted rollouts and trains, one step after the other, while each version is published.

1. It trains on submissions that the majority of the due validators accepted, each once, with a policy lag from 0 to
   ``async_level``, whatever their senders did. When a batch is full: ``node.roles.rollout_pool``.
2. The child drops groups without signal; where none has any, the version that follows has unchanged weights.
3. A step starts from what the child has just made, published or not, so training waits neither for weights to travel
   nor for peers to store them; the next batch comes in meanwhile. It is one version ahead of the log at most: what a
   step made is handed over to ``node.roles.publishing`` once the version before is published. With ``async_level`` 0 no
   rollout is fresh enough for that, and steps follow on publications by themselves.
4. The first trainer announces version 0 once a cut covers a validator and an inference node, because that cut decides
   who may audit and generate.
5. Where the validators due for the newest version are gone, or all who may generate with it, the same weights are
   announced again, so that those who are here now are due or may.
6. What was trained from a version that is thrown away is thrown away with it, and its rollouts are used again.
7. A step whose loss or gradient was not finite is thrown away with its batch, and the last good version loaded again:
   training goes on from there with other rollouts, and the health warning "training" says why. Where inference nodes
   count on what was thrown away and make no others, the same weights are announced again until it is too old.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from node.roles import trainer_evaluation
from node.roles.engine_client import load_timeout
from node.roles.inference import BACKLOG
from node.roles.publishing import Made, Publication, in_office, milliseconds
from node.roles.rollout_pool import Gathering
from node.roles.workbench import Workbench
from node.weights.held import payload as weights_payload
from node.workers.child_messages import ConfigureTrainer, LoadTraining, Trained, TrainingStopped, TrainStep
from node.workers.child_process import Worker, WorkerError
from protocol.log.entry import Entry
from protocol.records import Weights
from protocol.weights.manifest import Manifest

TRAIN_TIMEOUT = 3600.0
REFERENCE_TIMEOUT = 3600.0
"""Seconds that version 0 may take to arrive, where the recipe needs it."""
START_TIMEOUT = 300.0
"""Seconds that the child may take to start: several processes on a busy machine need their time."""


async def run(bench: Workbench) -> None:
    """Train until cancelled or until another term begins."""
    node = bench.node
    async with _open_trainer(bench) as worker:
        bench.own.children["trainer"] = worker.pid
        try:
            request = ConfigureTrainer(
                config=await bench.engines.file(node.domain.model.config),
                recipe=node.domain.recipe,
                threads=node.config.threads,
                dtype=node.domain.model.compute_dtype,
                recompute=node.config.trainer.recompute,
            )
            await worker.call(request, timeout=START_TIMEOUT)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trainer_evaluation.run, bench)
                await _Life(bench, worker, nursery).run()
        finally:
            bench.own.children.pop("trainer", None)
            bench.pool.give_all_back()  # what was under way ended with this
            for topic in ("office", "founding", "training"):
                node.health.clear(topic)


@asynccontextmanager
async def _open_trainer(bench: Workbench) -> AsyncIterator[Worker]:
    """The trainer child: one process, or as many as the configuration says, started through torchrun."""
    node, open_worker = bench.node, bench.engines.open_worker
    processes = node.config.trainer.processes
    start = partial(open_worker, "node.workers.trainer_child", name="trainer")
    with ExitStack() as stack:
        if processes > 1:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-", dir=node.directory.work))
            launcher = torchrun(processes, Path(folder))
            start = partial(start, prefix=launcher, launched=True, arguments=[folder])
        async with start() as worker:
            yield worker


def torchrun(processes: int, folder: Path) -> list[str]:
    """The command line before a child's own that starts so many processes of it.

    They meet in the empty ``folder`` (``node.workers.sharding``), whose name goes to the child as well: nothing listens
    for a rendezvous. All end when one dies, and none is started again: the role begins anew with the child.
    """
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(processes), "--max-restarts", "0", "--monitor-interval", "0.2"),
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(folder / "rendezvous")),
        *("--local-addr", "127.0.0.1", "--log-dir", str(folder / "log"), "--no-python"),
    ]


class _Life:
    def __init__(self, bench: Workbench, worker: Worker, nursery: trio.Nursery) -> None:
        self._node = node = bench.node
        self._bench = bench
        self._worker = worker
        self._nursery = nursery
        self._recipe = node.domain.recipe
        self._checkpoints = node.directory.trainer
        self._gathering = Gathering(node, bench.blobs, bench.pool)
        self._publication: Publication | None = None
        """The version that is on its way into the log."""
        self._holds: Publication | Entry | None = None
        """What the child can train from: that one, or a version of the log."""
        self._idle_since = trio.current_time()
        """When the child was last ready for a step."""
        self._published_at = trio.current_time()
        self._progress_at = trio.current_time()

    async def run(self) -> None:
        for leftover in self._checkpoints.glob("*.part"):
            leftover.unlink(missing_ok=True)
        seen = 0
        while True:
            self._note_publication()
            if not await self._turn():
                seen = await self._node.log.wait_change(seen, timeout=0.5)

    async def _turn(self) -> bool:
        """Do what is to be done now; False where that was to wait."""
        node = self._node
        if not in_office(node):
            node.health.warn("office", "another trainer was granted a term")
            return False
        if node.log.ledger.newest_weights() is None:
            await self._announce_version_0()
            return False
        number = await self._base_number()
        if number is None:
            return False
        if not self._paused() and await self._gathering.fill(number):
            await self._step(number)
            return True
        if self._publication is None:
            await self._announce_again_if_stuck()
        return False

    def _paused(self) -> bool:
        """Whether no other step is wanted; one that is being published counts."""
        made = self._node.log.ledger.step_count() + (self._publication is not None)
        return 0 < self._bench.own.pause_at_step <= made

    async def _base_number(self) -> int | None:
        """The number of the version that the child holds and that the next step starts from; None where it has to
        wait for one."""
        if self._publication is not None:
            return self._publication.number if self._holds is self._publication else None
        base = self._base()
        if base is None:
            return None
        if self._holds != base:
            await self._load(base)
        return weights_payload(base).number

    def _base(self) -> Entry | None:
        """The newest version, where it is held whole."""
        newest, held = self._node.log.ledger.newest_weights(), self._bench.weights.held.newest_held()
        return held if held is not None and newest is not None and held.id == newest.id else None

    async def _announce_version_0(self) -> None:
        node, bench = self._node, self._bench
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
        data = await bench.blobs.fetch(blob.hash, blob.size, timeout=30)
        manifest = await trio.to_thread.run_sync(Manifest.parse, data)
        await node.log.append(Weights(grant.term, 0, None, blob.hash, blob.size, manifest.whole, manifest.size, None))

    async def _announce_again_if_stuck(self) -> None:
        node, bench = self._node, self._bench
        patience = node.domain.timings.term_silence_ms / 1000
        base = self._base()
        if base is None or trio.current_time() < self._progress_at + patience or bench.own.paused():
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
        bench.weights.held.note(entries[-1])
        self._progress_at = trio.current_time()

    def _deserted(self, base: Entry) -> str | None:
        """Why no rollouts come for ``base`` and would for weights announced now; None where there is no such reason."""
        node, bench = self._node, self._bench
        ledger, replica = node.log.ledger, node.log.replica
        cut = replica.newest_cut_id
        if not bench.presences.can_decide(ledger.validators_of(base.id)) and bench.presences.can_decide(
            [author for author in ledger.authors() if ledger.standing_role(author, cut) == "validator"]
        ):
            return "too few are here who are due to audit"
        infers = {n for n, role in bench.presences.standing().items() if role == "inference"}
        if not any(ledger.may_infer(n, base.id) for n in infers) and any(ledger.joined_at(n, cut) for n in infers):
            return "nobody here may generate with"
        number, batches = weights_payload(base).number, min(BACKLOG, self._recipe.async_level + 1)
        if self._gathering.refused(number) and bench.pool.waiting(number).fills(batches, self._recipe):
            return "rollouts that cannot be trained on stand in the way of others from"
        return None

    async def _load(self, base: Entry) -> None:
        self._holds = None
        manifest, whole = self._bench.weights.held.paths(base.id)
        # Named by the weights, so that an optimizer state is never mixed up with another version's.
        checkpoint = self._checkpoints / f"{weights_payload(base).manifest.hex()}.safetensors"
        state = checkpoint.stat().st_size if checkpoint.exists() else None
        request = LoadTraining(
            manifest=str(manifest),
            weights=str(whole),
            checkpoint=None if state is None else str(checkpoint),
            reference=await self._reference(),
        )
        await self._worker.call(request, timeout=load_timeout(weights_payload(base).size + (state or 0)))
        self._holds = base
        self._idle_since = trio.current_time()  # what came before was no wait for rollouts

    async def _reference(self) -> tuple[str, str] | None:
        """The manifest's and the whole file's path of version 0, where the recipe has a KL term."""
        node, bench = self._node, self._bench
        if self._recipe.kl == 0:
            return None
        digest = node.domain.model.manifest.hash  # retention keeps it
        if not await trio.to_thread.run_sync(bench.versions.complete, digest):
            await bench.weights.hold(node.log.ledger.lineage()[0], timeout=REFERENCE_TIMEOUT)
        manifest, whole = bench.versions.paths(digest)
        return str(manifest), str(whole)

    # Steps

    async def _step(self, number: int) -> None:
        """Train on the batch from version ``number``, and hand over what comes of it to be published."""
        node = self._node
        self._note_publication()
        if self._holds is None:
            return  # what it had made was thrown away at this moment
        base = self._holds if isinstance(self._holds, Entry) else None
        before, started = self._publication, trio.current_time()
        # The child stood still for want of rollouts, or while a version was published.
        idle = started - self._idle_since
        blocked = idle if before is not None else min(idle, max(0.0, self._published_at - self._idle_since))
        batch = self._gathering.hand_out()
        publication = Publication(self._bench, number + 1, batch)
        self._nursery.start_soon(publication.run)
        self._holds = None
        try:
            answer = await self._train(publication)
            trained_at = trio.current_time()
            if before is not None:
                base = await self._published(before)
            if answer is not None and base is not None:
                times = (trained_at - started, idle - blocked, blocked + trio.current_time() - trained_at)
                publication.go(Made(answer, base, trained_at, *map(milliseconds, times)))
                self._publication = self._holds = publication
                self._idle_since = self._progress_at = trio.current_time()
                node.health.clear("training")
        except WorkerError:
            if before is not None:
                await self._published(before)  # what was made before is not lost with this
            raise
        finally:
            if self._publication is not publication:
                publication.drop()
                self._gathering.give_back(batch)

    async def _published(self, before: Publication) -> Entry | None:
        """The entry of a version that is on its way, once it is there; None where it was thrown away."""
        await before.over.wait()
        self._note_publication()
        return before.entry

    async def _train(self, publication: Publication) -> Trained | None:
        """The child's answer, None where the step had to be stopped. The next batch comes in meanwhile."""
        answer: Trained | TrainingStopped | WorkerError
        number, batch = publication.number, publication.batch
        request = TrainStep([str(g.path) for g in batch], str(publication.whole), str(publication.checkpoint))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gathering.keep_filling, number)
            try:
                answer = await self._worker.call(request, timeout=TRAIN_TIMEOUT)
            except WorkerError as error:
                answer = error  # raised outside, so that it comes alone and not in a group
            nursery.cancel_scope.cancel()
        if isinstance(answer, WorkerError):
            raise answer
        if isinstance(answer, TrainingStopped):
            self._node.health.warn("training", f"a step from version {number - 1} was thrown away: {answer.reason}")
            self._gathering.refuse(batch)
            return None
        return answer

    def _note_publication(self) -> None:
        """Take note of what became of the version that was on its way."""
        publication = self._publication
        if publication is None or not publication.over.is_set():
            return
        self._publication = None
        self._published_at = publication.over_at
        if publication.entry is None:
            self._gathering.give_back(publication.batch)
            self._holds = None
            return
        if self._holds is publication:
            self._holds = publication.entry
        self._progress_at = trio.current_time()
