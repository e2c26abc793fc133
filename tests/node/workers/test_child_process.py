from __future__ import annotations

import os
import sys

import pytest
import trio

from node.workers import child_process, frames
from node.workers.child_process import WorkerError, open_worker

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
        arguments = {"text": "héllo", "raw": bytes(range(256)) * 300, "numbers": [1, -2, 3.5, None, True]}
        assert await worker.call("echo", timeout=20, **arguments) == arguments
        with pytest.raises(WorkerError, match=r"echo: fail: no such file: x.jsonl name another$") as user:
            await worker.call("fail", timeout=5, kind="user")
        assert user.value.kind == "user"
        assert not user.value.gone
        with pytest.raises(WorkerError, match=r"ZeroDivisionError: nothing to divide$") as internal:
            await worker.call("fail", timeout=5, kind="internal")
        assert internal.value.kind == "internal"
        with pytest.raises(WorkerError, match="unknown operation 'nothing'"):
            await worker.call("nothing", timeout=5)
        with pytest.raises(WorkerError, match="missing 1 required positional argument"):
            await worker.call("die", timeout=5)
        with pytest.raises(WorkerError, match="cannot be encoded"):
            await worker.call("unspeakable", timeout=5)
        assert await worker.call("chatter", timeout=5, size=1_000_000) == {}
        found = await worker.call("environment", timeout=5)
        assert found["group"] == worker.pid
        assert found["nice"] >= min(19, os.nice(0) + 10)
        assert set(found["environment"]) <= set(child_process.child_environment({"EXTRA": "1"})) | {"LC_CTYPE"}
        assert found["environment"]["PYTHONHASHSEED"] == "0"
        assert worker.alive
    assert gone(worker.pid)
    assert not worker.alive


async def test_death_is_told_at_once_with_the_last_words() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        with pytest.raises(
            WorkerError, match=r"scorer: die: the child ended with exit code 7 \(the last words\)"
        ) as death:
            await worker.call("die", timeout=60, code=7)
        assert death.value.gone
        with pytest.raises(WorkerError, match="scorer: echo: the child ended with exit code 7"):
            await worker.call("echo", timeout=60)


async def test_a_child_that_never_stops_writing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        with monkeypatch.context() as patch:
            patch.setattr(os, "read", lambda descriptor, size: b"x" * size)  # it writes as fast as it is read
            assert worker._drain_stderr()
        assert await worker.call("echo", timeout=20, value=1) == {"value": 1}


async def test_death_is_noticed_although_a_descendant_holds_the_socket() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        other = (await worker.call("grandchild", timeout=20))["pid"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.wait_dead)
            with trio.fail_after(5), pytest.raises(WorkerError, match="exit code 3"):
                await worker.call("die", timeout=60, code=3)
        await wait_gone(other)


async def test_leaving_kills_the_whole_group() -> None:
    async with open_worker(ECHO, name="scorer") as worker:
        other = (await worker.call("grandchild", timeout=20))["pid"]
    assert gone(worker.pid)
    await wait_gone(other)


async def test_timeout_kills_the_child() -> None:
    async with open_worker(ECHO, name="engine") as worker:
        await worker.call("ping", timeout=20)
        with pytest.raises(WorkerError, match=r"engine: hang took longer than 0.05 s") as late:
            await worker.call("hang", timeout=0.05)
        assert late.value.kind == "timeout"
        assert late.value.gone
        assert not worker.alive
        await wait_gone(worker.pid)


async def test_cancellation_leaves_no_child() -> None:
    with trio.move_on_after(0.05) as scope:
        async with open_worker(ECHO, name="engine") as worker:
            await worker.call("hang", timeout=3600)
    assert scope.cancelled_caught
    assert gone(worker.pid)


async def test_calls_wait_for_each_other() -> None:
    answers: list[int] = []
    async with open_worker(ECHO, name="echo") as worker:

        async def one(number: int) -> None:
            answers.append((await worker.call("echo", timeout=20, number=number))["number"])

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, number)
    assert sorted(answers) == list(range(8))


async def test_a_missing_program_is_one_clear_error() -> None:
    with pytest.raises(WorkerError, match=r"scorer: cannot start the child: .*no-such-sandbox"):
        async with open_worker(ECHO, name="scorer", prefix=["/no-such-sandbox"]):
            pass
    with pytest.raises(WorkerError, match=r"exit code 1 .*No module named"):
        async with open_worker("node.workers.nothing", name="engine") as worker:
            await worker.call("ping", timeout=20)


async def test_the_child_ends_in_mid_operation_when_the_socket_closes() -> None:
    async with open_worker(ECHO, name="engine") as worker:
        await worker.call("ping", timeout=20)
        await worker._stream.send_all(frames.encode({"op": "hang"}))
        await worker._stream.aclose()
        with trio.fail_after(5):
            await worker.wait_dead()
        assert worker._process.returncode == 0


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
            await worker.call("echo", timeout=60)
        assert error.value.kind in ("died", "internal")
