"""Checks of the machine: Python, processor, torch and its driver, sandbox, memory, disk, clock."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import trio

from node.doctor.finding import ERROR, OK, WARNING, Finding
from node.store.data_directory import DataDirectory
from node.tasks import sandbox
from node.tasks.code import program_runner
from node.workers.child_process import child_environment

PYTHON: Final = (3, 11)
MACHINES: Final = ("x86_64", "aarch64")
DAEMON_MEMORY: Final = 800 << 20
"""Bytes of the daemon, its tasks child and one torch child with a small model."""
ROOM: Final = 200 << 20
"""Free bytes without which a node does not start (``node.daemon``)."""
SAMPLE_SECONDS: Final = 0.2

_TIME_ERROR: Final = 5  # <sys/timex.h>
_STA_UNSYNC: Final = 0x40


async def python(version: str = platform.python_version()) -> list[Finding]:
    """Is this Python new enough?"""
    found = f"Python {version}"
    if tuple(map(int, version.split(".")[:2])) < PYTHON:
        return [Finding("python", ERROR, found, f"install Python {PYTHON[0]}.{PYTHON[1]} or newer")]
    return [Finding("python", OK, found)]


async def machine(kind: str = platform.machine()) -> list[Finding]:
    """Is this a system that Farflung runs on?"""
    found = f"{platform.system()} on {kind}, {os.cpu_count()} cores"
    if platform.system() != "Linux" or kind not in MACHINES:
        return [Finding("machine", ERROR, found, f"Farflung runs on Linux on {' or '.join(MACHINES)}")]
    return [Finding("machine", OK, found)]


async def torch() -> list[Finding]:
    """Does torch compute, on the GPU as well where the machine has one? In a child: this process stays small."""
    done = await trio.run_process(
        [sys.executable, "-P", "-m", "node.workers.torch_probe"],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env=child_environment({}),
    )
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return [Finding("torch", ERROR, f"torch does not load: {lines[-1][:200]}", "install Farflung again")]
    driver = await trio.to_thread.run_sync(nvidia_driver)
    return judge_torch(json.loads(done.stdout), driver)


def nvidia_driver() -> str | None:
    """The version of the NVIDIA kernel driver, None where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")


def judge_torch(probe: dict[str, Any], driver: str | None) -> list[Finding]:
    """Findings from what ``node.workers.torch_probe`` printed and the NVIDIA driver's version."""
    version = f"torch {probe['torch']}"
    if probe["cpu"] is not None:
        return [Finding("torch", ERROR, f"{version} fails on the CPU: {probe['cpu']}", "install Farflung again")]
    if driver is None:
        return [Finding("torch", OK, f"{version} computes on the CPU; no NVIDIA GPU")]
    if probe["cuda_build"] is None:
        found = f"{version} is a CPU build, and there is an NVIDIA driver ({driver})"
        return [Finding("torch", WARNING, found, "delete .venv and install again, so that the GPU is used")]
    build = f"{version} for CUDA {probe['cuda_build']}, driver {driver}"
    if probe["cuda_error"] is not None or not probe["devices"]:
        reason = probe["cuda_error"] or "torch sees no GPU"
        remedy = "upgrade the NVIDIA driver to one for this CUDA version, and let this user open /dev/nvidia*"
        return [Finding("torch", ERROR, f"{build}: {reason}", remedy)]
    return [
        Finding("torch", OK, f"{build}: {device['name']}, {device['memory_mb']} MB, computes")
        if device["error"] is None
        else Finding("torch", ERROR, f"{build}: {device['name']} fails: {device['error']}", "see nvidia-smi and dmesg")
        for device in probe["devices"]
    ]


async def sandboxed(
    scorers: Callable[[], str | None] = sandbox.available,
    programs: Callable[[str], str | None] = program_runner.available,
) -> list[Finding]:
    """Do the tasks' scorers run in a sandbox, and do programs?"""
    problem = await trio.to_thread.run_sync(lambda: scorers(), abandon_on_cancel=True)  # type: ignore[call-arg]
    if problem is not None:
        found, _, remedy = problem.partition(": ")
        if remedy != sandbox.REMEDY:
            found, remedy = problem, "let this user make user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
        only = "only data sets whose scorers run no code, and texts, can be judged"
        return [Finding("sandbox", WARNING, f"{found}; {only}", remedy)]
    own = program_runner.own_version()
    problem = await trio.to_thread.run_sync(lambda: programs(own), abandon_on_cancel=True)  # type: ignore[call-arg]
    if problem is not None:
        found = f"bubblewrap works, but the programs of code tasks do not: {problem}"
        return [Finding("sandbox", WARNING, found, "take part in domains without code tasks, or mend it")]
    return [Finding("sandbox", OK, f"bubblewrap works, and programs run in it with Python {own}")]


def available_memory(meminfo: str, limit: int | None, used: int) -> int:
    """Bytes that may still be used: the kernel's ``MemAvailable``, or less where a control group sets a limit."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) << 10
    return free if limit is None else min(free, max(0, limit - used))


def _meminfo() -> str:
    return Path("/proc/meminfo").read_text(encoding="ascii")


def _cgroup() -> tuple[int | None, int]:
    """The memory limit of this process's control group (version 2) and what it uses; None without one."""
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition(":")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None, 0
    return (int(limit) if limit.isdigit() else None), used


async def memory(model: int, free: int | None = None) -> list[Finding]:
    """Is there memory for a node and a model of ``model`` bytes? ``free`` bytes are as the kernel says, or given."""
    if free is None:
        free = available_memory(_meminfo(), *_cgroup())
    # Weights, gradients and the optimizer's two moments: four times the model, in the trainer's child.
    need = DAEMON_MEMORY + 4 * model
    found = f"{free >> 20} MB available, a node that trains needs about {need >> 20} MB"
    if free < DAEMON_MEMORY // 2:
        return [Finding("memory", ERROR, found, "stop other programs, or use a larger machine")]
    if free < need:
        remedy = 'stop other programs, or let this node relay only: willing = ["relay"]'
        return [Finding("memory", WARNING, found, remedy)]
    return [Finding("memory", OK, found)]


def _nearest(path: Path) -> Path:
    """``path``, or the folder above it that is there and can be looked into."""
    while not os.path.exists(path):
        path = path.parent
    return path


def _barred(paths: Iterable[Path]) -> Path | None:
    """The first of ``paths`` that is there and that this user cannot read and write."""
    return next((path for path in paths if os.path.lexists(path) and not os.access(path, os.R_OK | os.W_OK)), None)


async def disk(directory: DataDirectory, model: int, free: int | None = None) -> list[Finding]:
    """Is there room for the log and the versions that every holder keeps? ``free`` bytes are as the kernel says, or
    given."""
    place = _nearest(directory.path)
    if free is None:
        free = DataDirectory(place).free_bytes()
    # Five versions are kept, one is on its way, and a trainer writes one more with its checkpoint.
    need = ROOM + 10 * model
    found = f"{free / 1e6:.0f} MB free at {place}, {need / 1e6:.0f} MB are needed"
    if free < ROOM:
        return [Finding("disk", ERROR, found, "free some room, or choose a folder on another disk")]
    if free < need:
        return [Finding("disk", WARNING, found, "free some room before long")]
    if (barred := _barred((place, *directory.written()))) is not None:
        remedy = f"run as its owner, or: chown -R {os.geteuid()} {barred}"
        return [Finding("disk", ERROR, f"this user cannot read and write {barred}", remedy)]
    return [Finding("disk", OK, found)]


def synchronised() -> bool | None:
    """Whether the kernel knows its clock to be synchronised (adjtimex(2)); None where it does not say."""

    class Timex(ctypes.Structure):
        # struct timex, <sys/timex.h>: only the first fields matter here; the rest is room.
        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_char * 512),
        )

    state = Timex()
    try:
        code = int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)))
    except (AttributeError, OSError):
        return None
    if code < 0:
        return None
    return code != _TIME_ERROR and not state.status & _STA_UNSYNC


async def clock(
    monotonic: Callable[[], float] = time.monotonic, known: Callable[[], bool | None] = synchronised
) -> list[Finding]:
    """Does the ``monotonic`` clock run as it should, and is the wall clock ``known`` to be synchronised?"""
    before = monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    await trio.sleep(SAMPLE_SECONDS)
    after = monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    passed, real = after[0] - before[0], after[1] - before[1]
    if passed < SAMPLE_SECONDS * 0.9 or abs(passed - real) > 0.1:
        found = f"the monotonic clock ran {passed:.2f} s while {real:.2f} s passed"
        return [Finding("clock", ERROR, found, "see whether this virtual machine is being paused; reboot it")]
    running = f"the monotonic clock runs; it is {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
    agrees = known()
    if agrees is False:
        remedy = "timedatectl set-ntp true (a node agrees with others without it; logs and certificates do not)"
        return [Finding("clock", WARNING, f"{running}, not synchronised by NTP", remedy)]
    return [Finding("clock", OK, f"{running}{', synchronised' if agrees else ''}")]
