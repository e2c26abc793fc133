"""Which questions evaluations ask, and what answers come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from node.errors import UserError
from node.evaluation import held_out, intervals
from node.evaluation.held_out import Plan, QuestionSource, compare, figures, scores
from node.evaluation.version_answers import Question, QuestionAnswers
from node.store.hashing import hash_bytes
from node.tasks.task_service import TaskService
from protocol.domain import Task, parse_genesis
from protocol.records import Blob
from protocol.taskset import TaskSet
from protocol.work import schedule
from tests.node.fake_children import genesis
from tests.protocol.builders import digest

SUMS = Task("reasoning-gym", "chain_sum", 3, "{}", "0.1.25", None)
HARD = Task("reasoning-gym", "chain_sum", 1, '{"max_terms": 9}', "0.1.25", None)


def plan(*tasks: Task, questions: int = 4, samples: int = 1) -> Plan:
    return Plan.of(digest("domain"), [QuestionSource(asdict(task)) for task in tasks or (SUMS,)], questions, samples)


def given(task: int, *rewards: int | None, ended: int | None = None) -> QuestionAnswers:
    lengths = tuple(range(2, 2 + len(rewards)))
    return QuestionAnswers(Question(task, 0, digest("s")), rewards, lengths, len(rewards) if ended is None else ended)


class Service:
    """Questions whose texts repeat after ``different`` items."""

    def __init__(self, different: int) -> None:
        self.different = different
        self.counts = (different, different)

    async def questions(self, items: Sequence[tuple[int, int]]) -> list[str]:
        await trio.lowlevel.checkpoint()
        return [f"task {task}: {item % self.different}" for task, item in items]


async def drawn(wanted: Plan, different: int = 1 << 31) -> list[Question]:
    return await held_out.draw(wanted, cast("TaskService", Service(different)))


async def test_questions_are_those_of_the_tasks_eval_seeds_whatever_else_is_asked() -> None:
    alone = await drawn(plan(SUMS))
    seeds = [schedule.eval_seed(digest("domain"), SUMS, number) for number in range(4)]
    assert alone == [Question(0, schedule.eval_item(seed), seed) for seed in seeds]
    both = await drawn(plan(HARD, SUMS))
    assert [q.seed for q in both if q.task == 1] == seeds
    assert len({q.seed for q in both}) == 8
    assert [q.seed for q in (await drawn(plan(SUMS, questions=9)))[:4]] == seeds


async def test_no_question_is_asked_twice_and_a_small_set_is_asked_whole() -> None:
    few = await drawn(plan(questions=40), different=16)
    assert sorted(question.item % 16 for question in few) == list(range(16))
    some = await drawn(plan(questions=12), different=16)
    assert len({question.item % 16 for question in some}) == 12
    assert some == few[:12]


async def test_of_a_task_with_a_set_the_other_items_are_asked() -> None:
    row = {**asdict(SUMS), "items": TaskSet.of(range(12)).encode()}
    source = QuestionSource.held_out(row)
    assert (source.row["items"], source.trained) == (None, frozenset(range(12)))
    held_out = Plan.of(digest("domain"), [source], 40)
    assert held_out.tasks == (SUMS,)
    asked = await drawn(held_out, different=16)
    assert sorted(question.item % 16 for question in asked) == [12, 13, 14, 15]
    # A set of everything leaves nothing to hold out.
    assert len(await drawn(held_out, different=12)) == 12
    assert QuestionSource.held_out(asdict(SUMS)) == QuestionSource(asdict(SUMS))


def test_what_is_asked_without_more_words_are_the_domains_tasks() -> None:
    domain = parse_genesis(genesis())
    rows: list[dict[str, Any]] = [{"name": "one", "data": None}, {"name": "two", "data": None}]
    assert [source.row for source in held_out.sources_named(None, domain, rows)] == rows
    assert held_out.sources_named("homework", domain, rows) == [QuestionSource(rows[1])]
    assert held_out.sources_named("homework, ", domain, rows) == [QuestionSource(rows[1])]
    (other,) = held_out.sources_named("gcd", domain, rows)
    assert (other.row["kind"], other.row["name"]) == ("reasoning-gym", "gcd")
    with pytest.raises(UserError, match="no task is named; the domain has basic_arithmetic, homework"):
        held_out.sources_named(" ,", domain, rows)


def test_a_tasks_identity_has_the_hash_of_its_data(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("{}")
    row: dict[str, Any] = {
        "kind": "jsonl",
        "name": "set",
        "weight": 2,
        "parameters": "{}",
        "version": "1",
        "data": str(file),
    }
    assert held_out.task_of(row) == Task("jsonl", "set", 2, "{}", "1", Blob(hash_bytes(b"{}"), 2))
    with pytest.raises(UserError, match=r"missing.*cannot be read"):
        held_out.task_of({**row, "data": str(tmp_path / "missing")})


def test_a_score_counts_what_was_decided() -> None:
    answers = [
        given(0, 1_000_000, None, ended=1),
        given(0, 500_000, 1_000_000),
        given(0, None, None),
        given(0, 0, 0),
        given(0, 999_999, 0),
    ]
    (score,) = scores(plan(samples=2), answers)
    assert (score.task, score.questions, score.answers, score.undecidable) == ("chain_sum", 4, 7, 3)
    assert math.isclose(score.pass_rate.value, (1 + 0.5 + 0 + 0) / 4)
    assert score.pass_rate == intervals.pass_rate([[True], [False, True], [False, False], [False, False]])
    assert math.isclose(score.reward.value, (1 + 0.75 + 0 + 0.4999995) / 4)
    assert (score.length, score.ended) == (2.5, 0.9)
    assert figures(score)["pass_rate_low"] == score.pass_rate.low
    assert scores(plan(), [given(0, None)]) == ()


def test_a_mix_is_weighed_as_training_weighs_it() -> None:
    answers = [given(0, 1_000_000), given(0, 1_000_000), given(1, 0), given(1, 0)]
    easy, hard, mix = scores(plan(SUMS, HARD), answers)
    assert (easy.task, hard.task, mix.task) == ("chain_sum", "chain_sum 2", "all")
    assert mix.pass_rate.value == mix.reward.value == 0.75
    assert mix.pass_rate == intervals.combined([(3, easy.pass_rate), (1, hard.pass_rate)])
    assert mix.questions == 4


def test_versions_are_compared_on_the_questions_decided_for_both() -> None:
    before = [given(0, 0), given(0, 0), given(0, 1_000_000), given(0, None), given(1, 0), given(1, 0)]
    after = [given(0, 1_000_000), given(0, 0), given(0, 1_000_000), given(0, 0), given(1, 0), given(1, None)]
    easy, hard, mix = compare(plan(SUMS, HARD), before, after)
    assert (easy.questions, hard.questions, mix.questions) == (3, 1, 4)
    assert easy.pass_rate == intervals.difference([0, 0, 1], [1, 0, 1])
    assert hard.pass_rate == intervals.Estimate(0.0, -1.0, 1.0)
    assert math.isclose(mix.reward.value, 0.75 / 3)
    assert compare(plan(), before[3:4], after[3:4]) == ()
