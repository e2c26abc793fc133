"""What the doctor says about a data directory."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.cli import doctor
from node.doctor import node_checks
from node.doctor.finding import ERROR, OK, WARNING, Check, Finding
from node.doctor.node_checks import Subject
from node.net.host import open_network
from node.peers import twins
from node.store.data_directory import DataDirectory
from protocol.domain import parse_genesis
from protocol.identity import Identity, peer_id
from tests.node.cli.stand_ins import carry_out
from tests.node.peers.test_twins import Heard
from tests.protocol.builders import small_genesis

GENESIS = small_genesis()
DOMAIN = parse_genesis(GENESIS)


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    """A data directory with a key and a domain."""
    made = DataDirectory(tmp_path / "node")
    made.create()
    made.identity()
    made.save_genesis(GENESIS)
    return made


@pytest.fixture
def port() -> Iterator[int]:
    """A port that something else listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def of(found: list[Finding], check: str) -> Finding:
    return next(one for one in found if one.check == check)


async def test_a_directory_in_order(directory: DataDirectory) -> None:
    subject = await node_checks.examine(directory)
    assert {one.check: one.severity for one in subject.findings} == dict.fromkeys(
        ("configuration", "key", "domain", "lock"), OK
    )
    assert (subject.node, subject.domain) == (directory.identity().node, DOMAIN)


async def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    subject = await node_checks.examine(DataDirectory(tmp_path / "nowhere"))
    assert all(one.severity == OK for one in subject.findings)
    assert os.listdir(tmp_path) == []


async def test_mistakes_in_the_files(directory: DataDirectory) -> None:
    directory.config_file.write_text('name = "x"\nlisten = 3\n')
    directory.key_file.chmod(0o644)
    directory.genesis_file.write_bytes(b"rubbish")
    found = (await node_checks.examine(directory)).findings
    assert [of(found, check).severity for check in ("configuration", "key", "domain")] == [ERROR] * 3
    assert "line 2" in of(found, "configuration").found
    assert of(found, "key").remedy == f"chmod 600 {directory.key_file}"
    assert all(one.remedy not in one.found for one in found if one.remedy)


async def test_a_folder_that_may_not_be_looked_into(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    directory.key_file.unlink()
    monkeypatch.setattr(Path, "exists", refuse)
    subject = await node_checks.examine(directory)
    assert of(subject.findings, "key").severity == ERROR
    assert "log.db: Permission denied" in of(subject.findings, "key").found
    (found,) = await node_checks.log(subject)
    assert (found.severity, found.remedy) == (ERROR, "run as the owner of the folder")


async def test_a_lost_key_is_an_error(directory: DataDirectory) -> None:
    directory.key_file.unlink()
    sqlite3.connect(directory.log_database).close()
    directory.log_database.touch()
    assert of((await node_checks.examine(directory)).findings, "key").severity == ERROR


async def test_a_daemon_that_does_not_answer(directory: DataDirectory) -> None:
    with directory.open_locked():
        subject = await node_checks.examine(directory)
    assert subject.holder == os.getpid()
    assert of(subject.findings, "lock").severity == WARNING
    assert directory.holder() is None


@pytest.mark.parametrize("running", [False, True])
async def test_a_port_that_another_holds(directory: DataDirectory, port: int, running: bool) -> None:
    address = f"/ip4/127.0.0.1/tcp/{port}"
    directory.config_file.write_text(f'listen = ["{address}", "/ip4/127.0.0.1/tcp/0", "/ip4/192.0.2.1/tcp/4001"]\n')
    subject = await node_checks.examine(directory)
    busy, chosen, foreign = await node_checks.ports(subject)
    assert (busy.severity, chosen.severity, foreign.severity) == (ERROR, OK, ERROR)
    assert str(port) in busy.remedy
    if running:
        subject.status = {"addresses": [f"{address}/p2p/{peer_id(bytes(32))}"]}
        assert (await node_checks.ports(subject))[0].severity == OK


async def test_a_port_for_weights_that_another_holds(directory: DataDirectory, port: int) -> None:
    address = f"/ip4/127.0.0.1/tcp/{port}"
    directory.config_file.write_text(f'listen = ["/ip4/127.0.0.1/tcp/0"]\n[bulk]\nlisten = ["{address}"]\n')
    subject = await node_checks.examine(directory)
    assert [found.severity for found in await node_checks.ports(subject)] == [OK, ERROR]
    subject.status = {"addresses": [], "bulk": {"listening": [f"{address}/http"]}}
    assert [found.severity for found in await node_checks.ports(subject)] == [OK, OK]


@pytest.mark.parametrize(
    ("status", "severity"),
    [
        ({"inbound": 2, "peers": 3, "addresses": []}, OK),
        ({"inbound": 0, "peers": 3, "addresses": ["/ip4/10.0.0.1/tcp/4001/p2p/x"]}, WARNING),
        ({"inbound": 0, "peers": 3, "addresses": ["/ip4/9.9.9.9/tcp/4001/p2p/x"]}, OK),
    ],
)
async def test_addresses(directory: DataDirectory, status: dict[str, Any], severity: str) -> None:
    assert (await node_checks.addresses(Subject(directory, status=status)))[0].severity == severity


async def test_a_damaged_log(directory: DataDirectory) -> None:
    subject = Subject(directory)
    assert (await node_checks.log(subject))[0].found == "no log yet"
    with sqlite3.connect(directory.log_database) as database:
        database.execute("CREATE TABLE entries (id BLOB PRIMARY KEY)")
        database.executemany("INSERT INTO entries VALUES (?)", [(bytes([i]) * 2000,) for i in range(50)])
    database.close()
    (found,) = await node_checks.log(subject)
    assert (found.severity, found.found.split()[0]) == (OK, "50")
    data = bytearray(directory.log_database.read_bytes())
    data[5000:9000] = bytes(4000)
    directory.log_database.write_bytes(data)
    (found,) = await node_checks.log(subject)
    assert found.severity == ERROR
    assert found.remedy


async def peers_say(subject: Subject, *heard: Heard) -> list[Finding]:
    """What the doctor finds where one peer heard what is said."""
    async with open_network(
        Identity(bytes([120]) * 32), listen=("/ip4/127.0.0.1/tcp/0",), domain_tag=DOMAIN.id.hex()[:16]
    ) as network:
        twins.serve(network, heard[0])  # type: ignore[arg-type]
        subject.directory.save_peers({peer_id(network.node): network.addresses})
        return await node_checks.peers(subject)


def presence(subject: Subject, boot: int, counter: int) -> bytes:
    from tests.node.peers import test_twins

    return test_twins.presence(boot, counter, subject.directory.identity(), DOMAIN.id)


async def test_who_is_heard_nowhere_is_alone(directory: DataDirectory) -> None:
    found = await peers_say(await node_checks.examine(directory), Heard(b""))
    assert [(one.check, one.severity) for one in found] == [("peers", OK), ("identity", OK)]


async def test_who_goes_on_elsewhere_is_told(directory: DataDirectory) -> None:
    subject = await node_checks.examine(directory)
    subject.boot = 3
    found = await peers_say(subject, Heard(presence(subject, 3, 1), presence(subject, 3, 2)))
    assert of(found, "identity").severity == ERROR
    assert "192.0.2.7" in of(found, "identity").found


async def test_our_own_last_presence_is_no_other_node(directory: DataDirectory) -> None:
    subject = await node_checks.examine(directory)
    subject.boot = 3
    found = await peers_say(subject, Heard(presence(subject, 3, 1)))
    assert of(found, "identity").severity == OK


@pytest.mark.parametrize(("boot", "severity"), [(3, OK), (4, ERROR)])
async def test_beside_our_own_daemon_only_a_later_start_is_another(
    directory: DataDirectory, boot: int, severity: str
) -> None:
    subject = await node_checks.examine(directory)
    subject.boot, subject.holder = 3, 1
    found = await peers_say(subject, Heard(presence(subject, boot, 9)))
    assert of(found, "identity").severity == severity


async def test_no_peer_that_answers_is_an_error(directory: DataDirectory, port: int) -> None:
    dead = peer_id(Identity(bytes([121]) * 32).node)
    directory.save_peers({dead: [f"/ip4/127.0.0.1/tcp/1/p2p/{dead}"]})
    (found,) = await node_checks.peers(await node_checks.examine(directory))
    assert found.severity == ERROR


def quick(subject: Subject) -> list[Check]:
    """All checks but those that start processes."""
    return [check for check in node_checks.checks(subject) if check.name not in ("torch", "sandbox")]


def test_the_command(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.config_file.write_text('listen = ["/ip4/127.0.0.1/tcp/0"]\n')
    assert carry_out(doctor.doctor, "doctor", "--data-dir", directory.path, "--json", checks=quick) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True
    assert {row["check"] for row in told["checks"]} >= {"python", "memory", "disk", "clock", "key", "lock", "log"}
    directory.key_file.chmod(0o644)
    assert carry_out(doctor.doctor, "doctor", "--data-dir", directory.path, checks=quick) == 1
    out = capsys.readouterr().out
    assert f"→ chmod 600 {directory.key_file}" in out
    assert "1 error, " in out
