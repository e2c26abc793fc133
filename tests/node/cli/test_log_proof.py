"""Proving with the command, and checking with nothing but a file and the domain's id."""

from __future__ import annotations

import json
import sqlite3
from base64 import b64decode
from contextlib import closing
from pathlib import Path

import pytest
import trio

from node.cli import main
from node.log.offline_verification import verify
from node.store.data_directory import DataDirectory
from protocol.log.checkpoint import CosignedCheckpoint
from protocol.log.merkle import root
from tests.node.log.test_offline_verification import DOMAIN, ELECTOR, fill
from tests.protocol.builders import digest, key
from tests.protocol.reference_log import parse_verifier_key, verify_consistency


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A node's folder with a small log."""
    trio.run(fill, DataDirectory(tmp_path / "node"))
    return tmp_path / "node"


def run(*words: object) -> int:
    return main.main(["log", *map(str, words)])


def entry_of(folder: Path, name: str, seq: int) -> str:
    return verify(DataDirectory(folder)).replica.entries(key(name).node)[seq].id.hex()


def test_a_proof_is_written_and_checked_without_the_log(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, file = entry_of(folder, "a", 2), tmp_path / "proof"
    assert run("prove", entry, "-o", file, "--data-dir", folder) == 0
    assert f"--domain {DOMAIN.id.hex()}" in capsys.readouterr().out
    folder.rename(tmp_path / "gone")
    assert run("check-proof", file, "--domain", DOMAIN.id.hex()) == 0
    told = capsys.readouterr().out
    for part in (
        f"{file} holds:",
        f"test, {DOMAIN.id.hex()}",
        entry,
        key("a").node.hex(),
        "2 in its author's feed, of which the first 4 are final",
        "role = inference",
        "at height 3 or before",
        "1 of 1 electors signed it, 1 are needed",
    ):
        assert part in told
    assert run("check-proof", file, "--domain", DOMAIN.id.hex().upper(), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert (found["entry"], found["author"], found["seq"]) == (entry, key("a").node.hex(), 2)
    assert (found["kind"], found["payload"], found["frozen"]) == ("role", {"role": "inference"}, False)
    assert (found["height"], found["signers"], found["quorum"]) == (3, [ELECTOR.node.hex()], 1)
    # Without -o the file is named by the entry; nothing is overwritten.
    monkeypatch.chdir(tmp_path)
    assert run("prove", entry[:12], "--data-dir", tmp_path / "gone") == 0
    assert (tmp_path / f"{entry[:16]}.proof").read_bytes() == file.read_bytes()
    assert run("prove", entry[:12], "--data-dir", tmp_path / "gone") == 2


def test_what_does_not_hold_is_one_line_and_1(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "proof"
    assert run("prove", entry_of(folder, "a", 1), "-o", file, "--data-dir", folder) == 0
    capsys.readouterr()
    good = file.read_bytes()
    for data, domain in (
        (good, digest("another domain")),
        (good[:-1] + bytes([good[-1] ^ 1]), DOMAIN.id),
        (b"", DOMAIN.id),
        (b"\x91" * 1000, DOMAIN.id),
        (bytes(9 << 20), DOMAIN.id),
    ):
        file.write_bytes(data)
        assert run("check-proof", file, "--domain", domain.hex()) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"farflung: {file} proves nothing: ")
        assert err.count("\n") == 1
        assert run("check-proof", file, "--domain", domain.hex(), "--json") == 1
        found = json.loads(capsys.readouterr().out)
        assert found["holds"] is False
        assert found["reason"]


def test_what_is_not_final_is_one_line_and_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = verify(DataDirectory(folder)).replica.entries(ELECTOR.node)[1].id.hex()
    assert run("prove", newest, "--data-dir", folder) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"farflung: entry {newest} is not final: no cut covers it\n")


@pytest.mark.parametrize(
    "words",
    [
        ["prove", "0" * 64, "--data-dir", "FOLDER"],
        ["prove", "short", "--data-dir", "FOLDER"],
        ["check-proof", "FOLDER/missing", "--domain", "0" * 64],
        ["check-proof", "FOLDER", "--domain", "0" * 64],
        ["check-proof", "FOLDER/genesis", "--domain", "0" * 63],
        ["check-proof", "FOLDER/genesis", "--domain", "x" * 64],
    ],
)
def test_a_users_mistake_is_one_line_and_2(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*(word.replace("FOLDER", str(folder)) for word in words)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_checkpoint_is_printed_for_other_tools(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "--data-dir", folder) == 0
    note = capsys.readouterr().out
    found = CosignedCheckpoint.parse(note.encode(), DOMAIN.id, DOMAIN.electors)
    found.require_quorum(DOMAIN.electors)
    bodies = [cut.cut.body for cut in verify(DataDirectory(folder)).replica.cuts]
    assert (found.checkpoint.size, found.checkpoint.root) == (3, root(bodies))
    assert run("checkpoint", "--data-dir", folder, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["note"] == note
    assert (told["origin"], told["size"], told["root"]) == (f"farflung/{DOMAIN.id.hex()}", 3, root(bodies).hex())
    assert told["cosigners"] == [ELECTOR.node.hex()]
    assert told["consistency"] is None
    (key_text,) = told["verifier_keys"]
    assert parse_verifier_key(key_text).key == ELECTOR.node
    # With --since it is the body of a witness' add-checkpoint.
    assert run("checkpoint", "--data-dir", folder, "--since", "2") == 0
    head, _, rest = capsys.readouterr().out.partition("\n\n")
    old, *proof = head.split("\n")
    assert (old, rest) == ("old 2", note)
    verify_consistency(2, 3, [b64decode(line) for line in proof], root(bodies[:2]), root(bodies))
    assert run("checkpoint", "--data-dir", folder, "--since", "3") == 0
    assert capsys.readouterr().out == f"old 3\n\n{note}"
    for size in ("0", "4", "-1"):
        assert run("checkpoint", "--data-dir", folder, "--since", size) == 2
        assert "there is no proof" in capsys.readouterr().err


def test_without_a_checkpoint_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(folder / "log" / "log.db")) as connection:
        connection.execute("DELETE FROM meta WHERE key = 'checkpoint'")
        connection.commit()
    assert run("checkpoint", "--data-dir", folder) == 1
    assert "no checkpoint has been cosigned yet" in capsys.readouterr().err
    with closing(sqlite3.connect(folder / "log" / "log.db")) as connection:
        connection.execute("INSERT INTO meta VALUES ('checkpoint', 'rubbish')")
        connection.commit()
    assert run("checkpoint", "--data-dir", folder) == 2
