"""``farflung doctor``: what keeps a node from working here, and the remedy."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import asdict

import trio

from node.cli import options
from node.doctor import node_checks
from node.doctor.finding import ERROR, WARNING, Check, Finding, exit_code, gather
from node.doctor.node_checks import Subject
from node.store.data_directory import DataDirectory

_MARKS = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


def add_to(commands: options.Parsers, phrase: str) -> None:
    """Add the command's parser."""
    options.add_command(commands, "doctor", doctor, help=phrase, json=True)


def doctor(arguments: argparse.Namespace, checks: Callable[[Subject], list[Check]] | None = None) -> int:
    """Check this machine and a node's folder, all at once, within about fifteen seconds: Python, torch and its driver,
    sandbox, memory, disk, clock, configuration, key, lock, ports, log, peers, and whether this node's key is in use
    elsewhere. Changes nothing. Exit code 1 where there is an error.

    Carry out ``checks``, by default all, and show what they found.
    """
    logging.disable(logging.CRITICAL)  # what libraries have to say about peers that do not answer
    directory = options.data_directory(arguments)
    try:
        findings = trio.run(_examine, directory, checks)
    finally:
        logging.disable(logging.NOTSET)
    code = exit_code(findings)
    found = {"data_dir": str(directory.path), "healthy": code == 0, "checks": list(map(asdict, findings))}
    options.show(arguments, found, lambda: print(text(findings)))
    return code


async def _examine(directory: DataDirectory, checks: Callable[[Subject], list[Check]] | None) -> list[Finding]:
    subject = await node_checks.examine(directory)
    return [*subject.findings, *await gather((checks or node_checks.checks)(subject))]


def text(findings: list[Finding]) -> str:
    """The findings for people: one a line, a remedy below what needs one."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.severity]} {finding.check:<13} {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<22}→ {finding.remedy}")
    errors, warnings = (sum(f.severity == severity for f in findings) for severity in (ERROR, WARNING))
    summary = f"{options.counted(errors, 'error')}, {options.counted(warnings, 'warning')}"
    return "\n".join([*lines, "", summary if errors or warnings else "all is well"])
