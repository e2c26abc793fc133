"""``farflung eval``: how good versions of a domain's weights are on held-out questions.

It starts an engine and a tasks child of its own, whether a daemon runs on the node's folder or not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.cli import options, tables
from node.config import ENGINES, MAX_QUESTIONS, MAX_SAMPLES
from node.errors import UserError
from node.store.data_directory import DataDirectory

if TYPE_CHECKING:
    from node.evaluation.held_out import Plan
    from node.evaluation.version_answers import Answers
    from node.roles.engine_client import Setup
    from protocol.domain import Domain


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "eval",
        help="measure versions of the weights on held-out questions",
        description="Ask versions of the domain's weights questions that training never draws, score the answers in "
        "the tasks' sandbox, and show pass rate and reward with 95 %% confidence intervals. Everybody asks every "
        "version the same questions, so results can be compared; several --version are compared question by question.",
    )
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
    parser.add_argument("--questions", type=int, metavar="N", help="questions of each task (default: 128)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="answers to each question (default: 1)")
    parser.add_argument(
        "--greedy", action="store_true", help="take the likeliest tokens instead of sampling by the domain's recipe"
    )
    parser.add_argument("--engine", choices=ENGINES, help="what generates (default: as the node's configuration says)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that compute (default: the configuration's)")
    options.add_data_dir(parser)
    options.add_json(parser)
    parser.set_defaults(command=_eval)


def _version(text: str) -> int | str:
    if re.fullmatch(r"[0-9]{1,7}", text):
        return int(text)
    if re.fullmatch(r"[0-9a-f]{8,64}", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor eight digits or more of an id")


@dataclass(frozen=True, slots=True)
class _Held:
    """A version on the disk; ``id`` is empty before version 0 is announced."""

    number: int
    id: str
    manifest: Path
    whole: Path


def _eval(arguments: argparse.Namespace) -> int:
    # Imported here, so that other commands start without loading what they do not use.
    import trio

    from node.domain import joining
    from node.evaluation.held_out import QUESTIONS

    directory = options.existing_directory(arguments)
    questions = QUESTIONS if arguments.questions is None else arguments.questions
    if not 1 <= questions <= MAX_QUESTIONS:
        raise UserError(f"--questions {questions}: expected 1 to {MAX_QUESTIONS}")
    if not 1 <= arguments.samples <= MAX_SAMPLES:
        raise UserError(f"--samples {arguments.samples}: expected 1 to {MAX_SAMPLES}")
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads {arguments.threads}: expected 1 or more")
    domain = joining.held(directory)
    if domain is None:
        raise UserError(f"{directory.path}: this node joined no domain yet", "farflung join ADDRESS")
    setup = _setup(arguments, directory, domain)
    held = _held(directory, list(dict.fromkeys(arguments.versions or [-1])))
    if len({version.number for version in held}) < len(held):
        raise UserError("--version: one version is named twice")
    found = trio.run(_measure, arguments, questions, domain, setup, directory, held)
    if arguments.json:
        options.print_json(found)
    else:
        _show(found)
    return 0


def _setup(arguments: argparse.Namespace, directory: DataDirectory, domain: Domain) -> Setup:
    from node.domain import pinned_files
    from node.roles.engine_client import Setup

    config = directory.config()
    return Setup(
        options={
            "config": str(pinned_files.path(directory, domain.model.config)),
            "tokenizer": str(pinned_files.path(directory, domain.model.tokenizer)),
            "threads": config.threads if arguments.threads is None else arguments.threads,
            "dtype": domain.model.compute_dtype,
        },
        engine=arguments.engine or config.engine,
        tensor_parallel=config.tensor_parallel,
        cache=directory.path / "vllm",
    )


def _held(directory: DataDirectory, wanted: Sequence[int | str]) -> list[_Held]:
    """The versions, fetched by the running daemon where they are not here. Raises ``UserError``."""
    from node.cli.node_reading import lock_holder
    from node.cli.weights import found_on_disk

    rows = found_on_disk(directory)["objects"]
    found: list[_Held] = []
    for each in wanted:
        version = _among(rows, each, directory.versions)
        if version is None:
            what = "no version is" if each == -1 else f"version {each} is not"
            if lock_holder(directory) is None:
                numbers = ", ".join(str(row["numbers"][-1]) for row in _whole(rows)) or "none"
                raise UserError(
                    f"{directory.path}: {what} here whole (whole are: {numbers}), and no daemon runs to fetch one",
                    f"farflung run --data-dir {directory.path}",
                )
            version = _fetched(directory, each)
        found.append(version)
    return found


def _fetched(directory: DataDirectory, wanted: int | str) -> _Held:
    from node.api.control_client import Declined
    from node.cli.pull_progress import pull
    from node.cli.weights import found_on_disk

    options.note(f"{'the newest version' if wanted == -1 else f'version {wanted}'} is not here: the node fetches it")
    try:
        number = pull(directory, wanted)["version"]
    except Declined as error:
        raise UserError(str(error), "farflung weights ls shows what is here") from None
    version = _among(found_on_disk(directory)["objects"], number, directory.versions)
    if version is None:
        raise UserError(f"{directory.path}: version {number} was removed again", "try again, or name a newer one")
    return version


def _whole(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "version" and row["numbers"] and row["here"] == row["size"]]


def _among(rows: Sequence[dict[str, Any]], wanted: int | str, versions: Path) -> _Held | None:
    """The version ``wanted`` (-1: the newest), where it is whole. Raises ``UserError`` where several ids begin so."""
    known = [
        _Held(number, identity, folder / "manifest", folder / "whole.bin")
        for row in _whole(rows)
        for folder in [versions / row["digest"]]
        for number, identity in zip(row["numbers"], row["ids"] or [""], strict=True)
    ]
    if wanted == -1:
        return max(known, key=lambda each: each.number, default=None)
    if isinstance(wanted, int):
        return next((each for each in known if each.number == wanted), None)
    alike = [each for each in known if each.id.startswith(wanted)]
    if len(alike) > 1:
        raise UserError(f"--version {wanted}: the ids of {len(alike)} versions begin so", "give more of its digits")
    return alike[0] if alike else None


async def _measure(
    arguments: argparse.Namespace,
    questions: int,
    domain: Domain,
    setup: Setup,
    directory: DataDirectory,
    held: Sequence[_Held],
) -> dict[str, Any]:
    from node.domain import pinned_files
    from node.evaluation import held_out
    from node.evaluation.version_answers import open_sampler, sampling
    from node.tasks.task_service import TaskService
    from node.workers.child_process import WorkerError
    from protocol.weights.manifest import Manifest

    plan = held_out.Plan.of(
        domain.id,
        held_out.sources_named(arguments.tasks, domain, pinned_files.task_rows(directory, domain)),
        questions,
        arguments.samples,
        greedy=arguments.greedy,
    )
    recipe = sampling(domain.recipe, plan.samples, greedy=plan.greedy)
    try:
        size = Manifest.parse(held[0].manifest.read_bytes()).size
        async with TaskService(plan.rows) as service, open_sampler(setup, recipe, size) as sampler:
            asked = await held_out.draw(plan, service)
            answers = [await _answers(version, sampler, service, asked) for version in held]
            engine = sampler.engine
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
        "versions": [_told(plan, version, given) for version, given in zip(held, answers, strict=True)],
        "differences": [
            {"version": version.number, "against": held[0].number, **held_out.difference_figures(row)}
            for version, given in zip(held[1:], answers[1:], strict=True)
            for row in held_out.compare(plan, answers[0], given)
        ],
    }


async def _answers(version: _Held, sampler: Any, service: Any, asked: Any) -> list[Answers]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from node.evaluation.version_answers import answer

    columns = (TextColumn(f"version {version.number}"), BarColumn(), MofNCompleteColumn(), TextColumn("questions"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(asked))
        await sampler.load(version.manifest, version.whole)
        return await answer(sampler, service, asked, lambda done, _: bar.update(task, completed=done))


def _told(plan: Plan, version: _Held, given: Sequence[Answers]) -> dict[str, Any]:
    from node.evaluation.held_out import figures, scores
    from protocol.constants import MILLION

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


def _show(found: dict[str, Any]) -> None:
    tables.table(
        ("version", "task", "questions", "answers", "passed", "reward", "tokens", "ended"),
        [
            (
                str(version["version"]),
                row["task"],
                str(row["questions"]),
                str(row["answers"]),
                _interval(row, "pass_rate"),
                _interval(row, "reward"),
                f"{row['length']:.1f}",
                f"{100 * row['ended']:.0f} %",
            )
            for version in found["versions"]
            for row in version["scores"]
        ],
    )
    if found["differences"]:
        print()
        tables.table(
            ("version", "against", "task", "questions", "passed", "reward"),
            [
                (
                    str(row["version"]),
                    str(row["against"]),
                    row["task"],
                    str(row["questions"]),
                    _interval(row, "pass_rate", "+"),
                    _interval(row, "reward", "+"),
                )
                for row in found["differences"]
            ],
        )
    undecidable = sum(row["undecidable"] for version in found["versions"] for row in version["scores"])
    how = "the likeliest tokens" if found["greedy"] else "sampled by the domain's recipe"
    options.note(
        f"95 % intervals; {how}, {found['engine']} in {found['dtype']}"
        + (f"; {options.counted(undecidable, 'answer')} undecidable and left out" if undecidable else "")
    )
    few = {
        row["task"]: row["questions"]
        for version in found["versions"]
        for row in version["scores"]
        if row["task"] != "all" and row["questions"] < found["questions"] and not row["undecidable"]
    }
    for task, count in few.items():
        options.note(f"{task} has only {options.counted(count, 'different question')}")


def _interval(row: dict[str, Any], name: str, sign: str = "-") -> str:
    value, low, high = (format(row[key], f"{sign}.3f") for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value} ({low} to {high})"
