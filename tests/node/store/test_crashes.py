"""A process that ends at any point of any write: what it acknowledged is there, and its feed goes on without a fork.

One helper process forks a child for each boundary, so that the imports are paid for once. The child ends itself,
without any cleaning up, before or after its n-th call to SQLite; the helper then opens what is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from node.log.elector import open_elector
from node.log.log_opening import load
from node.log.offline_verification import verify
from node.log.replicated_log import LogService
from node.store.data_directory import DataDirectory
from node.store.log_store import LogStore, open_log_store
from protocol.domain import parse_genesis
from protocol.records import Join, Role
from tests.protocol.builders import Writer, digest, key, small_genesis

GENESIS = small_genesis()
DOMAIN = parse_genesis(GENESIS)
ELECTOR = key("elector")
OFTEN = 6
"""A snapshot for every few entries."""


async def live(directory: DataDirectory, acknowledge: Any, *, archive: bool) -> None:
    """A few entries of one's own and of another, cuts, a grant, snapshots, pruning."""
    writer = Writer("a", DOMAIN.id)
    async with open_log_store(directory.log_database, DOMAIN) as store:
        service = LogService(
            ELECTOR, await load(store, DOMAIN, OFTEN), store, fresh=True, archive=archive, snapshot_entries=OFTEN
        )
        elector = await open_elector(service, ELECTOR)
        (joined,) = await service.append(Join(digest("r"), "farflung/test", "node"))
        acknowledge(joined)
        for number in range(6):
            for entry in await service.append(Role("relay"), Role("inference")):
                acknowledge(entry)
            writer.anchor = service.replica.newest_cut_id
            writer.append(Role("none"))
            await service.intake.receive(entries=[entry.encode() for entry in writer.entries[-2:]])
            await elector.cut()
            if number == 2:
                await elector.grant_term(writer.node)


def crash(directory: DataDirectory, boundary: int, file: Path, *, archive: bool) -> bool:
    """Live in a child that ends at ``boundary``; whether it did so before its life was over."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    calls = 0
    original = LogStore._run

    async def run(self: LogStore, function: Any, *arguments: Any) -> Any:
        nonlocal calls
        for step in ("before", "after"):
            calls += 1
            if calls == boundary:
                os._exit(9)
            if step == "before":
                result = await original(self, function, *arguments)
        return result

    LogStore._run = run  # type: ignore[method-assign]
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def acknowledge(entry: Any) -> None:
        os.write(descriptor, f"{entry.seq} {entry.id.hex()}\n".encode())

    trio.run(lambda: live(directory, acknowledge, archive=archive))
    os._exit(0)


async def go_on(directory: DataDirectory) -> tuple[dict[int, str], int]:
    """(id by seq of the own feed as it was found, its length after one more entry)."""
    async with open_log_store(directory.log_database, DOMAIN) as store:
        ledger = await load(store, DOMAIN, OFTEN)
        service = LogService(ELECTOR, ledger, store, fresh=True)
        node, count = ELECTOR.node, service.own_seq + 1
        held = await store.ids_at([(node, seq) for seq in range(count)])
        elector = await open_elector(service, ELECTOR)
        await service.append(Role("none") if count else Join(digest("r"), "farflung/test", "node"))
        await elector.cut()
        assert not service.replica.forks
        assert not service.replica.uncovered()
        return {seq: entry_id.hex() for (_, seq), entry_id in held.items()}, service.own_seq + 1


def explore(folder: Path, first: int, step: int, archive: bool) -> int:
    """Crash at the boundaries ``first``, ``first + step``, …; returns how many there were. Asserts what must hold."""
    for crashes, boundary in enumerate(range(first, 100_000, step)):
        directory = DataDirectory(folder / str(boundary))
        directory.create()
        directory.save_genesis(GENESIS)
        file = folder / f"{boundary}.txt"
        if not crash(directory, boundary, file, archive=archive):
            return crashes
        acknowledged = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        held, length = trio.run(go_on, directory)
        assert {int(seq): entry_id for seq, entry_id in acknowledged}.items() <= held.items()
        assert length == len(held) + 1
        if archive:
            report = verify(directory)
            assert report.problems == (), report.problems
    raise AssertionError("it never came to an end")


def run_explorer(folder: Path, first: int, step: int, *, archive: bool) -> int:
    command = [
        sys.executable,
        "-m",
        "tests.node.store.test_crashes",
        str(folder),
        str(first),
        str(step),
        str(int(archive)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    crashes: int = json.loads(done.stdout)
    return crashes


@pytest.mark.parametrize(("first", "archive"), [(3, True), (10, False)])
def test_nothing_acknowledged_is_lost(tmp_path: Path, first: int, archive: bool) -> None:
    assert run_explorer(tmp_path, first, 23, archive=archive) > 5


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
def test_nothing_is_lost_at_any_boundary(tmp_path: Path, archive: bool) -> None:
    assert run_explorer(tmp_path, 1, 1, archive=archive) > 150


if __name__ == "__main__":
    print(json.dumps(explore(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4])))))
