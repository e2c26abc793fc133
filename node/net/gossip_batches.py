"""Messages of others that can wait a little travel together: one RPC a peer instead of one for each message.

Whatever a topic's messages are worth, a frame costs the same (half a millisecond at both ends together, ten times
what a small message in it costs), so the presences of a quiet network are the better part of its work.

1. A message waits at most ``delay`` seconds here, so it takes at most that long for each hop. Own messages never wait.
2. A peer that sent a message in the meantime has it and is not sent it.
3. At most ``most`` messages wait; at the last of them all leave at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import trio

MAX_WAITING: Final = 128
"""Messages that wait. They fit one RPC in number; libp2p splits what is too large."""


class Forwards:
    """The messages of one topic that wait to be forwarded. ``send(peer, messages)`` must not block."""

    def __init__(self, delay: float, send: Callable[[Any, list[Any]], None], most: int = MAX_WAITING) -> None:
        self._delay = delay
        self._send = send
        self._most = most
        self._waiting: dict[bytes, tuple[Any, set[Any]]] = {}
        self._some = trio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: bytes, message: Any, peers: Iterable[Any]) -> None:
        """Forward ``message``, whose id is ``key``, to ``peers`` before long."""
        self._waiting[key] = (message, set(peers))
        self._some.set()
        if len(self._waiting) >= self._most:
            self.flush()

    def has(self, key: bytes, peer: Any) -> None:
        """``peer`` has the message ``key``."""
        if (waiting := self._waiting.get(key)) is not None:
            waiting[1].discard(peer)

    def flush(self) -> None:
        """Send what waits, in the order in which it came."""
        together: dict[Any, list[Any]] = {}
        for message, peers in self._waiting.values():
            for peer in peers:
                together.setdefault(peer, []).append(message)
        self._waiting.clear()
        self._some = trio.Event()
        for peer, messages in together.items():
            self._send(peer, messages)

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._some.wait()
            await trio.sleep(self._delay)
            self.flush()
