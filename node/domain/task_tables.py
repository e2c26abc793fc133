"""Tables of tasks, as people write them, to rows of ``node.tasks.catalogue``.

``[[task]]`` sections stand in a ``domain.toml``, or in a file of their own that ``--tasks`` names::

    [[task]]
    name = "chain_sum"
    weight = 2                                  # its share of the mix; 1 where left out
    parameters = { min_terms = 2, max_terms = 2 }
    set = "chain_sum.txt"                       # the items to ask (node.tasks.task_sets); all where left out

    [[task]]
    kind = "jsonl"                              # questions with answers; "reasoning-gym" where left out
    name = "homework"
    file = "homework.parquet"                   # JSON lines or Parquet, beside the TOML file
    columns = { question = "problem" }          # as in node.tasks.question_conversion; the usual names where left out
    skip = true                                 # leave out rows that cannot be judged
    parameters = { check = "exact" }            # "math" where left out

    [[task]]
    kind = "code"                               # problems with tests, the same kinds of files
    name = "programs"
    file = "programs.jsonl"

    [[task]]
    kind = "package"                            # of an installed package (node.tasks.package_tasks)
    name = "riddles"
    package = "farflung-riddles"                # only where several packages have a task of that name

Files are converted to one form (``node.tasks.question_conversion``), which is what a genesis names. Versions of what
questions and scores come from are pinned as they are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from node.config import toml_table
from node.errors import UserError
from node.starter import defaults
from node.store.durable_files import read_text
from node.tasks import catalogue, task_sets
from node.tasks import question_conversion as conversion

_KEYS: Final = {"kind", "name", "weight", "parameters", "file", "set", "columns", "skip", "package"}


def named(text: str | None) -> list[dict[str, Any]]:
    """The task table (see ``node.tasks.catalogue``) that ``--tasks`` stands for; None is the starter model's own mix.

    Raises ``UserError``.
    """
    if text is None:
        return [{**asdict(task), "data": None} for task in defaults.TASKS]
    path = Path(text)
    if path.suffix == ".toml" or "/" in text:
        return _file_rows(path)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"--tasks {text!r}: no task is named", "name data sets with commas, or a TOML file of tasks")
    return [row({"name": name}, Path(), f"--tasks {text}")[0] for name in names]


def _file_rows(path: Path) -> list[dict[str, Any]]:
    table = toml_table(read_text(path, "name a TOML file of tasks"), path)
    tasks = table.get("task")
    if (
        set(table) != {"task"}
        or not isinstance(tasks, list)
        or not tasks
        or not all(isinstance(task, dict) for task in tasks)
    ):
        raise UserError(f"{path}: expected [[task]] sections and nothing else", "see docs/OPERATING.md")
    return [row(task, path.parent, f"{path}: task {number}")[0] for number, task in enumerate(tasks, 1)]


def row(task: Mapping[str, Any], folder: Path, where: str) -> tuple[dict[str, Any], list[str]]:
    """The row of one table whose files lie in ``folder``, and what was left out of its file.

    Raises ``UserError``, which begins with ``where``.
    """
    if unknown := set(task) - _KEYS:
        raise UserError(f"{where}: unknown key {min(unknown)!r}", f"known keys are {', '.join(sorted(_KEYS))}")
    kind, name, weight = task.get("kind", "reasoning-gym"), task.get("name"), task.get("weight", 1)
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isascii() or not name.isprintable():
        raise UserError(f"{where}: the name is missing or not 1 to 64 printable ASCII characters")
    if type(weight) is not int or not 1 <= weight <= 1_000_000:
        raise UserError(f"{where}: the weight of {name} is not an integer from 1 to 1000000")
    if kind not in catalogue.KINDS:
        raise UserError(f"{where}: unknown kind {kind!r}", f"use {' or '.join(catalogue.KINDS)}")
    try:
        parameters = json.dumps(task.get("parameters", {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise UserError(
            f"{where}: the parameters of {name} hold what JSON cannot: a date, a time, nan or inf", "write it as a text"
        ) from None
    if not isinstance(task.get("parameters", {}), dict) or len(parameters) > 2000:
        raise UserError(f"{where}: the parameters of {name} are not a table of at most 2000 characters")
    file = task.get("file")
    if (kind in catalogue.WITH_DATA) != isinstance(file, str):
        kinds = " or ".join(catalogue.WITH_DATA)
        raise UserError(
            f"{where}: {name}: a task of kind {kinds}, and no other, names its file", 'write file = "….jsonl"'
        )
    for key, of, form, example in (
        ("columns", catalogue.WITH_DATA, dict, 'columns = { question = "…" }'),
        ("skip", catalogue.WITH_DATA, bool, "skip = true"),
        ("package", ("package",), str, 'package = "…"'),
    ):
        if key in task and (kind not in of or not isinstance(task[key], form)):
            raise UserError(f"{where}: {name}: {key} is for tasks of kind {' or '.join(of)}", f"write {example}")
    columns = task.get("columns", {})
    if not all(isinstance(column, str) for column in columns.values()):
        raise UserError(f"{where}: {name}: columns does not name columns", 'write columns = { question = "…" }')
    chosen = task.get("set")
    if chosen is not None and (not isinstance(chosen, str) or not chosen):
        raise UserError(f"{where}: {name}: the set is not the path of a file", 'write set = "….txt"')
    version = catalogue.package_version(kind, parameters, name=name, of=task.get("package"))
    for path in (file, chosen):
        if path is not None and "\0" in path:
            raise UserError(f"{where}: {name}: {path!r} is not the path of a file")
    data: Path | None = None
    left_out: list[str] = []
    if file is not None:
        source = conversion.ConversionSource(
            name, kind, parameters, (folder / file).absolute(), columns, task.get("skip", False)
        )
        data, left_out = conversion.pinned(source)
    found = {
        "kind": kind,
        "name": name,
        "weight": weight,
        "parameters": parameters,
        "version": version,
        "data": None if data is None else str(data),
        "items": None if chosen is None else task_sets.read(folder / chosen).encode(),
    }
    return found, left_out
