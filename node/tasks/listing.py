"""Which kinds of tasks this machine can serve, and what each that it cannot is missing. Imports no task library."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from node.tasks import catalogue, sandbox
from node.tasks.allowlist import DATASETS, UNSANDBOXED

ABOUT: Mapping[str, str] = {
    "reasoning-gym": "procedural puzzles, made from a seed",
    "jsonl": "a file of questions with short answers",
}


def kinds() -> list[dict[str, Any]]:
    """One row a kind: ``kind``, ``about``, ``version`` that a new domain pins, ``missing`` (None where nothing is).

    Starts a process once, for the sandbox; blocks for it.
    """
    problem = sandbox.available()
    return [
        {
            "kind": kind,
            "about": ABOUT[kind],
            "version": catalogue.package_version(kind),
            "missing": _missing(kind, problem),
        }
        for kind in catalogue.KINDS
    ]


def _missing(kind: str, sandbox_problem: str | None) -> str | None:
    distribution = {"reasoning-gym": "reasoning-gym", "jsonl": "math-verify"}[kind]
    wanted = catalogue.package_version(kind)
    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed; install {distribution}=={wanted}"
    if installed != wanted:
        return f"{distribution} {installed} is installed; install {distribution}=={wanted}"
    if sandbox_problem is None:
        return None
    if kind == "reasoning-gym":
        return f"{len(DATASETS) - len(UNSANDBOXED)} of {len(DATASETS)} data sets need a sandbox: {sandbox_problem}"
    return sandbox_problem
