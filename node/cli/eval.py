"""``farflung eval``: how good versions of a domain's weights are on held-out questions.

It starts an engine and a tasks child of its own, whether a daemon runs on the node's folder or not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from node.cli import held_versions, options, tables
from node.cli.held_versions import HeldVersion
from node.cli.options import Values
from node.config import MAX_QUESTIONS, MAX_SAMPLES
from node.domain import joining, pinned_files
from node.errors import UserError
from node.evaluation import held_out
from node.evaluation.held_out import QUESTIONS, Plan, figures, scores
from node.evaluation.version_answers import QuestionAnswers, answer, open_sampler, sampling
from node.roles.engine_client import Setup
from node.tasks.task_service import TaskService
from node.workers.child_process import WorkerError
from protocol.constants import MILLION
from protocol.domain import Domain
from protocol.weights.manifest import Manifest


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    parser = options.add_command(commands, "eval", _eval, help=phrase, json=True)
    parser.add_argument(
        "--tasks",
        metavar="FILE|NAMES",
        help="tasks of the domain by name with commas, other reasoning-gym data sets, or a TOML file of tasks "
        "(default: all tasks of the domain)",
    )
    parser.add_argument(
        "--version",
        dest="versions",
        action="append",
        type=_version,
        metavar="V",
        help="a version's number, or at least eight digits of its id; may be given several times, and all others are "
        "compared with the first (default: the newest that is here whole)",
    )
    options.add_number(parser, "--questions", help="questions of each task (default: 128)")
    options.add_number(parser, "--samples", default=1, metavar="K", help="answers to each question (default: 1)")
    parser.add_argument(
        "--greedy", action="store_true", help="take the likeliest tokens instead of sampling by the domain's recipe"
    )
    options.add_engine(parser, "the node's configuration")


def _version(text: str) -> int | str:
    if re.fullmatch(r"[0-9]{1,7}", text):
        return int(text)
    if re.fullmatch(r"[0-9a-f]{8,64}", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor eight digits or more of an id")


def _eval(arguments: argparse.Namespace) -> int:
    """Ask versions of the domain's weights questions that training never draws, score the answers in the tasks'
    sandbox, and show pass rate and reward with 95 % confidence intervals. Everybody asks every version the same
    questions, so results can be compared; several --version are compared question by question."""
    directory = options.existing_directory(arguments)
    questions = QUESTIONS if arguments.questions is None else arguments.questions
    if not 1 <= questions <= MAX_QUESTIONS:
        raise UserError(f"--questions {questions}: expected 1 to {MAX_QUESTIONS}")
    if not 1 <= arguments.samples <= MAX_SAMPLES:
        raise UserError(f"--samples {arguments.samples}: expected 1 to {MAX_SAMPLES}")
    options.check_threads(arguments)
    domain = joining.required(directory)
    setup = held_versions.engine_setup(directory, domain, arguments.engine, arguments.threads)
    held = held_versions.choose_or_fetch(directory, list(dict.fromkeys(arguments.versions or [held_versions.NEWEST])))
    if len({version.number for version in held}) < len(held):
        raise UserError("--version: one version is named twice")
    sources = held_out.sources_named(arguments.tasks, domain, pinned_files.task_rows(directory, domain))
    plan = Plan.of(domain.id, sources, questions, arguments.samples, greedy=arguments.greedy)
    found = trio.run(_measure, plan, domain, setup, held)
    options.show(arguments, found, lambda: _show(found))
    return 0


async def _measure(plan: Plan, domain: Domain, setup: Setup, held: Sequence[HeldVersion]) -> Values:
    recipe = sampling(domain.recipe, plan.samples, greedy=plan.greedy)
    try:
        size = Manifest.parse(held[0].manifest.read_bytes()).size
        async with TaskService(plan.rows) as service, open_sampler(setup, recipe, size) as sampler:
            asked = await held_out.draw(plan, service)
            answers = [await _answers(version, sampler, service, asked) for version in held]
            engine = sampler.kind
    except WorkerError as error:
        if error.kind == "user":
            raise UserError(str(error)) from None
        raise UserError(f"the version cannot be evaluated: {error}", "see farflung doctor") from None
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})", "farflung weights pull") from None
    return {
        "domain": domain.id.hex(),
        "engine": engine,
        "dtype": domain.model.compute_dtype,
        "questions": plan.questions,
        "samples": plan.samples,
        "greedy": plan.greedy,
        "versions": [_version_values(plan, version, given) for version, given in zip(held, answers, strict=True)],
        "differences": [
            {"version": version.number, "against": held[0].number, **figures(row)}
            for version, given in zip(held[1:], answers[1:], strict=True)
            for row in held_out.compare(plan, answers[0], given)
        ],
    }


async def _answers(version: HeldVersion, sampler: Any, service: Any, asked: Any) -> list[QuestionAnswers]:
    with tables.counting(f"version {version.number}", "bar", "count", "questions") as progress:
        progress(0, len(asked))
        await sampler.load(version.manifest, version.whole)
        return await answer(sampler, service, asked, progress)


def _version_values(plan: Plan, version: HeldVersion, given: Sequence[QuestionAnswers]) -> Values:
    labels = plan.labels()
    return {
        "version": version.number,
        "id": version.id,
        "scores": [figures(score) for score in scores(plan, given)],
        "answers": [
            {
                "task": labels[each.question.task],
                "item": each.question.item,
                "rewards": [None if reward is None else reward / MILLION for reward in each.rewards],
            }
            for each in given
        ],
    }


def _show(found: Values) -> None:
    rows = [(version["version"], row) for version in found["versions"] for row in version["scores"]]
    tables.table(
        ("version", "task", "questions", "answers", "passed", "reward", "tokens", "ended"),
        [
            (
                *(version, row["task"], row["questions"], row["answers"], *_intervals(row)),
                *(f"{row['length']:.1f}", f"{100 * row['ended']:.0f} %"),
            )
            for version, row in rows
        ],
    )
    if found["differences"]:
        print()
        tables.table(
            ("version", "against", "task", "questions", "passed", "reward"),
            [
                (row["version"], row["against"], row["task"], row["questions"], *_intervals(row, "+"))
                for row in found["differences"]
            ],
        )
    undecidable = sum(row["undecidable"] for _, row in rows)
    how = "the likeliest tokens" if found["greedy"] else "sampled by the domain's recipe"
    options.note(
        f"95 % intervals; {how}, {found['engine']} in {found['dtype']}"
        + (f"; {options.counted(undecidable, 'answer')} undecidable and left out" if undecidable else "")
    )
    few = {
        row["task"]: row["questions"]
        for _, row in rows
        if row["task"] != "all" and row["questions"] < found["questions"] and not row["undecidable"]
    }
    for task, count in few.items():
        options.note(f"{task} has only {options.counted(count, 'different question')}")


def _intervals(row: Values, sign: str = "-") -> Iterator[str]:
    for name in ("pass_rate", "reward"):
        value, low, high = (format(row[key], f"{sign}.3f") for key in (name, f"{name}_low", f"{name}_high"))
        yield f"{value} ({low} to {high})"
