"""The control socket: how ``farflung`` commands and the devnet talk to a running daemon.

A Unix socket in the data directory, for its owner only. One JSON object a line in (``node.api.control_requests``), one
a line out. An answer with ``error`` says in one line what was wrong with the request, or what failed: nothing that an
operation raises ends the socket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
import trio

from node.api import amend_requests, control_requests, recovery_requests, status, weight_requests
from node.api.control_requests import Answer, Handler, Panel, Request
from node.errors import UserError, innermost
from protocol.errors import Error

MAX_LINE: Final = 64 << 10
STOPPING: Final = {"stopping": True}


async def _leave(panel: Panel, request: control_requests.LeaveDomain) -> Answer:
    panel.own.leaving = True
    panel.own.announce()
    return {"leaving": True}


async def _pause_at(panel: Panel, request: control_requests.PauseAt) -> Answer:
    panel.own.pause_at_step = request.step
    return {"pause_at_step": request.step}


async def _stop(panel: Panel, request: control_requests.Stop) -> Answer:
    return STOPPING


HANDLERS: Final[dict[type[Request], Handler]] = {
    **status.HANDLERS,
    **weight_requests.HANDLERS,
    **amend_requests.HANDLERS,
    **recovery_requests.HANDLERS,
    control_requests.LeaveDomain: _leave,
    control_requests.PauseAt: _pause_at,
    control_requests.Stop: _stop,
}


class ControlSocket:
    """Serves one node by ``handlers``. ``open`` it once; then ``run`` it, again where it failed."""

    def __init__(self, panel: Panel, handlers: Mapping[type[Request], Handler] = HANDLERS) -> None:
        self._panel = panel
        self._handlers = handlers
        self._listener: trio.SocketListener | None = None
        kinds: Any = handlers.keys()
        self._decoder = msgspec.json.Decoder(_union(*kinds))

    async def open(self) -> None:
        """Put the socket in its place. Raises ``UserError`` where something is in the way, and ``OSError``."""
        directory = self._panel.node.directory
        try:
            directory.control_socket.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"{directory.control_socket}: cannot be replaced ({error.strerror})", "remove it by hand"
            ) from None
        listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        with directory.socket_address() as address:
            await listener.bind(address)
        os.chmod(directory.control_socket, 0o600)
        listener.listen(16)
        self._listener = trio.SocketListener(listener)

    async def run(self) -> None:
        """Serve until cancelled."""
        if self._listener is None:
            await self.open()
        assert self._listener is not None
        listener, self._listener = self._listener, None
        await trio.serve_listeners(self._handle, [listener])

    async def _handle(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._converse(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        buffer = b""
        async with stream:
            async for part in stream:
                buffer += part
                while b"\n" in buffer:
                    line, buffer = buffer.split(b"\n", 1)
                    answer = await self.answer(line)
                    await stream.send_all(json.dumps(answer).encode() + b"\n")
                    if answer == STOPPING:  # only now: it ends this conversation too
                        self._panel.stop()
                if len(buffer) > MAX_LINE:
                    return

    async def answer(self, line: bytes) -> Answer:
        """What is answered to one line; ``error`` says what was wrong with it, or what failed."""
        try:
            request = self._decoder.decode(line)
            return await self._handlers[type(request)](self._panel, request)
        except msgspec.ValidationError as error:
            return {"error": f"unknown request: {error}"}
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {"error": "the request is not JSON"}
        except Exception as group:
            cause = innermost(group)
            if not isinstance(cause, Error | OSError | trio.TooSlowError):
                self._panel.node.logger.error("control socket: a bug", exc_info=cause)
            return {"error": " ".join(str(cause).split()) or type(cause).__name__}


def _union(*kinds: type[Request]) -> Any:
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return union
