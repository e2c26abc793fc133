"""The rows that roles put into ``metrics.jsonl``: docs/OPERATING.md explains each field. Seconds, tokens, shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from protocol.constants import MILLION
from protocol.records import Step
from protocol.work.rollout import FINISH_END, Response

LEARNER: Final = (
    *("loss", "grad_norm", "entropy", "reference_kl", "behaviour_kl", "clip_share", "ratio_mean", "importance_mean"),
    *("learning_rate", "updates", "groups_used", "groups_dropped"),
)
"""What is taken over from the trainer child's answer (``node.workers.learner``)."""


def of_step(step: Step, learned: Mapping[str, Any], responses: Sequence[Response]) -> dict[str, Any]:
    """A training step that was committed; ``learned`` are the trainer child's metrics."""
    train = step.train_ms / 1000
    return {
        "version": step.number,
        "term": step.term,
        "reward": step.reward / MILLION,
        "groups": step.groups,
        "responses": step.accepted,
        "responses_rejected": step.rejected,
        "responses_trained": step.trained,
        "tokens": step.tokens,
        "tokens_per_second": step.tokens / train if train else None,
        "lag_mean": step.lag_mean / MILLION,
        "lag_max": step.lag_max,
        **lengths(responses),
        "training_seconds": train,
        "waiting_seconds": step.wait_ms / 1000,
        "blocked_seconds": step.blocked_ms / 1000,
        "publishing_seconds": step.publish_ms / 1000,
        **{name: learned[name] for name in LEARNER if name in learned},
    }


def lengths(responses: Sequence[Response]) -> dict[str, Any]:
    """How long responses are, in tokens, and the share of those that ended by themselves."""
    counts = [len(response.tokens) for response in responses]
    return {
        "length_mean": sum(counts) / len(counts),
        "length_max": max(counts),
        "ended": sum(response.finish == FINISH_END for response in responses) / len(responses),
    }
