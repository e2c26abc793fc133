"""A small child for the tests of the client: started as ``python -m tests.node.workers.echo FD``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from node.workers import child_loop


def echo(**arguments: Any) -> dict[str, Any]:
    return arguments


def fail(kind: str) -> dict[str, Any]:
    if kind == "user":
        raise child_loop.UserError("no such file: x.jsonl\nname another")
    raise ZeroDivisionError("nothing to divide")


def die(code: int) -> dict[str, Any]:
    print("the last words", file=sys.stderr)
    os._exit(code)


def environment() -> dict[str, Any]:
    return {"environment": dict(os.environ), "nice": os.nice(0), "group": os.getpgid(0)}


def hang() -> dict[str, Any]:
    time.sleep(3600)
    return {}


def grandchild() -> dict[str, Any]:
    """A descendant that holds the socket open, as bubblewrap does, and outlives its parent unless it is killed."""
    process = subprocess.Popen(["sleep", "3600"], close_fds=False)
    return {"pid": process.pid}


def chatter(size: int) -> dict[str, Any]:
    for _ in range(size // 1000):
        print("x" * 999, file=sys.stderr)
    return {}


def unspeakable() -> dict[str, Any]:
    return {"value": object()}


if __name__ == "__main__":
    child_loop.run(
        lambda: {
            "echo": echo,
            "fail": fail,
            "die": die,
            "environment": environment,
            "hang": hang,
            "grandchild": grandchild,
            "chatter": chatter,
            "unspeakable": unspeakable,
        }
    )
