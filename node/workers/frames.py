"""Frames between the daemon and its child processes: four big-endian length bytes, then msgpack.

This is internal to one machine: maps, floats and negative integers are allowed, and nothing here is hashed or
signed. A child may run code that judges attackers' text, so the daemon's side treats its frames as untrusted:
length and shape are checked before anything is believed.

1. A request is ``{"op": str, …arguments}``; an answer ``{"ok": {…}}`` or ``{"error": one line, "kind": "user" |
   "internal"}``.
2. One request is answered by exactly one frame, in order. After a timeout the two ends are out of step, and the child
   must be killed.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

from protocol.errors import LocalError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
"""Largest frame: four times the largest rollout submission, whose groups a replay request carries."""

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """``message`` as one frame. Raises ``LocalError`` where it cannot be encoded or is too large."""
    try:
        body: bytes = msgpack.packb(message, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalError(f"a worker message cannot be encoded: {error}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise LocalError(f"a worker message has {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return struct.pack(">I", len(body)) + body


def body_size(header: bytes) -> int:
    """The length that a frame's four header bytes announce. Raises ``LocalError`` where it is out of bounds."""
    if len(header) != HEADER_BYTES:
        raise LocalError("a worker frame ends within its header")
    size: int = struct.unpack(">I", header)[0]
    if size > MAX_FRAME_BYTES:
        raise LocalError(f"a worker frame announces {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return size


def unpack(body: bytes) -> Message:
    """The message in a frame's body. Raises ``LocalError`` unless it is a msgpack map with string keys."""
    try:
        message = msgpack.unpackb(body, raw=False, use_list=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise LocalError(f"a worker frame is not msgpack: {error}") from None
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise LocalError("a worker frame is not a map with string keys")
    return message


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


def read_frame(connection: socket.socket) -> Message | None:
    """The next message of a blocking socket, or None where the other end has closed it between two frames."""
    header = _receive_exactly(connection, HEADER_BYTES)
    if not header:
        return None
    size = body_size(header)
    body = _receive_exactly(connection, size)
    if len(body) != size:
        raise LocalError("a worker frame ends within its body")
    return unpack(body)


def write_frame(connection: socket.socket, message: Message) -> None:
    """Send ``message`` over a blocking socket."""
    connection.sendall(pack(message))
