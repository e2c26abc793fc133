"""The control socket: how ``farflung`` commands and the devnet talk to a running daemon.

A Unix socket in the data directory, for its owner only. One JSON object a line in (``node.api.control_requests``), one
a line out. An answer with ``error`` says in one line what was wrong with the request, or what failed: nothing that an
operation raises ends the socket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Union

import msgspec
import trio

from node.api import amend_requests, invite_requests, recovery_requests, status, weight_requests
from node.api.control_requests import Answer, Panel, Request
from node.errors import UserError, innermost
from protocol.errors import Error

MAX_LINE: Final = 64 << 10
STOPPING: Final = {"stopping": True}


class LeaveDomain(Request, tag="leave"):
    """End the node's part in its domain; a status tells when it has left."""

    async def answer(self, panel: Panel) -> Answer:
        panel.own.leaving = True
        panel.own.announce()
        return {"leaving": True}


class PauseAt(Request, tag="pause_at"):
    """End work at this step; 0: go on."""

    step: Annotated[int, msgspec.Meta(ge=0)]

    async def answer(self, panel: Panel) -> Answer:
        panel.own.pause_at_step = self.step
        return {"pause_at_step": self.step}


class Stop(Request, tag="stop"):
    """End the daemon."""

    async def answer(self, panel: Panel) -> Answer:
        return STOPPING


REQUESTS: Final[Sequence[type[Request]]] = (
    *(LeaveDomain, PauseAt, Stop, status.Status, status.Peers, status.Roles, status.Credits),
    *(weight_requests.ListWeights, weight_requests.CleanWeights, weight_requests.PullWeights),
    invite_requests.PutInvitation,
    *(amend_requests.ShowAmendments, amend_requests.SignAmendment, amend_requests.SubmitAmendment),
    *(recovery_requests.ShowRecovery, recovery_requests.CloseFeed, recovery_requests.RebindFeed),
)


class ControlSocket:
    """Serves one node's answers to ``requests``. ``open`` it once; then ``run`` it, again where it failed."""

    def __init__(self, panel: Panel, requests: Sequence[type[Request]] = REQUESTS) -> None:
        self._panel = panel
        self._listener: trio.SocketListener | None = None
        kinds: Any = Union[tuple(requests)]  # noqa: UP007  which they are is known only now
        self._decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(kinds)

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
        await trio.serve_listeners(self._converse, [listener])

    async def _converse(self, stream: trio.SocketStream) -> None:
        buffer = b""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
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
            return await self._decoder.decode(line).answer(self._panel)
        except msgspec.ValidationError as error:
            return {"error": f"unknown request: {error}"}
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {"error": "the request is not JSON"}
        except Exception as group:
            cause = innermost(group)
            if not isinstance(cause, Error | OSError | trio.TooSlowError):
                self._panel.node.logger.error("control socket: a bug", exc_info=cause)
            return {"error": " ".join(str(cause).split()) or type(cause).__name__}
