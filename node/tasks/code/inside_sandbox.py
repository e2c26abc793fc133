"""Runs one program against the inputs of its tests, inside the sandbox. A file by itself: the standard library only.

Started as ``python -P -s -S inside.py`` by ``node.tasks.code.program_runner``, which see for the sandbox around it. A
request comes as JSON on standard input: ``{program, tests: [["stdin", text] | ["call", expression]…], seconds, total,
memory, output, filter, number}``. For each test one frame goes to standard output: ``status size\\n`` and the output.

1. What a test expects is not here: the other side compares. So a program finds nothing to read or to forge.
2. Each test is a process of its own, forked from this one before the program was read, under resource limits and a
   system call filter that lets it start no process, signal nobody and open no connection.
3. A program in a test of kind "stdin" runs as ``__main__``; its output is what it printed. In one of kind "call" it
   runs as the module ``solution``; then the expression is evaluated among its names, and the output is the value as
   JSON (``encode``). Where the program has no such name, but a class ``Solution`` with such a method, that is meant.
4. Statuses: "ok"; "failed" (an exception, an exit code, a crash); "time" and "output" for more than it may use; "lost"
   where something else killed it, which says nothing about the program.
5. A test may use ``seconds`` of processor time and ``WALL_FACTOR`` times as much of wall time, all tests together
   ``total``; those beyond it are not run and have the status "time".
6. Chance is the same everywhere: ``random`` is seeded with 0 and ``os.urandom`` is drawn from it; PYTHONHASHSEED is 0.
"""

from __future__ import annotations

import ast
import builtins
import collections
import ctypes
import json
import os
import random
import resource
import select
import signal
import sys
import time
import types

WALL_FACTOR = 10
FILE_BYTES = 1 << 20
FILES = 64
THREADS = 64
_SECCOMP_SET_MODE_FILTER = 1


def encode(value: object) -> object:
    """``value`` as what JSON can hold, the same for equal values: tuples count as lists, sets and maps are sorted.

    Raises ``TypeError`` for a value that is no plain data.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    if isinstance(value, (list, tuple, range, collections.deque)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        pairs = [[encode(key), encode(item)] for key, item in value.items()]
        return {"map": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((encode(item) for item in value), key=json.dumps)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"{type(value).__name__} is no plain data")


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Runner:
    """What all tests of one request share."""

    def __init__(self, request: dict[str, object]) -> None:
        self.program = str(request["program"])
        self.seconds = int(request["seconds"])  # type: ignore[call-overload]
        self.left = float(request["total"])  # type: ignore[arg-type]
        self.memory = int(request["memory"])  # type: ignore[call-overload]
        self.output = int(request["output"])  # type: ignore[call-overload]
        self.number = int(request["number"])  # type: ignore[call-overload]
        code = bytes.fromhex(str(request["filter"]))
        self.code = ctypes.create_string_buffer(code, len(code))
        self.filter = _Filter(len(code) // 8, ctypes.addressof(self.code))
        self.libc = ctypes.CDLL(None)

    def test(self, kind: str, text: str) -> tuple[str, bytes]:
        """The status and the output of one test."""
        if self.left <= 0:
            return "time", b""
        read, write = os.pipe()
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(text.encode("utf-8", "replace") if kind == "stdin" else b"")
        os.lseek(stdin, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            self._become(stdin, write, kind)
            self._run(kind, text)
            sys.exit(0)  # as any program ends: threads are waited for, what is buffered is written
        os.close(write)
        os.close(stdin)
        status, output = self._watch(pid, read)
        os.close(read)
        return status, output

    def _become(self, stdin: int, write: int, kind: str) -> None:
        """Turn this new process into the program's: its files, its limits, its filter."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(stdin, 0)
        os.dup2(write if kind == "stdin" else null, 1)
        os.dup2(null, 2)
        os.dup2(write, 3)
        os.closerange(3 if kind == "stdin" else 4, 1024)
        for limit, value in (
            (resource.RLIMIT_CPU, self.seconds),
            (resource.RLIMIT_AS, self.memory),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_NOFILE, FILES),
            (resource.RLIMIT_NPROC, THREADS),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        call = ctypes.c_long(self.number)
        mode, flags = ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER), ctypes.c_ulong(0)
        if self.libc.syscall(call, mode, flags, ctypes.byref(self.filter)) != 0:
            os.kill(os.getpid(), signal.SIGKILL)  # never without it
        # Anew: what Python read ahead of its old standard input, or kept for its old output, is not this program's.
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def _run(self, kind: str, text: str) -> None:
        random.seed(0)
        name = "__main__" if kind == "stdin" else "solution"
        module = types.ModuleType(name)
        sys.modules[name] = module
        sys.argv = ["solution.py"]
        names = module.__dict__
        exec(compile(self.program, "solution.py", "exec", dont_inherit=True), names)  # noqa: S102  what this is for
        if kind == "stdin":
            return
        expression = compile(text, "test", "eval", dont_inherit=True)
        value = eval(expression, names, _missing(text, names))  # noqa: S307
        data = json.dumps(encode(value)).encode()
        with open(3, "wb", closefd=False) as file:
            file.write(data)

    def _watch(self, pid: int, read: int) -> tuple[str, bytes]:
        """Gather the output of the process ``pid`` and wait for its end, or end it."""
        status, output, size = "", [], 0
        began = time.monotonic()
        end = began + self.seconds * WALL_FACTOR
        dead = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(read, select.POLLIN)
        poll.register(dead, select.POLLIN)
        reading = True
        while not status:
            events = dict(poll.poll(max(0.0, end - time.monotonic()) * 1000))
            if read in events:
                part = os.read(read, 65536)
                size += len(part)
                output.append(part)
                if not part:
                    reading = False
                    poll.unregister(read)
                if size > self.output:
                    status = "output"
            elif dead in events:
                # Nobody else can hold the pipe: what the program wrote is read, and it is at its end.
                if not reading:
                    break
            else:
                status = "time"
        os.close(dead)
        os.kill(pid, signal.SIGKILL)
        _, code, usage = os.wait4(pid, 0)
        used = usage.ru_utime + usage.ru_stime
        self.left -= max(used, (time.monotonic() - began) / WALL_FACTOR)
        if not status:
            if os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGKILL:
                # The kernel's limit counts in ticks, the usage does not.
                status = "time" if 2 * used > self.seconds else "lost"
            else:
                status = "ok" if code == 0 else "failed"
        return status, b"".join(output)[: self.output]


def _missing(text: str, names: dict[str, object]) -> dict[str, object]:
    """The names that ``text`` uses and only an instance of the program's class ``Solution`` has."""
    solution = names.get("Solution")
    if not isinstance(solution, type):
        return {}
    used = {part.id for part in ast.walk(ast.parse(text, mode="eval")) if isinstance(part, ast.Name)}
    own = solution()
    return {name: getattr(own, name) for name in used if name not in names and hasattr(solution, name)}


def main() -> None:
    """Answer one request."""
    with open(0, "rb", closefd=False) as file:
        request = json.load(file)
    runner = Runner(request)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the module site, which is left out, does
    os.urandom = random.randbytes
    random._urandom = random.randbytes  # type: ignore[attr-defined]
    for kind, text in request["tests"]:
        status, output = runner.test(kind, text)
        frame = f"{status} {len(output)}\n".encode() + output
        while frame:
            frame = frame[os.write(1, frame) :]


if __name__ == "__main__":
    main()
