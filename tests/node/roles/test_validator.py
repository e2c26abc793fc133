"""Verdicts: what is accepted, what is rejected for which reason, and what blames nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from node.net.blob_exchange import BLOB_PROTOCOL
from node.roles import inference, validator
from node.workers.child_process import WorkerError
from protocol.constants import KEPT_VERSIONS, MILLION
from protocol.log.entry import Entry
from protocol.records import Rollout, Verdict
from protocol.work.rollout import Submission
from tests.node.fake_children import WHOLE_0, Faults, genesis, manifest_of
from tests.node.fakes import Cluster, Running, open_cluster
from tests.protocol.builders import POLICY, RECIPE, digest


@asynccontextmanager
async def stage(
    tmp_path: Path, faults: Faults, data: bytes | None = None, cheat: str = ""
) -> AsyncIterator[tuple[Cluster, Entry]]:
    """A trainer "t", a validator "v" whose life runs, and "i" and "j" that infer only when told."""
    async with open_cluster(tmp_path, faults, data=data) as cluster:
        await cluster.node("elector")
        await cluster.node("i", cheat=cheat)
        version = await cluster.stage(t="trainer", v="validator", i="inference", j="inference")
        for name in ("v", "i", "j"):
            await cluster.running[name].weights.hold(version, timeout=30)
        running = cluster.running["v"]
        running.nursery.start_soon(validator.run, running.bench)
        yield cluster, version


async def submit(running: Running, version: Entry) -> Entry:
    """An honest submission, as the inference role makes it."""
    engines = running.bench.engines
    async with engines.open() as engine, engines.open_tasks() as tasks:
        await inference.InferenceLife(running.bench, engine, tasks).submit(version)
    return running.node.log.replica.entries(running.id)[-1]


async def altered(running: Running, honest: Entry, **changes: object) -> Entry:
    """Announces the honest submission's successor with other bytes: ``changes`` are fields of the submission."""
    assert isinstance(honest.payload, Rollout)
    submission = Submission.parse(running.blobs.get(honest.payload.submission) or b"", running.node.domain.recipe)
    data = replace(submission, **changes).encode()  # type: ignore[arg-type]
    return await announce(running, honest, running.blobs.put(data), len(data))


async def announce(running: Running, honest: Entry, blob: bytes, size: int) -> Entry:
    rollout = honest.payload
    assert isinstance(rollout, Rollout)
    first = running.node.log.ledger.next_counter(running.id, rollout.weights)
    (entry,) = await running.node.log.append(replace(rollout, first_counter=first, submission=blob, size=size))
    return entry


def verdict_on(cluster: Cluster, rollout: Entry) -> Verdict | None:
    verdicts = cluster.running["v"].node.log.ledger.verdicts(rollout.id)
    entry = verdicts.get(cluster.running["v"].id)
    if entry is None:
        return None
    assert isinstance(entry.payload, Verdict)
    return entry.payload


async def judged(cluster: Cluster, rollout: Entry, seconds: float = 10.0) -> Verdict:
    await cluster.until(lambda: verdict_on(cluster, rollout) is not None, seconds)
    found = verdict_on(cluster, rollout)
    assert found is not None
    return found


def summary(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.outcome, verdict.severity, verdict.reason


@pytest.mark.parametrize(("share", "audited"), [(MILLION, 2), (0, 2)])  # a newcomer is audited fully in any case
async def test_honest_work_is_accepted(
    share: int, audited: int, tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults, genesis(policy=replace(POLICY, audit_share=share))) as (cluster, version):
        verdict = await judged(cluster, await submit(cluster.running["i"], version))
        assert summary(verdict) == ("accepted", "none", "ok")
        assert (verdict.score, verdict.audited) == (0, audited)
        assert cluster.running["v"].port.blamed == []
        # It serves what it judged, so that the trainer need not ask the author.
        author = cluster.running["i"].node.log.replica.entries(cluster.running["i"].id)[-1].payload
        assert isinstance(author, Rollout)
        assert cluster.running["v"].blobs.has(author.submission)


@pytest.mark.parametrize(("cheat", "reason"), [("forged-reward", "reward"), ("wrong-weights", "sampling")])
async def test_cheats_are_rejected_hard(
    cheat: str, reason: str, tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults, cheat=cheat) as (cluster, version):
        running = cluster.running["i"]
        rollout = await submit(running, version)
        assert summary(await judged(cluster, rollout)) == ("rejected", "hard", reason)
        await cluster.cut()
        account = running.node.log.ledger.accounts(final=True)[running.id]
        assert (account.credit, account.reasons) == (0, {reason: 1})


async def test_a_reward_that_cannot_be_decided_blames_nobody(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        faults.before["undecidable"] = lambda: None
        rollout = await submit(cluster.running["i"], version)
        assert summary(await judged(cluster, rollout)) == ("void", "soft", "undecidable")


async def test_altered_files(tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        running = cluster.running["i"]
        honest = await submit(running, version)
        await judged(cluster, honest)
        # Another's name, another version, or the file of other counters: not what was announced.
        for changes in ({"author": digest("x")}, {"weights": digest("x")}, {}):
            rollout = await altered(running, honest, **changes)
            assert summary(await judged(cluster, rollout)) == ("rejected", "hard", "wrong-header")
        garbage = running.blobs.put(b"\x96\x01")
        rollout = await announce(running, honest, garbage, 2)
        assert summary(await judged(cluster, rollout)) == ("rejected", "hard", "malformed")
        assert [peer for peer, _ in cluster.running["v"].port.blamed] == [running.id]


async def test_a_prompt_of_its_own_choice(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        running = cluster.running["i"]
        honest = await submit(running, version)
        assert isinstance(honest.payload, Rollout)
        submission = Submission.parse(running.blobs.get(honest.payload.submission) or b"", RECIPE)
        first = 2
        groups = tuple(replace(g, counter=first + i, prompt=(50, 51)) for i, g in enumerate(submission.groups))
        rollout = await altered(running, honest, groups=groups, first_counter=first)
        assert summary(await judged(cluster, rollout)) == ("rejected", "hard", "wrong-prompt")
        # Scorers and the engine's replay never saw it; of the honest one a group was replayed first, then the other.
        assert faults.count("engine", "replay") == 2


async def test_with_length_control_the_prompt_must_tell_the_budget(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    recipe = replace(RECIPE, max_prompt_tokens=200, target_lengths=(2, 3), budget_prompt="Use {} tokens.")
    async with stage(tmp_path, faults, genesis(recipe=recipe)) as (cluster, version):
        running = cluster.running["i"]
        honest = await submit(running, version)
        assert isinstance(honest.payload, Rollout)
        assert summary(await judged(cluster, honest)) == ("accepted", "none", "ok")
        submission = Submission.parse(running.blobs.get(honest.payload.submission) or b"", recipe)
        told = [bytes(group.prompt).decode().partition("\n")[2] for group in submission.groups]
        assert set(told) <= {"Use 2 tokens.", "Use 3 tokens."}
        assert len(told) == 2
        # The same questions with another budget are prompts of the author's own.
        swapped = {ord("2"): ord("3"), ord("3"): ord("2")}
        groups = tuple(
            replace(g, counter=2 + i, prompt=(*g.prompt[:-13], *(swapped.get(t, t) for t in g.prompt[-13:])))
            for i, g in enumerate(submission.groups)
        )
        rollout = await altered(running, honest, groups=groups, first_counter=2)
        assert summary(await judged(cluster, rollout)) == ("rejected", "hard", "wrong-prompt")


async def test_a_file_that_never_comes_is_missing_only_after_the_wait(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        running = cluster.running["i"]
        honest = await submit(running, version)
        await judged(cluster, honest)
        rollout = await announce(running, honest, digest("nowhere"), 100)
        wait = cluster.domain.timings.verdict_wait_ms / 1000
        await trio.sleep(wait - 1)
        assert verdict_on(cluster, rollout) is None
        # Meanwhile others are judged.
        assert (await judged(cluster, await submit(cluster.running["j"], version))).outcome == "accepted"
        assert summary(await judged(cluster, rollout)) == ("rejected", "soft", "missing")
        assert cluster.running["v"].port.blamed == []


async def test_a_file_that_comes_late_but_in_time_is_judged(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        running = cluster.running["i"]
        cluster.network.partition([running.id], [cluster.running["v"].id])
        honest = await submit(running, version)
        assert isinstance(honest.payload, Rollout)
        data = running.blobs.get(honest.payload.submission) or b""
        running.blobs.delete(honest.payload.submission)
        cluster.network.heal()
        await cluster.agree()
        await trio.sleep(1.5)
        assert verdict_on(cluster, honest) is None
        running.blobs.put(data)
        assert (await judged(cluster, honest)).outcome == "accepted"


async def test_an_old_version_is_late_although_its_file_is_here(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        newest = version
        for number in range(1, KEPT_VERSIONS + 1):
            newest = await cluster.announce("t", bytes([number]) + WHOLE_0[1:], newest)
            await cluster.running["v"].weights.hold(newest, timeout=30)
        running = cluster.running["v"]
        assert version.id not in running.weights.held.ids()
        assert running.versions.complete(cluster.domain.model.manifest.hash)  # version 0 is kept for newcomers
        rollout = await submit(cluster.running["i"], version)
        assert summary(await judged(cluster, rollout)) == ("rejected", "soft", "late")
        assert faults.count("engine", "load") == 1  # the author's


async def test_a_version_that_does_not_arrive_is_not_the_authors_fault(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        changed = b"\x05" + WHOLE_0[1:]
        newest = await cluster.announce("t", changed, version)
        await cluster.running["i"].weights.hold(newest, timeout=30)
        cluster.network.partition([cluster.running["v"].id], [cluster.running[name].id for name in ("t", "i")])
        rollout = await submit(cluster.running["i"], newest)
        for name in ("t", "i"):  # nobody has the bytes any more
            cluster.running[name].versions.delete([manifest_of(changed).digest])
        cluster.network.heal()
        assert summary(await judged(cluster, rollout, 300)) == ("void", "soft", "undecidable")
        assert cluster.running["v"].port.blamed == []


async def test_a_submission_that_kills_the_child_is_given_up_and_others_are_judged(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference", j="inference")
        for name in ("v", "i"):
            await cluster.running[name].weights.hold(version, timeout=30)
        bench = cluster.running["v"].bench
        poison = await submit(cluster.running["i"], version)
        await cluster.agree()
        for _ in range(2):
            faults.fail["replay"] = (WorkerError("engine: replay: the child was ended by signal SIGKILL", "died"), 1)
            if verdict_on(cluster, poison) is None:
                with trio.move_on_after(10) as scope, pytest.raises((WorkerError, BaseExceptionGroup)):
                    await validator.run(bench)
                if scope.cancelled_caught:
                    break
        assert summary(await judged(cluster, poison)) == ("void", "soft", "undecidable")
        faults.fail.clear()
        good = await submit(cluster.running["i"], version)
        with trio.move_on_after(5):
            await validator.run(bench)
        assert summary(await judged(cluster, good)) == ("accepted", "none", "ok")


async def test_a_question_that_cannot_be_asked_voids_its_submission_only(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):
        outcomes = iter([None, *2 * [WorkerError("tasks: prompts: ValueError: no such item", "internal")]])

        def fail() -> None:  # the author could make the question, the validator cannot
            if (error := next(outcomes, None)) is not None:
                raise error

        faults.before["questions"] = fail
        first = await submit(cluster.running["i"], version)
        assert summary(await judged(cluster, first)) == ("void", "soft", "undecidable")
        second = await submit(cluster.running["i"], version)
        assert (await judged(cluster, second)).outcome == "accepted"


async def test_those_who_earned_trust_are_judged_first(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        await cluster.node("elector")
        await cluster.node("j", cheat="forged-reward")
        version = await cluster.stage(t="trainer", v="validator", i="inference", j="inference")
        for name in ("v", "i", "j"):
            await cluster.running[name].weights.hold(version, timeout=30)
        cheat, honest = cluster.running["j"], cluster.running["i"]
        node, bench = cluster.running["v"].node, cluster.running["v"].bench
        for running in (cheat, honest):
            await submit(running, version)
        await cluster.agree()
        with trio.move_on_after(5):
            await validator.run(bench)
        for _ in range(6):
            await submit(cheat, version)
        wanted = await submit(honest, version)
        await cluster.agree()
        before = len(node.log.replica.entries(node.id))
        with trio.move_on_after(20):
            await validator.run(bench)
        first = node.log.replica.entries(node.id)[before].payload
        assert isinstance(first, Verdict)
        assert first.rollout == wanted.id
        assert node.log.ledger.pending_for(node.id) == []


async def test_an_author_who_stalls_holds_up_nobody_else(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, faults) as (cluster, version):

        async def stall(peer: bytes, request: bytes) -> bytes:
            await trio.sleep_forever()

        cluster.running["j"].port.handlers[BLOB_PROTOCOL] = stall
        stalled = await submit(cluster.running["j"], version)
        await cluster.agree()
        started = trio.current_time()
        good = await submit(cluster.running["i"], version)
        assert (await judged(cluster, good)).outcome == "accepted"
        assert trio.current_time() - started < 5
        assert (await judged(cluster, stalled, 300)).reason == "missing"


async def test_a_full_disk_ends_no_more_than_the_role(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        version = await cluster.stage(t="trainer", v="validator", i="inference")
        for name in ("v", "i"):
            await cluster.running[name].weights.hold(version, timeout=30)
        rollout = await submit(cluster.running["i"], version)
        await cluster.agree()
        cluster.running["v"].disk.full = True
        with trio.fail_after(10), pytest.raises(ExceptionGroup) as raised:
            await validator.run(cluster.running["v"].bench)
        assert raised.group_contains(OSError, match="no space")
        cluster.running["v"].disk.full = False
        with trio.move_on_after(5):
            await validator.run(cluster.running["v"].bench)
        assert (await judged(cluster, rollout)).outcome == "accepted"
