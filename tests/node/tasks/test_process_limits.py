from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from node.tasks import process_limits


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)


def burn() -> None:
    while True:
        pass


def test_time_is_bounded_and_the_timers_end_with_the_block() -> None:
    started = time.process_time()
    with pytest.raises(process_limits.OutOfTime), process_limits.time_limit(0.05) as clock:
        burn()
    assert clock.expired
    assert time.process_time() - started < 0.5
    for timer in (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL, signal.ITIMER_REAL):
        assert signal.getitimer(timer) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_DFL


def test_work_in_time_is_left_alone() -> None:
    with process_limits.time_limit(5) as clock:
        value = sum(range(1000))
    assert value == 499_500
    assert not clock.expired
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_swallowed_exception_comes_again_and_is_remembered() -> None:
    swallowed = 0
    with process_limits.time_limit(0.02) as clock:
        while swallowed < 2:
            try:
                burn()
            except BaseException:
                swallowed += 1
    assert clock.expired


def test_code_that_never_returns_ends_the_process() -> None:
    died = run(
        "from node.tasks import process_limits as limits\nlimits.WALL_FACTOR = 1000\n"
        "with limits.time_limit(0.1): sum(range(10**12))"
    )
    assert died.returncode == -signal.SIGVTALRM


def test_waiting_code_ends_the_process() -> None:
    died = run(
        "import time\nfrom node.tasks import process_limits as limits\nwith limits.time_limit(0.02): time.sleep(20)"
    )
    assert died.returncode == -signal.SIGALRM


def test_resource_limits() -> None:
    code = (
        "import resource\nfrom node.tasks import process_limits as limits\n"
        "limits.bound_process(memory_bytes=1 << 30, file_bytes=1 << 20)\nlimits.bound_processes(50)\n"
        "limits.bound_process(memory_bytes=2 << 30, file_bytes=1 << 20)\n"
        "print(*(resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE,"
        " resource.RLIMIT_CORE, resource.RLIMIT_NPROC)))\n"
        "try: bytearray(2 << 30)\nexcept MemoryError: print('bounded')"
    )
    assert run(code).stdout.split() == [str(1 << 30), str(1 << 20), "0", "50", "bounded"]
