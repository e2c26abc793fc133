"""The main loop that every child process shares: set up the process, then answer requests until the socket closes.

1. The child dies with its parent: ``PR_SET_PDEATHSIG``, and a thread that ends the process as soon as the other end of
   the socket is gone, in the midst of an operation too. Operations write files atomically, so this loses nothing.
2. It runs at low priority, so that the daemon stays responsive on a machine whose cores are all busy.
3. ``node.errors.UserError`` (a mistake that a person can mend) is answered as kind "user", every other exception as
   kind "internal" with its traceback on standard error; neither ends the child.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_type_hints

from node.errors import UserError
from node.workers import frames
from node.workers.frames import CallAnswered, CallFailed, ChildRequest
from protocol.errors import LocalError

NICENESS = 10
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

Operation = Callable[[Any], object]
"""Takes one kind of request and returns its answer, both named in its signature."""

Table = Mapping[type[ChildRequest[Any]], Operation]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (prctl(2), Linux only)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_when_closed(descriptor: int) -> None:
    """End the process as soon as the other end of the socket ``descriptor`` is gone. For a thread of its own."""
    # POLLRDHUP is reported although unread data is waiting, and needs no read that would steal from the main loop.
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:2000]


def methods(child: object) -> list[Operation]:
    """The public methods of ``child``, where these are its operations."""
    return [getattr(child, name) for name in dir(child) if not name.startswith("_")]


def table(operations: Iterable[Operation]) -> Table:
    """The ``operations`` by the type of the request that each takes, which its signature says.

    Raises ``TypeError`` for one that does not answer what its request asks for.
    """
    found: dict[type[ChildRequest[Any]], Operation] = {}
    for operation in operations:
        (kind, *_), answers = (hints := get_type_hints(operation)).values(), hints["return"]
        if answers != frames.answer_type(kind):
            raise TypeError(f"{operation} answers {answers}, {kind} asks for {frames.answer_type(kind)}")
        found[kind] = operation
    return found


def answer(operations: Table, body: bytes) -> bytes:
    """Do what the request in a frame's ``body`` asks for and return the frame to send back. Raises no ``Exception``."""
    try:
        request = frames.decode(body, functools.reduce(operator.or_, operations))
        return frames.encode(CallAnswered(operations[type(request)](request)))
    except UserError as error:
        return frames.encode(CallFailed(_one_line(error), "user"))
    except LocalError as error:
        return frames.encode(CallFailed(_one_line(error), "internal"))
    except Exception as error:
        traceback.print_exc()
        return frames.encode(CallFailed(f"{type(error).__name__}: {_one_line(error)}"[:2000], "internal"))


def serve(operations: Table, connection: socket.socket) -> None:
    """Answer requests over ``connection``, one at a time, until its other end closes."""
    while (body := frames.read_frame(connection)) is not None:
        connection.sendall(answer(operations, body))


def connect(descriptor: int) -> socket.socket:
    """Set up the process (rules 1 and 2); ``descriptor`` is the socket's number."""
    die_with_parent()
    os.nice(NICENESS)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=end_when_closed, args=(descriptor,), daemon=True, name="end-when-closed").start()
    return connection


def run(make_operations: Callable[[], Iterable[Operation]], arguments: Sequence[str] | None = None) -> None:
    """The body of a child's ``__main__``: ``arguments`` (default: the command line's) hold the socket's number."""
    connection = connect(int((sys.argv[1:] if arguments is None else arguments)[0]))
    with suppress(OSError):  # the daemon went away while an answer was being sent
        serve(table(make_operations()), connection)
