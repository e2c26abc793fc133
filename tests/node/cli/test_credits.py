"""``farflung credits`` from a log on disk: what credit is made of, and what became of nodes that ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from node.cli import main
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from protocol.domain import parse_genesis
from tests.protocol.builders import small_genesis
from tests.protocol.test_endings import Kept


@pytest.fixture
def story(tmp_path: Path) -> Kept:
    """A node's folder ``tmp_path / "node"`` with submissions, a training step, a rebind and a close."""
    story = Kept(inference=("i1", "i2", "i3"))
    story.worked("i1")
    story.worked("i1", 2, "hard")
    story.worked("i2")
    story.rollout("i2", 2)
    story.train()
    story.cut()
    story.rebind("i2", "i1")
    story.close("i2", "i3")
    story.cut()
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.save_genesis(small_genesis())
    assert parse_genesis(small_genesis()).id == story.domain.id

    async def store() -> None:
        async with open_log_store(directory.log_database, story.domain) as opened:
            await opened.append(story.objects)

    trio.run(store)
    return story


def test_credits(story: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["credits", "--json", "--data-dir", str(tmp_path / "node")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == "log"
    rows = {row["name"]: row for row in answer["nodes"]}
    for row in rows.values():
        assert row["credit"] == row["generated"] + row["audited"] + row["trained"]
    both = rows["i2"]
    assert (both["generated"], both["accepted"], both["rejected"], both["hard"], both["pending"]) == (16, 2, 1, 1, 1)
    assert both["goes_on_for"] == [story.node("i1").hex()]
    assert (rows["i1"]["credit"], rows["i1"]["ended"], rows["i1"]["goes_on_as"]) == (0, "moved", both["node"])
    assert (rows["i3"]["ended"], rows["i3"]["goes_on_as"]) == ("closed", None)
    # A quarter of eight replayed responses for each of three verdicts that agreed; eight responses trained on.
    assert (rows["v1"]["audited"], rows["trainer"]["trained"]) == (6, 8)
    assert rows["trainer"]["ended"] is None


def test_the_table_names_it_all(story: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["credits", "--data-dir", str(tmp_path / "node")]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = "node name role credit generated audited trained accepted rejected void pending reputation notes"
    assert lines[0].split() == header.split()
    rows = {line.split()[1]: line for line in lines[1:]}
    old, new = story.node("i1").hex()[:8], story.node("i2").hex()[:8]
    assert rows["i2"].split()[3:11] == ["16", "16", "0", "0", "2", "1", "0", "1"]
    assert rows["i2"].endswith(f"1 sampling; goes on for {old}")
    assert rows["i1"].endswith(f"goes on as {new}")
    assert rows["i3"].endswith("closed")


def test_the_log_shows_and_exports_them(story: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "node")
    assert main.main(["log", "show", "--kind", "rebind", "--data-dir", folder]) == 0
    assert f"goes on for {story.node('i1').hex()[:8]}" in capsys.readouterr().out
    assert main.main(["log", "show", "--kind", "close", "--json", "--data-dir", folder]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert entry["payload"]["target"] == story.node("i3").hex()
    assert entry["final"] is True
    assert main.main(["log", "export", "--data-dir", folder]) == 0
    kinds = [json.loads(line).get("kind") for line in capsys.readouterr().out.splitlines()]
    assert {"close", "rebind"} <= set(kinds)
    assert main.main(["log", "verify", folder]) == 0
    told = capsys.readouterr().out
    assert f"node {story.node('i1').hex()} credit 0 reputation 500000" in told
    assert f"node {story.node('i2').hex()} credit 16 " in told
