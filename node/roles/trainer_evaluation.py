"""The trainer's evaluations: each version whose number ``trainer.eval_every`` divides, on held-out questions.

1. They run beside training, in an engine child of their own that stays loaded while the node is the trainer. The
   trainer child's model is sharded and has no cache to generate with, and between steps training would stand still for
   as long as generation takes. So a step waits for nothing; it shares the machine with a child of lower priority
   (``node.roles.engine_client.MODEST``), and memory with a second copy of the model.
2. The questions are the same each time. Where versions come faster than they can be evaluated, those that a newer one
   to be evaluated has overtaken are left out: the newest figures are never old.
3. Whatever goes wrong here is a health warning and a pause: training goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import trio

from node.evaluation import held_out
from node.evaluation.held_out import Plan, QuestionSource
from node.evaluation.version_answers import Question, answer, open_sampler, sampling
from node.health import supervisor
from node.health.supervisor import Failure, RestartPolicy
from node.net.requests import Unreachable
from node.roles.engine_client import Engine
from node.roles.workbench import Workbench
from node.tasks.task_service import TaskService
from node.weights.held import payload
from protocol.log.entry import Entry

CHILD: Final = "evaluation"
POLICY: Final = RestartPolicy(pause=5.0, longest=300.0)
LOOK: Final = 0.2
"""Seconds after which a version that was published counts as held at the latest."""


def _words(failure: Failure) -> str:
    return f"a version was not evaluated: {failure.why}; again in {failure.pause:.0f} s"


async def run(bench: Workbench) -> None:
    """Evaluate until cancelled; returns at once where the configuration asks for none."""
    node = bench.node
    if not node.config.trainer.eval_every:
        return
    try:
        await supervisor.keep(CHILD, _Life(bench).run, node.health, policy=POLICY, words=_words)
    finally:
        node.health.clear(CHILD)


@dataclass(slots=True)
class _Life:
    bench: Workbench
    last: int = -1
    """The newest version that was evaluated."""

    async def run(self) -> None:
        """Evaluate what is due, until something fails."""
        try:
            await self._evaluate_all()
        finally:
            self.bench.evaluations.under_way = False

    async def _evaluate_all(self) -> None:
        node, bench, config = self.bench.node, self.bench, self.bench.node.config.trainer
        await self._due()  # nothing is started before there is a version
        plan = await trio.to_thread.run_sync(
            partial(
                Plan.of,
                node.domain.id,
                list(map(QuestionSource.held_out, await bench.engines.task_table())),
                config.eval_questions,
                config.eval_samples,
                greedy=config.eval_greedy,
            )
        )
        recipe = sampling(node.domain.recipe, plan.samples, greedy=plan.greedy)
        setup = replace(await bench.engines.setup(node.domain.model.compute_dtype), modest=True)
        size = await bench.engines.model_bytes(setup.engine)
        async with (
            bench.engines.open_tasks(plan.rows) as service,
            open_sampler(setup, recipe, size, open_worker=bench.engines.open_worker) as sampler,
        ):
            bench.own.children[CHILD] = sampler.pid
            try:
                questions = await held_out.draw(plan, service)
                while True:
                    await self._evaluate(await self._due(), plan, questions, sampler, service)
            finally:
                bench.own.children.pop(CHILD, None)

    async def _due(self) -> Entry:
        """The newest version that is to be evaluated and is not yet, once there is one."""
        node, bench, seen = self.bench.node, self.bench, 0
        while (found := self._newest_due()) is None:
            bench.evaluations.under_way = False
            seen = await node.log.wait_change(seen, timeout=LOOK)
        bench.evaluations.under_way = True
        return found

    def _newest_due(self) -> Entry | None:
        held, every = set(self.bench.weights.held.ids()), self.bench.node.config.trainer.eval_every
        for entry in reversed(self.bench.node.log.ledger.lineage()):
            number = payload(entry).number
            if number <= self.last:
                break
            if number % every == 0 and entry.id in held:
                return entry
        return None

    async def _evaluate(
        self, version: Entry, plan: Plan, questions: list[Question], sampler: Engine, service: TaskService
    ) -> None:
        node, bench, number = self.bench.node, self.bench, payload(version).number
        began = time.monotonic()
        try:
            await sampler.load(*bench.weights.held.paths(version.id))
        except Unreachable:
            return  # it went meanwhile; a newer one is due, or will be
        scores = held_out.scores(plan, await answer(sampler, service, questions))
        seconds = round(time.monotonic() - began, 3)
        self.last = number
        rows: list[dict[str, Any]] = [held_out.figures(score) for score in scores]
        for row in rows:
            bench.metrics.record(
                "eval", version=number, samples=plan.samples, greedy=int(plan.greedy), seconds=seconds, **row
            )
        bench.evaluations.rows.append({"version": number, "id": version.id.hex(), "seconds": seconds, "scores": rows})
        node.health.clear(CHILD)
        if rows:
            figures = (number, rows[-1]["pass_rate"], rows[-1]["pass_rate_low"], rows[-1]["pass_rate_high"])
            node.logger.info("version %d passes %.3f (%.3f to %.3f) of the held-out questions", *figures)
