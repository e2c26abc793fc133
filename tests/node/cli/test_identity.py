"""``farflung identity``: showing, exporting and importing a key as its owner does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nacl.pwhash import argon2id

from node.cli import identity, main
from node.cli.terminal import Terminal
from node.keys import key_file
from node.store.data_directory import DataDirectory
from protocol.identity import peer_id
from tests.node.cli.stand_ins import Nobody, Person


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest work factor: the tests are about everything else."""
    cheap = (int(argon2id.OPSLIMIT_MIN), int(argon2id.MEMLIMIT_MIN))
    monkeypatch.setattr(key_file.seal, "__kwdefaults__", dict(zip(("ops", "memory"), cheap, strict=True)))


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    """A data directory with both keys."""
    made = DataDirectory(tmp_path / "node")
    made.create()
    made.identity()
    made.make_recovery()
    return made


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    """A file whose first line is a passphrase."""
    path = tmp_path / "passphrase"
    path.write_text("correct horse\nbattery\n")
    return path


def run(*words: object, terminal: Terminal | None = None) -> int:
    return main.main(["identity", *map(str, words)], terminal=terminal or Nobody())


def test_show(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    node = directory.identity().node
    assert run("show", "--data-dir", directory.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["node"], found["peer"]) == (node.hex(), peer_id(node))
    assert found["fingerprint"].replace(" ", "") == node.hex()
    assert found["key_file"] == str(directory.key_file)
    assert run("show", "--data-dir", directory.path) == 0
    told = capsys.readouterr().out
    assert node.hex() in told
    assert identity.fingerprint(node) in told
    assert directory.identity().seed.hex() not in told


def test_show_makes_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--data-dir", tmp_path) == 2
    assert "no node lives here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_key_moves_to_another_directory(
    directory: DataDirectory, tmp_path: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "key.json", DataDirectory(tmp_path / "other")
    assert run("export", file, "--data-dir", directory.path, "--passphrase-file", passphrase) == 0
    assert run("import", file, "--data-dir", other.path, "--passphrase-file", passphrase) == 0
    assert other.read_identity().node == directory.identity().node
    assert other.recovery().node == directory.recovery().node
    assert other.next_boot() > 1_000_000_000
    assert other.key_file.stat().st_mode & 0o777 == 0o600
    assert "Two nodes must never run with one key" in capsys.readouterr().err


def test_nothing_is_overwritten(
    directory: DataDirectory, tmp_path: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key.json"
    assert run("export", file, "--data-dir", directory.path, "--passphrase-file", passphrase) == 0
    before, key = file.read_bytes(), directory.key_file.read_bytes()
    assert run("export", file, "--data-dir", directory.path, "--passphrase-file", passphrase) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert run("import", file, "--data-dir", directory.path, "--passphrase-file", passphrase) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (file.read_bytes(), directory.key_file.read_bytes()) == (before, key)


def test_nothing_is_imported_into_a_node_that_lost_its_key(
    directory: DataDirectory, tmp_path: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "key.json", DataDirectory(tmp_path / "other")
    assert run("export", file, "--data-dir", directory.path, "--passphrase-file", passphrase) == 0
    other.create()
    other.log_database.touch()
    assert run("import", file, "--data-dir", other.path, "--passphrase-file", passphrase) == 2
    assert "another node's log" in capsys.readouterr().err
    assert not other.key_file.exists()


def test_a_wrong_passphrase_imports_nothing(
    directory: DataDirectory, tmp_path: Path, passphrase: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other, wrong = tmp_path / "key.json", DataDirectory(tmp_path / "other"), tmp_path / "wrong"
    wrong.write_text("incorrect horse")
    assert run("export", file, "--data-dir", directory.path, "--passphrase-file", passphrase) == 0
    assert run("import", file, "--data-dir", other.path, "--passphrase-file", wrong) == 2
    assert "the passphrase is wrong" in capsys.readouterr().err
    assert not other.key_file.exists()


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"\xff\xfe"])
def test_an_unfit_passphrase_file(
    directory: DataDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    file = tmp_path / "words"
    if content is not None:
        file.write_bytes(content)
    assert run("export", tmp_path / "key.json", "--data-dir", directory.path, "--passphrase-file", file) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "key.json").exists()


def test_it_asks_twice_without_echo(
    directory: DataDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    person = Person("correct horse", "correct house", "correct horse", "correct horse")
    assert run("export", tmp_path / "key.json", "--data-dir", directory.path, terminal=person) == 2
    assert "differ" in capsys.readouterr().err
    assert run("export", tmp_path / "key.json", "--data-dir", directory.path, terminal=person) == 0
    assert person.answers == []


def test_without_a_terminal_it_names_the_option(
    directory: DataDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", tmp_path / "key.json", "--data-dir", directory.path) == 2
    assert "--passphrase-file" in capsys.readouterr().err
