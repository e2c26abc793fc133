"""The join command up to the daemon's start; tests/test_join.py joins a real network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node.cli import join
from node.cli.terminal import Terminal
from node.config import Config
from node.domain.invitation import DomainOffer, Invitation
from node.errors import UserError
from node.keys import recovery_words
from node.store.data_directory import DataDirectory
from protocol.domain import parse_genesis
from protocol.identity import Identity, peer_id
from tests.node.cli.stand_ins import Person, carry_out
from tests.node.fake_children import genesis
from tests.protocol.builders import small_genesis

PEER = peer_id(Identity(bytes(32)).node)
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
GENESIS = genesis()
OFFER = DomainOffer(parse_genesis(GENESIS), GENESIS, 1_234_567, 4_938_268, "3 layers of 64")


Started = list[tuple[Path, Config]]
"""The daemons that were started."""


async def inspect(wanted: Invitation, patience: float) -> DomainOffer:
    """The peer offers OFFER."""
    if wanted.domain not in (None, OFFER.domain.id):
        raise UserError("offers another domain")
    return OFFER


def run(*words: object, terminal: Terminal | None = None, started: Started | None = None) -> int:
    """``farflung join`` with a peer that offers OFFER."""

    def start(directory: DataDirectory, config: Config) -> None:
        assert started is not None
        started.append((directory.path, config))

    return carry_out(join.join, "join", *words, terminal=terminal, inspect=inspect, start=start)


def test_it_shows_asks_once_keeps_and_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: Started = []
    words = (ADDRESS, "--data-dir", tmp_path / "node", "--name", "late")
    assert run(*words, terminal=Person("y"), started=started) == 0
    text = capsys.readouterr().out
    for part in ("fakes", OFFER.domain.id.hex(), peer_id(OFFER.domain.creator), "3 layers of 64", "1.2 M", "4.9 MB"):
        assert part in text
    assert text.count("Join it?") == 1
    directory = DataDirectory(tmp_path / "node")
    assert directory.genesis() == GENESIS
    assert directory.known_peers() == {PEER: (ADDRESS,)}
    assert directory.config() == Config(name="late")
    assert started == [(directory.path, Config(name="late"))]


@pytest.mark.parametrize("texts", [("n",), ("",), ("what",), ()])
def test_without_a_yes_nothing_is_kept(
    texts: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(ADDRESS, "--data-dir", tmp_path / "node", terminal=Person(*texts)) == 1
    assert "nothing was kept" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rubbish", "--yes"], "'rubbish' is not an address"),
        ([ADDRESS], "there is no terminal"),
        ([f"{ADDRESS}?domain={'00' * 32}", "--yes"], "offers another domain"),
        ([ADDRESS, "--yes", "--threads", "0"], "--threads: "),
    ],
)
def test_a_mistake_is_one_line_and_keeps_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*arguments, "--data-dir", tmp_path / "node") == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_no_run_leaves_the_start_to_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ADDRESS, "--yes", "--no-run", "--data-dir", str(tmp_path / "node")) == 0
    assert DataDirectory(tmp_path / "node").exists()
    assert "farflung run" not in capsys.readouterr().out  # where a service is to run it


def test_it_says_how_to_start_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data-dir", f"{tmp_path}/my node", "--config", f"{tmp_path}/a.toml"]
    assert run(ADDRESS, "--yes", *words, started=[]) == 0
    assert f"later with: farflung run --data-dir '{words[1]}' --config {words[3]}" in capsys.readouterr().out


def test_an_unfit_folder_is_told_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/node"):
        assert run(ADDRESS, "--yes", "--data-dir", f"{tmp_path}/{folder}") == 2
        assert f"{tmp_path}/file: a file stands where a folder belongs" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert run(ADDRESS, "--yes", "--data-dir", f"{tmp_path}/node") == 2
    assert f"{tmp_path}: this user cannot write there" in capsys.readouterr().err


@pytest.mark.parametrize("unattended", [True, False])
def test_the_recovery_words_are_for_a_person_only(
    unattended: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [ADDRESS, "--no-run", "--data-dir", tmp_path / "node"]
    assert run(*([*arguments, "--yes"] if unattended else arguments), terminal=Person("y", sees=True)) == 0
    told = capsys.readouterr().out
    words = recovery_words.lines(DataDirectory(tmp_path / "node").recovery())
    assert all(line in told for line in words) is not unattended
    assert any(line in told for line in words) is not unattended
    assert ("farflung identity recovery show" in told) is unattended


def test_joining_again_remembers_another_peer_and_changes_nothing_else(tmp_path: Path) -> None:
    folder = str(tmp_path / "node")
    other = ADDRESS.replace("4001", "4002")
    assert run(ADDRESS, "--yes", "--no-run", "--data-dir", folder) == 0
    key = DataDirectory(folder).key_file.read_bytes()
    assert run(other, "--yes", "--no-run", "--data-dir", folder) == 0
    assert DataDirectory(folder).key_file.read_bytes() == key
    assert DataDirectory(folder).known_peers() == {PEER: (other, ADDRESS)}


@pytest.mark.parametrize("domain", ["", f"?domain={OFFER.domain.id.hex()}"])
def test_a_folder_belongs_to_one_domain(domain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.save_genesis(small_genesis())
    assert run(ADDRESS + domain, "--yes", "--data-dir", str(directory.path)) == 2
    assert "this node belongs to the domain" in capsys.readouterr().err
    assert directory.genesis() == small_genesis()


def test_a_running_node_is_not_disturbed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = DataDirectory(tmp_path / "node")
    with directory.open_locked():
        assert run(ADDRESS, "--yes", "--data-dir", str(directory.path)) == 2
    told = capsys.readouterr()
    assert "another daemon runs" in told.err
    assert told.out == ""  # before it shows and asks anything
    assert directory.genesis() is None


@pytest.mark.parametrize(("count", "shown"), [(0, "0"), (99_999, "99,999"), (640_000, "0.6 M"), (7 * 10**9, "7.0 G")])
def test_counts_for_people(count: int, shown: str) -> None:
    assert join.human_count(count) == shown
