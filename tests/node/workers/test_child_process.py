from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import trio

from node.workers import child_process, frames
from node.workers.child_process import WorkerError, open_worker
from tests.node.workers.echo import (
    AskSurroundings,
    Chatter,
    Die,
    Echo,
    Fail,
    Grandchild,
    Hang,
    Lie,
    Unknown,
    Unspeakable,
    Values,
)

ECHO = "tests.node.workers.echo"


def gone(pid: int) -> bool:
    """Whether no living process has this number (a zombie that its new parent has not reaped counts as gone)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def wait_gone(pid: int) -> None:
    if not gone(pid):
        pidfd = os.pidfd_open(pid)
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(pidfd)
        os.close(pidfd)


async def test_calls_errors_and_environment() -> None:
    async with open_worker(ECHO, name="echo", environment={"EXTRA": "1"}) as worker:
        values = Values("héllo", bytes(range(256)) * 300, [1, -2, 3.5, None])
        assert await worker.call(Echo(values), timeout=20) == values
        with pytest.raises(WorkerError, match=r"echo: fail: no such file: x.jsonl name another$") as user:
            await worker.call(Fail("user"), timeout=5)
        assert user.value.kind == "user"
        assert not user.value.gone
        with pytest.raises(WorkerError, match=r"ZeroDivisionError: nothing to divide$") as internal:
            await worker.call(Fail("internal"), timeout=5)
        assert internal.value.kind == "internal"
        with pytest.raises(WorkerError, match="echo: nothing: a worker frame has no known form"):
            await worker.call(Unknown(), timeout=5)
        with pytest.raises(WorkerError, match="cannot be encoded"):
            await worker.call(Unspeakable(), timeout=5)
        await worker.call(Chatter(1_000_000), timeout=5)
        found = await worker.call(AskSurroundings(), timeout=5)
        assert found.group == worker.pid
        assert found.nice >= min(19, os.nice(0) + 10)
        assert set(found.environment) <= set(child_process.child_environment({"EXTRA": "1"})) | {"LC_CTYPE"}
        assert found.environment["PYTHONHASHSEED"] == "0"
        assert worker.alive
    assert gone(worker.pid)
    assert not worker.alive


async def test_death_is_told_at_once_with_the_last_words() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        with pytest.raises(
            WorkerError, match=r"scorer: die: the child ended with exit code 7 \(the last words\)"
        ) as death:
            await worker.call(Die(7), timeout=60)
        assert death.value.gone
        with pytest.raises(WorkerError, match="scorer: echo: the child ended with exit code 7"):
            await worker.call(Echo(), timeout=60)


async def test_a_child_that_lies_is_ended() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        with pytest.raises(WorkerError, match="scorer: lie: the child was ended by signal SIGKILL") as death:
            await worker.call(Lie(), timeout=20)
        assert death.value.gone


FLOOD = """
import os, sys, threading
threading.Thread(target=lambda: [os.write(2, b"x" * 65536) for _ in iter(int, 1)], daemon=True).start()
from tests.node.workers import echo
from node.workers import child_loop
child_loop.run(lambda: echo.OPERATIONS, sys.argv[-1:])
"""


async def test_a_child_that_never_stops_writing_holds_up_nobody() -> None:
    async with open_worker(ECHO, name="scorer", prefix=[sys.executable, "-c", FLOOD]) as worker:
        assert await worker.call(Echo(Values("1")), timeout=20) == Values("1")


async def test_death_is_noticed_although_a_descendant_holds_the_socket() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        other = await worker.call(Grandchild(), timeout=20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.wait_dead)
            with trio.fail_after(5), pytest.raises(WorkerError, match="exit code 3"):
                await worker.call(Die(3), timeout=60)
        await wait_gone(other)


async def test_leaving_kills_the_whole_group() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        other = await worker.call(Grandchild(), timeout=20)
    assert gone(worker.pid)
    await wait_gone(other)


async def test_timeout_kills_the_child() -> None:
    async with open_worker(ECHO, name="engine") as worker:
        await worker.call(Echo(), timeout=20)
        with pytest.raises(WorkerError, match=r"engine: hang took longer than 0.05 s") as late:
            await worker.call(Hang(), timeout=0.05)
        assert late.value.kind == "timeout"
        assert late.value.gone
        assert not worker.alive
        await wait_gone(worker.pid)


async def test_cancellation_leaves_no_child() -> None:
    with trio.move_on_after(0.05) as scope:
        async with open_worker(ECHO, name="engine") as worker:
            await worker.call(Hang(), timeout=3600)
    assert scope.cancelled_caught
    assert gone(worker.pid)


async def test_calls_wait_for_each_other() -> None:
    answers: list[str] = []
    async with open_worker(ECHO, name="echo") as worker:

        async def one(number: int) -> None:
            answers.append((await worker.call(Echo(Values(str(number))), timeout=20)).text)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, number)
    assert sorted(answers) == list(map(str, range(8)))


async def test_a_missing_program_is_one_clear_error() -> None:
    with pytest.raises(WorkerError, match=r"scorer: cannot start the child: .*no-such-sandbox"):
        async with open_worker(ECHO, name="scorer", prefix=["/no-such-sandbox"]):
            pass
    with pytest.raises(WorkerError, match=r"exit code 1 .*No module named"):
        async with open_worker("node.workers.nothing", name="engine") as worker:
            await worker.call(Echo(), timeout=20)


def test_the_child_ends_in_mid_operation_when_the_socket_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", ECHO, str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            ours.sendall(frames.encode(Echo()))
            assert frames.read_frame(ours) is not None
            ours.sendall(frames.encode(Hang()))
            ours.close()
            assert process.wait(10) == 0


RUBBISH = """
import os, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[-1]))
connection.sendall(bytes.fromhex({frame!r}))
time.sleep(3600)
"""


@pytest.mark.parametrize("frame", ["ffffffff", "00000001c1", "0000000193", "000000028101", "0000000481a16f80c0"])
async def test_rubbish_from_the_child_ends_it(frame: str) -> None:
    prefix = [sys.executable, "-c", RUBBISH.format(frame=frame)]
    async with open_worker(ECHO, name="scorer", prefix=prefix) as worker:
        with trio.fail_after(20), pytest.raises(WorkerError) as error:
            await worker.call(Echo(), timeout=60)
        assert error.value.kind in ("died", "internal")


FULL = """
import os, resource, sys
import trio
from node.workers.child_process import WorkerError, open_worker
from tests.node.workers.echo import Echo, Values

def held():
    return len(os.listdir("/proc/self/fd"))

async def attempt():
    try:
        async with open_worker("tests.node.workers.echo", name="echo") as worker:
            return (await worker.call(Echo(Values("1")), timeout=20)).text
    except WorkerError as error:
        assert error.gone
        return str(error)

async def main():
    assert await attempt() == "1"
    before, found = held(), []
    for room in range(9):
        files = []
        try:
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(room):
            os.close(files.pop())
        found.append(await attempt())
        for file in files:
            os.close(file)
        assert held() == before, (room, held(), before)
    print(*found, sep="\\n")

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
trio.run(main)
"""

CROWDED = """
import os, resource
import trio
from node.log.signature_checkers import open_checkers
from node.tasks.allowlist import REASONING_GYM_VERSION as VERSION
from node.tasks.task_service import TaskService
from node.workers.child_process import WorkerError, child_environment, open_worker

ROW = dict(kind="reasoning-gym", name="chain_sum", parameters="{}", version=VERSION, data=None)

def held():
    count = 0
    for number in range(256):
        try:
            os.fstat(number)
            count += 1
        except OSError:
            pass
    return count

async def main():
    child_environment({})  # reads files that another user may not
    await trio.to_thread.run_sync(int)  # a thread is a process to the kernel; this one is kept for a while
    before = held()
    if os.getuid() == 0:  # whom the limit does not bind
        os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    for opened in (open_worker("tests.node.workers.echo", name="echo"), TaskService([ROW], sandboxed=False)):
        try:
            async with opened:
                print("started")
        except WorkerError as error:
            print(error)
    async with open_checkers(1) as checkers:
        print(await checkers.check([(b"", b"", b"", b"")]))
    assert held() == before

trio.run(main)
"""


def said(code: str) -> list[str]:
    """What a process of its own says."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_table_of_descriptors_is_an_error_and_leaves_none_behind() -> None:
    found = said(FULL)
    assert found[0] == "echo: cannot start the child: [Errno 24] Too many open files"
    assert found[-1] == "1"
    assert all(line == "1" or line.startswith(found[0]) for line in found)


def test_no_more_processes_is_an_error_to_all_who_start_children() -> None:
    cannot = "cannot start the child: [Errno 11] Resource temporarily unavailable"
    assert said(CROWDED) == [f"echo: {cannot}", f"tasks: {cannot}", "[False]"]
