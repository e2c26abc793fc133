"""What programs can and cannot do in their sandbox: the real one, with hostile programs."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path

import pytest

from node.tasks import sandbox
from node.tasks.code import program_runner
from node.tasks.code.program_runner import Input, ProgramLimits, Status

VERSION = program_runner.own_version()
pytestmark = pytest.mark.skipif(
    program_runner.available(VERSION) is not None, reason=str(program_runner.available(VERSION))
)
LIMITS = ProgramLimits(seconds=1, total=5, memory=256 << 20, output=10_000)


def run(program: str, *tests: Input, limits: ProgramLimits = LIMITS) -> list[tuple[Status, bytes]]:
    python = program_runner.find_python(VERSION)
    assert python is not None
    return list(program_runner.run(python, program, tests or [("stdin", "")], limits))


def printed(program: str) -> str:
    ((status, output),) = run(program)
    assert status == "ok"
    return output.decode()


def test_programs_read_and_print() -> None:
    program = "import sys\na, b = map(int, input().split())\nprint(a + b)\nsys.stdout.write(sys.stdin.read())"
    assert run(program, ("stdin", "1 2\nrest\n"), ("stdin", "3 4\n")) == [("ok", b"3\nrest\n"), ("ok", b"7\n")]


def test_expressions_are_evaluated_among_the_programs_names() -> None:
    program = """
if __name__ == "__main__":
    raise SystemExit("not as a main program")
print("noise")
def f(x):
    return (x, {x: 1.5}, {3, 1})
class Solution:
    def twice(self, x):
        return 2 * x
"""
    tests: list[Input] = [("call", "f(2)"), ("call", "twice(4)"), ("call", "Solution().twice('a')"), ("call", "g(1)")]
    assert run(program, *tests) == [
        ("ok", b'[2, {"map": [[2, 1.5]]}, {"set": [1, 3]}]'),
        ("ok", b"8"),
        ("ok", b'"aa"'),
        ("failed", b""),
    ]


def test_no_memory_outlives_the_limits_of_a_program() -> None:
    program = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(0, ctypes.c_size_t(2**30), 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600))
"""
    assert printed(program) == "-1 -1 -1\n"


def test_the_kernel_ends_nobody_for_a_program() -> None:
    program = """
import fcntl, os
read, write = os.pipe()
try:
    fcntl.fcntl(read, fcntl.F_SETOWN, os.getppid())
    fcntl.fcntl(read, 10, 9)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
except PermissionError:
    print("refused")
os.write(write, b"x")
"""
    assert run(program, ("stdin", ""), ("stdin", "")) == [("ok", b"refused\n")] * 2


def test_no_program_holds_up_who_opens_the_standard_library_on_the_host() -> None:
    program = """
import fcntl, os
file = os.open(os.__file__, os.O_RDONLY)
for attempt in (
    lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
):
    try:
        attempt()
        print("had")
    except PermissionError:
        print("refused")
"""
    assert printed(program) == "refused\n" * 3


def test_threads_deep_recursion_and_exit_work() -> None:
    program = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(depth(50_000)))
thread.start()
thread.join()
exit(0)
"""
    assert printed(program) == "50000\n"


def test_chance_is_the_same_every_time() -> None:
    program = "import os, random, uuid\nprint(random.random(), os.urandom(4), hash('a'), uuid.uuid4())"
    assert printed(program) == printed(program)


def test_each_test_is_a_process_of_its_own() -> None:
    program = "import builtins\nprint(hasattr(builtins, 'mark'))\nbuiltins.mark = 1"
    assert run(program, ("stdin", ""), ("stdin", "")) == [("ok", b"False\n")] * 2


@pytest.mark.parametrize(
    "program",
    ["raise ValueError", "def", "exit(3)", "import numpy", "x = bytearray(1 << 30)", "import os\nos.abort()"],
    ids=["exception", "syntax", "exit code", "package", "memory", "crash"],
)
def test_what_fails(program: str) -> None:
    assert run(program) == [("failed", b"")]


def test_time_is_limited_and_then_the_next_test_runs() -> None:
    program = "if input() == 'loop':\n    while True: pass\nprint(1)"
    assert run(program, ("stdin", "loop\n"), ("stdin", "go\n")) == [("time", b""), ("ok", b"1\n")]


def test_all_tests_together_are_limited() -> None:
    limits = ProgramLimits(seconds=1, total=1, memory=256 << 20, output=100)
    program = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    tests: list[Input] = [("stdin", "")] * 4
    assert [status for status, _ in run(program, *tests, limits=limits)][-1] == "time"
    assert run("", ("stdin", ""), limits=limits) == [("ok", b"")]


def test_output_is_limited() -> None:
    ((status, output),) = run("while True: print('x' * 1000)")
    assert status == "output"
    assert len(output) == LIMITS.output


def test_no_network() -> None:
    program = """
import socket
for family in (socket.AF_INET, socket.AF_UNIX):
    try:
        socket.socket(family)
        print("a socket")
    except OSError as error:
        print(error.errno)
"""
    assert printed(program) == "1\n1\n"


def test_nothing_of_the_machine_is_seen(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    places = [
        str(tmp_path / "secret"),
        "/proc",
        "/sys",
        "/etc/passwd",
        str(shutil.which("bwrap")),  # beside an interpreter of the system's, which is seen
        os.path.expanduser("~/.ssh"),
        str(tmp_path.parent),
    ]
    program = f"""
import os
print([place for place in {places!r} if os.path.exists(place)], os.getuid(), sorted(os.environ))
"""
    names = ["HOME", "LANG", "PATH", "PWD", "PYTHONHASHSEED", "TZ"]
    assert printed(program) == f"[] 65534 {names}\n"


def test_nothing_can_be_written() -> None:
    program = """
import os, sysconfig
for place in ("/x", "/tmp/x", "/dev/shm/x", "/dev/x", "/usr/lib/x", sysconfig.get_path("stdlib") + "/x"):
    try:
        open(place, "w")
        print("wrote", place)
    except OSError:
        pass
files = 0
try:
    while True:
        files += os.write(os.memfd_create("x"), b"x" * (1 << 21)) > 0
except OSError:
    pass
print(files)
"""
    assert int(printed(program)) < 64


def test_no_processes_and_no_signals() -> None:
    program = """
import ctypes, os, platform, signal, subprocess, sys
def attempt(what, *arguments):
    try:
        what(*arguments)
        print("done", what)
    except OSError as error:
        print(error.errno)
attempt(os.fork)
attempt(os.execv, sys.executable, ["x"])
attempt(lambda: subprocess.Popen([sys.executable, "-c", "1"], start_new_session=True))
attempt(os.kill, os.getppid(), signal.SIGKILL)
attempt(os.kill, 1, signal.SIGKILL)
attempt(os.kill, -1, signal.SIGKILL)
tgkill = {"x86_64": 234, "aarch64": 131}[platform.machine()]
print(ctypes.CDLL(None).syscall(tgkill, os.getppid(), os.getppid(), signal.SIGKILL))
"""
    assert printed(program) == "1\n" * 6 + "-1\n"


def test_a_bomb_of_threads_ends_at_the_limits() -> None:
    program = """
import threading, time
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    print(count < 1000)
"""
    assert printed(program) == "True\n"


def test_stopping_early_ends_everything_in_the_sandbox() -> None:
    python = program_runner.find_python(VERSION)
    assert python is not None
    results = program_runner.run(
        python, "import time\nif input(): time.sleep(60)", [("stdin", "\n"), ("stdin", "x\n")], LIMITS
    )
    assert next(results)[0] == "ok"
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 5


def test_what_is_said_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available = program_runner.available.__wrapped__
    assert available("3.1") == "there is no Python 3.1: install python3.1"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert available(VERSION) == "there is no system call filter for riscv64"
    monkeypatch.undo()
    program_runner.command.cache_clear()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert available(VERSION) == "the sandbox ended: bwrap: No permissions to create new namespace"
    monkeypatch.setenv("PATH", "/nowhere")
    assert available(VERSION) == f"there is no sandbox: {sandbox.REMEDY}"
    program_runner.command.cache_clear()
