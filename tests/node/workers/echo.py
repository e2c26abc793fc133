"""A small child for the tests of the client: started as ``python -m tests.node.workers.echo FD``."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec

from node.errors import UserError
from node.workers import child_loop
from node.workers.frames import ChildRequest


class Values(msgspec.Struct, frozen=True):
    text: str = ""
    raw: bytes = b""
    numbers: list[int | float | None] = []


class Echo(ChildRequest[Values], frozen=True, tag="echo"):
    values: Values = Values()


class Fail(ChildRequest[None], frozen=True, tag="fail"):
    kind: str


class Die(ChildRequest[None], frozen=True, tag="die"):
    code: int


class Surroundings(msgspec.Struct):
    environment: dict[str, str]
    nice: int
    group: int


class AskSurroundings(ChildRequest[Surroundings], frozen=True, tag="environment"):
    pass


class Hang(ChildRequest[None], frozen=True, tag="hang"):
    pass


class Grandchild(ChildRequest[int], frozen=True, tag="grandchild"):
    pass


class Chatter(ChildRequest[None], frozen=True, tag="chatter"):
    size: int


class Unspeakable(ChildRequest[Values], frozen=True, tag="unspeakable"):
    pass


class Lie(ChildRequest[Values], frozen=True, tag="lie"):
    """Is answered with something else than it asks for."""


class Unknown(ChildRequest[None], frozen=True, tag="nothing"):
    """Is no operation of this child."""


def echo(request: Echo) -> Values:
    return request.values


def fail(request: Fail) -> None:
    if request.kind == "user":
        raise UserError("no such file: x.jsonl\nname another")
    raise ZeroDivisionError("nothing to divide")


def die(request: Die) -> None:
    print("the last words", file=sys.stderr)
    os._exit(request.code)


def environment(request: AskSurroundings) -> Surroundings:
    return Surroundings(dict(os.environ), os.nice(0), os.getpgid(0))


def hang(request: Hang) -> None:
    time.sleep(3600)


def grandchild(request: Grandchild) -> int:
    """A descendant that holds the socket open, as bubblewrap does, and outlives its parent unless it is killed."""
    return subprocess.Popen(["sleep", "3600"], close_fds=False).pid


def chatter(request: Chatter) -> None:
    for _ in range(request.size // 1000):
        print("x" * 999, file=sys.stderr)


def unspeakable(request: Unspeakable) -> Values:
    return Values(text="\ud800")


def lie(request: Lie) -> Values:
    return Values(numbers=["1"])  # type: ignore[list-item]


OPERATIONS: list[child_loop.Operation] = [echo, fail, die, environment, hang, grandchild, chatter, unspeakable, lie]

if __name__ == "__main__":
    child_loop.run(lambda: OPERATIONS)
