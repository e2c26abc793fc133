"""Proofs from a log on disk: beside a running daemon, of a forked feed, and of what is not there."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from node.errors import UserError
from node.log.offline_proof import NotFinal, prove
from node.log.offline_verification import verify
from node.log.replicated_log import LogService
from node.store.data_directory import DataDirectory
from node.store.log_store import open_log_store
from protocol.log.entry_proof import LogProof
from protocol.log.fork_proof import ForkProof
from protocol.log.heads import RangeRequest
from protocol.log.replica import Replica
from protocol.records import Leave, Role
from tests.node.log.test_offline_verification import DOMAIN, ELECTOR, GENESIS, fill
from tests.protocol.builders import Writer, cut_for, key
from tests.protocol.log.test_entry_proof import Amended


@pytest.fixture
async def directory(tmp_path: Path) -> DataDirectory:
    """A node's folder with a small log under three cuts."""
    made = DataDirectory(tmp_path / "node")
    await fill(made)
    return made


async def test_what_is_final_is_proved(directory: DataDirectory) -> None:
    replica = verify(directory).replica
    for entry in replica.arrivals:
        if entry.seq <= replica.certified_head(entry.author):
            made = prove(directory, entry.id.hex())
            assert LogProof.parse(made.encode()).check(DOMAIN.id) == DOMAIN.electors
            assert made.covering.entry.id == entry.id
            assert made.covering.cut.cut.height == 3
            assert prove(directory, entry.id.hex()[:8].upper()) == made
        else:
            with pytest.raises(NotFinal, match="no cut covers it"):
                prove(directory, entry.id.hex())


async def test_a_proof_follows_the_amendments_of_the_electors(tmp_path: Path) -> None:
    world = Amended()
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.save_genesis(world.genesis)
    async with open_log_store(directory.log_database, world.replica.domain) as store:
        await store.append([*world.writer.entries, *world.replica.cuts])
        # Of what is pruned the join goes; amendments stay, for proofs rest on them.
        assert await store.prune([RangeRequest(world.writer.node, 0, 3)]) == 1
    for entry in world.writer.entries[1:]:
        made = LogProof.parse(prove(directory, entry.id.hex()).encode())
        assert made.check(world.replica.domain.id) == world.electors
        assert [covering.entry.kind for covering in made.amendments] == ["amend"] * 3
        assert [covering.cut.cut.height for covering in made.amendments] == [1, 2, 3]


async def test_what_was_dropped_is_not_proved_and_hinders_no_other_proof(directory: DataDirectory) -> None:
    entries = verify(directory).replica.entries(key("a").node)
    with closing(sqlite3.connect(directory.log_database)) as connection:
        connection.execute("UPDATE entries SET body = NULL, signature = NULL WHERE id = ?", (entries[1].id,))
        connection.commit()
    with pytest.raises(UserError, match="ask an archive"):
        prove(directory, entries[1].id.hex())
    assert prove(directory, entries[2].id.hex()).check(DOMAIN.id) == DOMAIN.electors


async def test_it_works_while_the_log_is_open(directory: DataDirectory) -> None:
    entry = verify(directory).replica.entries(key("a").node)[1]
    async with open_log_store(directory.log_database, DOMAIN):
        assert prove(directory, entry.id.hex()).covering.entry.id == entry.id


async def test_the_certified_branch_of_a_fork_is_proved_and_no_other(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "node")
    directory.create()
    directory.save_genesis(GENESIS)
    one, other = Writer("a", DOMAIN.id), Writer("a", DOMAIN.id)
    for role in ("relay", "validator", "trainer"):
        one.append(Role(role))
    for _ in range(3):
        other.append(Leave())
    async with open_log_store(directory.log_database, DOMAIN) as store:
        service = LogService(ELECTOR, Replica(DOMAIN), store, fresh=True)
        await service.intake.receive(entries=[entry.encode() for entry in one.entries])
        await service.intake.receive(cuts=[cut_for(service.replica, "elector").encode()])
        # The other branch is stored by hand, as another version might: it lies beside the certified one.
        await service.intake.receive(forks=[ForkProof.of(one.entries[2], other.entries[2]).encode()])
        await store.append(other.entries)
    for entry in one.entries:
        assert prove(directory, entry.id.hex()).check(DOMAIN.id) == DOMAIN.electors
    for entry in other.entries[1:]:
        with pytest.raises(NotFinal, match="another one was certified"):
            prove(directory, entry.id.hex())


@pytest.mark.parametrize("wanted", ["", "abc", "0123456", "0123456789abcdef" * 5, "xxxxxxxx", "00000000", "00" * 32])
async def test_what_is_not_there_is_the_users_mistake(directory: DataDirectory, wanted: str) -> None:
    with pytest.raises(UserError):
        prove(directory, wanted)


async def test_a_damaged_log_is_said_to_be_one(directory: DataDirectory, tmp_path: Path) -> None:
    entry = verify(directory).replica.entries(key("a").node)[2]
    for statement in (
        "DELETE FROM entries WHERE seq = 1",
        "UPDATE entries SET id = zeroblob(32) WHERE seq = 1 AND author = (SELECT author FROM entries WHERE seq = 3)",
        "UPDATE cuts SET data = zeroblob(9) WHERE height = 2",
        "UPDATE entries SET signature = zeroblob(64)",
        "UPDATE entries SET signature = 'text'",
        "UPDATE entries SET body = 'text' WHERE seq = 2",
        "UPDATE cuts SET data = 7",
        "DROP TABLE cuts",
    ):
        copy = DataDirectory(tmp_path / "copy")
        copy.create()
        copy.genesis_file.write_bytes(directory.genesis_file.read_bytes())
        copy.log_database.write_bytes(directory.log_database.read_bytes())
        with closing(sqlite3.connect(copy.log_database)) as connection:
            connection.execute(statement)
            connection.commit()
        with pytest.raises(UserError, match=r"damaged|cannot be read"):
            prove(copy, entry.id.hex())
    with pytest.raises(UserError, match="there is no log"):
        prove(DataDirectory(tmp_path / "nothing"), entry.id.hex())
