"""A real daemon whose trainer publishes what it is told to: ``python -m tests.bench.farnode FOLDER ROLE COUNT``.

It is the operator's daemon with everything in it; only the trainer's role does not train. Once ``COUNT`` nodes are
here and its own role is ``ROLE`` it says ``ready`` with its id. Then it takes lines on standard input:

``publish MANIFEST WHOLE …``  take in these files (and, where they follow, a delta's manifest and file) and append the
                            version's ``weights`` entry: ``published TIME`` (the monotonic clock's when appending began)
``await NUMBER``            ``done TIME`` as soon as that version or a later one is held whole
``ping NODE``, ``pings``    ask that node for an empty answer twenty times a second; ``pings`` with all round trips (ms)
``follow CONFIG TOKENIZER``  load each version into an engine: see ``tests.bench.following``
``spoil``                   from now on, a byte of every chunk that arrives is changed on disk behind the daemon's back
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Final

import trio

from node import daemon
from node.daemon import Parts
from node.net.requests import Unreachable
from node.roles.role_manager import Lives
from node.store.data_directory import DataDirectory
from protocol.constants import CHUNK_BYTES
from protocol.errors import PeerError
from protocol.records import Blob, Weights
from protocol.weights.delta import DeltaManifest, parse_chunk_list
from protocol.weights.manifest import ChunkList, Manifest
from tests.bench.following import Following

PING: Final = "/farflung/bench/ping/1"
INTERVAL: Final = 0.05
PATIENCE: Final = 5.0


def say(*words: object) -> None:
    print(*words, flush=True)


class Control:
    """Carries out the commands."""

    def __init__(self, parts: Parts, role: str, count: int) -> None:
        self._parts = parts
        self._node = parts.node
        self._role = role
        self._count = count
        self._pings: list[float] = []
        self._pinged: bytes | None = None

    async def run(self) -> None:
        """Follow the commands until standard input ends, then stop the daemon."""
        node = self._node
        node.network.serve(PING, self._answer, max_request=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_ready)
            nursery.start_soon(self._ping)
            stream, pending = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())), b""
            while data := await stream.receive_some():
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    await self._obey(nursery, *line.decode().split(" "))
            self._parts.stop()

    async def _obey(self, nursery: trio.Nursery, command: str, *words: str) -> None:
        if command == "publish":
            nursery.start_soon(self._publish, *map(Path, words))
        elif command == "await":
            nursery.start_soon(self._await, int(words[0]))
        elif command == "ping":
            self._pinged = bytes.fromhex(words[0])
        elif command == "pings":
            pings, self._pings = self._pings, []
            say("pings", json.dumps(pings, separators=(",", ":")))
        elif command == "follow":
            nursery.start_soon(Following(self._parts).run, *map(Path, words))
        elif command == "spoil":
            threading.Thread(target=spoil, args=(self._node.directory.versions,), daemon=True).start()

    async def _tell_ready(self) -> None:
        node, own, presences, seen = self._node, self._parts.own, self._parts.presences, 0
        while own.role != self._role or len(presences.live()) < self._count or node.log.ledger.grant() is None:
            seen = await node.log.wait_change(seen, timeout=0.2)
        say("ready", node.id.hex())

    async def _publish(self, manifest: Path, whole: Path, *delta: Path) -> None:
        node, weights = self._node, self._parts.weights
        blob, listing = await self._adopt(manifest, whole)
        assert isinstance(listing, Manifest)
        difference, found = await self._adopt(*delta) if delta else (None, None)
        assert found is None or isinstance(found, DeltaManifest)
        weights.held.expect(listing, found)
        grant, newest = node.log.ledger.grant(), node.log.ledger.newest_weights()
        assert grant is not None
        number, predecessor = (0, None) if newest is None else (weights.held.newest_number() + 1, newest.id)
        began = time.monotonic()
        (entry,) = await node.log.append(
            Weights(
                grant.term,
                number,
                predecessor,
                blob.hash,
                blob.size,
                listing.whole,
                listing.size,
                None,
                None if difference is None else difference.hash,
                0 if difference is None else difference.size,
            )
        )
        weights.held.note(entry)
        say("published", began)

    async def _adopt(self, manifest: Path, whole: Path) -> tuple[Blob, ChunkList]:
        """Take a chunk list and the file that it describes into the stores; the file moves."""
        node, data = self._node, await trio.Path(manifest).read_bytes()
        digest = await self._parts.blobs.put(data)
        scratch = node.directory.work / "next.bin"
        await trio.to_thread.run_sync(shutil.move, whole, scratch)
        await trio.to_thread.run_sync(self._parts.versions.adopt, data, scratch)
        return Blob(digest, len(data)), parse_chunk_list(data)

    async def _await(self, number: int) -> None:
        weights = self._parts.weights
        while True:
            held = weights.held.newest_held()
            if held is not None:
                assert isinstance(held.payload, Weights)
                if held.payload.number >= number:
                    say("done", time.monotonic())
                    return
            await weights.notice.wait(60)

    async def _answer(self, peer: bytes, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""

    async def _ping(self) -> None:
        while True:
            await trio.sleep(INTERVAL)
            if self._pinged is None:
                continue
            began = time.monotonic()
            try:
                await self._node.network.request(self._pinged, PING, b"", timeout=PATIENCE, max_response=0)
            except (Unreachable, PeerError):
                self._pings.append(PATIENCE * 1000)
            else:
                self._pings.append((time.monotonic() - began) * 1000)


def spoil(versions: Path) -> None:
    """Change the first byte of every chunk as soon as it is marked as verified, for ever."""
    spoiled: set[tuple[Path, int]] = set()
    while True:
        for marks in versions.glob("[0-9a-f]*/chunks"):
            fresh = [i for i, mark in enumerate(marks.read_bytes()) if mark == 1 and (marks, i) not in spoiled]
            with marks.with_name("whole.bin").open("r+b") as file:
                for index in fresh:
                    first = os.pread(file.fileno(), 1, index * CHUNK_BYTES)
                    os.pwrite(file.fileno(), bytes([first[0] ^ 0xFF]), index * CHUNK_BYTES)
                    spoiled.add((marks, index))
        time.sleep(0.002)


class Controlled(Parts):
    """The daemon's parts, with a trainer whose steps come from standard input."""

    def _lives(self) -> Lives:
        return {**super()._lives(), "trainer": trio.sleep_forever}

    async def run(self) -> None:
        _, role, count = sys.argv[1:]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Control(self, role, int(count)).run)
            await super().run()


def main() -> None:
    """Run the daemon of a data directory with its control."""
    daemon.Parts = Controlled  # type: ignore[misc]
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    daemon.run(DataDirectory(sys.argv[1]))


if __name__ == "__main__":
    main()
