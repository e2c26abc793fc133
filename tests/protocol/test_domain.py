"""The genesis: strict, signed, and pinned by a golden file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from protocol import codec, identity
from protocol.constants import MAX_SET_BYTES
from protocol.domain import (
    ID_CONTEXT,
    Task,
    default_admission,
    default_timings,
    make_genesis,
    parse_genesis,
)
from protocol.errors import LocalError, PeerError
from protocol.records import Blob
from tests.protocol.builders import MODEL, POLICY, RECIPE, THRESHOLDS, digest, key, small_domain, small_genesis
from tests.vectors import golden
from tests.vectors.make import golden_genesis

NAME, CREATOR, DEVNET, PRIVATE, ELECTORS, VALIDATORS, TRAINERS, ADMISSION = range(1, 9)
MODEL_AT, TASKS, RECIPE_AT, TIMINGS = range(9, 13)


def altered(change: Callable[[list[Any]], None]) -> bytes:
    """A genesis whose body was changed before it was signed."""
    body = codec.decode(small_domain(("elector", "elector 2")).body, max_bytes=1 << 16)
    change(body)
    raw = codec.encode(body)
    return codec.encode([raw, key("elector").sign(identity.GENESIS, raw)])


def put(*path: int, value: Any) -> Callable[[list[Any]], None]:
    """A change that puts ``value`` at a place in the nested arrays."""

    def change(body: list[Any]) -> None:
        target = body
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


def test_what_is_made_reads_as_itself() -> None:
    tasks = (
        Task("reasoning-gym", "basic_arithmetic", 3, "{}", "0.1.25", None),
        Task("jsonl", "sums", 1, '{"a": [1, 2.5, null]}', "0.9.0", Blob(digest("data"), 77), Blob(digest("set"), 12)),
    )
    domain = parse_genesis(
        make_genesis(
            key("creator"),
            name="a name",
            devnet=False,
            private=True,
            electors=tuple(key(name).node for name in ("b", "a", "c")),
            validators=(key("v").node,),
            model=MODEL,
            tasks=tasks,
            recipe=RECIPE,
            timings=default_timings(False),
            policy=POLICY,
            thresholds=THRESHOLDS,
        )
    )
    assert domain.name == "a name"
    assert domain.creator == key("creator").node
    assert domain.devnet == 0
    assert domain.private == 1
    assert domain.electors == tuple(sorted(key(name).node for name in ("a", "b", "c")))
    assert domain.validators == (key("v").node,)
    assert domain.model == MODEL
    assert domain.tasks == tasks
    assert set(domain.blobs) == {
        MODEL.config,
        MODEL.tokenizer,
        MODEL.manifest,
        Blob(digest("data"), 77),
        tasks[1].items,
    }
    assert domain.recipe == RECIPE
    assert domain.timings == default_timings(False)
    assert domain.policy == POLICY
    assert domain.thresholds == THRESHOLDS
    assert domain.id == sha256(ID_CONTEXT + domain.body).digest()


def test_a_devnets_timings_are_at_least_ten_times_shorter() -> None:
    devnet, wide = default_timings(True).to_value(), default_timings(False).to_value()
    assert all(10 * short <= long for short, long in zip(devnet, wide, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        put(0, value=1),
        put(0, value=3),
        put(TRAINERS, value=[bytes(32), bytes(32)]),
        put(ADMISSION, 0, value="closed"),
        put(ADMISSION, 2, value=0),
        put(NAME, value=""),
        put(NAME, value="n" * 65),
        put(CREATOR, value=key("another").node),
        put(DEVNET, value=2),
        put(PRIVATE, value=2),
        put(ELECTORS, value=[]),
        put(ELECTORS, value=[bytes(32), bytes(32)]),
        put(ELECTORS, value=[b"b" * 32, b"a" * 32]),
        put(VALIDATORS, value=[b"b" * 32, b"a" * 32]),
        put(MODEL_AT, 0, value="g" * 65),
        put(MODEL_AT, 1, 1, value=0),
        put(MODEL_AT, 5, value="float16"),
        put(TASKS, value=[]),
        put(TASKS, 0, 0, value="python"),
        put(TASKS, 0, 0, value="jsonl"),
        put(TASKS, 0, 1, value=""),
        put(TASKS, 0, 2, value=0),
        put(TASKS, 0, 3, value=""),
        put(TASKS, 0, 3, value="[]"),
        put(TASKS, 0, 3, value="{"),
        put(TASKS, 0, 3, value='{"a": NaN}'),
        put(TASKS, 0, 3, value="[" * 2000),
        put(TASKS, 0, 5, value=[bytes(32), 1]),
        put(TASKS, 0, 6, value=[bytes(32), 0]),
        put(TASKS, 0, 6, value=[bytes(32), MAX_SET_BYTES + 1]),
        put(RECIPE_AT, 19, value="group"),
        put(RECIPE_AT, 20, value=[3, 2]),
        put(RECIPE_AT, 20, value=[2, 2]),
        put(RECIPE_AT, 20, value=[0]),
        put(RECIPE_AT, 20, value=[2]),  # without a budget prompt
        put(RECIPE_AT, 20, value=list(range(1, 66))),
        put(RECIPE_AT, 21, value=1_000_001),
        put(RECIPE_AT, 22, value="x" * 201),
        put(RECIPE_AT, 1, value=0),
        put(RECIPE_AT, 6, value=0),
        put(RECIPE_AT, 7, value=1_000_001),
        put(TIMINGS, 0, value=0),
        put(TIMINGS, value=[]),
        lambda body: body.append(0),
        lambda body: body.pop(),
    ],
)
def test_a_genesis_that_breaks_a_rule_is_refused(change: Callable[[list[Any]], None]) -> None:
    assert parse_genesis(altered(lambda body: None)).name == "test"
    with pytest.raises(PeerError):
        parse_genesis(altered(change))


def test_every_flipped_byte_is_rejected() -> None:
    raw = small_genesis()
    for place in range(len(raw)):
        with pytest.raises(PeerError):
            parse_genesis(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])


def test_what_others_would_refuse_is_not_made() -> None:
    with pytest.raises(LocalError, match="no name"):
        small_genesis(name="")
    with pytest.raises(LocalError, match="ascending"):
        small_genesis(electors=("a", "a"))


def test_any_change_makes_another_domain() -> None:
    other = dataclasses.replace(POLICY, min_nodes=3)
    assert len({small_domain().id, small_domain(("b",)).id, small_domain(policy=other).id}) == 3


def test_golden_genesis() -> None:
    stored = golden("genesis")
    assert golden_genesis() == stored
    assert parse_genesis(bytes.fromhex(stored["wire"])).id.hex() == stored["id"]


def test_length_control_reads_as_itself_and_stays_within_a_response() -> None:
    def control(lengths: list[int], words: str) -> bytes:
        def change(body: list[Any]) -> None:
            body[RECIPE_AT][20], body[RECIPE_AT][22] = lengths, words

        return altered(change)

    recipe = parse_genesis(control([2, 8], "Use {} tokens.")).recipe
    assert (recipe.target_lengths, recipe.budget_prompt) == ((2, 8), "Use {} tokens.")
    assert hash(recipe)  # the lengths are a tuple whatever they came from
    for lengths, words in (([2, 9], "{}"), ([2], "{} of {}"), ([2], "none")):
        with pytest.raises(PeerError, match="target length"):
            parse_genesis(control(lengths, words))


def test_an_older_domain_is_refused_in_one_line() -> None:
    with pytest.raises(PeerError, match="made for protocol 1, and this program speaks 2"):
        parse_genesis(altered(put(0, value=1)))


def test_whoever_is_named_is_named() -> None:
    domain = small_domain(("elector",), ("v1",), members=("t",))
    assert domain.named == {key(name).node for name in ("elector", "v1", "t")}
    assert (domain.admission.mode, domain.admission.work) == ("open", 0)
    private = small_domain(private=True, admission=default_admission(devnet=False, private=True))
    assert private.admission.mode == "invited"
