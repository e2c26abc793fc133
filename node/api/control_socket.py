"""The control socket: how ``farflung`` commands and the devnet talk to a running daemon.

A Unix socket in the data directory, for its owner only. One JSON object a line in, one a line out:
``{"op": "status"}``, ``{"op": "peers"}``, ``{"op": "roles"}``, ``{"op": "credits"}`` (see ``node.api.status``);
those of ``node.api.amend_requests`` and ``node.api.weight_requests``; ``{"op": "pause_at", "step": N}`` (0: go on),
``{"op": "leave"}`` (a status tells when it has left), ``{"op": "stop"}``; and those of ``node.api.recovery_requests``.
An answer with ``error`` says in one line what was wrong with the request.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Final

import trio

from node.api import amend_requests, recovery_requests, weight_requests
from node.api.node_rows import credits
from node.api.status import RECENT_STEPS, peers, roles, status
from node.context import Node
from node.errors import UserError

__all__ = ["RECENT_STEPS", "STOPPING", "run", "status"]

MAX_LINE = 64 << 10
STOPPING: Final = {"stopping": True}


async def run(node: Node, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """Serve until cancelled."""
    try:
        node.directory.control_socket.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{node.directory.control_socket}: cannot be replaced ({error.strerror})", "remove it by hand"
        ) from None
    listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    with node.directory.socket_address() as address:
        await listener.bind(address)
    os.chmod(node.directory.control_socket, 0o600)
    listener.listen(16)

    async def handle(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await _converse(node, stream)

    task_status.started()
    await trio.serve_listeners(handle, [trio.SocketListener(listener)])


async def _converse(node: Node, stream: trio.SocketStream) -> None:
    buffer = b""
    async with stream:
        async for part in stream:
            buffer += part
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                answer = await _respond(node, line)
                await stream.send_all(json.dumps(answer).encode() + b"\n")
                if answer == STOPPING:  # only now: it ends this conversation too
                    node.stop()
            if len(buffer) > MAX_LINE:
                return


async def _respond(node: Node, line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        request = json.loads(line)
        if isinstance(request, dict) and request.get("op") in amend_requests.OPS:
            return await amend_requests.answer(node, request)
        if isinstance(request, dict) and request.get("op") in weight_requests.OPS:
            return await weight_requests.answer(node, request)
    return await recovery_requests.answer(node, line) or _answer(node, line)


def _answer(node: Node, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        match request:
            case {"op": "status"}:
                return status(node)
            case {"op": "peers"}:
                return peers(node)
            case {"op": "roles"}:
                return roles(node)
            case {"op": "credits"}:
                return credits(node.log.ledger)
            case {"op": "leave"}:
                node.leaving = True
                node.presences.announce_soon()
                return {"leaving": True}
            case {"op": "pause_at", "step": int(step)} if step >= 0 and not isinstance(step, bool):
                node.pause_at_step = step
                return {"pause_at_step": step}
            case {"op": "stop"}:
                return STOPPING
    except (ValueError, RecursionError):
        return {"error": "the request is not JSON"}
    return {"error": "unknown request"}
