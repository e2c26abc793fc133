"""Which accepted rollouts wait for a step."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from node.roles.rollout_pool import Amount
from protocol import identity
from protocol.constants import GATHER_FACTOR
from protocol.log.entry import Entry
from protocol.records import Rollout, Step, StepBlob, Verdict
from tests.node.fake_children import WHOLE_0, Faults
from tests.node.fakes import Cluster, open_cluster
from tests.protocol.builders import RECIPE, digest


async def stage(cluster: Cluster) -> Entry:
    return await cluster.stage(t="trainer", v="validator", i="inference", j="inference")


async def announce(cluster: Cluster, name: str, version: Entry, first: int = 0, signal: int = 2) -> Entry:
    node = cluster.running[name].node
    responses = 2 * RECIPE.group_size
    (entry,) = await node.log.append(
        Rollout(version.id, first, 2, responses, responses, digest(f"{name} {first}"), 100, signal)
    )
    await cluster.agree()
    return entry


async def judge(cluster: Cluster, rollout: Entry, outcome: str = "accepted") -> None:
    node = cluster.running["v"].node
    assert isinstance(rollout.payload, Rollout)
    severity, reason = ("none", "ok") if outcome == "accepted" else ("hard", "reward")
    draw = node.identity.sign(identity.DRAW, rollout.payload.submission + rollout.id)
    await node.log.append(Verdict(rollout.id, outcome, severity, reason, 0, draw, 2))
    await cluster.agree()


async def step(cluster: Cluster, base: Entry, raw: bytes, blob: bytes, *, held: bool = True) -> Entry:
    """The trainer makes a step of the submissions in ``blob``, and the version that belongs to it."""
    node, blobs = cluster.running["t"].node, cluster.running["t"].blobs
    stored = blobs.put(blob)
    number = (node.log.ledger.version_number(base.id) or 0) + 1
    await node.log.append(Step(1, number, base.id, stored, len(blob), 0, 0, 0, 2, 8, 0, 8, 8, 1, 1, 1, 0))
    made = node.log.replica.entries(node.id)[-1]
    if not held:
        blobs.delete(stored)
    return await cluster.announce("t", raw, base, made.id)


async def test_accepted_until_a_step_used_them(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        first, second, third = (
            await announce(cluster, "i", version),
            await announce(cluster, "i", version, 2),
            await announce(cluster, "j", version),
        )
        pool = cluster.running["i"].pool
        await pool.update()
        assert pool.usable(0) == {}
        assert pool.waiting(0) == Amount(6, 6)
        await judge(cluster, first)
        await judge(cluster, second)
        await judge(cluster, third, "rejected")
        await pool.update()
        assert {i: lag for i, (_, lag) in pool.usable(0).items()} == {first.id: 0, second.id: 0}
        assert pool.waiting(0) == Amount(4, 4)
        assert cluster.running["i"].node.log.ledger.fold().rejected == 2 * RECIPE.group_size
        await step(cluster, version, b"\1" + WHOLE_0[1:], StepBlob(((first.id, ()),)).encode())
        await pool.update()
        assert {i: lag for i, (_, lag) in pool.usable(1).items()} == {second.id: 1}
        assert pool.waiting(1) == Amount(2, 2)
        # The file that says what a step used was fetched from its trainer, and is kept for others.
        made = cluster.running["t"].node.log.ledger.steps()[0].payload
        assert isinstance(made, Step)
        assert cluster.running["i"].blobs.has(made.blob)


def test_a_batch_is_full_with_groups_that_teach_something() -> None:
    step = RECIPE.groups_per_step
    assert not Amount(GATHER_FACTOR * step - 1, step - 1).fills(1, RECIPE)
    assert Amount(step, step).fills(1, RECIPE)
    assert not Amount(2 * step, step).fills(2, RECIPE)
    # However few there are, the gathering has an end.
    assert Amount(GATHER_FACTOR * step, 0).fills(1, RECIPE)
    assert not Amount(GATHER_FACTOR * step, 0).fills(2, RECIPE)


async def test_what_a_step_of_our_own_takes_is_not_taken_twice(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        rollout = await announce(cluster, "i", version, signal=1)
        await judge(cluster, rollout)
        pool = cluster.running["t"].pool
        await pool.update()
        assert pool.waiting(0) == Amount(2, 1)
        pool.take([rollout.id])
        assert pool.usable(0) == {}
        pool.give_back([rollout.id])
        assert set(pool.usable(0)) == {rollout.id}
        pool.take([rollout.id])
        blob = StepBlob(((rollout.id, ()),))
        await step(cluster, version, b"\1" + WHOLE_0[1:], blob.encode())
        pool.add_step(cluster.running["t"].node.log.ledger.steps()[0], blob)
        pool.give_back([rollout.id])
        assert pool.usable(1) == {}


async def test_the_oldest_versions_come_first_and_too_old_ones_are_forgotten(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        versions = [await stage(cluster)]
        for number in range(1, 4):
            rollout = await announce(cluster, "i", versions[-1])
            await judge(cluster, rollout)
            versions.append(await cluster.announce("t", bytes([number]) + WHOLE_0[1:], versions[-1]))
        pool = cluster.running["t"].pool
        await pool.update()
        assert [lag for _, lag in pool.usable(2).values()] == [2, 1, 0]
        assert [lag for _, lag in pool.usable(3).values()] == [2, 1]
        # For good: a lower number does not bring it back. One of the future is not usable, but not forgotten.
        assert [lag for _, lag in pool.usable(1).values()] == [0]
        assert [lag for _, lag in pool.usable(3).values()] == [2, 1]


async def test_a_steps_file_that_nobody_has_is_asked_for_again(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        rollout = await announce(cluster, "i", version)
        await judge(cluster, rollout)
        blob = StepBlob(((rollout.id, ()),)).encode()
        await step(cluster, version, b"\1" + WHOLE_0[1:], blob, held=False)
        pool = cluster.running["j"].pool
        await pool.update()
        assert set(pool.usable(1)) == {rollout.id}
        cluster.running["t"].blobs.put(blob)
        await pool.update()
        assert pool.usable(1) == {}
        assert cluster.running["j"].port.blamed == []


async def test_a_steps_file_that_is_rubbish_is_asked_for_once_and_is_its_trainers_fault(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        await step(cluster, version, b"\1" + WHOLE_0[1:], b"\x92\x01\x91")
        pool = cluster.running["j"].pool
        for _ in range(3):
            await pool.update()
        assert [peer for peer, _ in cluster.running["j"].port.blamed] == [cluster.running["t"].id]


async def test_our_own_step_needs_no_file(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        rollout = await announce(cluster, "i", version)
        await judge(cluster, rollout)
        blob = StepBlob(((rollout.id, ()),))
        pool = cluster.running["t"].pool
        await step(cluster, version, b"\1" + WHOLE_0[1:], blob.encode(), held=False)
        pool.add_step(cluster.running["t"].node.log.ledger.steps()[0], blob)
        await pool.update()
        assert pool.usable(1) == {}


async def test_what_nobody_here_will_judge_is_not_waited_for(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        await announce(cluster, "i", version)
        running = cluster.running["i"]
        await trio.sleep(1)
        assert running.pool.waiting(0) == Amount(2, 2)
        cluster.crash("v")
        await trio.sleep(3)
        assert running.pool.waiting(0) == Amount()
        assert len(running.node.log.ledger.outstanding()) == 1


async def test_strangers_who_announce_what_never_comes_hold_nobody_up(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        await trio.sleep(1)
        for first in range(0, 20 * RECIPE.groups_per_step, 2):
            await announce(cluster, "j", version, first)
        pool = cluster.running["i"].pool
        most = 20 * RECIPE.groups_per_step
        assert pool.waiting(0) == Amount(GATHER_FACTOR * RECIPE.groups_per_step, RECIPE.groups_per_step)
        # Whoever was right so far is believed, and everybody believes himself.
        await judge(cluster, cluster.running["j"].node.log.ledger.outstanding()[0])
        assert pool.waiting(0) == Amount(most - 2, most - 2)
        assert cluster.running["j"].pool.waiting(0) == Amount(most - 2, most - 2)
