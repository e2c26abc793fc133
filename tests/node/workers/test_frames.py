from __future__ import annotations

import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.workers import frames
from protocol.errors import LocalError


class Put(msgspec.Struct, tag_field="op", tag="put"):
    key: bytes
    numbers: list[int] = []
    rate: float = 0.0
    note: str | None = None


class Forget(msgspec.Struct, tag_field="op", tag="forget"):
    keys: list[bytes]


Either = Put | Forget


@given(
    st.builds(
        Put,
        key=st.binary(),
        numbers=st.lists(st.integers(-(2**63), 2**63)),
        rate=st.floats(allow_nan=False),
        note=st.none() | st.text(),
    )
    | st.builds(Forget, keys=st.lists(st.binary()))
)
def test_what_is_encoded_decodes(message: Put | Forget) -> None:
    frame = frames.encode(message)
    assert frames.body_size(frame[:4]) == len(frame) - 4
    assert frames.decode(frame[4:], Either) == message
    assert frames.decode(frame[4:], type(message)) == message


@given(st.binary(max_size=40))
def test_rubbish_raises_local_error_only(body: bytes) -> None:
    try:
        message = frames.decode(body, Either)
    except LocalError:
        return
    assert isinstance(message, Put | Forget)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"op": "put"},
        {"op": "put", "key": 1},
        {"op": "put", "key": b"", "numbers": ["1"]},
        {"op": "take", "key": b""},
        {"op": ["put"]},
        [1],
        None,
    ],
)
def test_a_wrong_shape_raises_local_error(value: object) -> None:
    with pytest.raises(LocalError, match="no known form"):
        frames.decode(frames.encode(value)[4:], Either)


def test_bounds() -> None:
    with pytest.raises(LocalError, match="announces 4294967295 bytes"):
        frames.body_size(b"\xff" * 4)
    with pytest.raises(LocalError, match="within its header"):
        frames.body_size(b"\0\0")
    for value in (object(), "\ud800", 1 << 70):
        with pytest.raises(LocalError, match="cannot be encoded"):
            frames.encode(value)
    with pytest.raises(LocalError, match="at most 10 are allowed"):
        frames.encode(Put(b"0123456789"), limit=10)
    with pytest.raises(LocalError, match="no known form"):
        frames.decode(b"\x91" * 100_000, Either)


def test_frames_over_a_socket_pair() -> None:
    left, right = socket.socketpair()
    with left, right:
        message = Put(b"\0" * 1000)
        left.sendall(frames.encode(message))
        body = frames.read_frame(right)
        assert body is not None
        assert frames.decode(body, Put) == message
        left.sendall(frames.encode(message)[:-1])
        left.close()
        with pytest.raises(LocalError, match="ends within its body"):
            frames.read_frame(right)
        assert frames.read_frame(right) is None
