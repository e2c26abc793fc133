"""A bare copy that also hashes, in the shape of a broadcast: what the machine itself allows.

One process a node. The origin sends a file with ``sendfile``; every other node receives it chunk by chunk
(``recv_into``), takes each chunk's BLAKE3, and sends what it has on to its own children while the rest arrives
(cut-through). No protocol, no checks, no disk beside the file itself. ``python -m tests.bench.bare`` is one node.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from blake3 import blake3

from protocol.constants import CHUNK_BYTES
from tests.bench.processes import Children

Tree = Literal["star", "chain", "halves"]
TREES: Final[dict[Tree, tuple[int, ...]]] = {
    # parent of node 1, 2, …; node 0 is the origin, node 1 the relay
    "star": (0, 1, 1, 1, 1),
    "chain": (0, 1, 2, 3, 4),
    "halves": (0, 1, 1, 2, 3),
}
Into = Literal["map", "buffer"]
"""Where a chunk is received: straight into the mapped file, or into a small buffer that is then written out."""


class Progress:
    """How many bytes of the file may be sent on."""

    def __init__(self, have: int) -> None:
        self.have = have
        self.changed = threading.Condition()

    def reach(self, have: int) -> None:
        with self.changed:
            self.have = have
            self.changed.notify_all()

    def beyond(self, sent: int) -> int:
        """Wait for more than ``sent`` bytes; returns how many there are."""
        with self.changed:
            self.changed.wait_for(lambda: self.have > sent)
            return self.have


def send(connection: socket.socket, descriptor: int, size: int, progress: Progress) -> None:
    """Send the whole file, each part as soon as it is here."""
    sent = 0
    with connection:
        while sent < size:
            have = progress.beyond(sent)
            while sent < have:
                sent += os.sendfile(connection.fileno(), descriptor, sent, have - sent)


def receive(parent: int, path: Path, size: int, into: Into, progress: Progress) -> None:
    """Receive the whole file and hash its chunks."""
    with socket.create_connection(("127.0.0.1", parent)) as connection, path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), size)
        whole, buffer = memoryview(mapped), memoryview(bytearray(CHUNK_BYTES))
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            view = whole[start : start + length] if into == "map" else buffer[:length]
            got = 0
            while got < length:
                more = connection.recv_into(view[got:], length - got, socket.MSG_WAITALL)
                if not more:
                    raise EOFError("the parent ended")
                got += more
            blake3(view).digest()
            if into == "buffer":
                os.pwrite(file.fileno(), view, start)
            progress.reach(start + length)


def node(path: Path, size: int, parent: int, children: int, into: Into) -> None:
    """One node's life: tells its port, waits for a line, then copies and tells when it was done."""
    progress = Progress(0 if parent else size)
    if parent:
        with path.open("wb") as file:
            file.truncate(size)
    descriptor = os.open(path, os.O_RDONLY)
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        print("ready", server.getsockname()[1], flush=True)
        if not sys.stdin.readline():
            return
        receiving = threading.Thread(target=receive, args=(parent, path, size, into, progress), daemon=True)
        if parent:
            receiving.start()
        sending = []
        for _ in range(children):
            connection = server.accept()[0]
            sending.append(threading.Thread(target=send, args=(connection, descriptor, size, progress), daemon=True))
            sending[-1].start()
        if parent:
            receiving.join()
        print("done", time.monotonic(), flush=True)
        for thread in sending:
            thread.join()
    sys.stdin.readline()


def run(source: Path, folder: Path, tree: Tree, into: Into) -> float:
    """Seconds of one copy in this shape, to the last receiver."""
    size, parents = source.stat().st_size, TREES[tree]
    with Children(folder) as children:
        ports: list[int] = []
        nodes = []
        for number in range(len(parents) + 1):
            parent = ports[parents[number - 1]] if number else 0
            path = folder / f"bare-{number}.bin" if number else source
            command = [sys.executable, "-m", "tests.bench.bare", str(path), str(size), str(parent)]
            child = children.start(f"bare-{number}", [*command, str(parents.count(number)), into])
            nodes.append(child)
            ports.append(int(child.expect("ready", 30)[0]))
        began = time.monotonic()
        for child in nodes:
            child.tell("go")
        ended = [float(child.expect("done", 120)[0]) for child in nodes]
    for number in range(1, len(parents) + 1):
        (folder / f"bare-{number}.bin").unlink()
    return max(ended) - began


def best(source: Path, folder: Path, rounds: int, trees: Sequence[Tree] = tuple(TREES)) -> dict[str, float]:
    """The least seconds of every shape and way of receiving, by name; ``rounds`` of each."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for tree in trees:
            for into in ("map", "buffer"):
                seconds = run(source, folder, tree, into)
                name = f"{tree}-{into}"
                found[name] = min(seconds, found.get(name, seconds))
    return found


def main() -> None:
    """One node, for ``run``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("size", type=int)
    parser.add_argument("parent", type=int)
    parser.add_argument("children", type=int)
    parser.add_argument("into", choices=("map", "buffer"))
    arguments = parser.parse_args()
    node(arguments.path, arguments.size, arguments.parent, arguments.children, arguments.into)


if __name__ == "__main__":
    main()
