"""``farflung tasks profile``: which questions are of use to a model. See ``node.evaluation.difficulty``."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import trio

from node.cli import held_versions, options, tables
from node.cli.options import Values
from node.domain import domain_toml, founding, joining, pinned_files, task_tables
from node.errors import os_errors
from node.evaluation import difficulty
from node.evaluation.difficulty import AnsweringModel, Profile, ProfileWanted, set_file
from node.roles.engine_client import Setup
from node.starter import defaults
from node.store.data_directory import DataDirectory
from node.workers.child_messages import ConfigureEngine
from protocol.domain import Recipe

Held = tuple[AnsweringModel, tuple[Mapping[str, Any], ...], Recipe]
"""A version on the disk, and its domain's tasks and recipe."""


def add_to(actions: options.Parsers) -> None:
    """Add the action's parser."""
    parser = options.add_command(
        actions,
        "profile",
        _run,
        help="find the questions that are neither too easy nor too hard for a model",
        json=True,
    )
    options.add_folder(parser, "-o", "--out", required=True, help="where the sets are written")
    source = parser.add_mutually_exclusive_group()
    options.add_file(source, "--domain", help="a domain.toml: its model, tasks and recipe (default: starter)")
    version = "a version that a node's folder holds, with its domain's tasks and recipe"
    options.add_number(source, "--version", help=version)
    options.add_folder(source, "--model", help="a Hugging Face folder instead of the starter model")
    parser.add_argument("--tasks", metavar="FILE|NAMES", help="other tasks, as of farflung devnet")
    options.add_number(parser, "--items", default=1000, help="items of each task, as far as it has them (1000)")
    options.add_number(parser, "--first", default=0, help="the first of them (0)")
    options.add_number(parser, "--responses", default=16, help="answers to each question (16)")
    options.add_number(parser, "-k", default=1, metavar="K", help="the k of pass@k (1)")
    parser.add_argument(
        "--low", type=_share, default=Fraction(1, 8), metavar="P", help="keep from this pass@k on (0.125)"
    )
    parser.add_argument("--high", type=_share, default=Fraction(1, 2), metavar="P", help="up to this (0.5)")
    options.add_number(parser, "--seed", default=0, help="of the sampler's noise (0)")
    options.add_engine(parser, "the node's configuration, else auto and 1 thread")


def _share(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _run(arguments: argparse.Namespace) -> int:
    """Have a model answer each question several times, as inference nodes do, score the answers in the tasks' sandbox,
    and write for each task the set of the questions whose pass@k lies in a band. A task names such a file as its set,
    and the new domain then asks these questions only. Run it again with the same --out to go on, to ask more items, or
    to choose another band."""
    found: list[Profile]
    held = None
    if arguments.version is not None:  # asks the daemon, with a loop of its own
        held = _held(options.existing_directory(arguments), arguments)
    wanted, found = trio.run(_profile, arguments, held)
    values = [_values(each, arguments.out) for each in found]
    band = {"k": wanted.band.k, "low": float(wanted.band.low), "high": float(wanted.band.high)}
    result = {"responses": wanted.responses, **band, "tasks": values}
    options.show(arguments, result, lambda: _show(wanted, values))
    return 0 if all(each.kept for each in found) else 1


async def _profile(arguments: argparse.Namespace, held: Held | None) -> tuple[ProfileWanted, list[Profile]]:
    options.check_threads(arguments)
    async with _source(arguments, held) as (wanted, model):
        with tables.progress("asked", "bar", "count", "questions", "left") as bar:
            task = bar.add_task("")
            tenths = 0

            def show(done: int, total: int) -> None:
                nonlocal tenths
                bar.update(task, completed=done, total=total)
                if bar.disable and 10 * done // max(1, total) > tenths:  # lines, where there is no terminal to draw on
                    tenths = 10 * done // max(1, total)
                    options.note(f"{done} of {total} questions asked")

            return wanted, await difficulty.profile(wanted, model, arguments.out, show)


@asynccontextmanager
async def _source(
    arguments: argparse.Namespace, held: Held | None
) -> AsyncIterator[tuple[ProfileWanted, AnsweringModel]]:
    """What to ask, and the model that answers. Raises ``UserError``."""
    band = difficulty.Band(arguments.k, arguments.low, arguments.high)
    asked: Values = {name: getattr(arguments, name) for name in ("items", "first", "responses", "seed")}
    rows: tuple[Mapping[str, Any], ...]
    other = None if arguments.tasks is None else tuple(task_tables.named(arguments.tasks))
    if held is not None:
        model, rows, recipe = held
    elif arguments.domain is not None:
        file = domain_toml.load(arguments.domain)
        rows, recipe, dtype, folder = file.tasks, file.recipe, file.dtype, file.model
    else:
        rows, recipe = tuple(task_tables.named(None)), defaults.RECIPE
        dtype, folder = "float32", arguments.model or founding.MODEL
    wanted = difficulty.ProfileWanted(other or rows, recipe, band=band, **asked)
    wanted.check()
    if held is not None:
        yield wanted, model
        return
    setup = Setup(
        # The model's files come with their conversion.
        configured=ConfigureEngine("", "", wanted.recipe, dtype, arguments.threads or 1),
        engine=arguments.engine or "auto",
        cache=arguments.out.absolute() / "vllm",
    )
    with os_errors(arguments.out, "cannot be made", "name another folder"):
        arguments.out.mkdir(parents=True, exist_ok=True)
    async with difficulty.converted(folder.absolute(), setup, arguments.out.absolute()) as model:
        yield wanted, model


def _held(directory: DataDirectory, arguments: argparse.Namespace) -> Held:
    """A version on the disk, with its domain's tasks and recipe."""
    domain = joining.required(directory)
    rows = tuple(pinned_files.task_rows(directory, domain))
    remedy = f"farflung weights pull {arguments.version}, or see farflung weights ls"
    version = held_versions.choose(directory, arguments.version, remedy)
    setup = held_versions.engine_setup(directory, domain, arguments.engine, arguments.threads)
    return AnsweringModel(setup, version.manifest, version.whole), rows, domain.recipe


def _values(found: Profile, out: Path) -> Values:
    return {
        "task": found.label,
        "questions": found.questions,
        "undecided": found.undecided,
        "kept": len(found.kept),
        "set": str(set_file(found, out)) if found.kept else None,
        "right": {str(right): count for right, count in found.counts.items()},
    }


def _show(wanted: ProfileWanted, values: list[Values]) -> None:
    rows = []
    for row in values:
        counts = {int(right): count for right, count in row["right"].items()}
        low, high = (counts.get(number, 0) for number in (0, wanted.responses))
        mean = sum(right * count for right, count in counts.items()) / max(1, row["questions"]) / wanted.responses
        rows.append((row["task"], row["questions"], f"{mean:.3f}", low, high, row["kept"], row["set"] or "none"))
    tables.table(("task", "questions", "passed", "never right", "always right", "kept", "set"), rows)
    for row in values:
        if row["set"] is not None:
            options.note(
                f'{row["task"]}: add set = "{row["set"]}" to its [[task]], the path being relative to that file'
            )
        else:
            options.note(f"{row['task']}: no question lies in the band; ask more items, or choose another one")
        if row["undecided"]:
            options.note(f"{row['task']}: {options.counted(row['undecided'], 'question')} undecided and left out")
