"""``farflung weights`` on a folder without a daemon."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from node.cli import held_versions, main
from node.store.blob_store import BlobStore
from node.store.data_directory import DataDirectory
from node.store.version_store import VersionStore
from protocol.weights.manifest import Manifest
from tests.node.cli.stand_ins import serving
from tests.node.log.test_offline_verification import fill

OTHER = Manifest.of_file([("other", "F32", (4,))], bytes(16), 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A node's folder with a small log that names no version yet, and with a stray object."""
    directory = DataDirectory(tmp_path / "node")
    trio.run(fill, directory)
    BlobStore(directory.blobs)
    store = VersionStore(directory.versions)
    file = tmp_path / "file"
    file.write_bytes(bytes(16))
    store.adopt(OTHER.encode(), file)
    return directory.path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.main(["weights", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_is_not_of_the_lineage_is_listed_and_goes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ls", "--json", "--data-dir", str(folder))
    (row,) = json.loads(out)["objects"]
    assert code == 0
    assert (row["digest"], row["numbers"], row["kept"], row["here"]) == (OTHER.digest.hex(), [], None, 16)
    code, out, err = run(capsys, "ls", "--data-dir", str(folder))
    assert out.splitlines()[1].split()[:2] == ["version", "not"]
    assert "weights take 16 B" in err
    code, out, _ = run(capsys, "gc", "--dry-run", "--data-dir", str(folder))
    assert (code, out.split()[-3:]) == (0, ["would", "be", "deleted"])
    store = VersionStore(folder / "versions", owner=False)
    assert store.held() == [OTHER.digest]
    code, out, _ = run(capsys, "gc", "--json", "--data-dir", str(folder))
    found: dict[str, Any] = json.loads(out)
    assert found["gone"] == [{"digest": OTHER.digest.hex(), "size": 16}]
    assert store.held() == []


def test_the_quota_of_the_folders_configuration_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "farflung.toml").write_text("[weights]\nquota = 7\nreserve = 3\n")
    _, out, _ = run(capsys, "ls", "--json", "--data-dir", str(folder))
    found = json.loads(out)
    assert (found["quota"], found["reserve"]) == (7 << 20, 3 << 20)


def test_pulling_needs_a_daemon_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "pull", "--data-dir", str(folder))
    assert (code, out) == (2, "")
    assert err == (
        f"farflung: {folder}: no daemon runs, and only a running one can fetch; farflung run --data-dir {folder}\n"
    )


def test_a_pull_shows_how_far_it_is_how_fast_from_whom_and_when_it_will_be_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    parts = [("delta", have, 2_000_000) for have in (500_000, 1_000_000)]
    parts += [("whole", have, 900_000_000) for have in range(0, 700_000_000, 100_000_000)]
    found = [
        {"version": 7, "part": part, "have": have, "total": total, "rate": 50_000_000, "peers": 3, "done": False}
        for part, have, total in parts
    ]
    found.append({"version": 7, "size": 900_000_000, "done": True})

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "status":
            return {}
        assert request == {"op": "weights-pull", "version": -1}
        now[0] += 2
        return found.pop(0)

    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    with serving(DataDirectory(folder), answer):
        pulled = held_versions.pull(DataDirectory(folder), -1, poll=0, clock=lambda: now[0])
    assert (pulled["version"], pulled["size"]) == (7, 900_000_000)
    err = capsys.readouterr().err
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err).replace("\r", "\n").splitlines()
    last = [line for line in shown if "whole" in line and "peer" in line][-1]
    assert "version 7" in last
    assert "600.0/900.0 MB" in last
    assert "50.0 MB/s" in last
    assert "from 3 peers" in last
    assert "0:00:0" in last  # 300 MB lack, and 50 came a second


def test_a_version_that_is_here_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(DataDirectory(folder), lambda request: {"version": 7, "size": 900_000_000, "done": True}):
        code, _, err = run(capsys, "pull", "--data-dir", str(folder))
    assert (code, err) == (0, "farflung: version 7 is here, whole and verified (900.0 MB)\n")


def test_exporting_what_is_not_here_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wanted in ([], ["--version", "3"]):
        code, out, err = run(capsys, "export", str(tmp_path / "out"), *wanted, "--data-dir", str(folder))
        assert (code, out) == (2, "")
        assert "whole are: none" in err
        assert not (tmp_path / "out").exists()
