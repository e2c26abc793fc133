"""Joining a running network from another folder, with nothing but an address: real daemons, one devnet for all.

The tests build on one another in this order: the newcomer joins, earns, leaves, and comes back without its first peer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from node.api.control_client import Unavailable, request
from node.log.offline_verification import verify
from node.store.data_directory import DataDirectory
from protocol.credit.ledger import Ledger
from protocol.records import Join, Leave, Role, Rollout

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 180.0
"""Seconds that a thing may take on a machine that does others besides; each takes a few on a quiet one."""


def farflung(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "node.cli.main", *arguments]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home)}


def status(folder: Path) -> dict[str, Any]:
    """What the daemon of a folder says; empty while it does not."""

    async def ask() -> dict[str, Any]:
        return await request(DataDirectory(folder), "status", timeout=10)

    try:
        return trio.run(ask)
    except Unavailable:
        return {}


def wait(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited {PATIENCE:.0f} s in vain for {what}")


@contextmanager
def process(*arguments: str, home: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("ab") as file:
        running = subprocess.Popen(
            farflung(*arguments),
            cwd=home,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(timeout=20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


@dataclass
class World:
    """A devnet that runs on, and the newcomer's home."""

    devnet: Path
    home: Path
    stack: ExitStack
    first_peer: Path = field(init=False)
    runs: int = 0

    @property
    def late(self) -> Path:
        """Where a user's node lives by default."""
        return self.home / ".local/share/farflung/node"

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command that ends, as a newcomer types it."""
        done = subprocess.run(
            farflung(*arguments),
            cwd=self.home,
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command that goes on."""
        self.runs += 1
        output = self.home / f"output-{self.runs}"
        return self.stack.enter_context(process(*arguments, home=self.home, output=output))

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The status of each of the devnet's nodes that answers."""
        return {name: found for number in range(1, 5) if (found := status(self.devnet / (name := f"node-{number}")))}

    def rest(self) -> None:
        """Have the devnet make no further step: what is tested from now on needs its nodes and not their work."""
        for name in self.nodes():
            directory = DataDirectory(self.devnet / name)
            trio.run(partial(request, directory, "pause_at", step=1, timeout=10))


def ready(world: World) -> Path | None:
    """Once all roles are taken: the node to join at. Not the elector, without which nothing goes on."""
    nodes = world.nodes()
    if len(nodes) < 4 or {found["role"] for found in nodes.values()} != {"trainer", "relay", "validator", "inference"}:
        return None
    if any(found["step"] < 1 for found in nodes.values()):
        return None
    order = ("inference", "relay", "validator", "trainer")
    names = sorted((name for name in nodes if name != "node-1"), key=lambda name: order.index(nodes[name]["role"]))
    return world.devnet / names[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four nodes that have met their step and go on."""
    folder = tmp_path_factory.mktemp("join")
    home = folder / "home"
    home.mkdir()
    with ExitStack() as stack:
        arguments = ("--nodes", "4", "--steps", "1", "--keep-running", "--dir", str(folder / "devnet"))
        stack.enter_context(process("devnet", *arguments, home=folder, output=folder / "output"))
        world = World(folder / "devnet", home, stack)
        world.first_peer = wait(lambda: ready(world), "the devnet's first step")
        yield world


@pytest.fixture(scope="module")
def address(world: World) -> str:
    """The address of the node to join at."""
    found: str = status(world.first_peer)["addresses"][0]
    return found


def test_a_peer_of_another_domain_is_refused_before_anything_is_kept(world: World, address: str) -> None:
    done = world.run("join", f"{address}?domain={'ab' * 32}", "--yes", code=2)
    assert len(done.stderr.splitlines()) == 1
    assert "ab" * 32 in done.stderr
    assert status(world.first_peer)["domain"] in done.stderr
    assert list(world.home.iterdir()) == []


def test_it_joins_with_the_address_alone_takes_a_role_and_earns(world: World, address: str) -> None:
    domain = status(world.first_peer)["domain"]
    late = ("--name", "late", "--listen", "/ip4/127.0.0.1/tcp/0")
    world.start("join", f"{address}?domain={domain}", "--yes", *late)
    wait(lambda: status(world.late).get("role") == "inference", "a role")
    found = wait(lambda: (now := status(world.late)) and (now["account"] or {}).get("credit") and now, "credit")
    shown = (world.home / "output-1").read_text()
    assert domain in shown
    assert "chain_sum" in shown
    assert (found["domain"], found["name"]) == (domain, "late")
    assert found["account"]["accepted"] > 0
    # Every other node knows of it as well, from its own log.
    wait(lambda: all(now["credit"].get(found["node"]) for now in world.nodes().values()), "the others' knowledge")
    world.rest()


def test_the_commands_tell_how_it_is(world: World) -> None:
    told = json.loads(world.run("status", "--json").stdout)
    assert (told["running"], told["role"], told["problems"]) == (True, "inference", [])
    text = world.run("status").stdout
    assert "late: inference" in text
    assert "infer" in text
    rows = json.loads(world.run("credits", "--json").stdout)
    assert rows["source"] == "daemon"
    assert {row["name"]: row["credit"] > 0 for row in rows["nodes"]}["late"]
    roles = json.loads(world.run("roles", "--json").stdout)["nodes"]
    assert sorted(row["role"] for row in roles) == ["inference", "inference", "relay", "trainer", "validator"]
    assert all(row["present"] for row in roles)
    peers = json.loads(world.run("peers", "--json").stdout)["peers"]
    assert [row["name"] for row in peers if row["connected"]].count("late") == 0
    assert {row["name"] for row in peers} == {"node-1", "node-2", "node-3", "node-4"}
    refused = world.run("run", code=2).stderr
    assert "another daemon runs on this data directory" in refused


def test_it_leaves_and_the_log_says_so(world: World) -> None:
    assert "has left" in world.run("leave").stdout
    assert status(world.late) == {}
    assert "no daemon runs" in world.run("leave", code=2).stderr
    assert json.loads(world.run("status", "--json", code=1).stdout)["running"] is False
    rows = json.loads(world.run("roles", "--json").stdout)
    assert rows["source"] == "log"
    assert {row["name"]: row["role"] for row in rows["nodes"]}["late"] == "none"
    shown = json.loads(world.run("log", "show", "--author", "late", "--last", "1", "--json").stdout)["entries"]
    assert [entry["kind"] for entry in shown] == ["leave"]
    assert "the log is valid" in world.run("log", "verify").stderr


def test_it_comes_back_without_the_address_and_without_its_first_peer(world: World) -> None:
    async def stop() -> None:
        await request(DataDirectory(world.first_peer), "stop", timeout=10)

    trio.run(stop)
    wait(lambda: not status(world.first_peer), "the first peer's end")
    before = verify(DataDirectory(world.late))
    earned = {before.ledger.name(author): account for author, account in before.ledger.accounts(final=True).items()}[
        "late"
    ]
    world.start("run")
    wait(lambda: status(world.late).get("role", "none") != "none", "a role")
    found = wait(lambda: (now := status(world.late)) and now["own_final"] and now, "its entries to be final")
    log = verify(DataDirectory(world.late))
    assert log.problems == ()
    node = bytes.fromhex(found["node"])
    kinds = [entry.kind for entry in log.replica.entries(node)]
    # One feed: it joined once, left, and took a role again.
    assert (kinds[0], kinds.count(Join.KIND), kinds.count(Leave.KIND)) == (Join.KIND, 1, 1)
    assert Rollout.KIND in kinds[: kinds.index(Leave.KIND)]
    assert Role.KIND in kinds[kinds.index(Leave.KIND) :]
    assert Ledger(log.replica).standing_role(node) == found["role"]
    assert log.ledger.accounts(final=True)[node].generated >= earned.generated > 0
