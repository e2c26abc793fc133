"""What a devnet's run came to: ``summary.json``, from a node's own log.

``{format, steps: [{step, reward, lag_mean, lag_max, accepted, rejected, trained, seconds, training, waiting, blocked,
publishing}],
nodes: [{name, id, role, credit, rejections: [{reason, count}]}], seconds, bytes,
evaluations: [{version, task, questions, pass_rate, pass_rate_low, pass_rate_high, reward}]}``

1. Steps are those whose weights stand on the lineage, in its order. ``reward`` is the mean over all accepted responses
   that the step gathered, from 0 to 1; ``accepted``, ``rejected`` and ``trained`` count responses. ``seconds`` of the
   trainer's time are the sum of ``training``, ``waiting`` for rollouts and ``blocked``, for the version before was not
   published yet. ``publishing`` took so many seconds beside them.
2. ``credit`` counts final entries only. ``rejections`` counts submissions by reason, the most frequent first.
3. ``seconds`` is the run's length, ``bytes`` what all its nodes sent each other over libp2p (weights mostly travel
   beside it), and ``evaluations``, left out where there are none, what the trainers told of versions on held-out
   questions: things no log knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from node.api.node_rows import step_row
from protocol.credit.ledger import Ledger
from protocol.records import Step

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class StepRow:
    """One training step; fractions and seconds as floats."""

    step: int
    reward: float
    lag_mean: float
    lag_max: int
    accepted: int
    rejected: int
    trained: int
    seconds: float
    training: float
    waiting: float
    blocked: float
    publishing: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> StepRow:
        """From a row of ``node.api.node_rows.step_row``, as statuses have them."""
        same = {
            name: row[name] for name in ("step", "reward", "lag_mean", "lag_max", "accepted", "rejected", "trained")
        }
        training, waiting, blocked, publishing = (
            row[f"{name}_ms"] / 1000 for name in ("train", "wait", "blocked", "publish")
        )
        seconds = (row["train_ms"] + row["wait_ms"] + row["blocked_ms"]) / 1000
        return cls(**same, seconds=seconds, training=training, waiting=waiting, blocked=blocked, publishing=publishing)


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """A version on the held-out questions of a task, or of the mix ("all"); the limits are those of a 95 % interval."""

    version: int
    task: str
    questions: int
    pass_rate: float
    pass_rate_low: float
    pass_rate_high: float
    reward: float


def evaluation_rows(evaluations: Iterable[Mapping[str, Any]]) -> tuple[EvaluationRow, ...]:
    """The rows of evaluations as statuses tell them (``node.api.status``), by version; each version counts once."""
    versions = {evaluation["version"]: evaluation["scores"] for evaluation in evaluations}
    names = [field.name for field in fields(EvaluationRow) if field.name != "version"]
    return tuple(
        EvaluationRow(version, **{name: score[name] for name in names})
        for version, scores in sorted(versions.items())
        for score in scores
    )


@dataclass(frozen=True, slots=True)
class Rejection:
    """How many of a node's submissions were rejected for one reason code."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node; ``id`` is its node id in hex."""

    name: str
    id: str
    role: str
    credit: int
    rejections: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The whole summary; ``bytes`` were sent between the nodes in ``seconds``."""

    steps: tuple[StepRow, ...]
    nodes: tuple[NodeRow, ...]
    seconds: float
    bytes: int
    evaluations: tuple[EvaluationRow, ...] = ()

    def to_json(self) -> str:
        """The text of ``summary.json``."""
        value: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        if not self.evaluations:
            del value["evaluations"]
        return json.dumps(value, indent=1) + "\n"


EMPTY: Final = RunSummary((), (), 0.0, 0)
"""The summary of a run that ended before there was a log."""


def rejections(reasons: Mapping[str, int]) -> tuple[Rejection, ...]:
    """Rows of ``reasons`` (code to count), the most frequent first, then by code; "ok" is none."""
    rows = [Rejection(reason, count) for reason, count in reasons.items() if reason != "ok" and count]
    return tuple(sorted(rows, key=lambda row: (-row.count, row.reason)))


def of_ledger(ledger: Ledger, order: Sequence[str] = ()) -> RunSummary:
    """What the log says; ``seconds`` and ``bytes`` are 0, see ``timed``.

    Nodes come in the ``order`` of their names, others behind them by name and id: keys in order say nothing to people.
    """
    accounts = ledger.accounts(final=True)
    nodes = []
    for author in ledger.authors():
        account = accounts.get(author)
        nodes.append(
            NodeRow(
                name=ledger.name(author),
                id=author.hex(),
                role=ledger.standing_role(author),
                credit=0 if account is None else account.credit,
                rejections=() if account is None else rejections(account.reasons),
            )
        )
    places = {name: place for place, name in enumerate(order)}
    nodes.sort(key=lambda row: (places.get(row.name, len(places)), row.name, row.id))
    steps = tuple(StepRow.of(step_row(entry.payload)) for entry in ledger.steps() if isinstance(entry.payload, Step))
    return RunSummary(steps, tuple(nodes), 0.0, 0)


def timed(
    summary: RunSummary, seconds: float, bytes_sent: int, evaluations: tuple[EvaluationRow, ...] = ()
) -> RunSummary:
    """``summary`` with what no log knows."""
    return replace(summary, seconds=round(seconds, 3), bytes=bytes_sent, evaluations=evaluations)
