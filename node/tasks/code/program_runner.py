"""Runs a program against the inputs of tests, each in a process of its own, in a sandbox made for this one program.

1. The sandbox (bubblewrap): no network, no other process in sight, no capabilities, nothing to write to, and to be
   read only this Python, its standard library and the system's shared libraries; no installed package. It ends with
   whoever started it, and everything in it ends with it.
2. ``node.tasks.code.inside_sandbox`` runs in it as the only other process. It forks one process a test, with limits on
   processor time, memory, file sizes and threads, and the system call filter of ``node.tasks.seccomp``.
3. Nothing in the sandbox knows what a test expects. Output comes back test by test, bounded in size, so the caller can
   stop early.
4. Programs run on the Python of the minor version that the domain pins: the one that runs this, else one on the PATH.

Blocking; for child processes, in any thread that lives on until the run is over.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from node.tasks import sandbox, seccomp
from node.tasks.code import inside_sandbox

INSIDE: Final = Path(inside_sandbox.__file__)
START_SECONDS: Final = 20.0
"""Wall time beyond the programs' own that starting a sandbox on a busy machine may take."""
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    # The flag -I would make Python ignore this one; -P, -s and -S are what else it stands for.
    "PYTHONHASHSEED": "0",
}
_LIBRARIES: Final = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache")

Status = Literal["ok", "failed", "time", "output", "lost"]
Input = tuple[Literal["stdin", "call"], str]
"""What a test gives a program: a text on standard input, or an expression to evaluate among its names."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What one test may use: ``seconds`` of processor time (ten times as much of wall time), ``memory`` bytes of
    address space, ``output`` bytes; and ``total`` seconds that all tests may use."""

    seconds: int
    total: int
    memory: int
    output: int


class Lost(Exception):
    """The sandbox ended, or could not be started: nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter: its program, its prefix, and its standard library."""

    program: Path
    prefix: Path
    library: Path


def own_version() -> str:
    """The minor version of this Python, as in "3.11"."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


@functools.cache
def find_python(version: str) -> Python | None:
    """The interpreter for ``version`` ("3.11"), None where this machine has none."""
    if version == own_version():
        program = Path(getattr(sys, "_base_executable", sys.executable))
        return Python(program.resolve(), Path(sys.base_prefix), Path(sysconfig.get_path("stdlib")))
    program_name = shutil.which(f"python{version}")
    if program_name is None:
        return None
    code = "import json, sys, sysconfig as s"
    code += "\nprint(json.dumps([sys._base_executable, sys.base_prefix, s.get_path('stdlib')]))"
    try:
        done = subprocess.run([program_name, "-I", "-c", code], capture_output=True, timeout=START_SECONDS, check=True)
        program_name, prefix, library = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Python(Path(program_name).resolve(), Path(prefix), Path(library))


@functools.cache
def command(python: Python) -> tuple[str, ...]:
    """The command line that runs ``inside`` in the sandbox."""
    line = sandbox.confined(_ENVIRONMENT) + sandbox.shown(_LIBRARIES)
    bound = list(map(Path, _LIBRARIES))
    # The prefix's own lib has the shared library of an interpreter that lies elsewhere than in the system's folders.
    for path in (python.prefix / "lib", python.library, python.program, INSIDE):
        if path.exists() and not any(path.is_relative_to(above) for above in bound):
            line += ["--ro-bind", str(path.resolve()), str(path)]
            bound.append(path)
    line += ["--dev", "/dev"]
    for packages in _packages(python):
        line += ["--tmpfs", str(packages), "--remount-ro", str(packages)]
    return (*line, *sandbox.SEALED, str(python.program), "-P", "-s", "-S", "-B", str(INSIDE))


def _packages(python: Python) -> list[Path]:
    """The folders of installed packages that lie in what is bound, to be hidden."""
    near = [python.library / name for name in ("site-packages", "dist-packages")]
    system = [Path("/usr/lib/python3/dist-packages"), *Path("/usr/lib").glob("python3.*/*-packages")]
    return sorted({path for path in (*near, *system) if path.is_dir() and not path.is_symlink()})


def run(
    python: Python, program: str, tests: Sequence[Input], limits: ProgramLimits
) -> Generator[tuple[Status, bytes], None, None]:
    """The status and the output of each test in turn; closing the iterator ends the sandbox.

    Raises ``Lost``.
    """
    machine = platform.machine()
    request = {
        "program": program,
        "tests": tests,
        **asdict(limits),
        "filter": seccomp.program(machine).hex(),
        "number": seccomp.call_number(machine),
    }
    try:
        process = subprocess.Popen(
            command(python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
    except OSError as error:
        raise Lost(f"the sandbox cannot be started: {error}") from None
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request).encode("ascii"))
        end = time.monotonic() + START_SECONDS
        reader = _Reader(process.stdout.fileno())
        for _ in tests:
            end += limits.seconds * inside_sandbox.WALL_FACTOR
            yield reader.frame(end)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


class _Reader:
    """Frames out of a pipe, with deadlines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._buffer = bytearray()

    def frame(self, end: float) -> tuple[Status, bytes]:
        """The next frame, until the monotonic time ``end``. Raises ``Lost``."""
        while (line := self._buffer.find(b"\n")) < 0:
            self._more(end)
        status, size = self._buffer[:line].decode().split()
        stop = line + 1 + int(size)
        while len(self._buffer) < stop:
            self._more(end)
        output = bytes(self._buffer[line + 1 : stop])
        del self._buffer[:stop]
        return status, output  # type: ignore[return-value]

    def _more(self, end: float) -> None:
        if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise Lost("the sandbox does not answer")
        part = os.read(self._descriptor, 1 << 16)
        if not part:
            raise Lost("the sandbox ended")
        self._buffer += part


@functools.cache
def available(version: str) -> str | None:
    """None where programs of Python ``version`` can be run here, else why not, with the remedy. Tries it, once."""
    if platform.machine() not in seccomp.MACHINES:
        return f"there is no system call filter for {platform.machine()}"
    if shutil.which("bwrap") is None:
        return f"there is no sandbox: {sandbox.REMEDY}"
    python = find_python(version)
    if python is None:
        return f"there is no Python {version}: install python{version}"
    try:
        answer = list(run(python, "print(int(input()) + 1)", [("stdin", "1\n")], ProgramLimits(10, 10, 512 << 20, 100)))
    except Lost as error:
        return f"{error}: {_first_words(python)}"
    return None if answer == [("ok", b"2\n")] else f"the sandbox does not run programs: {answer[0][0]}"


def _first_words(python: Python) -> str:
    """What bubblewrap says where it does not start."""
    try:
        done = subprocess.run(command(python), stdin=subprocess.DEVNULL, capture_output=True, timeout=START_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return sandbox.last_line(done.stderr, "it says nothing")
