"""Making a node's folder."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from node import config
from node.cli import main
from node.store.data_directory import DataDirectory
from protocol.identity import peer_id


def test_it_makes_key_and_configuration_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["init", "--json", "--name", "mine", "--threads", "2"]) == 0
    first = json.loads(capsys.readouterr().out)
    directory = DataDirectory(home / ".local/share/farflung/node")
    assert first["made"] is True
    assert first["peer_id"] == peer_id(directory.read_identity().node)
    assert stat.S_IMODE(directory.key_file.stat().st_mode) == 0o600
    assert directory.config() == config.Config(name="mine", threads=2)
    key = directory.key_file.read_bytes()
    assert main.main(["init"]) == 0
    assert "stood already" in capsys.readouterr().out
    assert directory.key_file.read_bytes() == key


def test_the_configuration_may_stand_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "etc" / "farflung.toml"
    arguments = ["init", "--data-dir", str(tmp_path / "data"), "--config", str(path), "--name", "service"]
    assert main.main(arguments) == 2
    assert "there is no folder" in capsys.readouterr().err
    path.parent.mkdir()
    assert main.main(arguments) == 0
    assert config.load(path).name == "service"
    assert not (tmp_path / "data" / "farflung.toml").exists()


def test_a_mistake_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["init", "--data-dir", str(tmp_path / "data"), "--threads", "0"]) == 2
    assert capsys.readouterr().err.startswith("farflung: --threads: ")
    assert not (tmp_path / "data").exists()
