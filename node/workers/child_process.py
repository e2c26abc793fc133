"""The daemon's side of a child process: start it, call it, and never outlive or leak it. Imports no torch.

1. A child is started from the main thread, because Linux ties ``PR_SET_PDEATHSIG`` to the thread that forks (trio's
   own ``open_process`` forks in a worker thread that ends after ten idle seconds).
2. It gets a process group of its own and only the environment it needs; leaving ``open_worker`` kills its whole process
   group, whatever was going on, and waits for it for a bounded time even under cancellation.
3. One call at a time. A call ends with the child's answer, the child's death (noticed at once through its pidfd), or
   its timeout. After a timeout or a cancellation the stream is out of step, so the child is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Required, TypedDict, TypeVar, Unpack

import trio

import node
from node.workers import frames
from node.workers.frames import Answer, CallAnswered, CallFailed, ChildRequest
from protocol.errors import Error, LocalError

_CLOSE_SECONDS = 3.0
_STDERR_TAIL = 8192
_STDERR_READS = 4
"""Pipes full of standard error that are read at a time."""
# What a child may inherit: where programs, libraries, temporary files and GPUs are. Nothing else of the operator's.
_INHERITED = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")

Kind = Literal["user", "internal", "died", "timeout"]


class WorkerError(Error):
    """A call to a child failed.

    ``kind``: "user" (a mistake that a person can mend), "internal" (the operation failed; the child lives on), "died"
    or "timeout" (the child is gone and must be started anew).
    """

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(message)
        self.kind: Kind = kind

    @property
    def gone(self) -> bool:
        """Whether the child is dead, so that only a new one can go on."""
        return self.kind in ("died", "timeout")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a child; ``extra`` wins over the defaults."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= {
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # five of reasoning-gym's generators depend on it
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    root = Path(node.__file__).resolve().parents[1]
    # Run from a source tree, the child (python -P) needs to be told where the packages are. An installed one finds
    # them, and must not have all of site-packages put before the standard library.
    if str(root) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = str(root)
    return environment | dict(extra)


@dataclass(eq=False)
class Process:
    """One running child: our end of the socket to it, and descriptors of its standard error and of the process. Made by
    ``spawn``; ``aclose`` ends it."""

    name: str
    pid: int
    _process: subprocess.Popen[bytes]
    _stream: trio.SocketStream
    _stderr: int
    _pidfd: int
    _watching: trio.Lock = field(default_factory=trio.Lock, init=False)
    _tail: bytes = field(default=b"", init=False)

    def _reap(self) -> int | None:
        """The child's exit code, None while it runs. What a dead child left running in its group is killed."""
        if self._process.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # a zombie still holds its number, so nobody else is hit
            self._process.poll()
        return self._process.returncode

    async def wait_dead(self) -> None:
        """Return once the child's process has ended."""
        while self._reap() is None:
            # One task alone may wait for a descriptor; the others wait for that one, and look for themselves.
            async with self._watching:
                if self._reap() is None:
                    await trio.lowlevel.wait_readable(self._pidfd)

    async def read_frame(self) -> bytes:
        """The body of the next frame from the child.

        Raises ``LocalError`` for rubbish or a closed end, ``trio.BrokenResourceError`` where the socket broke.
        """
        size = frames.body_size(await self._receive(frames.HEADER_BYTES))
        return await self._receive(size)

    async def send(self, frame: bytes) -> None:
        """Send one frame. Raises ``trio.BrokenResourceError``."""
        await self._stream.send_all(frame)

    async def drain(self) -> None:
        """Keep the tail of what the child writes to standard error, until it closes that."""
        while self._drain_stderr():
            await trio.lowlevel.wait_readable(self._stderr)

    async def _receive(self, size: int) -> bytes:
        buffer = bytearray()
        while len(buffer) < size:
            part = await self._stream.receive_some(min(1 << 20, size - len(buffer)))
            if not part:
                raise LocalError("the child closed its end")
            buffer += part
        return bytes(buffer)

    def _drain_stderr(self) -> bool:
        """Keep the tail of what the child wrote to standard error; False once it is closed."""
        with suppress(BlockingIOError):
            for _ in range(_STDERR_READS):  # one that never stops writing must not hold up the loop
                part = os.read(self._stderr, 65536)
                if not part:
                    return False
                self._tail = (self._tail + part)[-_STDERR_TAIL:]
        return True

    def how_it_ended(self) -> str:
        """How the child's life ended, with its last words, for people."""
        self._drain_stderr()
        code = self._reap()
        if code is None:
            how = "does not answer in step"
        elif code < 0:
            how = f"was ended by signal {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return how + (f" ({lines[-1].strip()[:300]})" if lines else "")

    def kill(self) -> None:
        """Kill the child's process group now. Calling it again does no harm."""
        # Once reaped, its number may belong to somebody else, so ask before signalling.
        if self._reap() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """Kill the child and wait for it, for a bounded time even under cancellation."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_SECONDS):
            self.kill()
            await self.wait_dead()
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)
        os.close(self._stderr)
        os.close(self._pidfd)


@dataclass(eq=False)
class Worker(Process):
    """A child that answers one call at a time. Made by ``open_worker`` only."""

    _lock: trio.Lock = field(default_factory=trio.Lock, init=False)
    _out_of_step: bool = field(default=False, init=False)

    @property
    def alive(self) -> bool:
        """Whether the child can take another call."""
        return not self._out_of_step and self._reap() is None

    def kill(self) -> None:
        """Kill the child's process group now. Calling it again does no harm."""
        self._out_of_step = True
        super().kill()

    async def call(self, request: ChildRequest[Answer], *, timeout: float) -> Answer:
        """Ask the child for something and return its answer.

        ``timeout`` in seconds counts from when the child is free; the first call also waits for the child to start (a
        torch child takes about three seconds). Raises ``WorkerError``.
        """
        op, frame = frames.operation_of(type(request)), frames.encode(request)
        answered: Any = CallAnswered[frames.answer_type(type(request))]  # type: ignore[misc]
        async with self._lock:
            if not self.alive:
                raise self._death(op)
            self._out_of_step = True
            try:
                with trio.move_on_after(timeout) as deadline:
                    answer: CallAnswered[Answer] | CallFailed | None = await self._exchange(
                        frame, answered | CallFailed
                    )
            except BaseException:  # a nursery wraps the Cancelled of its tasks in a group
                self.kill()
                raise
            if deadline.cancelled_caught:
                self.kill()
                raise WorkerError(f"{self.name}: {op} took longer than {timeout:g} s, the child was killed", "timeout")
            if answer is None:
                self.kill()  # it closed its end, or sent rubbish, or is dead already
                with trio.move_on_after(_CLOSE_SECONDS):
                    await self.wait_dead()
                raise self._death(op)
            self._out_of_step = False
        if isinstance(answer, CallFailed):
            raise WorkerError(f"{self.name}: {op}: {answer.error}", answer.kind)
        return answer.answer

    async def _exchange(self, frame: bytes, expected: Any) -> Any:
        """Send ``frame`` and return the answer, or None where the child died or spoke rubbish."""
        answer = None

        async def talk() -> None:
            nonlocal answer
            with suppress(trio.BrokenResourceError, LocalError):
                await self.send(frame)
                answer = frames.decode(await self.read_frame(), expected)
            nursery.cancel_scope.cancel()

        async def watch() -> None:
            # A descendant may keep the child's end of the pair open, so the stream alone does not tell of its death.
            await self.wait_dead()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            nursery.start_soon(watch)
            nursery.start_soon(self.drain)
        return answer

    def _death(self, op: str) -> WorkerError:
        return WorkerError(f"{self.name}: {op}: the child {self.how_it_ended()}", "died")


P = TypeVar("P", bound=Process)


class StartOptions(TypedDict, total=False):
    """How a child is started, beside its module."""

    name: Required[str]
    """What people read in errors."""
    environment: Mapping[str, str]
    """Adds to the little that a child gets."""
    prefix: Sequence[str]
    """Goes before the command line: a sandbox, or a launcher."""
    launched: bool
    """``prefix`` is a launcher of processes: those close every descriptor but the standard ones, so the socket is
    standard input."""
    arguments: Sequence[str]
    """What follows the socket's number on the command line."""
    inherited: Sequence[int]
    """Descriptors that it gets under the same numbers."""


def spawn(kind: type[P], module: str, **how: Unpack[StartOptions]) -> P:
    """Start ``python -P -m module FD arguments…`` as a child.

    Call it from the main thread. Raises ``WorkerError`` where it cannot be started, for whatever reason, and leaves
    nothing behind then.
    """
    name, launched = how["name"], how.get("launched", False)
    command = [*how.get("prefix", ()), sys.executable, "-P", "-m", module]
    try:
        # What the child gets is closed here in any case, what is kept where something fails.
        with ExitStack() as given, ExitStack() as kept:
            ours, theirs = socket.socketpair()
            kept.enter_context(ours)
            given.enter_context(theirs)
            stderr_read, stderr_write = os.pipe()
            kept.callback(os.close, stderr_read)
            given.callback(os.close, stderr_write)
            process = subprocess.Popen(
                [*command, str(0 if launched else theirs.fileno()), *how.get("arguments", ())],
                stdin=theirs.fileno() if launched else subprocess.DEVNULL,
                stdout=stderr_write,
                stderr=stderr_write,
                pass_fds=(theirs.fileno(), *how.get("inherited", ())),
                # No session of its own: with autogroups (sched(7)) niceness counts among the processes of one session
                # only.
                process_group=0,
                env=child_environment(how.get("environment", {})),
            )
            kept.callback(_discard, process)
            pidfd = os.pidfd_open(process.pid)
            kept.callback(os.close, pidfd)
            os.set_blocking(stderr_read, False)
            ours.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            kept.pop_all()
    except OSError as error:
        raise WorkerError(f"{name}: cannot start the child: {error}", "died") from None
    return kind(name, process.pid, process, stream, stderr_read, pidfd)


def _discard(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@asynccontextmanager
async def open_worker(module: str, **how: Unpack[StartOptions]) -> AsyncIterator[Worker]:
    """Start a child as ``spawn`` does and yield it; leaving the block kills it."""
    worker = spawn(Worker, module, **how)
    try:
        yield worker
    finally:
        await worker.aclose()


class OpenWorker(Protocol):
    """How children are started: ``open_worker``, or what tests put in its place."""

    def __call__(self, module: str, **how: Unpack[StartOptions]) -> AbstractAsyncContextManager[Worker]:
        """See ``open_worker``."""
