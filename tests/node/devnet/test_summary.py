"""summary.json: what the issue of record asks for, and from the log alone."""

from __future__ import annotations

import json

from node.devnet import summary
from node.devnet.summary import (
    EMPTY,
    EvaluationRow,
    NodeRow,
    Rejection,
    RunSummary,
    StepRow,
    evaluation_rows,
    of_ledger,
    rejections,
    timed,
)
from protocol.credit.ledger import Ledger
from protocol.identity import DRAW
from protocol.log.replica import Replica
from protocol.records import Role, Rollout, Step, Verdict, Weights
from tests.protocol.builders import MODEL, Writer, cut_for, digest, grant_for, small_domain


def ledger() -> Ledger:
    """A trainer, a validator, an honest author and a cheat; one step; all of it final."""
    domain = small_domain()
    replica = Replica(domain)
    result = Ledger(replica)
    writers = {name: Writer(name, domain.id) for name in ("node-1", "node-2", "node-10", "cheat")}

    def add(name: str, payload: Role | Rollout | Step | Verdict | Weights) -> bytes:
        entry = writers[name].append(payload)
        assert replica.add_entry(entry)
        result.update()
        return entry.id

    def cut() -> None:
        assert replica.add_cut(cut_for(replica, "elector"))
        for writer in writers.values():
            writer.anchor = replica.newest_cut_id

    for writer in writers.values():
        assert replica.add_entry(writer.entries[0])
        result.update()
    for name, role in (("node-1", "trainer"), ("node-2", "validator"), ("node-10", "inference")):
        add(name, Role(role))
    cut()
    assert replica.add_grant(grant_for(domain, 1, writers["node-1"].node))
    zero = add("node-1", Weights(1, 0, None, MODEL.manifest.hash, MODEL.manifest.size, MODEL.whole, 5000, None))
    for name, outcome, severity, reason in (
        ("node-10", "accepted", "none", "ok"),
        ("cheat", "rejected", "hard", "reward"),
    ):
        rollout = add(name, Rollout(zero, 0, 2, 8, 30, digest(name), 900, 2))
        draw = writers["node-2"].identity.sign(DRAW, digest(name) + rollout)
        add("node-2", Verdict(rollout, outcome, severity, reason, 0, draw, 2))
    step = Step(1, 1, zero, digest("blob"), 100, 412_000, 800_000, 2, 2, 8, 8, 8, 30, 1500, 2000, 500, 250)
    made = add("node-1", step)
    add("node-1", Weights(1, 1, zero, digest("manifest 1"), 2000, digest("whole 1"), 5000, made))
    cut()
    return result


def test_it_is_what_the_log_says() -> None:
    found = timed(of_ledger(ledger(), ["node-1", "node-2", "node-10"]), 12.34567, 3_200_000)
    assert found.steps == (StepRow(1, 0.412, 0.8, 2, 8, 8, 8, 3.75, 1.5, 2.0, 0.25, 0.5),)
    assert [(row.name, row.role, row.credit) for row in found.nodes] == [
        ("node-1", "trainer", 8),
        ("node-2", "validator", 4),
        ("node-10", "inference", 8),
        ("cheat", "none", 0),
    ]
    assert found.nodes[3].rejections == (Rejection("reward", 1),)
    assert (found.seconds, found.bytes) == (12.346, 3_200_000)


def test_the_json_has_exactly_the_agreed_fields() -> None:
    nodes = (NodeRow("node-1", "ab" * 32, "trainer", 8, (Rejection("late", 2),)),)
    value = json.loads(
        RunSummary((StepRow(1, 0.5, 0.25, 1, 8, 0, 6, 4.0, 1.5, 2.0, 0.5, 1.0),), nodes, 12.5, 77).to_json()
    )
    assert value == {
        "format": summary.FORMAT,
        "steps": [
            {
                **{
                    "step": 1,
                    "reward": 0.5,
                    "lag_mean": 0.25,
                    "lag_max": 1,
                    "accepted": 8,
                    "rejected": 0,
                    "trained": 6,
                },
                **{"seconds": 4.0, "training": 1.5, "waiting": 2.0, "blocked": 0.5, "publishing": 1.0},
            }
        ],
        "nodes": [
            {
                "name": "node-1",
                "id": "ab" * 32,
                "role": "trainer",
                "credit": 8,
                "rejections": [{"reason": "late", "count": 2}],
            }
        ],
        "seconds": 12.5,
        "bytes": 77,
    }


def test_a_run_without_a_log_has_a_summary_too() -> None:
    assert json.loads(EMPTY.to_json())["steps"] == []


def test_the_most_frequent_reason_comes_first() -> None:
    assert rejections({"late": 1, "reward": 5, "gap": 1, "ok": 9, "bounds": 0}) == (
        Rejection("reward", 5),
        Rejection("gap", 1),
        Rejection("late", 1),
    )


def test_evaluations_come_by_version_and_each_counts_once() -> None:
    score = {
        "task": "sums",
        "questions": 64,
        "pass_rate": 0.5,
        "pass_rate_low": 0.4,
        "pass_rate_high": 0.6,
        "reward": 0.55,
        "length": 3.2,
    }
    told = [{"version": version, "id": "ab", "scores": [score]} for version in (4, 0, 4)]
    rows = evaluation_rows(told)
    assert rows == tuple(EvaluationRow(version, "sums", 64, 0.5, 0.4, 0.6, 0.55) for version in (0, 4))
    found = timed(EMPTY, 1.0, 2, rows)
    assert [row["version"] for row in json.loads(found.to_json())["evaluations"]] == [0, 4]
    assert "evaluations" not in json.loads(EMPTY.to_json())
