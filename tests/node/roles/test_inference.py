"""When an inference node generates, with what, and what it announces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.roles import inference
from node.roles.inference import BACKLOG, backlog
from node.roles.rollout_pool import Amount
from protocol import identity
from protocol.log.entry import Entry
from protocol.records import Role, Rollout, Step, StepBlob, Verdict
from protocol.work import schedule
from protocol.work.rollout import Submission
from tests.node.fake_children import WHOLE_0, Faults, manifest_of
from tests.node.fakes import Cluster, Running, open_cluster
from tests.protocol.builders import RECIPE


def just_full(rollouts: Sequence[Rollout], batches: int) -> bool:
    """Whether so many batches are full with these, and were not without the last of them."""
    amounts = [Amount(rollout.groups, rollout.signal) for rollout in rollouts]
    before = sum(amounts[:-1], Amount())
    return (before + amounts[-1]).fills(batches, RECIPE) and not before.fills(batches, RECIPE)


def announced(running: Running) -> list[Rollout]:
    found = running.node.log.replica.entries(running.id)
    return [entry.payload for entry in found if isinstance(entry.payload, Rollout)]


async def stage(cluster: Cluster) -> Entry:
    version = await cluster.stage(t="trainer", v="validator", i="inference")
    for name in ("v", "i"):
        await cluster.running[name].weights.hold(version, timeout=10)
    return version


async def for_seconds(running: Running, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await inference.run(running.bench)


async def accept(cluster: Cluster) -> None:
    """The validator accepts what it is due to judge, unseen."""
    node = cluster.running["v"].node
    await cluster.agree()
    for entry in node.log.ledger.pending_for(node.id):
        assert isinstance(entry.payload, Rollout)
        draw = node.identity.sign(identity.DRAW, entry.payload.submission + entry.id)
        await node.log.append(Verdict(entry.id, "accepted", "none", "ok", 0, draw, 2))
    await cluster.agree()


async def test_it_announces_what_the_seeds_prescribe_and_stops_at_the_backlog(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        await for_seconds(running, 30)
        rollouts = announced(running)
        assert just_full(rollouts, BACKLOG)
        assert [rollout.first_counter for rollout in rollouts] == list(range(0, 2 * len(rollouts), 2))
        assert not running.own.generating
        # Each submission of the fake engine takes half a second.
        assert running.own.tokens_generated == sum(rollout.tokens for rollout in rollouts)
        assert running.own.tokens_per_second == 2 * rollouts[-1].tokens
        data = running.blobs.get(rollouts[1].submission) or b""
        assert len(data) == rollouts[1].size
        submission = Submission.parse(data, RECIPE)
        assert (submission.weights, submission.author) == (version.id, running.id)
        assert submission.responses == rollouts[1].responses == 8
        assert submission.tokens == rollouts[1].tokens
        assert submission.signal == rollouts[1].signal
        weights = [task.weight for task in cluster.domain.tasks]
        for group in submission.groups:
            seed = schedule.seed(cluster.domain.id, version.id, running.id, group.counter)
            index, item = schedule.choose_task(seed, weights)
            assert bytes(group.prompt).decode() == f"{cluster.domain.tasks[index].name[:8]} {item}"
            right = [int((item + response.tokens[0]) % 2 == 0) * 1_000_000 for response in group.responses]
            assert [response.reward for response in group.responses] == right


async def test_generation_goes_on_until_there_is_enough_to_learn_from(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    faults.score = lambda item, text: 1_000_000 * (item % 2 and int(text) % 2)  # half of the items cannot be solved
    async with open_cluster(tmp_path, faults) as cluster:
        await stage(cluster)
        running = cluster.running["i"]
        await for_seconds(running, 60)
        rollouts = announced(running)
        assert just_full(rollouts, BACKLOG)
        signal, groups = sum(r.signal for r in rollouts), sum(r.groups for r in rollouts)
        assert BACKLOG * RECIPE.groups_per_step <= signal < groups / 1.5


async def test_how_many_batches_may_wait(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        node, trainer = cluster.running["i"].node, cluster.running["t"].node
        assert backlog(node.log.ledger, RECIPE) == BACKLOG
        for number, publish in ((1, 49), (2, 51)):
            blob = cluster.running["t"].blobs.put(StepBlob(()).encode())
            times = (100, 0, publish, 0)
            await trainer.log.append(Step(1, number, version.id, blob, 3, 0, 0, 0, 2, 8, 0, 8, 8, *times))
            made = trainer.log.replica.entries(trainer.id)[-1]
            version = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], version, made.id)
            assert backlog(node.log.ledger, RECIPE) == BACKLOG + (publish > 50)
        # What is generated for a later step than this one would be too old for it.
        assert backlog(node.log.ledger, replace(RECIPE, async_level=0)) == 1


async def test_counters_go_on_after_a_restart(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await stage(cluster)
        running = cluster.running["i"]
        faults.seconds["generate"] = 0.3
        for _ in range(4):
            await for_seconds(running, 2.4)
        counters = [rollout.first_counter for rollout in announced(running)]
        assert counters == list(range(0, 2 * len(counters), 2))
        assert len(counters) >= 3


async def test_only_one_batch_waits_while_a_newer_version_is_on_its_way(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        await cluster.announce("t", b"\1" + WHOLE_0[1:], version)
        await for_seconds(running, 20)
        assert just_full(announced(running), 1)
        assert {rollout.weights for rollout in announced(running)} == {version.id}


async def test_a_version_that_is_too_old_to_count_is_not_used(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        newest = await stage(cluster)
        for number in range(1, RECIPE.async_level + 2):
            newest = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], newest)
        running = cluster.running["i"]
        await for_seconds(running, 10)
        assert announced(running) == []
        await running.weights.hold(newest, timeout=10)
        await for_seconds(running, 10)
        assert {rollout.weights for rollout in announced(running)} == {newest.id}


async def test_it_never_goes_back_to_an_older_version(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        running = cluster.running["i"]
        changed = b"\1" + WHOLE_0[1:]
        newer = await cluster.announce("t", changed, version)
        await running.weights.hold(newer, timeout=10)
        await running.weights.hold(version, timeout=10)
        engines = running.bench.engines
        async with engines.open() as engine, engines.open_tasks() as tasks:
            life = inference.InferenceLife(running.bench, engine, tasks)
            assert await life.wanted() == newer
            await life.submit(newer)
            running.versions.delete([manifest_of(changed).digest])
            await running.weights.held.clean(dry_run=False)
            assert running.weights.held.newest_held() == version
            assert await life.wanted() is None


async def test_a_newcomer_waits_for_a_version_that_knows_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await stage(cluster)
        newcomer = await cluster.node("n")
        newcomer.nursery.start_soon(newcomer.presences.run)
        await newcomer.node.log.append(Role("inference"))
        await cluster.agree()
        await newcomer.weights.hold(version, timeout=10)
        await for_seconds(newcomer, 10)
        assert announced(newcomer) == []
        await cluster.cut()
        newer = await cluster.announce("t", b"\1" + WHOLE_0[1:], version)
        await newcomer.weights.hold(newer, timeout=10)
        await for_seconds(newcomer, 10)
        assert announced(newcomer) != []


async def test_nothing_is_made_that_nobody_will_judge(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await stage(cluster)
        cluster.crash("v")
        await trio.sleep(3)  # its presence lapses
        running = cluster.running["i"]
        await for_seconds(running, 20)
        assert announced(running) == []


async def test_a_pause_ends_generation_and_its_end_begins_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            await cluster.start(name, pause_at_step=1)
        await cluster.until(lambda: all(r.steps == 1 for r in cluster.running.values()))
        await trio.sleep(10)
        inferring = [r for r in cluster.running.values() if r.own.role == "inference"]
        made = [len(announced(r)) for r in inferring]
        assert sum(made) > 0
        await trio.sleep(10)
        assert [len(announced(r)) for r in inferring] == made
        for running in cluster.running.values():
            assert running.own.paused()
            running.own.pause_at_step = 0
        await cluster.until(lambda: all(r.steps >= 3 for r in cluster.running.values()))


@pytest.mark.parametrize("cheat", ["", "forged-reward"])
async def test_rewards(cheat: str, tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        await cluster.node("i", cheat=cheat)
        version = await stage(cluster)
        running = cluster.running["i"]
        faults.before["undecidable"] = lambda: None
        engines = running.bench.engines
        async with engines.open() as engine, engines.open_tasks() as tasks:
            await inference.InferenceLife(running.bench, engine, tasks).submit(version)
        submission = Submission.parse(running.blobs.get(announced(running)[0].submission) or b"", RECIPE)
        rewards = {response.reward for group in submission.groups for response in group.responses}
        # What cannot be decided is sent as nothing; a forger claims everything.
        assert rewards == ({1_000_000} if cheat else {0})


async def test_accepted_work_that_waits_counts_as_backlog(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await stage(cluster)
        running = cluster.running["i"]
        await for_seconds(running, 20)
        await accept(cluster)
        await for_seconds(running, 10)
        assert just_full(announced(running), BACKLOG)
