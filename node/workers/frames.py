"""Frames between the daemon and its child processes: four big-endian length bytes, then a struct in msgpack.

This is internal to one machine: maps, floats and negative integers are allowed, and nothing here is hashed or
signed. Messages are msgspec structs, defined in modules that both ends import. A child may run code that judges
attackers' text, so the daemon's side treats its frames as untrusted: length and shape are checked before anything is
believed.

1. A child that answers is sent a ``ChildRequest`` and sends back a ``CallAnswered`` or a ``CallFailed``: one frame for
   each, in order. After a timeout the two ends are out of step, and the child must be killed.
2. The bulk child (``node.weights.bulk``) has a stream of messages both ways instead.
"""

from __future__ import annotations

import functools
import socket
import struct
from typing import Any, Generic, Literal, TypeVar, get_args, overload

import msgspec

from protocol.errors import LocalError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""Largest frame: four times the largest rollout submission, whose groups a replay request carries."""

Message = TypeVar("Message")
Answer = TypeVar("Answer")


class ChildRequest(msgspec.Struct, Generic[Answer], frozen=True, tag_field="op"):
    """What a child is asked for; a subclass ``class Encode(ChildRequest[list[bytes]], tag="encode")`` names the type of
    the answer and the operation."""


class CallAnswered(msgspec.Struct, Generic[Answer], frozen=True, tag_field="is", tag="answer"):
    """The child did what it was asked for."""

    answer: Answer


class CallFailed(msgspec.Struct, frozen=True, tag_field="is", tag="error"):
    """It did not: ``error`` is one line, ``kind`` as of ``node.workers.child_process.WorkerError``."""

    error: str
    kind: Literal["user", "internal"]


def operation_of(kind: type[ChildRequest[Any]]) -> str:
    """What the operation that a request asks for is called."""
    return str(kind.__struct_config__.tag)


def answer_type(kind: type[ChildRequest[Any]]) -> Any:
    """The type of the answer to a request."""
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    return get_args(base)[0]


def encode(message: object, limit: int = MAX_FRAME_BYTES) -> bytes:
    """``message`` as one frame. Raises ``LocalError`` where it cannot be encoded or is larger than ``limit`` bytes."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalError(f"a worker message cannot be encoded: {error}") from None
    if len(body) > limit:
        raise LocalError(f"a worker message has {len(body)} bytes, at most {limit} are allowed")
    return struct.pack(">I", len(body)) + body


def body_size(header: bytes) -> int:
    """The length that a frame's four header bytes announce. Raises ``LocalError`` where it is out of bounds."""
    if len(header) != HEADER_BYTES:
        raise LocalError("a worker frame ends within its header")
    size: int = struct.unpack(">I", header)[0]
    if size > MAX_FRAME_BYTES:
        raise LocalError(f"a worker frame announces {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return size


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@overload
def decode(body: bytes, kind: type[Message]) -> Message: ...


@overload
def decode(body: bytes, kind: Any) -> Any: ...


def decode(body: bytes, kind: Any) -> Any:
    """The message in a frame's body, which must be of ``kind``: a struct, or a union of tagged ones.

    Raises ``LocalError`` for anything else.
    """
    try:
        return _decoder(kind).decode(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise LocalError(f"a worker frame has no known form: {error}") from None


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    filled = 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            break
        filled += count
    return bytes(view[:filled])


def read_frame(connection: socket.socket) -> bytes | None:
    """The next frame's body from a blocking socket, or None where the other end has closed it between two frames."""
    header = _receive_exactly(connection, HEADER_BYTES)
    if not header:
        return None
    size = body_size(header)
    body = _receive_exactly(connection, size)
    if len(body) != size:
        raise LocalError("a worker frame ends within its body")
    return body
