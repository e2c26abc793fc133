from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.workers import frames
from protocol.errors import LocalError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_what_is_packed_unpacks(message: dict[str, Any]) -> None:
    frame = frames.pack(message)
    assert frames.body_size(frame[:4]) == len(frame) - 4
    assert frames.unpack(frame[4:]) == message


@given(st.binary(max_size=40))
def test_rubbish_raises_local_error_only(body: bytes) -> None:
    try:
        message = frames.unpack(body)
    except LocalError:
        return
    assert all(isinstance(key, str) for key in message)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalError, match="announces 4294967295 bytes"):
        frames.body_size(b"\xff" * 4)
    with pytest.raises(LocalError, match="within its header"):
        frames.body_size(b"\0\0")
    with pytest.raises(LocalError, match="cannot be encoded"):
        frames.pack({"value": object()})
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(LocalError, match="at most 10 are allowed"):
        frames.pack({"value": b"0123456789"})


def test_frames_over_a_socket_pair() -> None:
    left, right = socket.socketpair()
    with left, right:
        frames.write_frame(left, {"op": "x", "data": b"\0" * 1000})
        assert frames.read_frame(right) == {"op": "x", "data": b"\0" * 1000}
        left.sendall(frames.pack({"a": 1})[:-1])
        left.close()
        with pytest.raises(LocalError, match="ends within its body"):
            frames.read_frame(right)
        assert frames.read_frame(right) is None
