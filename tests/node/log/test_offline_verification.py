"""Checking a log offline: sound logs alike byte for byte, every alteration listed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from node.errors import UserError
from node.log.elector import open_elector
from node.log.offline_verification import LogReport, verify
from node.log.replicated_log import LogService
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from protocol.domain import parse_genesis
from protocol.log.replica import Replica
from protocol.records import Join, Role
from tests.protocol.builders import Writer, digest, key, small_genesis

GENESIS = small_genesis()
DOMAIN = parse_genesis(GENESIS)
ELECTOR = key("elector")


async def fill(first: DataDirectory, second: DataDirectory | None = None) -> LogReport:
    """The same log in two directories, taken in different orders; the report on the first while it is still open."""
    a, b = Writer("a", DOMAIN.id), Writer("b", DOMAIN.id)
    for directory in (first, second):
        if directory is not None:
            directory.create()
            directory.save_genesis(GENESIS)
    async with open_log_store(first.log_database, DOMAIN) as store:
        service = LogService(ELECTOR, Replica(DOMAIN), store, fresh=True)
        elector = await open_elector(service, ELECTOR)
        await service.append(Join(digest("r"), "farflung/test", "node-1"))
        for _ in range(3):
            for writer in (a, b):
                writer.anchor = service.replica.newest_cut_id
                writer.append(Role("inference"))
                await service.intake.receive(entries=[entry.encode() for entry in writer.entries])
            await elector.cut()
        await elector.grant_term(a.node)
        await service.append(Role("relay"))
        if second is not None:
            async with open_log_store(second.log_database, DOMAIN) as other:
                copy = LogService(key("b"), Replica(DOMAIN), other, fresh=True)
                replica = service.replica
                for author in sorted(replica.heads, reverse=True):
                    await copy.intake.receive(entries=[entry.encode() for entry in reversed(replica.entries(author))])
                await copy.intake.receive(
                    cuts=[cut.encode() for cut in reversed(replica.cuts)],
                    grants=[grant.encode() for grant in replica.grants.values()],
                )
        return verify(first)


def alter(directory: DataDirectory, *statements: str) -> LogReport:
    with closing(sqlite3.connect(directory.log_database)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return verify(directory)


async def test_two_nodes_print_the_same(tmp_path: Path) -> None:
    first, second = DataDirectory(tmp_path / "1"), DataDirectory(tmp_path / "2")
    running = await fill(first, second)
    report, other = verify(first), verify(second)
    assert report.problems == other.problems == running.problems == ()
    assert report.exit_code == 0
    assert report.text() == other.text() == running.text()
    text = report.text()
    assert text.startswith(f"domain {DOMAIN.id.hex()} test\nheads root {report.replica.heads_root().hex()}\n")
    assert f"newest cut 3 {report.replica.newest_cut_id.hex()}\n" in text
    assert "entries 10: 3 join, 7 role\n" in text
    assert f"node {key('a').node.hex()} credit 0 reputation 500000 entries 4 final 4 a\n" in text
    assert f"node {ELECTOR.node.hex()} credit 0 reputation 500000 entries 2 final 1 node-1\n" in text


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE entries SET signature = zeroblob(64) WHERE seq = 2", "the signature is wrong"),
        ("UPDATE entries SET signature = NULL WHERE seq = 2", None),
        ("UPDATE entries SET body = substr(body, 1, 80) WHERE seq = 3", "entry 3: "),
        ("UPDATE entries SET body = 'text' WHERE seq = 3", "entry 3: "),
        ("UPDATE entries SET seq = 'x' WHERE seq = 3", "labelled wrongly"),
        ("UPDATE entries SET id = zeroblob(32) WHERE rowid = 4", "labelled wrongly"),
        ("DELETE FROM entries WHERE seq = 1", "hang on something that is missing"),
        ("DELETE FROM entries WHERE seq = 3", "entries that it covers are missing"),
        ("DELETE FROM cuts WHERE height = 2", "the cut before it is missing"),
        ("DELETE FROM cuts WHERE height = 1", "hang on something that is missing"),
        ("UPDATE cuts SET data = substr(data, 1, 90) WHERE height = 2", "cut 2: "),
        ("UPDATE cuts SET height = 9 WHERE height = 3", "it is of height 3"),
        ("UPDATE cuts SET data = 5 WHERE height = 3", "cut 3: "),
        ("UPDATE grants SET term = 2", "it is of term 1"),
        ("UPDATE grants SET data = x'00'", "grant 1: "),
        ("INSERT INTO forks VALUES (x'00', 99, x'00')", "fork proof: "),
    ],
)
async def test_every_alteration_is_listed(tmp_path: Path, statement: str, words: str | None) -> None:
    directory = DataDirectory(tmp_path / "1")
    await fill(directory)
    if statement.startswith("UPDATE entries SET signature = NULL"):
        # The schema refuses it; a file that was made by hand need not.
        with pytest.raises(sqlite3.IntegrityError):
            alter(directory, statement)
        return
    report = alter(directory, statement)
    assert report.exit_code == 1
    assert words is not None
    assert any(words in problem for problem in report.problems), report.problems
    assert all("\n" not in problem for problem in report.problems)
    report.text()


async def test_every_flipped_bit_of_an_entry_is_found(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "1")
    await fill(directory)
    with closing(sqlite3.connect(directory.log_database)) as connection:
        ((body,),) = connection.execute("SELECT body FROM entries WHERE rowid = 5").fetchall()
    for place in range(0, len(body), 7):
        flipped = bytearray(body)
        flipped[place] ^= 1 << place % 8
        assert alter(directory, f"UPDATE entries SET body = x'{flipped.hex()}' WHERE rowid = 5").problems
    assert not alter(directory, f"UPDATE entries SET body = x'{body.hex()}' WHERE rowid = 5").problems


async def test_a_fork_is_shown_and_no_problem(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "1")
    await fill(directory)
    rival = Writer("a", DOMAIN.id)
    rival.append(Role("trainer"))
    async with open_log_store(directory.log_database, DOMAIN) as store:
        await store.append([rival.entries[1]])
    report = verify(directory)
    assert report.problems == ()
    assert f"node {rival.node.hex()} credit 0 reputation 500000 entries 4 final 4 frozen a\n" in report.text()


def break_genesis(directory: DataDirectory) -> None:
    directory.genesis_file.write_bytes(GENESIS[:-1] + bytes([GENESIS[-1] ^ 1]))


def break_log(directory: DataDirectory) -> None:
    for file in directory.log.iterdir():
        file.write_bytes(b"rubbish" * 1000)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda directory: directory.genesis_file.unlink(), "there is no genesis"),
        (break_genesis, "signature is wrong"),
        (lambda directory: directory.log_database.unlink(), "there is no log"),
        (break_log, "cannot be read"),
    ],
)
async def test_what_cannot_be_checked(tmp_path: Path, damage: Callable[[DataDirectory], None], words: str) -> None:
    directory = DataDirectory(tmp_path / "1")
    await fill(directory)
    damage(directory)
    with pytest.raises(UserError, match=words):
        verify(directory)


async def removed(directory: DataDirectory) -> None:
    """A log of which old bodies were removed."""
    writer = Writer("a", DOMAIN.id)
    directory.create()
    directory.save_genesis(GENESIS)
    async with open_log_store(directory.log_database, DOMAIN) as store:
        service = LogService(ELECTOR, Replica(DOMAIN), store, fresh=True, archive=False, snapshot_entries=4)
        elector = await open_elector(service, ELECTOR)
        await service.append(Join(digest("r"), "farflung/test", "node-1"))
        for number in range(9):
            writer.anchor = service.replica.newest_cut_id
            writer.append(Role("inference"))
            await service.intake.receive(entries=[entry.encode() for entry in writer.entries[-2:]])
            if number == 5:
                await elector.grant_term(writer.node)
            await elector.cut()


async def test_what_is_left_of_a_log_without_old_bodies_is_checked(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "1")
    await removed(directory)
    report = verify(directory)
    assert report.problems == ()
    assert len(report.notes) == 1
    assert "entries have no bodies" in report.notes[0]
    assert report.exit_code == 0
    assert len(report.replica.cuts) == 9
    assert f"node {key('a').node.hex()} credit 0 reputation 500000 entries 10 final 10 a\n" in report.text()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE entries SET id = zeroblob(32) WHERE position = 3", "do not fit it"),
        ("DELETE FROM entries WHERE position = 3", "do not fit it"),
        ("DELETE FROM cuts WHERE height = 2", "does not follow the one before"),
        ("UPDATE cuts SET data = substr(data, 1, 90) WHERE height = 2", "cut 2: "),
        ("UPDATE snapshot SET data = x'90'", "the snapshot is of no use"),
        ("DELETE FROM snapshot", "there is no snapshot"),
        ("UPDATE entries SET signature = zeroblob(64) WHERE seq = 9", "the signature is wrong"),
    ],
)
async def test_alterations_of_what_is_left_are_listed(tmp_path: Path, statement: str, words: str) -> None:
    directory = DataDirectory(tmp_path / "1")
    await removed(directory)
    report = alter(directory, statement)
    assert any(words in problem for problem in report.problems), report.problems
    report.text()


async def test_a_check_that_keeps_nothing_says_the_same(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "1")
    await fill(directory)
    told: list[tuple[int, int]] = []
    report = verify(directory, keep=False, forget_from=2, progress=lambda done, total: told.append((done, total)))
    assert report.replica.cuts.lowest > 1
    assert report.text() == verify(directory).text()
    assert told[-1] == (10, 10)
