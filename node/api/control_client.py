"""Asking a running daemon over its control socket.

1. A request is one line of JSON, ``{"op": …}``; the answer is one line: the fields of the operation, or
   ``{"error": "…"}``.
2. Every request has a deadline. A daemon that is not there, does not answer in time or answers nonsense is
   ``Unavailable``: what to make of that is the caller's business.
"""

from __future__ import annotations

import json
from typing import Any, Final

import trio

from node.store.data_directory import DataDirectory
from protocol.errors import Error

MAX_ANSWER_BYTES: Final = 16 << 20
"""Longest answer line: a status carries at most some hundred steps and nodes."""


class Unavailable(Error):
    """The daemon did not answer."""


class Declined(Unavailable):
    """The daemon answered that it does not do it; the text says why."""


async def request(directory: DataDirectory, op: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
    """One operation on the daemon of ``directory``, within ``timeout`` seconds. Raises ``Unavailable``."""
    try:
        with trio.fail_after(timeout), directory.socket_address() as address:
            async with await trio.open_unix_socket(address) as stream:
                await stream.send_all(json.dumps({"op": op, **arguments}).encode() + b"\n")
                answer = await _answer(stream)
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unavailable(f"{directory.path}: no daemon answers ({error})") from None
    except trio.TooSlowError:
        raise Unavailable(f"{directory.path}: the daemon did not answer within {timeout:g} s") from None
    if "error" in answer:
        raise Declined(f"{directory.path}: {answer['error']}")
    return answer


async def _answer(stream: trio.SocketStream) -> dict[str, Any]:
    received = bytearray()
    while not received.endswith(b"\n"):
        part = await stream.receive_some()
        if not part or len(received) > MAX_ANSWER_BYTES:
            raise trio.BrokenResourceError("the answer is no line")
        received += part
    try:
        answer = json.loads(received)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise trio.BrokenResourceError("the answer is no JSON object")
    return answer
