"""Closing and rebinding on running nodes: over a real control socket, in a network of fakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.api.control_client import Unavailable, request
from node.api.node_rows import credits
from node.daemon import ROLES
from protocol.errors import LocalError
from protocol.identity import Identity
from protocol.log import recovery
from protocol.log.recovery import commitment
from protocol.records import Join, Role, Rollout
from tests.node.fake_children import Faults
from tests.node.fakes import Cluster, Running, open_cluster
from tests.protocol.builders import digest, key


def secret(name: str) -> Identity:
    """The recovery key of a node."""
    return key(f"recovery {name}")


async def joined(cluster: Cluster, *names: str) -> list[Running]:
    """Nodes whose joins name real recovery keys, with their control sockets."""
    nodes = []
    for name in names:
        running = await cluster.node(name, join=False)
        await running.node.log.append(Join(commitment(secret(name).node), "farflung/test", name))
        await running.open_control()
        nodes.append(running)
    await cluster.cut()
    return nodes


async def ask(running: Running, op: str, **arguments: Any) -> dict[str, Any]:
    return await request(running.node.directory, op, timeout=20, **arguments)


async def known(running: Running, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await ask(running, "recovery", commitment=commitment(secret(name).node).hex()))[
        "nodes"
    ]
    return found


def statement(kind: str, target: str, author: str, domain: bytes) -> dict[str, str]:
    make = recovery.close if kind == "close" else recovery.rebind
    record = make(secret(target), domain, key(target).node, key(author).node)
    return {"target": record.target.hex(), "recovery": record.recovery.hex(), "signature": record.signature.hex()}


async def test_a_stolen_node_is_closed_and_says_so(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        elector, thief, owner = await joined(cluster, "elector", "thief", "owner")
        assert [row["name"] for row in await known(owner, "thief")] == ["thief"]
        assert await known(owner, "stranger") == []
        made = await ask(owner, "close", **statement("close", "thief", "owner", cluster.domain.id))
        assert made["seq"] == 1
        assert (await known(owner, "thief"))[0]["ended"] is None
        await cluster.cut()
        (row,) = await known(owner, "thief")
        assert row == {"node": thief.id.hex(), "name": "thief", "ended": 2, "successor": None}
        # The closed node goes on serving, and appends nothing.
        with pytest.raises(LocalError, match="closed with its recovery key"):
            await thief.node.log.append(Role("inference"))
        status = await ask(thief, "status")
        assert "closed with its recovery key" in status["over"]
        assert status["problems"][-1] == status["over"]
        assert (await ask(owner, "status"))["over"] is None
        thief.keep("keeping the own feed")
        await trio.sleep(1)
        assert list(thief.node.health.warnings.values()) == [status["over"]]
        # The end is shown by the next cut, everywhere alike.
        await cluster.cut()
        assert len({one.node.log.replica.heads_root() for one in (elector, thief, owner)}) == 1
        assert elector.node.log.replica.uncovered() == []


async def test_a_lost_node_goes_on_as_another(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        _, old, new = await joined(cluster, "elector", "old", "new")
        await old.node.log.append(Rollout(digest("no version"), 0, 2, 8, 16, digest("file"), 10, 2))
        await cluster.cut()
        await ask(new, "rebind", **statement("rebind", "old", "new", cluster.domain.id))
        await cluster.cut()
        (row,) = await known(new, "old")
        assert (row["ended"], row["successor"]) == (3, new.id.hex())
        told = {row["name"]: row for row in credits(new.node.log.ledger)["nodes"]}
        assert (told["new"]["pending"], told["new"]["goes_on_for"]) == (1, [old.id.hex()])
        assert (told["old"]["pending"], told["old"]["ended"]) == (0, "moved")
        assert told["old"]["goes_on_as"] == new.id.hex()
        assert (told["elector"]["ended"], told["elector"]["goes_on_as"]) == (None, None)
        assert f"node {new.id.hex()} goes on with its credit" in (await ask(old, "status"))["over"]


async def test_an_ended_node_has_no_role_and_no_presence(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        _, thief, owner = await joined(cluster, "elector", "thief", "owner")
        for running in (thief, owner):
            running.nursery.start_soon(running.presences.run)
        await cluster.until(lambda: thief.id in owner.presences.live())
        await thief.node.log.append(Role("relay"))
        thief.keep(ROLES)
        await cluster.until(lambda: thief.own.role == "relay")
        await ask(owner, "close", **statement("close", "thief", "owner", cluster.domain.id))
        await cluster.cut()
        await cluster.until(lambda: thief.own.role == "none")
        assert thief.id not in owner.presences.live()
        assert owner.id in thief.presences.live()


async def test_what_would_have_no_effect_is_refused_at_once(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        _, first, _ = await joined(cluster, "elector", "first", "second")
        good = statement("close", "second", "first", cluster.domain.id)
        other = statement("close", "elector", "first", cluster.domain.id)
        wrong = recovery.close(secret("first"), cluster.domain.id, key("second").node, first.id)
        for kind, arguments, said in (
            ("rebind", good, "signature is wrong"),
            ("close", {**good, "target": other["target"]}, "signature is wrong"),
            ("close", {**good, "signature": "00"}, "signature is wrong"),
            ("close", {**good, "target": "xx"}, "the statement is not hexadecimal"),
            ("close", {**good, "recovery": 7}, "unknown request"),
            (
                "close",
                {"target": good["target"], "recovery": wrong.recovery.hex(), "signature": wrong.signature.hex()},
                "did not name this recovery key",
            ),
        ):
            with pytest.raises(Unavailable, match=said):
                await ask(first, kind, **arguments)
        assert first.node.log.own_seq == 0
        with pytest.raises(Unavailable, match="the commitment is not hexadecimal"):
            await ask(first, "recovery", commitment="xx")
        assert await ask(first, "close", **good)
