"""What a running node tells of itself, in whole networks on a mock clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.api.explain import problems, why
from node.api.node_rows import credits, role_rows
from node.api.reason_words import REMEDIES, remedy, words
from node.api.status import ROOM
from node.config import WILLING
from proofs.checks import REASONS
from protocol.domain import Policy
from protocol.log.quorum import Grant
from protocol.records import Leave, Role
from protocol.work.presence import Presence
from tests.node.fake_children import Faults
from tests.node.fakes import Cluster, open_cluster
from tests.protocol.builders import POLICY, key

NODES = ("elector", "a", "b", "c")
DOMAIN = bytes(32)


def presence(name: str, role: str, willing: tuple[str, ...] = WILLING) -> Presence:
    node = key(name).node
    return Presence(DOMAIN, node, 1, 1, name, role, willing, ("/ip4/127.0.0.1/tcp/1",), (), (), (), 1, 1, 0, 0, 0, 0, 0)


def standing(heard: dict[bytes, Presence]) -> dict[bytes, str]:
    """The log says of everybody what its presence says."""
    return {node: row.role for node, row in heard.items()}


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("a", "trainer", "it holds the grant of term 7"),
        ("b", "validator", "it holds one of 1 validator places among the 5 nodes present"),
        ("c", "relay", "it holds one of 1 relay places among the 5 nodes present"),
        ("d", "inference", "the other places among the 5 nodes present are taken, and all others infer"),
        ("e", "inference", "it is willing to do nothing else"),
    ],
)
def test_why_a_node_has_its_role(name: str, role: str, said: str) -> None:
    present = [presence("a", "trainer"), presence("b", "validator"), presence("c", "relay")]
    present += [presence("d", "inference"), presence("e", "inference", ("inference",))]
    heard = {row.node: row for row in present}
    policy = Policy(4, 1, 0, 1, 0, 0, 1_000_000)
    grant = Grant(DOMAIN, 7, key("a").node, DOMAIN, 0, 0, DOMAIN, b"")
    assert why(role, key(name).node, heard, policy, grant, standing(heard)) == said


def test_a_change_of_role_is_announced() -> None:
    heard = {row.node: row for row in (presence("a", "trainer"), presence("b", "none"), presence("c", "inference"))}
    grant = Grant(DOMAIN, 1, key("a").node, DOMAIN, 0, 0, DOMAIN, b"")
    assert why("none", key("b").node, heard, POLICY, grant, standing(heard)).startswith("it becomes ")
    unwilling = {**heard, key("b").node: presence("b", "none", ())}
    assert why("none", key("b").node, unwilling, POLICY, grant, standing(unwilling)) == "it is not willing to take any"


def test_every_reason_has_words_and_a_later_versions_is_shown_as_it_is() -> None:
    assert all(words(reason) == row.words for reason, row in REASONS.items())
    assert words("invented") == "invented"


def test_problems() -> None:
    sound = {"peers": 1, "disk_free": ROOM, "over": None}
    assert problems(sound, ROOM) == []
    for change in ({"peers": 0}, {"disk_free": ROOM - 1}, {"over": "it was closed"}):
        assert len(problems({**sound, **change}, ROOM)) == 1


async def running(cluster: Cluster, steps: int) -> None:
    for name in NODES:
        await cluster.start(name, pause_at_step=3)
    await cluster.until(lambda: all(node.steps >= steps for node in cluster.running.values()))


async def test_who_catches_up_says_how_far_it_is(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator")
        running = cluster.running["v"]
        running.node.log.ready = trio.Event()
        height = len(running.node.log.replica.cuts)
        assert len((await running.ask("status"))["waits_for"]) == 1
        running.node.log.height_claimed = height + 40
        assert (await running.ask("status"))["waits_for"][1] == f"the log to arrive: cut {height} of {height + 40}"


async def test_an_elector_that_takes_no_part_says_so(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.stage(t="trainer", v="validator")
        running = cluster.running["elector"]
        voter = running.elector.voter
        assert not any("elector" in phrase for phrase in (await running.ask("status"))["waits_for"])
        voter.state = replace(voter.state, abstains=99)
        waits_for = (await running.ask("status"))["waits_for"]
        assert "its part as an elector: it abstains, for a part of its past is lost" in waits_for


async def test_a_network_tells_of_itself(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        first = await cluster.node("elector")
        told = await first.ask("status")
        assert (told["role"], told["version"], told["own_entries"]) == ("none", -1, 1)
        assert told["why"] == "the domain has no trainer yet"
        assert told["waits_for"] == [f"a first trainer: 0 nodes are present, {POLICY.min_nodes} are asked for"]
        assert told["problems"] == ["no peer is connected: see farflung peers"]
        cluster.crash("elector")
    async with open_cluster(tmp_path / "again", faults) as cluster:
        await running(cluster, 2)
        for name, node in cluster.running.items():
            told = await node.ask("status")
            assert (told["name"], told["problems"], told["last_rejection"]) == (name, [], None)
            assert told["why"]
            assert told["inbound"] + told["outbound"] == told["peers"] == 3
            assert told["account"]["rejected"] == 0
            rows = (await node.ask("peers"))["peers"]
            assert len(rows) == 3
            assert all(row["connected"] and row["present"] for row in rows)
            assert sum(row["inbound"] for row in rows) == told["inbound"]
            listed = (await node.ask("roles"))["nodes"]
            assert sorted(row["role"] for row in listed) == ["inference", "relay", "trainer", "validator"]
            assert all(row["present"] and row["plays"] == row["role"] for row in listed)
            assert [row["term"] for row in role_rows(node.node.log.ledger) if row["role"] == "trainer"] == [1]
        ledger = cluster.running["elector"].node.log.ledger
        rich = credits(ledger)["nodes"]
        assert [row["credit"] for row in rich] == sorted((row["credit"] for row in rich), reverse=True)
        assert rich[0]["credit"] > 0


async def test_the_last_rejection_is_told_in_words(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        # Work ends before a version is outdated: a validator that is never idle comes to no newcomer's submissions.
        for name in NODES:
            await cluster.start(name, pause_at_step=3)
        await cluster.start("cheat", willing=("inference",), cheat="forged-reward", pause_at_step=3)
        cheat = cluster.running["cheat"]
        ledger = cheat.node.log.ledger

        def reasons() -> Mapping[str, int]:
            account = ledger.accounts().get(cheat.id)
            return {} if account is None else account.reasons

        await cluster.until(lambda: "reward" in reasons())
        told = await cheat.ask("status")
        # Which of its submissions was decided last is chance.
        found = told["last_rejection"]
        assert found["reason"] in reasons()
        assert found["words"] == words(found["reason"])
        (unpaid,) = (row for row in told["unpaid"] if row["reason"] == "reward")
        assert (unpaid["severity"], unpaid["words"]) == ("hard", REASONS["reward"].words)
        assert unpaid["count"] >= 1
        assert "farflung" in unpaid["remedy"]
        assert told["why_nothing"] is None


def test_every_reason_has_a_remedy() -> None:
    assert REMEDIES.keys() == REASONS.keys() - {"ok"}
    assert remedy("of a later version") == ""


async def test_a_node_that_leaves_says_so_and_takes_no_role_again(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await running(cluster, 1)
        name = cluster.role("inference")
        leaver = cluster.running[name]
        assert await leaver.ask("leave") == {"leaving": True}
        assert (await leaver.ask("status"))["why"] == "it is leaving"
        await cluster.until(lambda: leaver.own.left)
        await trio.sleep(3)
        told = await leaver.ask("status")
        assert (told["role"], told["left"], told["waits_for"]) == ("none", True, [])
        assert [row["name"] for row in told["children"]] == ["bulk"]
        feed = leaver.node.log.replica.entries(leaver.id)
        assert isinstance(feed[-1].payload, Leave)
        assert [isinstance(entry.payload, Leave) for entry in feed].count(True) == 1
        await cluster.agree()
        others = [node for other, node in cluster.running.items() if other != name]
        assert all(node.node.log.ledger.standing_role(leaver.id) == "none" for node in others)
        # Its place is somebody else's now.
        await cluster.until(lambda: any(node.own.role == "inference" for node in others))


async def test_the_next_start_brings_it_back(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await running(cluster, 1)
        name = next(name for name in NODES if name != "elector" and cluster.running[name].own.role != "trainer")
        leaver = cluster.running[name]
        leaver.own.leaving = True
        await cluster.until(lambda: leaver.own.left)
        await cluster.agree()
        cluster.crash(name)
        back = await cluster.start(name, disk=leaver.disk, known=[cluster.running["elector"].id])
        await cluster.until(lambda: back.own.role != "none")
        feed = back.node.log.replica.entries(back.id)
        kinds = [entry.kind for entry in feed]
        assert Role.KIND in kinds[kinds.index(Leave.KIND) :]


async def test_the_reading_operations_answer_in_json(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        for op in ("status", "peers", "roles", "credits"):
            answer = await running.parts.control.answer(json.dumps({"op": op}).encode())
            assert "error" not in answer
            assert json.loads(json.dumps(answer)) == answer
