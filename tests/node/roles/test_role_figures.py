"""What roles put into metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing

from node.config import WILLING
from node.roles.publishing import step_figures
from protocol.records import Step
from protocol.work.rollout import FINISH_END, FINISH_LENGTH, Response
from tests.node.fake_children import Faults
from tests.node.fakes import open_cluster
from tests.protocol.builders import digest

STEP = Step(
    term=3,
    number=9,
    base=digest("base"),
    blob=digest("blob"),
    blob_size=100,
    reward=412_000,
    lag_mean=1_500_000,
    lag_max=2,
    groups=64,
    accepted=1024,
    rejected=16,
    trained=800,
    tokens=4000,
    train_ms=2000,
    wait_ms=500,
    publish_ms=250,
    blocked_ms=125,
)
RESPONSES = [
    Response((1, 2, 3), (0, 0, 0), 1_000_000, FINISH_END),
    Response((1, 2, 3, 4, 5), (0, 0, 0, 0, 0), 0, FINISH_LENGTH),
]


def test_a_steps_row_is_in_seconds_and_shares() -> None:
    learned = {"loss": -0.5, "grad_norm": 2.0, "clip_share": 0.1, "seconds": 9.9, "trained": 800, "groups_dropped": 14}
    assert step_figures(STEP, learned, RESPONSES) == {
        "version": 9,
        "term": 3,
        "reward": 0.412,
        "groups": 64,
        "responses": 1024,
        "responses_rejected": 16,
        "responses_trained": 800,
        "tokens": 4000,
        "tokens_per_second": 2000.0,
        "lag_mean": 1.5,
        "lag_max": 2,
        "length_mean": 4.0,
        "length_max": 5,
        "ended": 0.5,
        "training_seconds": 2.0,
        "waiting_seconds": 0.5,
        "blocked_seconds": 0.125,
        "publishing_seconds": 0.25,
        "loss": -0.5,
        "grad_norm": 2.0,
        "clip_share": 0.1,
        "groups_dropped": 14,
    }


async def test_each_role_measures_what_it_does(
    tmp_path: Path, faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_cluster(tmp_path, faults) as cluster:
        for name in ("elector", "a", "b", "c"):
            await cluster.start(name, willing=("inference",) if name == "elector" else WILLING, pause_at_step=2)
        await cluster.until(lambda: all(running.steps >= 2 for running in cluster.running.values()))
        ledger = cluster.running["elector"].node.log.ledger
        rows = [row for running in cluster.running.values() for row in running.measured.take()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["version"] for row in steps] == [1, 2]
    payloads = [entry.payload for entry in ledger.steps()]
    assert [row["tokens"] for row in steps] == [step.tokens for step in payloads if isinstance(step, Step)]
    made = [row for row in rows if row["kind"] == "generation"]
    judged = [row for row in rows if row["kind"] == "verdict"]
    assert made
    assert judged
    assert all(row["length_mean"] == 2.0 and row["tokens"] == 2 * row["responses"] for row in made)
    assert all(row["tokens_per_second"] == pytest.approx(row["tokens"] / 0.5) for row in made)
    assert {row["outcome"] for row in judged} == {"accepted"}
    assert all(0 < row["groups_replayed"] <= row["groups"] for row in judged)
