"""``farflung domain``: founding a domain that is no devnet, showing it, and living in it with another node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import node
from node import starter
from node.cli import main
from node.devnet import fleet
from node.store.data_directory import DataDirectory
from protocol.domain import parse_genesis

ROOT = Path(node.__file__).resolve().parents[1]
TEXT = f"""
name = "arithmetic"
model = "{Path(starter.__file__).parent}"

[[task]]
name = "chain_sum"

[recipe]
learning_rate = 1e-4

[timings]
presence = 0.5
epoch = 0.5
founding_wait = 1
"""


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A founder's data directory, made by the command; ``join`` beside it holds the line to give to others."""
    folder = tmp_path_factory.mktemp("domain")
    (folder / "domain.toml").write_text(TEXT)
    data = folder / "founder"
    data.mkdir()
    (port,) = fleet.free_ports(1)
    (data / "farflung.toml").write_text(f'listen = ["/ip4/127.0.0.1/tcp/{port}"]\nwilling = ["relay"]\n')
    done = subprocess.run(
        [*command("domain", "create"), str(folder / "domain.toml"), "--data-dir", str(data), "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "made.json").write_text(done.stdout)
    return data


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "node.cli.main", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_genesis_is_signed_by_the_founder_and_no_devnets(founder: Path) -> None:
    directory = DataDirectory(founder)
    domain = parse_genesis(directory.genesis() or b"")
    node = directory.read_identity().node
    assert (domain.devnet, domain.creator, domain.electors) == (0, node, (node,))
    assert domain.recipe.learning_rate == 100_000_000
    assert (domain.timings.presence_ms, domain.timings.term_silence_ms) == (500, 60_000)
    made = json.loads((founder.parent / "made.json").read_text())
    assert made["id"] == domain.id.hex()
    assert made["join"] == f"farflung join '{made['address']}?domain={domain.id.hex()}'"
    assert made["recipe"]["learning_rate"] == 1e-4


def test_show_tells_the_same_of_a_file_and_of_a_directory(
    founder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["domain", "show", str(founder / "genesis"), "--json"]) == 0
    of_file = json.loads(capsys.readouterr().out)
    assert main.main(["domain", "show", "--data-dir", str(founder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == of_file
    assert main.main(["domain", "show", "--data-dir", str(founder)]) == 0
    out = capsys.readouterr().out
    assert "chain_sum" in out
    assert "learning_rate = 0.0001" in out
    data = bytearray((founder / "genesis").read_bytes())
    data[-1] ^= 1
    (tmp_path / "forged").write_bytes(data)
    assert main.main(["domain", "show", str(tmp_path / "forged")]) == 2
    assert "not a valid genesis" in capsys.readouterr().err


def test_a_directory_has_one_domain_for_good(founder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (founder / "genesis").read_bytes()
    assert main.main(["domain", "create", str(founder.parent / "domain.toml"), "--data-dir", str(founder)]) == 2
    assert "has a domain already" in capsys.readouterr().err
    assert (founder / "genesis").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("model = ", "modle = "), "line 3: modle: unknown key"),
        ((str(Path(starter.__file__).parent), "/nowhere"), "line 3: model: /nowhere is no folder"),
        (("chain_sum", "chain_sun"), "chain_sun"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_domain(
    tmp_path: Path, change: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "domain.toml").write_text(TEXT.replace(*change))
    assert main.main(["domain", "create", str(tmp_path / "domain.toml"), "--data-dir", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("farflung: ")
    assert words in error
    assert not (tmp_path / "new" / "genesis").exists()


@contextmanager
def running(output: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A farflung command that runs until the block ends."""
    with output.open("wb") as log:
        process = subprocess.Popen(
            command(*words),
            env={**environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(output: Path, words: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while words not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def test_a_founder_and_a_joiner_and_no_copy_and_no_cheat(founder: Path, tmp_path: Path) -> None:
    made = json.loads((founder.parent / "made.json").read_text())
    joiner, copy = tmp_path / "joiner", tmp_path / "copy"
    common = ("--listen", "/ip4/127.0.0.1/tcp/0", "--willing", "relay")
    address = f"{made['address']}?domain={made['id']}"
    with running(tmp_path / "founder.log", "run", "--data-dir", str(founder)):
        until(tmp_path / "founder.log", "serves at")
        with running(tmp_path / "joiner.log", "join", address, "--yes", "--data-dir", str(joiner), *common):
            until(tmp_path / "joiner.log", "serves at")
            assert (joiner / "genesis").read_bytes() == (founder / "genesis").read_bytes()
            shutil.copytree(joiner, copy, ignore=shutil.ignore_patterns("control.sock", "lock", "peers.json"))
            # Its boot counter counts on, so that the two would not even be told apart by their presences.
            with running(
                tmp_path / "copy.log", "run", "--data-dir", str(copy), "--bootstrap", made["address"]
            ) as other:
                assert other.wait(90) == 2
            assert "runs elsewhere already" in (tmp_path / "copy.log").read_text().splitlines()[-1]
        # Once the first one is gone the copy may run: it is the same node, moved.
        time.sleep(0.5)
        with running(tmp_path / "copy.log", "run", "--data-dir", str(copy), "--bootstrap", made["address"], *common):
            until(tmp_path / "copy.log", "serves at")
        cheat = {"FARFLUNG_DEVNET_CHEAT": "forged-reward"}
        with running(tmp_path / "cheat.log", "run", "--data-dir", str(joiner), *common, **cheat) as process:
            assert process.wait(60) == 2
        assert "is for a devnet only" in (tmp_path / "cheat.log").read_text()
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("*.log"))
