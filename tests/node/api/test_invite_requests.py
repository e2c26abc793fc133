"""Invitations over the control socket, and the address that holds one."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing

from node.api.control_client import Unavailable, request
from node.domain import invitation
from node.errors import UserError
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster
from tests.protocol.builders import key

ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW9yTXe8PK1fF2JoFzfbBM6P4PZEzo1EXZQ1H1k5Ec28Se"


async def test_an_elector_invites_and_takes_it_back(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    public = key("invitation").node
    async with open_cluster(tmp_path, faults) as cluster:
        running = await cluster.node("elector")
        await running.open_control()
        made = await request(running.node.directory, "invite", timeout=5, key=public.hex(), uses=2, cuts=50)
        assert made["domain"] == cluster.domain.id.hex()
        await cluster.cut()
        assert running.node.log.replica.admissions.invitations[public].uses == 2
        await request(running.node.directory, "invite", timeout=5, key=public.hex(), uses=0, cuts=1)
        await cluster.cut()
        assert public not in running.node.log.replica.admissions.invitations


async def test_nobody_else_does_and_nonsense_is_refused(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    public = key("invitation").node.hex()
    async with open_cluster(tmp_path, faults) as cluster:
        elector, other = await cluster.node("elector"), await cluster.node("a")
        for running in (elector, other):
            await running.open_control()
        with pytest.raises(Unavailable, match="only the founder and the electors"):
            await request(other.node.directory, "invite", timeout=5, key=public, uses=1, cuts=50)
        for uses, cuts in ((-1, 5), (1, 0), (1 << 30, 5)):
            with pytest.raises(Unavailable, match="uses are"):
                await request(elector.node.directory, "invite", timeout=5, key=public, uses=uses, cuts=cuts)


def test_an_address_holds_domain_and_invitation() -> None:
    seed, domain = "ab" * 32, "cd" * 32
    assert invitation.parse(ADDRESS).seed is None
    both = invitation.parse(f"{ADDRESS}?domain={domain}&invite={seed}")
    assert (both.address, both.domain, both.seed) == (ADDRESS, bytes.fromhex(domain), bytes.fromhex(seed))
    assert invitation.parse(f"{ADDRESS}?invite={seed}").domain is None
    for wrong in (f"?invite={seed[:-2]}", f"?invite={seed}&invite={seed}", "?invite=", f"?domain={domain}&"):
        with pytest.raises(UserError, match="the address ends in"):
            invitation.parse(ADDRESS + wrong)
