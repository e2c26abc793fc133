"""status and leave against a stand-in for a daemon, and without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from node.cli import leave, main, node_reading
from node.store.data_directory import DataDirectory
from protocol.domain import parse_genesis
from tests.node.cli.stand_ins import carry_out, serving
from tests.protocol.builders import small_genesis

STATUS: dict[str, Any] = {
    "name": "mine",
    "node": "ab" * 32,
    "peer_id": "12D3KooWExample",
    "role": "inference",
    "why": "the other places are taken",
    "waits_for": ["version 3 of the weights to arrive"],
    "leaving": False,
    "left": False,
    "domain": "d0" * 32,
    "domain_name": "sums",
    "version": 2,
    "newest_version": 3,
    "evaluations": [
        {
            "version": 2,
            "scores": [{"task": "sums", "pass_rate": 0.5, "pass_rate_low": 0.4, "pass_rate_high": 0.6}],
        }
    ],
    "steps": [{"step": 3, "reward": 0.25, "train_ms": 1500, "wait_ms": 200, "blocked_ms": 0, "publish_ms": 700}],
    "peers": 4,
    "inbound": 1,
    "outbound": 3,
    "addresses": ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooWExample"],
    "bulk": {"addresses": ["/ip4/127.0.0.1/tcp/10001/http"], "listening": [], "private": False},
    "disk_free": 10**10,
    "account": {"credit": 96, "accepted": 3, "rejected": 1, "void": 0, "pending": 0, "reputation": 800_000},
    "last_rejection": {"outcome": "rejected", "reason": "reward", "words": "a reward is not what it earns"},
    "why_nothing": None,
    "unpaid": [
        {
            "reason": "reward",
            "count": 1,
            "severity": "hard",
            "words": "a reward is not what it earns",
            "remedy": "compare",
        }
    ],
    "cut_height": 9,
    "own_entries": 5,
    "own_final": True,
    "health": [],
    "problems": [],
}


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    """A node that joined a domain."""
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.identity()
    directory.save_genesis(small_genesis())
    return directory


def daemon(directory: DataDirectory, answer: Callable[[str], dict[str, Any]]) -> AbstractContextManager[list[str]]:
    """One that answers by the operation; gives the operations asked for."""
    return serving(directory, lambda request: answer(request["op"]))


def run(directory: DataDirectory, *arguments: str) -> int:
    return main.main([*arguments, "--data-dir", str(directory.path)])


def test_a_healthy_node(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with daemon(directory, lambda op: STATUS):
        assert run(directory, "status") == 0
        text = capsys.readouterr().out
        assert run(directory, "status", "--json") == 0
        told = json.loads(capsys.readouterr().out)
    assert told == {"running": True, "data_dir": str(directory.path), **STATUS}
    assert text.splitlines()[0] == "mine: inference, all is well"
    for part in (
        "inference: the other places are taken",
        "2; the newest is 3",
        "version 3 of the weights to arrive",
        "step 3, reward 0.250",
        "the trainer trained 1.5 s, waited for rollouts 0.2 s, and for its last version 0.0 s; publishing took 0.7 s",
        "version 2 passes 0.500 (0.400 to 0.600) of the held-out questions",
        "4: 3 dialled by it, 1 dialled it",
        "others reach it",
        "/ip4/127.0.0.1/tcp/10001/http",
        "10.0 GB free",
        "3 accepted, 1 rejected, 0 void, 0 pending; reputation 0.800",
        "a reward is not what it earns (rejected: reward)",
        "1 × a reward is not what it earns (reward, hard): compare",
    ):
        assert part in text
    assert "\x1b" not in text


@pytest.mark.parametrize("key", ["health", "problems"])
def test_an_unhealthy_one_is_exit_code_1(
    key: str, directory: DataDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(directory, lambda op: {**STATUS, key: ["the disk refuses"]}):
        assert run(directory, "status") == 1
    text = capsys.readouterr().out
    assert "not all is well" in text
    assert "trouble" in text
    assert "the disk refuses" in text


def test_one_that_does_not_run(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(directory, "status") == 1
    text = capsys.readouterr().out
    assert "no daemon runs" in text
    assert parse_genesis(small_genesis()).id.hex() in text
    assert f"farflung run --data-dir {directory.path}" in text
    assert run(directory, "status", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["running"], told["pid"]) == (False, None)


def test_one_that_starts_is_told_from_one_that_does_not_run(
    directory: DataDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node_reading.lock_holder(directory) is None
    with directory.open_locked():
        assert node_reading.lock_holder(directory) is not None
        assert run(directory, "status") == 1
    assert "holds the folder" in capsys.readouterr().out


def test_no_node_is_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "peers", "roles", "credits", "leave"):
        assert run(DataDirectory(tmp_path / "none"), command) == 2
        assert "no node lives here" in capsys.readouterr().err


def test_leaving_waits_until_all_is_settled_and_stops(
    directory: DataDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    account = {**STATUS["account"], "pending": 1}
    states = iter(
        (
            STATUS,
            {**STATUS, "leaving": True},
            {**STATUS, "left": True, "own_final": False, "account": account},
            {**STATUS, "left": True, "own_final": False, "account": account},
            {**STATUS, "left": True, "account": account},
            {**STATUS, "left": True},
        )
    )
    with daemon(directory, lambda op: next(states) if op == "status" else {"done": True}) as asked:
        assert carry_out(leave.leave, "leave", "--data-dir", directory.path, poll=0.0) == 0
    assert asked == ["status", "leave", *["status"] * 5, "stop"]
    assert "mine has left sums with credit 96" in capsys.readouterr().out


def test_a_leave_entry_that_cannot_be_made_stops_nothing(
    directory: DataDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = {**STATUS, "leaving": True, "waits_for": ["its own head"]}
    with daemon(directory, lambda op: waiting) as asked:
        assert carry_out(leave.leave, "leave", "--data-dir", directory.path, patience=0.0, poll=0.0) == 1
    assert "stop" not in asked
    assert "its own head" in capsys.readouterr().err


def test_one_that_never_joined_just_stops(directory: DataDirectory) -> None:
    with daemon(directory, lambda op: {**STATUS, "own_entries": 0, "account": None}) as asked:
        assert run(directory, "leave") == 0
    assert asked == ["status", "stop"]


def test_leaving_needs_a_daemon(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(directory, "leave") == 2
    assert "no daemon runs" in capsys.readouterr().err
