"""Evaluating versions on held-out questions: which are asked, and what the answers come to.

1. Questions have seeds of their own (``protocol.work.schedule``, rule 7): the same for every version and everybody, and
   never a training seed. Of questions with the same text the first is asked only, as answers to it twice would not be
   independent; a task that has too few different ones is asked all it has. Where the domain asks a set of a task's
   items, evaluations ask the others, if there are any.
2. Answers are written by the inference role's engine and sampler (``node.evaluation.version_answers``). So two people
   who evaluate the same version with the same engine on processors of the same kind get the same numbers, to the last
   digit; elsewhere a token may differ where two were all but tied.
3. An answer passes where its reward is full. What is undecidable counts nowhere; it is told how many were.
4. Over several tasks the mean is by the tasks' weights, as the mix that training asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from node.domain import task_tables
from node.errors import UserError
from node.evaluation import intervals
from node.evaluation.intervals import Estimate
from node.evaluation.version_answers import Question, QuestionAnswers, data_blob, numbered
from node.tasks.task_service import Row, TaskService
from protocol.constants import MILLION
from protocol.domain import Domain, Task
from protocol.errors import PeerError
from protocol.taskset import TaskSet
from protocol.work import schedule

QUESTIONS: Final = 128
"""Asked of each task unless somebody says otherwise: a rate of a half is then known to ±9 points."""
DRAWS: Final = 8
"""Times as many questions are drawn at most, where many have the same text."""
MIX: Final = "all"
"""What the mean over several tasks is called."""


@dataclass(frozen=True, slots=True)
class QuestionSource:
    """Where questions come from: a row of a task table, and the items of it that training asks and nobody else may."""

    row: Row
    trained: frozenset[int] = frozenset()

    @classmethod
    def held_out(cls, row: Row) -> QuestionSource:
        """All of the task of a domain's ``row`` but the set that the domain asks, where it has one.

        Raises ``UserError`` for a set that is none.
        """
        if row.get("items") is None:
            return cls(row)
        try:
            chosen = TaskSet.parse(row["items"])
        except PeerError as error:
            raise UserError(f"{row['name']}: {error}") from None
        return cls({**row, "items": None}, frozenset(chosen.items))


@dataclass(frozen=True, slots=True)
class Plan:
    """What versions are asked: ``questions`` of each task, with ``samples`` answers, under the domain with this 32-byte
    id; ``greedy``: with the likeliest tokens instead of sampled ones. ``rows`` are the task table's (for the
    service), ``tasks`` the same as values, ``trained`` the items that are not asked."""

    domain: bytes
    rows: tuple[Row, ...]
    tasks: tuple[Task, ...]
    trained: tuple[frozenset[int], ...]
    questions: int = QUESTIONS
    samples: int = 1
    greedy: bool = False

    @classmethod
    def of(
        cls,
        domain: bytes,
        sources: Sequence[QuestionSource],
        questions: int = QUESTIONS,
        samples: int = 1,
        *,
        greedy: bool = False,
    ) -> Plan:
        """A plan for these sources. Raises ``UserError`` where the data of one cannot be read."""
        rows = tuple(source.row for source in sources)
        trained = tuple(source.trained for source in sources)
        return cls(domain, rows, tuple(map(task_of, rows)), trained, questions, samples, greedy)

    def labels(self) -> tuple[str, ...]:
        """What each task is called; a name that several have is numbered."""
        return tuple(numbered((task.name for task in self.tasks), " "))


@dataclass(frozen=True, slots=True)
class Score:
    """A version's result on one task, or on the mix. ``pass_rate`` and ``reward`` are from 0 to 1, ``length`` is the
    mean in tokens, ``ended`` the share of answers that ended by themselves. ``questions`` and ``answers`` count decided
    ones."""

    task: str
    questions: int
    answers: int
    undecidable: int
    pass_rate: Estimate
    reward: Estimate
    length: float
    ended: float


@dataclass(frozen=True, slots=True)
class Difference:
    """How much better a version is than another on one task or the mix, on the ``questions`` decided for both."""

    task: str
    questions: int
    pass_rate: Estimate
    reward: Estimate


# What is asked


def sources_named(text: str | None, domain: Domain, rows: Sequence[Row]) -> list[QuestionSource]:
    """What ``--tasks`` stands for: the domain's ``rows``, or those of the names, or those of a TOML file.

    A name that the domain does not have is a reasoning-gym data set's. Raises ``UserError``.
    """
    if text is None:
        return list(map(QuestionSource.held_out, rows))
    if text.endswith(".toml") or "/" in text:
        return list(map(QuestionSource, task_tables.named(text)))
    found: list[QuestionSource] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        own = [row for task, row in zip(domain.tasks, rows, strict=True) if task.name == name]
        found += list(map(QuestionSource.held_out, own)) or list(map(QuestionSource, task_tables.named(name)))
    if not found:
        known = ", ".join(task.name for task in domain.tasks)
        raise UserError(f"--tasks {text!r}: no task is named", f"the domain has {known}")
    return found


def task_of(row: Row) -> Task:
    """The whole task of a row of the table, with the hash of its data.

    Raises ``UserError`` where that cannot be read.
    """
    return Task(row["kind"], row["name"], row["weight"], row["parameters"], row["version"], data_blob(row))


async def draw(plan: Plan, service: TaskService) -> list[Question]:
    """The questions, task by task. Raises ``WorkerError`` where a generator fails."""
    questions: list[Question] = []
    for index, (task, trained) in enumerate(zip(plan.tasks, plan.trained, strict=True)):
        texts: set[str] = set()
        count = service.counts[index]
        for start in range(0, DRAWS * plan.questions, plan.questions):
            seeds = [schedule.eval_seed(plan.domain, task, start + number) for number in range(plan.questions)]
            drawn = [
                question
                for question in (Question(index, schedule.eval_item(seed), seed) for seed in seeds)
                if question.item % count not in trained or len(trained) == count
            ]
            asked = await service.questions([(question.task, question.item) for question in drawn])
            for question, text in zip(drawn, asked, strict=True):
                if text not in texts and len(texts) < plan.questions:
                    texts.add(text)
                    questions.append(question)
            if len(texts) == plan.questions:
                break
    return questions


# What it comes to


def scores(plan: Plan, answers: Sequence[QuestionAnswers]) -> tuple[Score, ...]:
    """A score a task of which anything was decided, and where there are several of these one of the mix, the last."""
    found = []
    for index, label in enumerate(plan.labels()):
        own = [each for each in answers if each.question.task == index]
        decided = [rewards for each in own if (rewards := _decided(each))]
        if not decided:
            continue
        lengths = [length for each in own for length in each.lengths]
        count = sum(map(len, decided))
        found.append(
            Score(
                task=label,
                questions=len(decided),
                answers=count,
                undecidable=len(lengths) - count,
                pass_rate=intervals.pass_rate([[reward == MILLION for reward in rewards] for rewards in decided]),
                reward=intervals.reward([fmean(rewards) / MILLION for rewards in decided]),
                length=fmean(lengths),
                ended=sum(each.ended for each in own) / len(lengths),
            )
        )
    return (*found, _mix(plan, found)) if len(found) > 1 else tuple(found)


def _decided(answers: QuestionAnswers) -> list[int]:
    return [reward for reward in answers.rewards if reward is not None]


def _mix(plan: Plan, found: Sequence[Score]) -> Score:
    shares = [_share(plan, score.task) for score in found]
    total = sum(shares)
    return Score(
        task=MIX,
        questions=sum(score.questions for score in found),
        answers=sum(score.answers for score in found),
        undecidable=sum(score.undecidable for score in found),
        pass_rate=intervals.combined([(s, score.pass_rate) for s, score in zip(shares, found, strict=True)]),
        reward=intervals.combined([(s, score.reward) for s, score in zip(shares, found, strict=True)]),
        length=sum(s * score.length for s, score in zip(shares, found, strict=True)) / total,
        ended=sum(s * score.ended for s, score in zip(shares, found, strict=True)) / total,
    )


def _share(plan: Plan, label: str) -> int:
    return dict(zip(plan.labels(), (task.weight for task in plan.tasks), strict=True))[label]


def compare(plan: Plan, before: Sequence[QuestionAnswers], after: Sequence[QuestionAnswers]) -> tuple[Difference, ...]:
    """What the version that gave the answers ``after`` does better than that of ``before``, on the same questions.

    One row a task, and one of the mix where there are several.
    """
    rows = []
    for index, label in enumerate(plan.labels()):
        pairs = [
            (first, second)
            for old, new in zip(before, after, strict=True)
            if old.question.task == index and (first := _decided(old)) and (second := _decided(new))
        ]
        if not pairs:
            continue
        passes = [[fmean(reward == MILLION for reward in side) for side in sides] for sides in zip(*pairs, strict=True)]
        rewards = [[fmean(side) / MILLION for side in sides] for sides in zip(*pairs, strict=True)]
        rows.append(Difference(label, len(pairs), intervals.difference(*passes), intervals.difference(*rewards)))
    if len(rows) > 1:
        shares = [_share(plan, row.task) for row in rows]
        rows.append(
            Difference(
                MIX,
                sum(row.questions for row in rows),
                intervals.combined([(s, row.pass_rate) for s, row in zip(shares, rows, strict=True)]),
                intervals.combined([(s, row.reward) for s, row in zip(shares, rows, strict=True)]),
            )
        )
    return tuple(rows)


def figures(found: Score | Difference) -> dict[str, Any]:
    """A score or a difference as one flat row for JSON: ``pass_rate``, ``pass_rate_low``, ``pass_rate_high``, …"""
    flat: dict[str, Any] = {}
    for name, value in asdict(found).items():
        if isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            flat[name] = value
    return flat
