"""Which kinds of tasks this machine can serve, and what each that it cannot is missing. Imports no task library."""

from __future__ import annotations

from typing import Any

from node.tasks import package_tasks, sandbox, task_versions
from node.tasks.allowlist import DATASETS, REASONING_GYM_VERSION, UNSANDBOXED
from node.tasks.code import program_runner


def kinds() -> list[dict[str, Any]]:
    """One row a kind, and one for each task of a package: ``kind``, ``about``, ``version`` that a new domain pins,
    ``missing`` (None where nothing is).

    Starts processes once, for the sandboxes; blocks for them.
    """
    problem = sandbox.available()
    gym = _lacking((("reasoning-gym", REASONING_GYM_VERSION),))
    if gym is None and problem is not None:
        gym = f"{len(DATASETS) - len(UNSANDBOXED)} of {len(DATASETS)} data sets need a sandbox: {problem}"
    own = program_runner.own_version()
    return [
        _row("reasoning-gym", "procedural puzzles, made from a seed", REASONING_GYM_VERSION, gym),
        _row(
            "jsonl",
            "questions with mathematical answers",
            task_versions.MATH,
            _lacking(task_versions.MATH_PACKAGES) or problem,
        ),
        _row("jsonl", 'the same, check = "exact": texts', task_versions.EXACT, None),
        _row("code", "problems with tests for a program", f"python=={own}", program_runner.available(own)),
        *(_row("package", offer.name, offer.pin, problem) for offer in package_tasks.offers()),
    ]


def _row(kind: str, about: str, version: str, missing: str | None) -> dict[str, Any]:
    return {"kind": kind, "about": about, "version": version, "missing": missing}


def _lacking(requirements: tuple[tuple[str, str], ...]) -> str | None:
    found = task_versions.problem(requirements)
    return None if found is None else "; ".join(found)
