"""One audit, from a submission's bytes to its result: what a validator does, and who replays its verdict.

The order is that of ``proofs.audit``. What it rests on is a ``Case``, which the log alone gives, the submission's file,
the validator's draw and the version's weights; so whoever has these gets the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from node.roles.engine_client import Engine
from node.tasks.task_service import TaskService
from proofs import audit, checks
from proofs.audit import AuditResult
from protocol.credit.sequential_test import Standing
from protocol.domain import Domain, Thresholds
from protocol.errors import PeerError
from protocol.records import Rollout
from protocol.work import schedule
from protocol.work.rollout import Submission, unpack


@dataclass(frozen=True, slots=True)
class Case:
    """A submission to judge, and what the log says about it; ``share`` (micro) of its groups is drawn."""

    domain: Domain
    author: bytes
    rollout: Rollout
    share: int
    standing: Standing
    thresholds: Thresholds


async def examine(
    case: Case,
    data: bytes,
    draw: bytes,
    engine: Engine,
    tasks: TaskService,
    suspect: Callable[[Submission], Collection[int]] = lambda submission: (),
) -> AuditResult:
    """Judge the file ``data``; ``engine`` holds the version.

    ``suspect`` names groups that look like others' (``proofs.duplicates``), called in a thread: they are replayed
    beside those that the draw picks. Raises ``WorkerError`` where a child fails.
    """
    domain, rollout = case.domain, case.rollout
    try:
        # In a thread, like whatever looks at each token: the largest file has millions of them.
        submission = await trio.to_thread.run_sync(Submission.parse, data, domain.recipe)
    except PeerError:
        return checks.result("malformed")
    if not checks.header_matches(submission, domain.id, case.author, rollout):
        return checks.result("wrong-header")
    seeds = [schedule.seed(domain.id, rollout.weights, case.author, group.counter) for group in submission.groups]
    items = [schedule.choose_task(seed, [task.weight for task in domain.tasks]) for seed in seeds]
    # Prompts are cheap to make: those of all groups are checked, so that nobody answers others' in between.
    asked = zip(await tasks.questions(items), seeds, strict=True)
    posed = [schedule.prompt(question, seed, domain.recipe) for question, seed in asked]
    prompts = dict(enumerate(map(unpack, await engine.encode(posed))))
    before = audit.inspect(submission, prompts, domain.recipe, engine.end_token, engine.vocabulary)
    if before.reason != "ok":
        return before
    groups = len(submission.groups)
    alike = set(await trio.to_thread.run_sync(suspect, submission))
    picked = sorted(alike.union(schedule.audited_groups(draw, groups, case.share)))
    # One group first, that the author cannot foresee: most of what is worth nothing is found out at an eighth of the
    # price, and so costs its author more than those who audit it.
    (first,) = schedule.audited_groups(draw, groups, 0)
    replays: dict[int, checks.GroupReplay] = {}
    texts: dict[int, list[str]] = {}
    for part in ([first], [i for i in picked if i != first]):
        if not part or any(checks.hopeless(found, case.thresholds) for found in replays.values()):
            break
        answer = await engine.replay([(seeds[i], submission.groups[i]) for i in part], case.thresholds.deficit_clip)
        for i, replayed in zip(part, answer, strict=True):
            replays[i], texts[i] = replayed.found, replayed.texts
    before = audit.audit_replay(submission, replays, case.thresholds, case.standing)
    if before.reason == "sampling" and any(
        checks.sampling_reason([replays[i]], case.thresholds) == "sampling" for i in alike & replays.keys()
    ):
        before = checks.result("copied", score=before.score, audited=before.audited)
    if before.reason != "ok":
        return before
    flat = [(*items[i], text) for i in picked for text in texts[i]]
    claimed = [response.reward for i in picked for response in submission.groups[i].responses]
    scores = iter(await _score(tasks, flat, claimed))
    rewards = {i: tuple(next(scores) for _ in texts[i]) for i in picked}
    return audit.audit_rewards(submission, rewards, before)


async def _score(tasks: TaskService, flat: list[tuple[int, int, str]], claimed: list[int]) -> list[int | None]:
    """The rewards; a claim is called false only after it was tried again with more patience. One is enough."""
    rewards = await tasks.score(flat)
    for place, (item, claim) in enumerate(zip(flat, claimed, strict=True)):
        if rewards[place] != claim:
            (rewards[place],) = await tasks.confirm([item], [claim])
            if rewards[place] not in (None, claim):
                break
    return rewards
