"""The processes of a benchmark: they say ``ready`` and ``done`` on standard output and are all ended with the block."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class Failed(Exception):
    """A process of a benchmark ended, or did not answer in time."""


class Missing(Exception):
    """A part of a benchmark cannot run on this machine; says why."""


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Runs in the new process: nothing of a benchmark outlives it, however it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One process, the leader of its own group. Its errors go into a file."""

    def __init__(self, name: str, command: Sequence[str], errors: Path, env: Mapping[str, str] | None) -> None:
        self.name = name
        self.errors = errors
        with errors.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                # A group and no session: kernels that share the processor out among sessions first would let a node's
                # background work push another node's daemon aside, which on a machine of its own it cannot.
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        self._read = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, *words: object) -> None:
        """One line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(str(word) for word in words) + "\n").encode())
        self.process.stdin.flush()

    def expect(self, word: str, timeout: float) -> list[str]:
        """The rest of its next line that begins with ``word``. Raises ``Failed`` where none comes."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._line(deadline)
            if line is None:
                raise Failed(f"{self.name} said no {word!r} in {timeout:.0f} s: {self._last_error()}")
            first, *rest = line.split(" ")
            if first == word:
                return rest

    def _line(self, deadline: float) -> str | None:
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise Failed(f"{self.name} ended with {self.process.wait()}: {self._last_error()}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def _last_error(self) -> str:
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def signal(self, number: int) -> None:
        """A signal to its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End its group: asked first, killed after three seconds."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Children:
    """The processes of one measurement; leaving the block, however, ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Child] = []

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        child = Child(name, command, self.folder / f"{name}.log", env)
        self.all.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all of them."""
        for child in self.all:
            child.signal(signal.SIGTERM)
        for child in self.all:
            child.end()
        self.all.clear()
