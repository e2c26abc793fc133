"""What the trainer takes in, commits and refuses to commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.config import WILLING
from node.roles.publishing import in_a_step, rejected_since
from node.roles.rollout_pool import Amount, Gathering, amount
from node.workers.child_process import WorkerError
from protocol.constants import GATHER_FACTOR, MILLION
from protocol.records import Rollout, Step, StepBlob, Weights
from protocol.work.rollout import Submission
from tests.node.fake_children import WHOLE_0, Faults, genesis
from tests.node.fakes import Cluster, Running, open_cluster
from tests.protocol.builders import RECIPE, digest, status_of

TRAINING = "the trainer role"
"""The topic of its warning."""


async def started(cluster: Cluster, *names: str, pause_at_step: int = 0) -> None:
    for name in ("elector", *(names or ("a", "b", "c"))):
        willing = ("inference",) if name == "elector" else WILLING
        await cluster.start(name, willing=willing, pause_at_step=pause_at_step)


async def trained(cluster: Cluster, steps: int, seconds: float = 60) -> None:
    await cluster.until(lambda: all(running.steps >= steps for running in cluster.running.values()), seconds)


def steps_of(running: Running) -> list[Step]:
    return [s.payload for s in running.node.log.ledger.steps() if isinstance(s.payload, Step)]


def weights_of(running: Running) -> list[Weights]:
    return [w.payload for w in running.node.log.ledger.lineage() if isinstance(w.payload, Weights)]


def own_steps(running: Running) -> list[Step]:
    """The steps that a node made, whatever became of them."""
    return [e.payload for e in running.node.log.replica.entries(running.id) if isinstance(e.payload, Step)]


async def test_a_step_says_what_it_was_made_of(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster, pause_at_step=4)
        await trained(cluster, 4)
        running = cluster.running[cluster.role("trainer")]
        ledger, blobs = running.node.log.ledger, running.blobs
        used: set[bytes] = set()
        lags = []
        for step in steps_of(running):
            rewards, signal, groups = [], 0, 0
            for rollout, verdicts in StepBlob.parse(blobs.get(step.blob) or b"").submissions:
                assert rollout not in used
                used.add(rollout)
                entry = ledger.replica.entry(rollout)
                assert entry is not None
                assert isinstance(entry.payload, Rollout)
                assert status_of(ledger, rollout).outcome == "accepted"
                assert set(verdicts) == {verdict.id for verdict in ledger.verdicts(rollout).values()}
                lag = step.number - 1 - (ledger.version_number(entry.payload.weights) or 0)
                submission = Submission.parse(blobs.get(entry.payload.submission) or b"", RECIPE)
                signal, groups = signal + submission.signal, groups + len(submission.groups)
                assert submission.signal == entry.payload.signal
                rewards += [(r.reward, lag) for group in submission.groups for r in group.responses]
            assert step.reward == sum(reward for reward, _ in rewards) // len(rewards)
            assert step.lag_mean == sum(lag for _, lag in rewards) * MILLION // len(rewards)
            assert step.lag_max == max(lag for _, lag in rewards) <= RECIPE.async_level
            assert step.accepted == len(rewards) == groups * RECIPE.group_size
            assert step.trained == signal * RECIPE.group_size
            # Groups without a signal fill no batch, and the last submission made it full.
            assert RECIPE.groups_per_step <= signal < RECIPE.groups_per_step + RECIPE.groups_per_submission
            assert step.groups == groups
            lags.append(step.lag_max)
        assert any(lags)
        # Each step's weights stand right behind it and name it.
        for weights, made in zip(weights_of(running)[1:], ledger.steps(), strict=True):
            assert weights.step == made.id
        assert {step.rejected for step in steps_of(running)} == {0}
        kept = list(running.node.directory.trainer.glob("*.safetensors"))
        assert [file.read_text() for file in kept] == ["4"]


async def test_a_task_that_teaches_nothing_hangs_nobody(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    faults.score = lambda item, text: 0
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster, pause_at_step=2)
        await trained(cluster, 2)
        running = cluster.running[cluster.role("trainer")]
        assert {step.groups for step in steps_of(running)} == {GATHER_FACTOR * RECIPE.groups_per_step}
        assert {(step.trained, step.reward) for step in steps_of(running)} == {(0, 0)}


async def test_the_next_step_is_trained_while_a_version_is_published(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        faults.seconds |= {"train": 2.0, "describe": 1.6, "generate": 0.05}
        await trained(cluster, 11, 120)
        later = steps_of(cluster.running[cluster.role("trainer")])[6:]
        for step in later:
            assert 2000 <= step.train_ms < 2100
            assert step.publish_ms >= 1600
            assert step.lag_max <= RECIPE.async_level
        # Were it to wait for the version before, it would stand still for 1.6 s each time.
        idle = sorted(step.wait_ms + step.blocked_ms for step in later)
        assert idle[len(idle) // 2] < 800


async def test_without_an_async_level_a_step_waits_for_the_version_before(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults, data=genesis(recipe=replace(RECIPE, async_level=0))) as cluster:
        await started(cluster, pause_at_step=3)
        faults.seconds |= {"train": 0.5, "describe": 1.0}
        await trained(cluster, 3, 120)
        steps = steps_of(cluster.running[cluster.role("trainer")])
        assert {step.lag_max for step in steps} == {0}
        assert all(step.blocked_ms >= 1000 for step in steps[1:])


async def test_what_was_made_before_is_not_lost_with_a_child_that_dies(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 2)
        running = cluster.running[cluster.role("trainer")]
        faults.seconds |= {"train": 0.2, "describe": 3.0}
        begun = faults.count("delta", "describe")
        await cluster.until(lambda: faults.count("delta", "describe") > begun)
        made, calls = running.steps, faults.count("trainer", "train")
        await cluster.until(lambda: faults.count("trainer", "train") > calls)
        faults.fail["train"] = (WorkerError("trainer: train: the child was ended by signal SIGKILL", "died"), 1)
        await cluster.until(lambda: TRAINING in running.warnings)
        assert running.steps == made + 1
        assert faults.count("trainer", "start") == 1
        await trained(cluster, made + 3)
        numbers = [step.number for step in own_steps(running)]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_what_was_trained_from_a_version_that_is_thrown_away_goes_with_it(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster, "a", "b", "c", "d")
        await trained(cluster, 1)
        old = cluster.running[cluster.role("trainer")]
        faults.seconds |= {"train": 0.3, "describe": 3.0}
        begun = faults.count("delta", "describe")
        await cluster.until(lambda: faults.count("delta", "describe") > begun)
        made, calls = len(own_steps(old)), faults.count("trainer", "train")
        await cluster.until(lambda: faults.count("trainer", "train") > calls)
        elector = cluster.running["elector"].elector
        assert elector is not None
        # Renewed: the same node goes on, but what was under way was for the term before.
        await elector.grant_term(old.id)
        faults.seconds |= {"train": 0.05, "describe": 0.05}
        await trained(cluster, made + 3)
        await cluster.agree()
        steps = own_steps(old)
        assert {step.term for step in steps[made + 1 :]} == {2}
        used: list[bytes] = []
        for step in steps:
            used += [r for r, _ in StepBlob.parse(old.blobs.get(step.blob) or b"").submissions]
        assert len(used) == len(set(used))
        assert [step.number for step in steps_of(old)] == list(range(1, len(steps_of(old)) + 1))


async def test_version_0_waits_for_a_validator_and_an_inference_node(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.start("elector", willing=())
        running = await cluster.start("a", willing=("trainer",))
        await cluster.start("b", willing=("validator",))
        await trio.sleep(10)
        assert running.own.role == "trainer"
        assert running.node.log.ledger.newest_weights() is None
        assert "waiting for a validator and an inference node" in running.node.health.warnings["founding"]
        await cluster.start("c", willing=("inference",))
        await trained(cluster, 1)
        assert "founding" not in running.node.health.warnings
        first = running.node.log.ledger.lineage()[0]
        assert running.node.log.ledger.may_infer(cluster.running["c"].id, first.id)


async def test_a_restarted_trainer_resumes_from_its_checkpoint(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 2)
        name = cluster.role("trainer")
        gone = cluster.crash(name)
        made = gone.steps
        await trio.sleep(1)
        faults.arguments.clear()
        again = await cluster.start(name, disk=gone.disk, known=[cluster.running["elector"].id])
        await trained(cluster, made + 2)
        loads = [a["checkpoint"] for a in faults.arguments if "checkpoint" in a and "manifest" in a]
        assert loads[0] is not None
        assert [step.term for step in steps_of(again)] == [1] * len(steps_of(again))
        assert again.node.log.replica.forks == {}
        # The state was carried on: it counts every step that was ever made.
        (kept,) = again.node.directory.trainer.glob("*.safetensors")
        await cluster.until(lambda: again.weights.held.newest_held() == again.node.log.ledger.newest_weights())
        assert int(next(iter(again.node.directory.trainer.glob("*.safetensors"))).read_text()) >= made + 2
        assert kept.parent == again.node.directory.trainer


async def test_another_trainer_goes_on_from_the_newest_version(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster, "a", "b", "c", "d")
        await trained(cluster, 2)
        name = cluster.role("trainer")
        old = cluster.running[name]
        # Cut off, it goes on believing that it is in office.
        others = [r.id for r in cluster.running.values() if r is not old]
        cluster.network.partition([old.id], others)
        rest = [r for r in cluster.running.values() if r is not old]
        await cluster.until(lambda: any(r.own.role == "trainer" for r in rest))
        await cluster.until(lambda: steps_of(rest[0])[-1].term == 2)
        cluster.network.heal()
        await cluster.until(lambda: old.own.role != "trainer")
        await trained(cluster, old.steps + 2)
        await cluster.agree()
        terms = [step.term for step in steps_of(old)]
        assert terms == sorted(terms)
        assert set(terms) == {1, 2}
        numbers = [weights.number for weights in weights_of(old)]
        assert numbers == list(range(len(numbers)))
        assert "office" not in old.node.health.warnings


async def test_a_step_whose_term_ended_meanwhile_is_thrown_away(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster, "a", "b", "c", "d")
        await trained(cluster, 1)
        name = cluster.role("trainer")
        old = cluster.running[name]
        faults.seconds["train"] = 1.0  # done before the role changes
        begun = faults.count("trainer", "train")
        await cluster.until(lambda: faults.count("trainer", "train") > begun)
        elector = cluster.running["elector"].elector
        assert elector is not None
        other = next(r for n, r in cluster.running.items() if r.own.role == "inference" and n != "elector")
        made = len(own_steps(old))
        await elector.grant_term(other.id)
        await trio.sleep(2)
        faults.seconds["train"] = 0.05
        await cluster.until(lambda: other.own.role == "trainer")
        await trained(cluster, made + 2)
        assert len(own_steps(old)) == made
        assert steps_of(old)[-1].term == 2


async def test_a_failing_child_costs_its_piece_of_work_only(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        running = cluster.running[cluster.role("trainer")]
        faults.fail["train"] = (WorkerError("trainer: train: the child was ended by signal SIGKILL", "died"), 1)
        before = running.steps
        await cluster.until(lambda: TRAINING in running.warnings)
        await trained(cluster, before + 2)
        assert faults.count("trainer", "start") == 2
        numbers = [step.number for step in steps_of(running)]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_step_that_is_not_finite_is_thrown_away_with_its_batch(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        running = cluster.running[cluster.role("trainer")]
        before, loads = running.steps, faults.count("trainer", "load")
        faults.diverge = 1
        await cluster.until(lambda: "training" in running.node.health.warnings)
        assert "the loss (nan)" in running.node.health.warnings["training"]
        stopped = next(
            each["submissions"]
            for call, each in reversed(list(zip(faults.calls, faults.arguments, strict=True)))
            if call == ("trainer", "train")
        )
        await trained(cluster, before + 2)
        # The same child loaded the last good version again, and none of the stopped rollouts was tried another time.
        assert faults.count("trainer", "start") == 1
        assert faults.count("trainer", "load") > loads
        later = [each["submissions"] for each in faults.arguments if "submissions" in each][-2:]
        assert not {path for paths in later for path in paths} & set(stopped)
        assert "training" not in running.node.health.warnings
        numbers = [step.number for step in steps_of(running)]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_recipe_with_a_kl_term_gives_the_child_version_0(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    """The fake child looks at the files; version 0 stays although newer ones displace it."""
    async with open_cluster(tmp_path, faults, data=genesis(recipe=replace(RECIPE, kl=1000))) as cluster:
        await started(cluster)
        await trained(cluster, 8)
        given = [each["reference"] for each in faults.arguments if "reference" in each]
        assert given
        assert all(paths is not None for paths in given)


async def test_a_full_disk_pauses_training(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        running = cluster.running[cluster.role("trainer")]
        running.disk.full = True
        await trio.sleep(8)
        before = running.steps
        assert "no space left" in running.warnings[TRAINING]
        running.disk.full = False
        await trained(cluster, before + 1)
        await cluster.agree()


async def test_weights_are_announced_again_for_newcomers(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.start("elector", willing=("relay",))
        for name, role in {"a": "trainer", "b": "validator", "c": "inference"}.items():
            await cluster.start(name, willing=(role,))
        await trained(cluster, 1)
        cluster.crash("c")
        await trio.sleep(1)
        await cluster.start("d", willing=("inference",))
        before = cluster.running["a"].steps
        await trained(cluster, before + 2)
        again = [weights for weights in weights_of(cluster.running["a"])[1:] if weights.step is None]
        assert len(again) == 1
        assert again[0].whole == weights_of(cluster.running["a"])[again[0].number - 1].whole


async def test_nothing_is_announced_again_while_all_are_there(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        faults.seconds["generate"] = 15.0
        await trio.sleep(20)
        running = cluster.running["elector"]
        assert all(weights.step is not None for weights in weights_of(running)[1:])


async def test_no_number_of_announced_responses_is_too_large_for_a_step(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(a="trainer", b="validator", c="inference")
        node = cluster.running["a"].node
        liar = cluster.running["c"].node
        announced = Rollout(version.id, 0, 2**16, 2**20, 2**30, digest("nothing"), 100, 2)
        await liar.log.append(announced)
        await cluster.agree()
        assert node.log.ledger.fold().rejected == 2**20
        assert rejected_since(node.log.ledger) == 2**20
    assert in_a_step(2**40) == 2**31 - 1
    assert in_a_step(-1) == 0


async def test_what_the_author_hands_out_instead_is_his_fault_alone(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(a="trainer", b="validator", c="inference")
        running, author = cluster.running["a"], cluster.running["c"].node
        file = b"\x90"
        stored = cluster.running["c"].blobs.put(file)
        (entry,) = await author.log.append(Rollout(version.id, 0, 2, 8, 16, stored, len(file), 2))
        await cluster.agree()
        gathering = Gathering(running.node, running.parts.blobs, running.pool)
        await gathering.take(entry, 0)
        await gathering.take(entry, 0)
        assert gathering.amount == Amount()
        assert [peer for peer, _ in running.port.blamed] == [author.id]
        assert running.weights.held.newest_held() is not None
        assert running.weights.held.paths(version.id)[1].read_bytes() == WHOLE_0


async def test_without_an_async_level_a_child_that_dies_costs_no_rollout(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    """While a step is trained the next batch comes in; with it, what the step itself may use was forgotten."""
    async with open_cluster(tmp_path, faults, data=genesis(recipe=replace(RECIPE, async_level=0))) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        running = cluster.running[cluster.role("trainer")]
        faults.seconds["train"] = 2.0
        faults.fail["train"] = (WorkerError("trainer: train: the child was ended by signal SIGKILL", "died"), 1)
        before = running.steps
        await cluster.until(lambda: TRAINING in running.warnings)
        await trained(cluster, before + 2)


@pytest.mark.parametrize(("level", "diverging"), [(0, 1), (1, 2)])
async def test_steps_that_are_not_finite_hang_nobody(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock, level: int, diverging: int
) -> None:
    """Inference nodes cannot know that a batch was thrown away, and count on it."""
    async with open_cluster(tmp_path, faults, data=genesis(recipe=replace(RECIPE, async_level=level))) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        running = cluster.running[cluster.role("trainer")]
        faults.diverge = diverging
        before = running.steps
        await cluster.until(lambda: faults.diverge == 0)
        await trained(cluster, before + 2)


async def test_nothing_is_left_of_a_publication_that_failed(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await started(cluster)
        await trained(cluster, 1)
        running = cluster.running[cluster.role("trainer")]
        faults.seconds["describe"] = 1.0
        faults.fail["describe"] = (OSError("broken"), 1)
        await cluster.until(lambda: TRAINING in running.warnings)
        # Its rollouts are there for the next step.
        usable = running.pool.usable(running.weights.held.newest_number()).values()
        assert sum((amount(entry) for entry, _ in usable), Amount()).fills(1, RECIPE)
        assert not list(running.node.directory.trainer.glob("*.part"))
        assert not list(running.node.directory.work.glob("*.bin"))
        await trained(cluster, running.steps + 2)
