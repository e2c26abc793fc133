"""The inference role: groups from the newest version it holds, scored, proved, stored and announced.

1. It never goes back to an older version, and its counters run on without a gap, also after a restart.
2. It generates only while rollouts are wanted: so many batches may wait, network-wide; and only one while a newer
   version is on its way, because waiting for that costs no training time and lowers the policy lag. Groups without a
   signal fill no batch, so generation goes on until the trainer has enough to learn from (``node.roles.rollout_pool``).
   Nothing is wanted while the version's validators are not there to judge it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from node.roles import cheats
from node.roles.engine_client import Engine
from node.roles.workbench import Workbench
from node.tasks.task_service import TaskService
from node.weights.held import payload as weights_payload
from node.workers.child_messages import WrittenGroup
from protocol.constants import MILLION
from protocol.credit.ledger import Ledger
from protocol.domain import Recipe
from protocol.log.entry import Entry
from protocol.records import Rollout, Step
from protocol.work import schedule
from protocol.work.rollout import FINISH_END, Group, Response, Submission, unpack

BACKLOG = 2
"""Batches of groups that may stand announced and unused. One is being trained on while the next fills up."""
SLOW = 2
"""Where publishing takes longer than one part in so many of training, one batch more: that of the step whose version is
being published stands there as well, because nobody knows yet that it was used."""


async def run(bench: Workbench) -> None:
    """Generate until cancelled."""
    node, engines = bench.node, bench.engines
    dtype = node.domain.model.compute_dtype
    async with engines.open(dtype, generates=True) as engine, engines.open_tasks() as tasks:
        life = InferenceLife(bench, engine, tasks)
        seen = 0
        try:
            while True:
                version = await life.wanted()
                bench.own.generating = version is not None
                if version is None:
                    seen = await node.log.wait_change(seen, timeout=0.5)
                else:
                    await life.submit(version)
        finally:
            bench.own.generating = False


@dataclass(slots=True)
class InferenceLife:
    """Makes one submission after the other, while there is something to do."""

    bench: Workbench
    engine: Engine
    tasks: TaskService
    newest_used: int = -1
    """The number of the newest version that it generated with."""

    async def wanted(self) -> Entry | None:
        """The version to generate with now, or None while nothing is to be done."""
        node, bench, recipe = self.bench.node, self.bench, self.bench.node.domain.recipe
        version = bench.weights.held.newest_held()
        newest = bench.weights.held.newest_number()
        if version is None:
            return None
        number = weights_payload(version).number
        if number < self.newest_used or not schedule.usable(newest - number, recipe.async_level):
            return None
        if bench.own.paused() or not node.log.ready.is_set():
            return None
        ledger = node.log.ledger
        others = ledger.validators_of(version.id) - {node.id}
        if not ledger.may_infer(node.id, version.id) or not bench.presences.can_decide(others):
            return None
        await bench.pool.update()
        batches = backlog(ledger, recipe) if number == newest else 1
        return None if bench.pool.waiting(newest).fills(batches, recipe) else version

    async def submit(self, version: Entry) -> None:
        """Make one submission and announce it."""
        node, bench, recipe = self.bench.node, self.bench, self.bench.node.domain.recipe
        self.newest_used = weights_payload(version).number
        cheat = node.config.devnet.cheat
        manifest, whole = bench.weights.held.paths(version.id)
        wrong = cheat == cheats.WRONG_WEIGHTS
        if wrong:
            whole = await cheats.perturbed(node.directory.work, version.id, manifest, whole)
        await self.engine.load(manifest, whole, other=wrong)
        first = node.log.ledger.next_counter(node.id, version.id)
        counters = range(first, first + recipe.groups_per_submission)
        seeds = [schedule.seed(node.domain.id, version.id, node.id, c) for c in counters]
        items = [schedule.choose_task(s, [t.weight for t in node.domain.tasks]) for s in seeds]
        questions = await self.tasks.questions(items)
        prompts = [schedule.prompt(question, s, recipe) for question, s in zip(questions, seeds, strict=True)]
        written = await self.engine.generate(prompts, seeds)
        bench.own.tokens_generated += written.tokens
        if written.seconds > 0:
            bench.own.tokens_per_second = int(written.tokens / written.seconds)
        began = time.monotonic()
        pairs = zip(items, written.groups, strict=True)
        rewards = iter(await self.tasks.score([(*item, one.text) for item, group in pairs for one in group.responses]))
        scoring = time.monotonic() - began
        if cheat == cheats.FORGED_REWARD:
            rewards = itertools.repeat(MILLION)
        groups = tuple(_group(counter, group, rewards) for counter, group in zip(counters, written.groups, strict=True))
        submission = Submission(node.domain.id, version.id, node.id, first, groups)
        data = await trio.to_thread.run_sync(submission.encode)
        digest = await bench.blobs.put(data)
        sent = [response for group in groups for response in group.responses]
        counts = (len(groups), submission.responses, submission.tokens)
        await node.log.append(Rollout(version.id, first, *counts, digest, len(data), submission.signal))
        bench.metrics.record(
            "generation",
            version=self.newest_used,
            groups=len(groups),
            groups_with_signal=submission.signal,
            responses=submission.responses,
            tokens=submission.tokens,
            tokens_per_second=submission.tokens / written.seconds if written.seconds else None,
            generating_seconds=written.seconds,
            scoring_seconds=scoring,
            bytes=len(data),
            reward=sum(response.reward for response in sent) / MILLION / len(sent),
            **lengths(sent),
        )


def backlog(ledger: Ledger, recipe: Recipe) -> int:
    """Batches that may wait. More than ``async_level`` beyond the one that is wanted next would be too old."""
    steps = ledger.steps()
    last = steps[-1].payload if steps else None
    slow = isinstance(last, Step) and last.publish_ms * SLOW > last.train_ms
    return min(BACKLOG + slow, recipe.async_level + 1)


def _group(counter: int, group: WrittenGroup, rewards: Iterator[int | None]) -> Group:
    # An undecidable reward is sent as 0: the validator finds it undecidable as well and drops the submission without
    # blame, so nothing is gained or lost by the value.
    responses = tuple(
        Response(unpack(one.tokens), unpack(one.logprobs), min(next(rewards) or 0, MILLION), one.finish)
        for one in group.responses
    )
    return Group(counter, unpack(group.prompt), responses, group.proofs)


def lengths(responses: Sequence[Response]) -> dict[str, Any]:
    """How long responses are, in tokens, and the share of those that ended by themselves."""
    counts = [len(response.tokens) for response in responses]
    return {
        "length_mean": sum(counts) / len(counts),
        "length_max": max(counts),
        "ended": sum(response.finish == FINISH_END for response in responses) / len(responses),
    }
