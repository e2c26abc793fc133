"""Canonical msgpack: one encoding a value, and nothing but PeerError for the rest."""

from __future__ import annotations

import json
import re
from enum import IntEnum
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import (
    HASH,
    MAX_INT,
    Anything,
    Array,
    Bytes,
    Int,
    Many,
    Optional,
    Schema,
    Tagged,
    Text,
    check,
    decode,
    encode,
    parse,
)
from protocol.constants import MAX_DEPTH
from protocol.errors import LocalError, PeerError
from tests.protocol.strategies import values
from tests.vectors import public


class Colour(IntEnum):
    """Equal to an int, and not one."""

    RED = 1


class Word(str):
    """Equal to a string, and not one."""


def nested(depth: int) -> Any:
    """``depth`` arrays inside one another."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@given(values)
def test_what_is_encoded_decodes_to_itself(value: Any) -> None:
    data = encode(value)
    assert decode(data, max_bytes=len(data)) == value
    assert msgpack.unpackb(data) == value


def test_tuples_encode_like_lists() -> None:
    assert encode((1, (b"a", None))) == encode([1, [b"a", None]])


@pytest.mark.parametrize(
    "value",
    [
        -1,
        MAX_INT + 1,
        1.0,
        True,
        False,
        {},
        {1: 2},
        "é",
        "a\n",
        "\x7f",
        Colour.RED,
        Word("a"),
        bytearray(b"a"),
        {1},
        [0, [1.5]],
        nested(MAX_DEPTH + 1),
    ],
    ids=repr,
)
def test_values_outside_the_subset_are_our_own_mistake(value: Any) -> None:
    with pytest.raises(LocalError):
        encode(value)


def test_the_depth_bound_is_inclusive() -> None:
    value = nested(MAX_DEPTH)
    assert decode(encode(value), max_bytes=100) == value
    with pytest.raises(PeerError):
        decode(b"\x91" * (MAX_DEPTH + 1) + b"\x00", max_bytes=100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xcc\x00",  # 0 in two bytes
        b"\xcd\x00\xff",  # 255 in three
        b"\xcf" + (2**63).to_bytes(8, "big"),
        b"\xff",  # -1
        b"\xd0\x01",  # 1 as a signed integer
        b"\xcb" + bytes(8),  # 0.0
        b"\xc2",  # false
        b"\xc3",  # true
        b"\x80",  # {}
        b"\x81\x01\x02",  # {1: 2}
        b"\x82\x01\x02\x01\x03",  # a key twice
        b"\xd4\x05a",  # an extension
        b"\xd6\xff" + bytes(4),  # a timestamp
        b"\xd9\x01a",  # a short string with a long header
        b"\xc5\x00\x01a",  # short bytes with a long header
        b"\xdc\x00\x01\x00",  # a short array with a long header
        b"\xa2\xc3\xa9",  # é
        b"\xa1\xff",  # not UTF-8
        b"\xa1\n",
        b"\x00\x00",  # trailing byte
        b"\x92\x00",  # truncated array
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million items
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\xc1",  # never used
        b"\x91" * 200_000 + b"\x00",  # deeper than any stack
    ],
    ids=lambda data: data[:6].hex(),
)
def test_everything_else_is_the_peers_mistake(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode(data, max_bytes=1 << 20)


def test_size_is_bounded_before_anything_is_decoded() -> None:
    with pytest.raises(PeerError, match="at most 3"):
        decode(encode(b"abcd"), max_bytes=3, what="thing")


@given(st.binary(max_size=60))
@example(b"\xcf\x7f\xff\xff\xff\xff\xff\xff\xff")
def test_any_bytes_decode_canonically_or_are_refused(data: bytes) -> None:
    try:
        value = decode(data, max_bytes=60)
    except PeerError:
        return
    assert encode(value) == data


@given(values, st.data())
def test_a_flipped_byte_never_gives_the_same_value(value: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(value))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = decode(bytes(raw), max_bytes=len(raw))
    except PeerError:
        return
    assert other != value


SCHEMA = Array((("count", Int(1, 5)), ("hash", HASH), ("names", Many(Text(3), most=2, least=1)), ("more", Anything())))


def test_a_schema_lets_through_what_fits() -> None:
    value = [5, bytes(32), ["abc", ""], [1, [None]]]
    assert parse(encode(value), SCHEMA, max_bytes=100, what="thing") == value
    check(None, Optional(Int()), "thing")
    check(3, Optional(Int()), "thing")
    check("b", Text(1, ("a", "b")), "thing")


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([0, bytes(32), ["a"], 0], "thing.count"),
        ([6, bytes(32), ["a"], 0], "thing.count"),
        (["1", bytes(32), ["a"], 0], "thing.count"),
        ([1, bytes(31), ["a"], 0], "thing.hash"),
        ([1, "a" * 32, ["a"], 0], "thing.hash"),
        ([1, bytes(32), [], 0], "thing.names"),
        ([1, bytes(32), ["a", "b", "c"], 0], "thing.names"),
        ([1, bytes(32), ["abcd"], 0], "thing.names"),
        ([1, bytes(32), [b"a"], 0], "thing.names"),
        ([1, bytes(32), "a", 0], "thing.names"),
        ([1, bytes(32), ["a"]], "thing"),
        ([1, bytes(32), ["a"], 0, 0], "thing"),
        (None, "thing"),
        (b"", "thing"),
    ],
    ids=repr,
)
def test_a_schema_names_the_field_that_does_not_fit(value: Any, where: str) -> None:
    with pytest.raises(PeerError, match=f"^{where}: "):
        parse(encode(value), SCHEMA, max_bytes=100, what="thing")


@pytest.mark.parametrize(
    ("value", "schema"), [("c", Text(1, ("a", "b"))), (b"abc", Bytes(most=2)), (1, Optional(HASH))], ids=repr
)
def test_choices_lengths_and_options_are_checked(value: Any, schema: Schema) -> None:
    with pytest.raises(PeerError):
        check(value, schema, "thing")


def test_public_msgpack_vectors_give_one_accepted_encoding_a_value() -> None:
    suite = json.loads(public("msgpack", "kawanet.json").read_bytes())
    encodings = [
        bytes.fromhex(form.replace("-", "")) for group in suite.values() for case in group for form in case["msgpack"]
    ]
    assert len(encodings) == 233
    accepted = []
    for data in encodings:
        try:
            value = decode(data, max_bytes=1 << 20)
        except PeerError:
            continue
        assert encode(value) == data
        accepted.append(data)
    python = [
        data for data in encodings if msgpack.packb(msgpack.unpackb(data, strict_map_key=False, timestamp=0)) == data
    ]
    assert len(python) == 96
    assert set(accepted) <= set(python)
    # What Python's packer writes as well, and we refuse: maps, floats, booleans, negative or huge integers,
    # extensions and text beyond printable ASCII.
    assert len(accepted) == 28


_SHAPES: tuple[Schema, ...] = (
    Int(0, 9),
    Int(2),
    Bytes(4),
    Bytes(most=5),
    Text(3),
    Text(9, ("join", "role", "much too long")),
    Anything(),
    Optional(Int(0, 9)),
    Many(Optional(Bytes(2)), most=3, least=1),
    Array((("number", Int(0, 9)), ("things", Many(Anything(), most=2)))),
    Array((("kind", Text(9, ("join", "role"))), ("inner", Array((("key", Bytes(1)),))))),
    Tagged(1, {"join": Array((("a", Int()), ("kind", Text(9)))), "role": Many(Anything(), most=3)}),
)
_NEAR = st.recursive(
    st.none()
    | st.integers(-1, 12)
    | st.booleans()
    | st.binary(max_size=6)
    | st.sampled_from(["join", "role", "much too long", "abcd", "", "\x7f", "ü"])
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


def agree(value: Any, schema: Schema) -> None:
    """Fail unless the fast test lets a value through where the slow check does."""
    data = msgpack.packb(value, use_bin_type=True)
    try:
        expected = codec.decode(data, max_bytes=10_000, what="value")
        codec.check(expected, schema, "value")
    except PeerError as error:
        with pytest.raises(PeerError, match=re.escape(str(error))):
            codec.parse(data, schema, max_bytes=10_000, what="value")
    else:
        assert codec.parse(data, schema, max_bytes=10_000, what="value") == expected
        assert codec.fits(expected, schema)
        with pytest.raises(PeerError):
            codec.parse(data + b"\xc0", schema, max_bytes=10_000, what="value")
        with pytest.raises(PeerError):
            codec.parse(data, schema, max_bytes=len(data) - 1, what="value")


@settings(max_examples=500)
@given(_NEAR | values, st.sampled_from(_SHAPES))
def test_the_fast_test_lets_through_what_the_slow_check_does(value: Any, schema: Schema) -> None:
    agree(value, schema)


@given(_NEAR, st.sampled_from(["join", "role", "none"]), st.lists(_NEAR, max_size=2))
def test_a_tag_tells_which_schema_holds(first: Any, tag: str, rest: list[Any]) -> None:
    agree([first, tag, *rest], _SHAPES[-1])


@given(st.binary(max_size=600) | st.integers(250, 70_000).map(bytes), st.binary(max_size=300))
def test_pairs_are_packed_as_the_encoder_does(first: bytes, second: bytes) -> None:
    data = codec.encode([first, second])
    assert codec.pack_pair(first, second) == data
    fast = len(first) < 1 << 16 and len(second) < 1 << 8
    assert codec.split_pair(data, len(second) if fast else 255) == ((first, second) if fast else None)


@given(
    st.sampled_from([bytes(3), bytes(255), bytes(256), bytes(700)]),
    st.integers(0, 6),
    st.binary(max_size=3),
    st.sampled_from([b"\x92\xc5\x00\x03", b"\x92\xc4\x03", b"\x92\xc5\x00\xff", b"\x92", b"", b"\x91\xc4\x03"]),
)
def test_no_other_bytes_split_into_a_pair(first: bytes, place: int, new: bytes, head: bytes) -> None:
    good = codec.encode([first, bytes(64)])
    end = len(first) + 3 + (len(first) > 255)
    for data in (
        good[:place] + new + good[place + len(new) :],
        good[: end + place] + new + good[end + place + len(new) :],
        good + new,
        good[: -1 - place],
        head + bytes(3) + b"\xc4\x40" + bytes(64),
        head,
    ):
        pair = codec.split_pair(data, 64)
        assert pair is None or codec.encode(list(pair)) == data


def test_depth_counts_through_schemas() -> None:
    for depth, right in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False)):
        value: Any = []
        for _ in range(depth - 1):
            value = [value]
        data = msgpack.packb([value])
        if right:
            assert codec.parse(data, Many(Anything(), most=1), max_bytes=100, what="value") == [value]
        else:
            with pytest.raises(PeerError):
                codec.parse(data, Many(Anything(), most=1), max_bytes=100, what="value")
