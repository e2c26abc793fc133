"""Showing, exporting and checking a log with the command."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path

import pytest
import trio

from node.cli import main
from node.store.data_directory import DataDirectory
from protocol.domain import parse_genesis
from protocol.log.entry import decode
from protocol.log.quorum import CertifiedCut, CertifiedGrant
from tests.node.log.test_offline_verification import alter, fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A node's folder with a small log."""
    trio.run(fill, DataDirectory(tmp_path / "node"))
    return tmp_path / "node"


def test_entries_are_shown_in_order_and_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> list[dict[str, object]]:
        assert main.main(["log", "show", "--json", "--data-dir", str(folder), *arguments]) == 0
        entries: list[dict[str, object]] = json.loads(capsys.readouterr().out)["entries"]
        return entries

    entries = shown()
    assert [entry["cut"] for entry in entries] == sorted(entry["cut"] for entry in entries)  # type: ignore[type-var]
    assert {entry["kind"] for entry in entries} == {"join", "role"}
    assert [entry["kind"] for entry in shown("--author", "node-1")] == ["join", "role"]
    assert {entry["kind"] for entry in shown("--kind", "role")} == {"role"}
    assert shown("--last", "1") == entries[-1:]
    assert shown("--last", "0") == entries
    assert main.main(["log", "show", "--data-dir", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["cut", "entry", "node", "name", "seq", "kind", "what"]
    assert len(lines) == len(entries) + 1


@pytest.mark.parametrize("mistake", [["--author", "nobody"], ["--last", "-1"]])
def test_a_wrong_choice_is_one_line(mistake: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["log", "show", "--data-dir", str(folder), *mistake]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_export_can_be_read_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.jsonl"
    assert main.main(["log", "export", "--data-dir", str(folder), str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    parse_genesis(bytes.fromhex(rows[0]["data"]))
    assert {row["type"] for row in rows} == {"genesis", "entry", "cut", "grant"}
    # Every entry is final with the first cut behind it, or behind all cuts.
    last_cut = max(place for place, row in enumerate(rows) if row["type"] == "cut")
    places = {place: row["final"] for place, row in enumerate(rows) if row["type"] == "entry"}
    assert places == {place: place < last_cut for place in places}
    assert set(places.values()) == {True, False}
    seqs = [(row["author"], row["seq"]) for row in rows if row["type"] == "entry"]
    assert len(set(seqs)) == len(seqs)
    assert all(seq == 0 or seqs.index((author, seq - 1)) < place for place, (author, seq) in enumerate(seqs))
    for row in rows[1:]:
        data = bytes.fromhex(row["data"])
        match row["type"]:
            case "entry":
                assert decode(data).id.hex() == row["id"]
            case "cut":
                assert CertifiedCut.parse(data).cut.height == row["height"]
            case "grant":
                assert CertifiedGrant.parse(data).grant.term == row["term"]
    assert main.main(["log", "export", "--data-dir", str(folder), str(file)]) == 2
    assert "there is a file already" in capsys.readouterr().err
    assert main.main(["log", "export", "--data-dir", str(folder)]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_an_export_that_fails_leaves_no_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.jsonl"
    full = partial(json.dumps, default=str)

    def dumps(value: dict[str, object]) -> str:
        if value["type"] == "cut":
            raise OSError(errno.ENOSPC, "No space left on device")
        return full(value)

    monkeypatch.setattr("node.cli.log.json.dumps", dumps)
    assert main.main(["log", "export", "--data-dir", str(folder), str(file)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert not file.exists()


def test_verify_takes_the_folder_either_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["log", "verify", str(folder)]) == 0
    first = capsys.readouterr()
    assert "the log is valid" in first.err
    assert main.main(["log", "verify", "--data-dir", str(folder)]) == 0
    assert capsys.readouterr().out == first.out
    assert main.main(["log", "verify", "--data-dir", str(folder), str(folder)]) == 2


def test_a_damaged_log_is_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alter(DataDirectory(folder), "UPDATE entries SET signature = zeroblob(64) WHERE seq = 0")
    for command in (["show"], ["export"], ["verify"]):
        assert main.main(["log", *command, "--data-dir", str(folder)]) == 1
        told = capsys.readouterr().err
        assert "the signature is wrong" in told
    assert f"{folder}: {len(told.splitlines()) - 1} problem" in told


def test_a_file_is_no_folder_to_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = DataDirectory(folder).log_database
    assert main.main(["log", "verify", str(file)]) == 2
    assert capsys.readouterr().err == f"farflung: {file}: this is a file; name a node's folder\n"


def test_credits_and_roles_are_read_from_it_where_no_daemon_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("credits", "roles"):
        assert main.main([command, "--json", "--data-dir", str(folder)]) == 0
        told = capsys.readouterr()
        assert "no daemon runs" in told.err
        answer = json.loads(told.out)
        assert answer["source"] == "log"
        assert "node-1" in {row["name"] for row in answer["nodes"]}
        assert main.main([command, "--data-dir", str(folder)]) == 0
        assert "node-1" in capsys.readouterr().out
    assert main.main(["peers", "--json", "--data-dir", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {"source": "file", "peers": []}
