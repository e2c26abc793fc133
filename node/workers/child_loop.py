"""The main loop that every child process shares: set up the process, then answer requests until the socket closes.

1. The child dies with its parent: ``PR_SET_PDEATHSIG``, and a thread that ends the process as soon as the other end of
   the socket is gone, in the midst of an operation too. Operations write files atomically, so this loses nothing.
2. It runs at low priority, so that the daemon stays responsive on a machine whose cores are all busy.
3. ``UserError`` is answered as kind "user" (one line that names the thing and the remedy), every other exception as
   kind "internal" with its traceback on standard error; neither ends the child.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from node.workers import frames
from protocol.errors import LocalError

NICENESS = 10
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

Operation = Callable[..., dict[str, Any]]


class UserError(Exception):
    """A mistake that a person can mend (an unreadable file, an unknown task): one line, no traceback."""


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


def answer(operations: Mapping[str, Operation], request: dict[str, Any]) -> dict[str, Any]:
    """Run the operation that ``request`` names and return the frame to send back. Never raises an ``Exception``."""
    name = request.pop("op", None)
    operation = operations.get(name) if isinstance(name, str) else None
    if operation is None:
        return {"error": f"unknown operation {name!r}", "kind": "internal"}
    try:
        return {"ok": operation(**request)}
    except UserError as error:
        return {"error": _one_line(error), "kind": "user"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {_one_line(error)}"[:2000], "kind": "internal"}


def serve(operations: Mapping[str, Operation], connection: socket.socket) -> None:
    """Answer requests over ``connection``, one at a time, until its other end closes. ``ping`` is always there."""
    table: dict[str, Operation] = {"ping": dict, **operations}
    while (body := frames.read_frame(connection)) is not None:
        reply = answer(table, frames.decode(body, dict[str, Any]))
        try:
            frame = frames.encode(reply)
        except LocalError as error:
            frame = frames.encode({"error": _one_line(error), "kind": "internal"})
        connection.sendall(frame)


def connect(descriptor: int) -> socket.socket:
    """Set up the process (rules 1 and 2); ``descriptor`` is the socket's number."""
    die_with_parent()
    os.nice(NICENESS)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=end_when_closed, args=(descriptor,), daemon=True, name="end-when-closed").start()
    return connection


def run(make_operations: Callable[[], Mapping[str, Operation]], arguments: list[str] | None = None) -> None:
    """The body of a child's ``__main__``: ``arguments`` (default: the command line's) hold the socket's number."""
    connection = connect(int((sys.argv[1:] if arguments is None else arguments)[0]))
    with suppress(OSError):  # the daemon went away while an answer was being sent
        serve(make_operations(), connection)
