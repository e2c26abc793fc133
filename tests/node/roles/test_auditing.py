"""``node.roles.auditing``: what is replayed, and what becomes of groups that look like others'."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from node.roles.auditing import Case, examine
from node.roles.engine_client import Engine
from node.tasks.task_service import TaskService
from node.workers.child_messages import ReplayedGroup
from proofs.audit import AuditResult
from proofs.checks import FLOAT32_THRESHOLDS, GroupReplay
from protocol.constants import MILLION
from protocol.credit.sequential_test import CONVICTS, NEWCOMER, Standing
from protocol.records import Rollout
from protocol.work import schedule
from protocol.work.rollout import FINISH_END, Group, Response, Submission, pack
from tests.protocol.builders import RECIPE, digest, small_domain

END, GROUPS = 0, 8
RECIPE_8 = replace(RECIPE, groups_per_submission=GROUPS)
DOMAIN = replace(small_domain(), recipe=RECIPE_8)
AUTHOR, WEIGHTS = digest("author"), digest("weights")
RESPONSE = Response((5, END), (100, 200), MILLION, FINISH_END)


def submission(**changes: Any) -> Submission:
    groups = tuple(Group(4 + index, (7, index), (RESPONSE,) * 4, b"proof") for index in range(GROUPS))
    return replace(Submission(DOMAIN.id, WEIGHTS, AUTHOR, 4, groups), **changes)


MADE = submission()


@dataclass
class Measuring:
    """Measures what ``bad`` says of a group (by counter), and exactness of others."""

    bad: dict[int, GroupReplay] = field(default_factory=dict)
    replayed: list[int] = field(default_factory=list)
    end_token: int = END
    vocabulary: int = 40

    async def encode(self, prompts: Sequence[str]) -> list[bytes]:
        return [pack((7, int(prompt))) for prompt in prompts]

    async def replay(self, groups: Sequence[tuple[bytes, Group]], clip: int) -> list[ReplayedGroup]:
        assert clip == FLOAT32_THRESHOLDS.deficit_clip
        assert all(seed == schedule.seed(DOMAIN.id, WEIGHTS, AUTHOR, group.counter) for seed, group in groups)
        asked = [group.counter - 4 for _, group in groups]
        self.replayed += asked
        return [ReplayedGroup(self.bad.get(index, GOOD), ["x"] * 4) for index in asked]


class Tasks:
    """Every response earns everything, except in the groups of ``wrong``."""

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        return [str(index) for index in range(len(items))]

    async def score(self, items: Sequence[tuple[int, int, str]]) -> list[int | None]:
        return [MILLION for _ in items]

    async def confirm(self, items: Sequence[tuple[int, int, str]], claimed: Sequence[int]) -> list[int | None]:
        return await self.score(items)


GOOD = GroupReplay(8, 0, 0, 0, 0, 32, 0, 0, 0)
BAD = GroupReplay(8, 8, 8 * MILLION, 1_000, 0, 32, 0, 0, 0)


def case(share: int = MILLION, standing: Standing = NEWCOMER) -> Case:
    rollout = Rollout(WEIGHTS, 4, GROUPS, 4 * GROUPS, 8 * GROUPS, digest("file"), 1000, MADE.signal)
    return Case(DOMAIN, AUTHOR, rollout, share, standing, FLOAT32_THRESHOLDS)


async def judge(
    engine: Measuring,
    *,
    about: Case | None = None,
    made: Submission = MADE,
    alike: Collection[int] = (),
    draw: bytes = bytes(64),
) -> AuditResult:
    def suspect(seen: Submission) -> Collection[int]:
        assert seen == made
        assert threading.current_thread() is not threading.main_thread()  # it looks at every token
        return alike

    children = (cast("Engine", engine), cast("TaskService", Tasks()))
    return await examine(about or case(), made.encode(), draw, *children, *([suspect] if alike else []))


async def test_a_share_of_the_groups_is_replayed_by_the_draw() -> None:
    engine = Measuring()
    drawn = schedule.audited_groups(bytes(64), GROUPS, MILLION // 8)
    found = await judge(engine, about=case(MILLION // 8))
    assert (found.reason, found.audited, engine.replayed) == ("ok", 1, list(drawn))
    other = next(index for index in range(GROUPS) if index not in drawn)
    assert (await judge(Measuring({other: BAD}), about=case(MILLION // 8))).reason == "ok"  # it was not drawn
    engine = Measuring({other: BAD})
    assert (await judge(engine)).reason == "sampling"
    assert sorted(engine.replayed) == list(range(GROUPS))


async def test_one_hopeless_group_is_enough() -> None:
    """Files of rubbish cost an eighth of an audit: the first group is one that their author cannot foresee."""
    for draw in (bytes(64), bytes(63) + b"\1", bytes(63) + b"\2"):
        (first,) = schedule.audited_groups(draw, GROUPS, 0)
        engine = Measuring(dict.fromkeys(range(GROUPS), BAD))
        found = await judge(engine, draw=draw)
        assert (found.reason, found.audited, engine.replayed) == ("sampling", 1, [first])
        # One group that is a little off says nothing about the others.
        engine = Measuring({first: GroupReplay(8, 2, 2 * MILLION, 1_000, 5_001, 32, 0, 0, 0)})
        found = await judge(engine, draw=draw)
        assert (found.reason, found.audited, engine.replayed[0]) == ("borderline", GROUPS, first)


async def test_what_looks_like_anothers_is_replayed_beside_the_draw() -> None:
    drawn = schedule.audited_groups(bytes(64), GROUPS, MILLION // 8)
    first, second, *_ = (index for index in range(GROUPS) if index not in drawn)
    engine = Measuring()
    found = await judge(engine, about=case(MILLION // 8), alike={first})
    assert (found.reason, engine.replayed) == ("ok", [*drawn, first])  # it was right: a coincidence
    found = await judge(Measuring({first: BAD}), about=case(MILLION // 8), alike={first})
    assert (found.severity, found.reason, found.audited) == ("hard", "copied", 2)
    # Another group's failure is no copying.
    engine = Measuring({drawn[0]: BAD})
    assert (await judge(engine, about=case(MILLION // 8), alike={second})).reason == "sampling"


async def test_prompts_of_all_groups_are_checked() -> None:
    drawn = schedule.audited_groups(bytes(64), GROUPS, MILLION // 8)
    other = next(index for index in range(GROUPS) if index not in drawn)
    groups = list(MADE.groups)
    groups[other] = replace(groups[other], prompt=(1,))
    engine = Measuring()
    found = await judge(engine, about=case(MILLION // 8), made=submission(groups=tuple(groups)))
    assert (found.reason, engine.replayed) == ("wrong-prompt", [])


async def test_a_standing_that_convicts_rejects_whatever_comes() -> None:
    assert (await judge(Measuring(), about=case(standing=Standing(0, CONVICTS - 1, 0)))).reason == "ok"
    found = await judge(Measuring(), about=case(standing=Standing(0, CONVICTS, 0)))
    assert (found.severity, found.reason) == ("hard", "drift")


@pytest.mark.parametrize(
    ("made", "reason"),
    [(submission(author=digest("x")), "wrong-header"), (submission(first_counter=5), "malformed")],
)
async def test_files_that_are_not_what_was_announced(made: Submission, reason: str) -> None:
    data = MADE.encode() + b"\0" if reason == "malformed" else made.encode()
    children = (cast("Engine", Measuring()), cast("TaskService", Tasks()))
    assert (await examine(case(), data, bytes(64), *children)).reason == reason
