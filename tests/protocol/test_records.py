"""Payloads: what each kind may say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.constants import MAX_STEP_BLOB_BYTES, MILLION
from protocol.errors import LocalError, PeerError
from protocol.records import KINDS, Join, Record, Role, Rollout, Step, StepBlob, Verdict, Weights, parse_payload
from tests.protocol.builders import digest
from tests.protocol.strategies import ids, records, values

HASH = digest("hash")
WEIGHTS = Weights(1, 1, HASH, HASH, 10, HASH, 20, HASH)
ROLLOUT = Rollout(HASH, 0, 2, 8, 40, HASH, 1000, 1)
VERDICT = Verdict(HASH, "accepted", "none", "ok", 0, bytes(64), 2)
STEP = Step(1, 1, HASH, HASH, 10, 300_000, 500_000, 1, 4, 16, 0, 12, 100, 5, 6, 7, 8)


@given(records)
def test_what_is_written_reads_as_itself(record: Record) -> None:
    value = codec.decode(codec.encode(record.to_value()), max_bytes=4096)
    assert parse_payload(record.KIND, value) == record


@given(st.sampled_from(KINDS), values)
def test_any_value_is_a_record_or_the_peers_mistake(kind: str, value: Any) -> None:
    try:
        record = parse_payload(kind, value)
    except PeerError:
        return
    assert record.to_value() == value


@pytest.mark.parametrize("kind", ["", "Join"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(PeerError, match="unknown kind"):
        parse_payload(kind, [])


def change(record: Record, **fields: object) -> Record:
    """A copy of the record with other fields."""
    return dataclasses.replace(record, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "record",
    [
        Join(bytes(31), "agent", "name"),
        Join(HASH, "a" * 65, "name"),
        Join(HASH, "agent", "n" * 33),
        Role("king"),
        change(WEIGHTS, term=0),
        change(WEIGHTS, number=0),
        change(WEIGHTS, predecessor=None),
        change(WEIGHTS, number=0, predecessor=None),  # version 0, made by a step
        change(WEIGHTS, manifest_size=0),
        change(WEIGHTS, delta=HASH),
        change(WEIGHTS, delta_size=10),
        change(WEIGHTS, number=0, predecessor=None, step=None, delta=HASH, delta_size=10),
        change(ROLLOUT, groups=0),
        change(ROLLOUT, responses=1),
        change(ROLLOUT, tokens=7),
        change(ROLLOUT, size=0),
        change(ROLLOUT, signal=3),
        change(VERDICT, outcome="rejected"),
        change(VERDICT, severity="hard"),
        change(VERDICT, reason="reward"),
        change(VERDICT, outcome="rejected", severity="hard"),  # for the reason "ok"
        change(VERDICT, outcome="rejected", severity="none", reason="reward"),
        change(VERDICT, outcome="void", severity="hard", reason="undecidable"),
        change(VERDICT, outcome="void", severity="soft", reason=""),
        change(VERDICT, outcome="maybe"),
        change(VERDICT, draw=bytes(63)),
        change(STEP, trained=17),
        change(STEP, lag_mean=1_000_001),
        change(STEP, reward=MILLION + 1),
        change(STEP, number=0),
    ],
    ids=str,
)
def test_records_that_break_a_rule_are_refused(record: Record) -> None:
    with pytest.raises(PeerError):
        parse_payload(record.KIND, record.to_value())


@pytest.mark.parametrize("record", [WEIGHTS, ROLLOUT, VERDICT, STEP, change(WEIGHTS, step=None)], ids=str)
def test_a_field_more_or_less_is_refused(record: Record) -> None:
    assert parse_payload(record.KIND, record.to_value()) == record
    with pytest.raises(PeerError):
        parse_payload(record.KIND, record.to_value()[:-1])
    with pytest.raises(PeerError):
        parse_payload(record.KIND, [*record.to_value(), None])


@given(st.lists(st.tuples(ids, st.lists(ids, max_size=3).map(tuple)), max_size=5, unique_by=lambda item: item[0]))
def test_step_blobs_read_as_written(submissions: list[tuple[bytes, tuple[bytes, ...]]]) -> None:
    blob = StepBlob(tuple(submissions))
    assert StepBlob.parse(blob.encode()) == blob


def test_a_step_blob_lists_a_rollout_once() -> None:
    with pytest.raises(PeerError, match="twice"):
        StepBlob.parse(StepBlob(((HASH, ()), (HASH, (HASH,)))).encode())


def test_step_blobs_are_bounded() -> None:
    many = tuple((i.to_bytes(32, "big"), ()) for i in range(MAX_STEP_BLOB_BYTES // 34))
    with pytest.raises(LocalError):
        StepBlob(many).encode()
    with pytest.raises(PeerError):
        StepBlob.parse(bytes(MAX_STEP_BLOB_BYTES + 1))
    with pytest.raises(PeerError):
        StepBlob.parse(codec.encode([2, []]))
