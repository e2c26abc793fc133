from __future__ import annotations

import errno
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from node.tasks import seccomp

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
THREAD = 0x00010000
# A thread and a process as glibc makes them.
THREAD_FLAGS, PROCESS_FLAGS = 0x3D0F00, 0x01200011


def decide(machine: str, architecture: int, number: int, argument: int = 0, second: int = 0) -> int:
    """What the filter answers: a small interpreter of classic BPF."""
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    data = struct.pack("<iIQQQ", number, architecture, 0, argument, second)
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = code[position]
        position += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            position += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "column", "clone", "read"),
    [("x86_64", 0xC000003E, 0, 56, 0), ("aarch64", 0xC00000B7, 1, 220, 63)],
)
def test_decisions(machine: str, architecture: int, column: int, clone: int, read: int) -> None:
    def ask(number: int, argument: int = 0) -> int:
        # The first argument stands 16 bytes into seccomp_data.
        code = struct.pack("<iIQQ", number, architecture, 0, argument)
        assert len(code) == 24
        return decide(machine, architecture, number, argument)

    refused = [numbers[column] for numbers in seccomp._REFUSED.values() if numbers[column] is not None]
    assert len(refused) == len(set(refused))
    for number in refused:
        assert number is not None
        assert ask(number) == ERRNO | errno.EPERM
    assert ask(read) == ALLOW
    assert ask(435) == ERRNO | errno.ENOSYS
    assert decide(machine, 0x40000003, read) == KILL
    assert decide(machine, architecture, clone) == ERRNO | errno.EPERM


@pytest.mark.parametrize(
    ("machine", "architecture", "fcntl"), [("x86_64", 0xC000003E, 72), ("aarch64", 0xC00000B7, 25)]
)
def test_the_kernel_signals_and_holds_up_nobody_for_it(machine: str, architecture: int, fcntl: int) -> None:
    refused = {operation for operation in range(2000) if decide(machine, architecture, fcntl, 0, operation) != ALLOW}
    signalling = {8, 10, 15}  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    locking = {6, 7, 37, 38}  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
    assert refused == signalling | locking | {1024, 1026, 1040}  # F_SETLEASE, F_NOTIFY, F_SETDELEG
    # The kernel reads 32 bits of the operation.
    assert decide(machine, architecture, fcntl, 0, 1024 | 1 << 32) == ERRNO | errno.EPERM


def test_x32_calls_end_the_process() -> None:
    assert decide("x86_64", 0xC000003E, 0x40000000 + 57) == KILL


def test_the_filter_at_work() -> None:
    code = """
import json, os, socket, subprocess, threading
from node.tasks import seccomp
threading.Thread(target=threading.Event().wait, daemon=True).start()
report = {"install": seccomp.install()}
def attempt(name, function):
    try:
        function()
        report[name] = "done"
    except OSError as error:
        report[name] = error.errno
attempt("fork", os.fork)
attempt("socket", socket.socket)
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("subprocess", lambda: subprocess.run(["true"]))
attempt("file", lambda: open("/dev/null").read())
thread = threading.Thread(target=lambda: attempt("fork in a thread", os.fork))
thread.start()
thread.join()
print(json.dumps(report))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    report = json.loads(output.stdout)
    assert report.pop("install") is None
    assert report.pop("file") == "done"
    assert len(report) == 6
    assert set(report.values()) == {errno.EPERM}


def test_no_lease_and_no_lock_is_had(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("of the host")
    code = f"""
import fcntl, json, os, struct
from node.tasks import seccomp
file = os.open({str(file)!r}, os.O_RDONLY)
folder = os.open({str(tmp_path)!r}, os.O_RDONLY)
lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
attempts = {{
    "lease": lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "notify": lambda: fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_CREATE),
    "record": lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB),
    "description": lambda: fcntl.fcntl(file, 37, lock),
    "flock": lambda: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB),
    "flags": lambda: fcntl.fcntl(file, fcntl.F_GETFL),
}}
def report():
    found = {{}}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = error.errno
    return found
before = report()
assert seccomp.install() is None
print(json.dumps([before, report()]))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert output.returncode == 0, output.stderr
    before, after = json.loads(output.stdout)
    # What the file system of this machine does not know is refused for other reasons.
    had = {name for name, outcome in before.items() if outcome == "done"}
    assert had >= {"record", "flock", "flags"}
    assert after.pop("flags") == "done"
    assert set(after.values()) == {errno.EPERM}
