"""What the doctor says about a machine."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from node.doctor import machine_checks
from node.doctor.finding import ERROR, OK, WARNING, Finding
from node.store.data_directory import DataDirectory
from node.tasks import sandbox

CPU: dict[str, Any] = {"torch": "2.13.0+cpu", "cuda_build": None, "cpu": None, "devices": [], "cuda_error": None}
DEVICE = {"name": "GPU", "memory_mb": 1000, "error": None}
CUDA = {**CPU, "torch": "2.13.0", "cuda_build": "13.0", "devices": [DEVICE]}


@pytest.mark.parametrize(
    ("probe", "driver", "severity", "words"),
    [
        (CPU, None, OK, "no NVIDIA GPU"),
        (CUDA, "580.1", OK, "GPU, 1000 MB, computes"),
        (CUDA, None, OK, "no NVIDIA GPU"),
        (CPU, "580.1", WARNING, "is a CPU build"),
        ({**CPU, "cpu": "illegal instruction"}, None, ERROR, "illegal instruction"),
        ({**CUDA, "devices": [], "cuda_error": "driver too old"}, "470.0", ERROR, "driver too old"),
        ({**CUDA, "devices": []}, "580.1", ERROR, "sees no GPU"),
        ({**CUDA, "devices": [{**DEVICE, "error": "no kernel image"}]}, "580.1", ERROR, "no kernel image"),
    ],
)
def test_torch_against_the_driver(probe: dict[str, Any], driver: str | None, severity: str, words: str) -> None:
    (found,) = machine_checks.judge_torch(probe, driver)
    assert (found.check, found.severity) == ("torch", severity)
    assert words in found.found
    assert bool(found.remedy) == (severity != OK)


async def test_torch_computes_in_a_child() -> None:
    (found,) = await machine_checks.torch()
    assert found.severity in (OK, WARNING), found
    assert "torch" in found.found


async def test_python_and_machine() -> None:
    assert [one.severity for one in [*await machine_checks.python(), *await machine_checks.machine()]] == [OK, OK]
    assert (await machine_checks.python("3.10.1"))[0].severity == ERROR
    assert (await machine_checks.machine("riscv64"))[0].severity == ERROR


@pytest.mark.parametrize(
    ("problem", "severity", "remedy"),
    [
        (None, OK, ""),
        (f"there is no sandbox: {sandbox.REMEDY}", WARNING, "install bubblewrap"),
        ("the sandbox does not work here: no namespaces", WARNING, "user namespaces"),
    ],
)
async def test_sandbox(problem: str | None, severity: str, remedy: str) -> None:
    (found,) = await machine_checks.sandboxed(lambda: problem, lambda version: None)
    assert found.severity == severity
    assert remedy in found.remedy


async def test_programs_that_do_not_run() -> None:
    ended = "the sandbox ended: no more namespaces"
    (found,) = await machine_checks.sandboxed(lambda: None, lambda version: ended)
    assert found.severity == WARNING
    assert "the programs of code tasks do not: the sandbox ended: no more namespaces" in found.found


@pytest.mark.parametrize(
    ("limit", "used", "available"), [(None, 0, 2 << 30), (1 << 30, 256 << 20, 768 << 20), (1 << 30, 2 << 30, 0)]
)
def test_a_control_group_bounds_the_memory(limit: int | None, used: int, available: int) -> None:
    meminfo = "MemTotal:  9000000 kB\nMemAvailable:    2097152 kB\n"
    assert machine_checks.available_memory(meminfo, limit, used) == available


@pytest.mark.parametrize(
    ("free", "model", "severity"),
    [(8 << 30, 0, OK), (8 << 30, 4 << 30, WARNING), (700 << 20, 0, WARNING), (300 << 20, 0, ERROR)],
)
async def test_memory(free: int, model: int, severity: str) -> None:
    (found,) = await machine_checks.memory(model, free)
    assert found.severity == severity


@pytest.mark.parametrize(
    ("free", "model", "severity"), [(8 << 30, 0, OK), (8 << 30, 1 << 30, WARNING), (100 << 20, 0, ERROR)]
)
async def test_disk(free: int, model: int, severity: str, tmp_path: Path) -> None:
    (found,) = await machine_checks.disk(DataDirectory(tmp_path / "not" / "there"), model, free)
    assert found.severity == severity
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("barred", ["", "log", "lock"])
async def test_a_disk_that_this_user_cannot_write(barred: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    directory.lock_file.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / barred)
    (found,) = await machine_checks.disk(directory, 0)
    assert found == Finding(
        "disk",
        ERROR,
        f"this user cannot read and write {tmp_path / barred}",
        f"run as its owner, or: chown -R {os.geteuid()} {tmp_path / barred}",
    )


@pytest.mark.parametrize(("known", "severity"), [(True, OK), (None, OK), (False, WARNING)])
async def test_clock(known: bool | None, severity: str) -> None:
    (found,) = await machine_checks.clock(known=lambda: known)
    assert found.severity == severity


async def test_a_clock_that_stands_still_is_an_error() -> None:
    (found,) = await machine_checks.clock(lambda: 1.0)
    assert found.severity == ERROR


def test_the_kernel_says_whether_its_clock_is_synchronised() -> None:
    assert machine_checks.synchronised() in (True, False, None)


@pytest.mark.parametrize("check", [machine_checks.python, machine_checks.machine, machine_checks.clock])
async def test_every_problem_has_a_remedy(check: Callable[[], Awaitable[list[Finding]]]) -> None:
    for found in await check():
        assert found.severity == OK or found.remedy
