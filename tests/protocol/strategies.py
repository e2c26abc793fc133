"""Hypothesis strategies for the log's values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from protocol.codec import MAX_INT
from protocol.constants import MAX_MANIFEST_BYTES, MAX_STEP_BLOB_BYTES, MAX_SUBMISSION_BYTES, MILLION
from protocol.log.heads import Head
from protocol.records import ROLES, Close, Join, Leave, Rebind, Record, Role, Rollout, Step, Verdict, Weights

ids = st.binary(min_size=32, max_size=32)
counts = st.integers(0, 2**31 - 1)
integers = st.integers(0, MAX_INT)


def text(most: int, least: int = 0) -> st.SearchStrategy[str]:
    """Printable ASCII."""
    return st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=least, max_size=most)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | integers | st.binary(max_size=40) | text(40), lambda inner: st.lists(inner, max_size=4), max_leaves=12
)
"""Values of the canonical subset, at most a few levels deep."""


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    """Valid ``Weights``."""
    number = draw(st.integers(0, 5))
    delta = draw(st.none() | ids) if number else None
    return Weights(
        draw(st.integers(1, MAX_INT)),
        number,
        draw(ids) if number else None,
        draw(ids),
        draw(st.integers(1, MAX_MANIFEST_BYTES)),
        draw(ids),
        draw(st.integers(1, MAX_INT)),
        draw(st.none() | ids) if number else None,
        delta,
        0 if delta is None else draw(st.integers(1, MAX_MANIFEST_BYTES)),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Valid ``Rollout``."""
    groups, each, tokens = draw(st.integers(1, 16)), draw(st.integers(1, 16)), draw(st.integers(1, 100))
    responses = groups * each
    size = draw(st.integers(1, MAX_SUBMISSION_BYTES))
    counter = draw(st.integers(0, 2**62))
    return Rollout(
        draw(ids), counter, groups, responses, responses * tokens, draw(ids), size, draw(st.integers(0, groups))
    )


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Valid ``Verdict``."""
    outcome, severity, reason = draw(
        st.sampled_from(
            [
                ("accepted", "none", "ok"),
                ("rejected", "soft", "late"),
                ("rejected", "hard", "reward"),
                ("void", "soft", "undecidable"),
            ]
        )
    )
    draw_bytes = draw(st.binary(min_size=64, max_size=64))
    score = draw(st.integers(0, MILLION))
    return Verdict(draw(ids), outcome, severity, reason, score, draw_bytes, draw(st.integers(0, 2**16)))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Valid ``Step``."""
    trained = draw(st.integers(0, 1000))
    lag = draw(st.integers(0, 4))
    return Step(
        draw(st.integers(1, MAX_INT)),
        draw(st.integers(1, MAX_INT)),
        draw(ids),
        draw(ids),
        draw(st.integers(1, MAX_STEP_BLOB_BYTES)),
        draw(st.integers(0, MILLION)),
        draw(st.integers(0, lag * MILLION)),
        lag,
        draw(counts),
        trained + draw(st.integers(0, 1000)),
        draw(counts),
        trained,
        *draw(st.tuples(integers, integers, integers, integers, integers)),
    )


plain_records: st.SearchStrategy[Record] = st.one_of(
    st.builds(Join, ids, text(64), text(32)),
    st.builds(Leave),
    st.builds(Role, st.sampled_from(ROLES)),
    weights(),
    rollouts(),
    verdicts(),
    steps(),
)
"""Payloads that any entry may carry."""
records = st.one_of(
    plain_records,
    st.builds(Close, ids, ids, st.binary(min_size=64, max_size=64)),
    st.builds(Rebind, ids, ids, st.binary(min_size=64, max_size=64)),
)
"""Payloads of every kind: what a recovery key has to sign is well-formed, and its signature wrong."""
heads = st.builds(Head, ids, st.integers(0, 2**62), ids, ids, st.integers(0, 1))
