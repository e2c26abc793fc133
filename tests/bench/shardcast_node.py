"""One node of a shardcast broadcast. It runs in shardcast's own virtual environment and imports nothing of Farflung's.

Usage: ``shardcast_node.py origin FOLDER PORT FILE`` | ``relay FOLDER PORT UPSTREAM`` | ``receiver FOLDER SERVERS``
(servers with commas between). It says ``ready``, and ``published``/``done`` with the time of the monotonic clock.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from shardcast.client_node import ClientNode  # type: ignore[import-not-found]  # lives in another environment
from shardcast.middle_node import MiddleNode  # type: ignore[import-not-found]
from shardcast.origin_server import OriginServer  # type: ignore[import-not-found]

POLL: Final = 1
"""Seconds between a relay's looks at its upstream, and between a receiver's looks at its servers."""


def say(*words: object) -> None:
    print(*words, flush=True)


def origin(folder: Path, port: int, file: Path) -> None:
    server = OriginServer(str(folder), port)
    say("ready")
    sys.stdin.readline()
    server.broadcast(str(file))
    say("published", time.monotonic())


def relay(folder: Path, port: int, upstream: str) -> None:
    MiddleNode([upstream], str(folder), port, POLL)
    while not (folder / "distribution.txt").exists():
        time.sleep(0.01)
    say("ready")


def receiver(folder: Path, servers: list[str]) -> None:
    client = ClientNode(servers, str(folder))
    say("ready")
    sys.stdin.readline()
    while "v1" not in client.list_available_versions() or client.download_version("v1") is None:
        time.sleep(POLL)
    say("done", time.monotonic())


def main() -> None:
    role, folder, *rest = sys.argv[1:]
    if role == "origin":
        origin(Path(folder), int(rest[0]), Path(rest[1]))
    elif role == "relay":
        relay(Path(folder), int(rest[0]), rest[1])
    else:
        receiver(Path(folder), rest[0].split(","))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
