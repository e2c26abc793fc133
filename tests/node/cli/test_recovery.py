"""The recovery key's commands: words shown and forgotten, and what is asked of a daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from node.cli import main, recovery
from node.cli.terminal import Terminal
from node.keys import recovery_words
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from protocol.domain import parse_genesis
from protocol.identity import Identity
from protocol.log.entry import NO_PREV, make
from protocol.log.recovery import check, commitment
from protocol.records import Close, Join, Rebind
from tests.node.cli.stand_ins import Nobody, Person, carry_out, serving
from tests.protocol.builders import digest, key, small_genesis

GENESIS = small_genesis()
DOMAIN = parse_genesis(GENESIS)
SECRET = Identity(digest("a recovery key"))
OLD, OTHER = key("old").node.hex(), key("other").node.hex()


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    """A node that joined a domain."""
    made = DataDirectory(tmp_path / "node")
    made.create()
    made.identity()
    made.make_recovery()
    made.save_genesis(GENESIS)
    return made


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A file with the words of SECRET."""
    path = tmp_path / "words"
    path.write_text(recovery_words.words(SECRET))
    return path


def run(*arguments: object, terminal: Terminal | None = None) -> int:
    return main.main(["identity", *map(str, arguments)], terminal=terminal or Nobody())


def test_the_words_are_shown(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    key_words = recovery_words.words(directory.recovery()).split()
    assert run("recovery", "show", "--data-dir", directory.path) == 0
    shown = capsys.readouterr()
    assert "1 " + key_words[0] in shown.out
    assert recovery_words.PURPOSE in shown.err
    assert run("recovery", "show", "--data-dir", directory.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["words"] == key_words
    assert found["public"] == directory.recovery().node.hex()
    assert found["committed"] is None


@pytest.mark.parametrize("right", [True, False])
def test_a_key_that_the_join_does_not_name_is_told(
    directory: DataDirectory, right: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    named = directory.recovery().node if right else SECRET.node
    join = make(directory.identity(), DOMAIN.id, 0, NO_PREV, DOMAIN.id, Join(commitment(named), "farflung/test", "a"))

    async def fill() -> None:
        async with open_log_store(directory.log_database, DOMAIN) as store:
            await store.append([join])

    trio.run(fill)
    assert run("recovery", "show", "--data-dir", directory.path) == (0 if right else 2)
    assert ("not the recovery key that the node named" in capsys.readouterr().err) is not right
    assert run("recovery", "show", "--data-dir", directory.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["committed"] is right


def test_forgetting_asks_first(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    public = directory.recovery_public()
    assert run("recovery", "forget", "--data-dir", directory.path) == 2
    assert "--yes" in capsys.readouterr().err
    assert run("recovery", "forget", "--data-dir", directory.path, terminal=Person("no")) == 1
    assert directory.recovery_file.exists()
    assert run("recovery", "forget", "--data-dir", directory.path, terminal=Person("y")) == 0
    assert not directory.recovery_file.exists()
    assert directory.recovery_public() == public
    capsys.readouterr()
    for command in (["recovery", "show"], ["recovery", "forget", "--yes"]):
        assert run(*command, "--data-dir", directory.path) == 2
        assert "was forgotten here" in capsys.readouterr().err
    assert run("show", "--data-dir", directory.path) == 0
    assert "its words alone" in capsys.readouterr().out


class Daemon:
    """A stand-in for a daemon in whose log ``nodes`` committed to SECRET; it takes every signed statement."""

    def __init__(self, node: bytes, *nodes: str) -> None:
        self.node = node
        self.rows: list[dict[str, Any]] = [
            {"node": node, "name": f"n{place}", "ended": None, "successor": None} for place, node in enumerate(nodes)
        ]
        self.taken: list[Close | Rebind] = []
        self.asked: list[str] = []
        self.cuts = True

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the daemon says."""
        self.asked.append(json.dumps(request))
        match request["op"]:
            case "status":
                return {"node": self.node.hex(), "domain": DOMAIN.id.hex(), "name": "mine"}
            case "recovery":
                return {"nodes": self.rows if request["commitment"] == commitment(SECRET.node).hex() else []}
            case kind:
                cls = Close if kind == "close" else Rebind
                record = cls(*(bytes.fromhex(request[name]) for name in ("target", "recovery", "signature")))
                check(record, DOMAIN.id, self.node)
                self.taken.append(record)
                if self.cuts:
                    (row,) = [row for row in self.rows if row["node"] == request["target"]]
                    row["ended"], row["successor"] = 7, None if cls is Close else self.node.hex()
                return {"entry": "ab" * 32, "seq": 3}


def test_closing_finds_the_node_by_the_words(
    directory: DataDirectory, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon(directory.identity().node, OLD)
    with serving(directory, daemon.answer):
        assert run("close", "--words-file", words, "--data-dir", directory.path) == 0
        assert capsys.readouterr().out == f"n0 ({OLD[:8]}) is closed (final since the cut of height 7)\n"
        (record,) = daemon.taken
        assert isinstance(record, Close)
        assert (record.target.hex(), record.recovery) == (OLD, SECRET.node)
        # Once is enough, and the secret never went over the socket.
        assert run("close", OLD[:6], "--words-file", words, "--data-dir", directory.path) == 0
        assert "ended already, with the cut of height 7" in capsys.readouterr().out
        assert len(daemon.taken) == 1
    sent = " ".join(daemon.asked)
    assert SECRET.seed.hex() not in sent
    assert recovery_words.words(SECRET).split()[0] not in sent


def test_rebinding_asks_for_the_words(directory: DataDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    person = Person(recovery_words.words(SECRET).upper(), recovery_words.words(SECRET))
    daemon = Daemon(directory.identity().node, OLD, OTHER)
    with serving(directory, daemon.answer):
        assert run("rebind", OTHER, "--data-dir", directory.path, terminal=person) == 0
        assert f"mine goes on for n1 ({OTHER[:8]})" in capsys.readouterr().out
        assert [type(record) for record in daemon.taken] == [Rebind]
        assert run("rebind", OTHER, "--data-dir", directory.path, terminal=person) == 2
        assert "went on as" in capsys.readouterr().err


def test_an_entry_without_a_cut_is_told_as_such(
    directory: DataDirectory, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon(directory.identity().node, OLD)
    daemon.cuts = False
    with serving(directory, daemon.answer):
        line = ("identity", "close", "--words-file", words, "--data-dir", directory.path)
        assert carry_out(recovery.close_lost, *line, patience=0.0) == 0
    assert "takes effect with the next cut" in capsys.readouterr().err


def test_mistakes_are_one_line(
    directory: DataDirectory,
    words: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*arguments: object) -> str:
        assert run(*arguments, "--data-dir", directory.path) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "no daemon runs" in said("close", "--words-file", words)
    wrong = tmp_path / "wrong"
    wrong.write_text("abandon")
    own = directory.identity().node.hex()
    with serving(directory, Daemon(bytes.fromhex(own), OLD, OTHER, own).answer):
        assert "3 nodes named this key" in said("close", "--words-file", words)
        assert "1 words" in said("close", "--words-file", wrong)
        assert "--words-file" in said("close")
        assert f"no node {'0' * 9}" in said("rebind", "0" * 9, "--words-file", words)
        assert "cannot take over from itself" in said("rebind", own, "--words-file", words)
        other = tmp_path / "other"
        other.write_text(recovery_words.words(key("another recovery")))
        assert "no node of this domain" in said("close", "--words-file", other)


def test_a_new_key_is_shown_once_and_only_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["init", "--data-dir", str(tmp_path / "piped")], terminal=Nobody()) == 0
    told = capsys.readouterr().out
    assert f"farflung identity recovery show --data-dir {tmp_path / 'piped'}" in told
    assert main.main(["init", "--data-dir", str(tmp_path / "seen")], terminal=Person(sees=True)) == 0
    told = capsys.readouterr().out
    directory = DataDirectory(tmp_path / "seen")
    for line in recovery_words.lines(directory.recovery()):
        assert line in told
    assert recovery_words.PURPOSE in told
    assert main.main(["init", "--data-dir", str(tmp_path / "seen")]) == 0
    told = capsys.readouterr().out
    assert not any(line in told for line in recovery_words.lines(directory.recovery()))
    assert main.main(["init", "--data-dir", str(tmp_path / "json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] is True
