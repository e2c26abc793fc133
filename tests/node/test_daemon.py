"""The daemon from its start to its end, with real sockets and disks, and what its user may do wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node import daemon
from node.api.control_client import Unavailable, request
from node.cli.main import main
from node.config import Config, DevnetConfig, write
from node.log.offline_verification import verify
from node.store.data_directory import DataDirectory
from protocol.domain import make_genesis, parse_genesis
from protocol.identity import peer_id
from tests.node.fake_children import genesis
from tests.protocol.builders import key, small_genesis

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The daemon sets up its process's logging; here that is pytest's."""
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    logger = logging.getLogger("libp2p")
    level = logger.level
    yield
    logger.setLevel(level)


def prepare(tmp_path: Path, name: str, data: bytes | None = None, **changes: Any) -> DataDirectory:
    """A data directory of a node that takes no role, on a free port."""
    directory = DataDirectory(tmp_path / name)
    directory.create()
    directory.key_file.write_bytes(key(name).seed)
    directory.key_file.chmod(0o600)
    config = Config(name=name, listen=("/ip4/127.0.0.1/tcp/0",), willing=())
    write(replace(config, **changes), directory.config_file)
    if data is not None:
        directory.save_genesis(data)
    return directory


# --- a life --------------------------------------------------------------------------------------------------------


async def status(directory: DataDirectory) -> dict[str, Any]:
    with trio.fail_after(30):
        while True:
            with contextlib.suppress(Unavailable):
                return await request(directory, "status", timeout=5)
            await trio.sleep(0.1)


async def test_two_daemons_meet_share_a_log_and_end(tmp_path: Path) -> None:
    founder = DataDirectory(tmp_path / "founder")
    founder.create()
    write(Config(name="founder", listen=("/ip4/127.0.0.1/tcp/0",), willing=()), founder.config_file)
    founder.save_genesis(founded_by(founder))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.main, founder, founder.config())
        first = await status(founder)
        (address,) = first["addresses"]
        other = DataDirectory(tmp_path / "other")
        other.create()
        write(
            Config(name="other", listen=("/ip4/127.0.0.1/tcp/0",), willing=(), bootstrap=(address,)), other.config_file
        )
        nursery.start_soon(daemon.main, other, other.config())
        with trio.fail_after(30):
            while True:
                a, b = await status(founder), await status(other)
                if len(a["nodes"]) == len(b["nodes"]) == 2 and a["final"] and a["heads_root"] == b["heads_root"]:
                    break
                await trio.sleep(0.1)
        assert b["domain"] == a["domain"]
        assert a["peers"] == b["peers"] == 1
        assert {row["name"] for row in a["nodes"]} == {"founder", "other"}
        assert [a["role"], b["role"]] == ["none", "none"]
        assert b["health"] == []
        for directory in (founder, other):
            assert await request(directory, "stop", timeout=5) == {"stopping": True}
    reports = [verify(directory) for directory in (founder, other)]
    assert reports[0].text() == reports[1].text()
    assert [report.problems for report in reports] == [(), ()]
    assert reports[0].replica.uncovered() == []
    assert other.genesis() == founder.genesis()
    # A second life of it: the same feed, the next boot, and nothing appended.
    assert (founder.boot_file.read_text(), other.boot_file.read_text()) == ("1\n", "1\n")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.main, founder, founder.config())
        assert (await status(founder))["heads_root"] == reports[0].replica.heads_root().hex()
        nursery.cancel_scope.cancel()
    assert verify(founder).text() == reports[0].text()
    assert founder.boot_file.read_text() == "2\n"


def founded_by(directory: DataDirectory) -> bytes:
    """A genesis with the directory's key as its only elector."""
    domain = parse_genesis(genesis())
    identity = directory.identity()
    return make_genesis(
        identity,
        name="test",
        devnet=True,
        electors=(identity.node,),
        validators=(),
        model=domain.model,
        tasks=domain.tasks,
        recipe=domain.recipe,
        timings=domain.timings,
        policy=domain.policy,
        thresholds=domain.thresholds,
    )


# --- what its user may do wrong ------------------------------------------------------------------------------------


def refusal(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``farflung run`` ends with."""
    assert main(["run", "--data-dir", str(directory.path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("farflung: ")
    return line.removeprefix("farflung: ")


def test_an_unreadable_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "elector", genesis())
    directory.key_file.chmod(0o640)
    assert refusal(directory, capsys) == (
        f"{directory.key_file}: others can read the key (mode 0640); chmod 600 {directory.key_file}"
    )
    directory.key_file.chmod(0o600)
    directory.key_file.write_bytes(b"short")
    assert "the key has 5 bytes, not 32; restore it" in refusal(directory, capsys)


def test_a_busy_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        directory = prepare(tmp_path, "elector", genesis(), listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        line = refusal(directory, capsys)
    assert line == f"port {port} on 127.0.0.1 is in use: stop the program that holds it or choose another"


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "GENESIS_PATIENCE", 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}/p2p/{peer_id(key('founder').node)}"
    line = refusal(prepare(tmp_path, "a", bootstrap=(address,)), capsys)
    assert line.startswith(f"no genesis: {address}: ")
    assert line.endswith("; check the address and that the peer runs")


def test_nobody_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the domain is not known; name a peer in farflung.toml" in refusal(prepare(tmp_path, "a"), capsys)


def test_a_genesis_with_a_wrong_signature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = genesis()
    line = refusal(prepare(tmp_path, "elector", data[:-1] + bytes([data[-1] ^ 1])), capsys)
    assert "genesis: not a valid genesis (" in line
    assert "; delete the file to fetch it" in line


def test_a_log_of_another_domain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "elector", genesis())

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.main, directory, directory.config())
            await status(directory)
            nursery.cancel_scope.cancel()

    trio.run(once)
    directory.genesis_file.write_bytes(small_genesis())
    assert "log.db: this log belongs to another domain; use a new data directory" in refusal(directory, capsys)


def test_a_damaged_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "elector", genesis())
    directory.log_database.write_bytes(b"not a database" * 100)
    assert str(directory.log_database) in refusal(directory, capsys)


def test_a_cheat_outside_a_devnet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "a", genesis(devnet=False), devnet=DevnetConfig(cheat="forged-reward"))
    assert refusal(directory, capsys) == (
        "cheat = 'forged-reward' is for a devnet only; delete the line (wrong-weights, forged-reward)"
    )


def test_a_disk_without_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataDirectory, "free_bytes", lambda self: 5_000_000)
    line = refusal(prepare(tmp_path, "elector", genesis()), capsys)
    assert "the disk has 5 MB free, 210 MB are needed; free some room" in line


def test_a_mistake_in_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "elector", genesis())
    directory.config_file.write_text('listen = "here"\n')
    assert "listen: expected a list of 1 to 8 addresses" in refusal(directory, capsys)


def test_a_folder_where_the_socket_belongs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "elector", genesis())
    directory.control_socket.mkdir()
    assert refusal(directory, capsys) == (
        f"{directory.control_socket}: cannot be replaced (Is a directory); remove it by hand"
    )


def test_a_second_daemon_on_the_same_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, "elector", genesis())
    with directory.open_locked():
        line = refusal(directory, capsys)
    assert f"another daemon runs on this data directory (pid {os.getpid()})" in line


def test_a_process_of_its_own_says_the_line_and_no_traceback(tmp_path: Path) -> None:
    directory = prepare(tmp_path, "elector", b"nonsense")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "node.cli.main", "run", "--data-dir", str(directory.path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"farflung: {directory.genesis_file}: not a valid genesis")
