"""A private domain as its users have it: real daemons, founded and joined by the commands, and what a stranger gets."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from node import starter
from node.api.control_client import Unavailable, request
from node.devnet import fleet
from node.errors import Refused
from node.net.blob_exchange import BLOB_PROTOCOL, CHUNK_PROTOCOL, HAVE_PROTOCOL
from node.net.host import open_network
from node.store.data_directory import DataDirectory
from node.weights.bulk import node_certificate, token_exchange
from node.weights.bulk.bulk_ports import PORT_STEP
from protocol import codec
from protocol.domain import Domain, parse_genesis
from protocol.identity import Identity
from protocol.weights.manifest import Manifest

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 180.0
NAMES = ("founder", "judge", "maker")
TEXT = f"""
name = "secret"
model = "{Path(starter.__file__).parent}"

[[task]]
name = "chain_sum"

[timings]
presence = 0.5
epoch = 0.5
founding_wait = 1

[policy]
min_nodes = 3
relays_min = 0
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "node.cli.main", *words]


def run(*words: str) -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command(*words), env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(output: Path, *words: str) -> Iterator[None]:
    """A command that goes on until the block ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with output.open("wb") as log:
        process = subprocess.Popen(command(*words), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def ask(folder: Path, op: str) -> dict[str, Any]:
    """What the daemon of a folder says; empty while it does not."""

    async def call() -> dict[str, Any]:
        return await request(DataDirectory(folder), op, timeout=10)

    try:
        return trio.run(call)
    except Unavailable:
        return {}


def wait(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


@dataclass(frozen=True)
class World:
    """Three nodes that hold version 0; ``address`` is the founder's."""

    folder: Path
    address: str
    port: int
    domain: Domain

    @property
    def manifest(self) -> Manifest:
        """Version 0's."""
        place = self.folder / "maker" / "versions" / self.domain.model.manifest.hash.hex()
        return Manifest.parse((place / "manifest").read_bytes())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("private")
    (folder / "domain.toml").write_text(TEXT)
    (port,) = fleet.free_ports(1)
    founder = folder / "founder"
    founder.mkdir()
    (founder / "farflung.toml").write_text(f'listen = ["/ip4/127.0.0.1/tcp/{port}"]\nwilling = ["trainer"]\n')
    create = ("domain", "create", str(folder / "domain.toml"), "--private", "--data-dir", str(founder), "--json")
    made = json.loads(run(*create))
    assert made["private"] is True
    with ExitStack() as stack:
        stack.enter_context(running(folder / "founder.log", "run", "--data-dir", str(founder)))
        wait(lambda: ask(founder, "status"), "the founder")
        invited = json.loads(run("domain", "invite", "--uses", "2", "--data-dir", str(founder), "--json"))
        assert "&invite=" in invited["addresses"][0]
        for name, role in (("judge", "validator"), ("maker", "inference")):
            options = ("--name", name, "--willing", role, "--listen", "/ip4/127.0.0.1/tcp/0")
            join = ("join", invited["addresses"][0], "--yes", "--data-dir", str(folder / name))
            stack.enter_context(running(folder / f"{name}.log", *join, *options))
        wait(lambda: all(ask(folder / name, "status").get("version", -1) >= 0 for name in NAMES), "version 0")
        yield World(folder, made["address"], port, parse_genesis((founder / "genesis").read_bytes()))
    assert "Traceback" not in "".join(path.read_text() for path in folder.glob("*.log"))


def test_members_get_the_weights(world: World) -> None:
    assert "private: encrypted, between nodes that joined" in run(
        "domain", "show", "--data-dir", str(world.folder / "judge")
    )
    digest = world.domain.model.manifest.hash.hex()
    wholes = {(world.folder / name / "versions" / digest / "whole.bin").read_bytes() for name in NAMES}
    assert len(wholes) == 1
    assert len(wholes.pop()) == world.manifest.size
    for name in NAMES:
        assert not any("libp2p" in warning for warning in ask(world.folder / name, "status")["health"])


def over_tls(port: int, path: str) -> bytes:
    """What somebody without a certificate hears; raises ``OSError`` where it is nothing."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as raw, anybody.wrap_socket(raw) as secured:
        secured.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        if not (heard := secured.recv(100)):
            raise OSError("EOF")
        return heard


def test_plain_http_and_a_stranger_with_tls_get_nothing(world: World) -> None:
    port = world.port + PORT_STEP
    path = f"/farflung/1/{world.domain.id.hex()}/{world.domain.model.manifest.hash.hex()}/0-0"
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        plain.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n".encode())
        answer = b""
        try:
            while part := plain.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    assert b"HTTP" not in answer
    assert len(answer) < 100
    with pytest.raises(OSError, match=r"(?i)certificate|reset|EOF"):
        over_tls(port, path)
    if shutil.which("curl") is not None:
        for scheme in ("http", "https"):
            curl = ["curl", "-sk", "--max-time", "10", f"{scheme}://127.0.0.1:{port}{path}"]
            done = subprocess.run(curl, capture_output=True, timeout=60, check=False)
            assert (done.returncode != 0, done.stdout) == (True, b"")


def test_a_stranger_over_libp2p_gets_what_the_genesis_names_and_no_weights(world: World) -> None:
    identity = Identity(secrets.token_bytes(32))
    digest, model = world.domain.model.manifest.hash, world.domain.model

    async def stranger() -> None:
        tag = world.domain.id.hex()[:16]
        async with open_network(identity, listen=["/ip4/127.0.0.1/tcp/0"], domain_tag=tag) as network:
            founder = await network.connect(world.address, 10)
            _, certified = node_certificate.make(identity)
            for protocol, wanted in (
                (token_exchange.PROTOCOL, certified),
                (CHUNK_PROTOCOL, codec.encode([digest, 0])),
                (HAVE_PROTOCOL, digest),
            ):
                with pytest.raises(Refused, match="only nodes that joined"):
                    await network.request(founder, protocol, wanted, timeout=10, max_response=1 << 20)
            wanted = codec.encode([digest, 0, model.manifest.size])
            found = await network.request(founder, BLOB_PROTOCOL, wanted, timeout=10, max_response=1 << 20)
            assert Manifest.parse(found) == world.manifest

    trio.run(stranger)
