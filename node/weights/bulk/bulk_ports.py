"""The ports of the data plane. They are the daemon's, and children inherit them: a port is the node's for its whole
life, whatever becomes of a child, and what others know of it stays right.

A port that is taken and was chosen by nobody is replaced by a free one. One that the operator named is tried again and
again, with a warning, and weights reach others over libp2p alone meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

from node.config import Config
from node.health.warnings import Health
from node.net import address_text

TOPIC: Final = "bulk port"
"""The health warning's."""
PORT_STEP: Final = 10000
BACKLOG: Final = 256


class BulkPorts:
    """The listening sockets of one node's data plane. ``secure``: what is served there is encrypted."""

    def __init__(self, config: Config, health: Health, *, secure: bool) -> None:
        self._config = config
        self._health = health
        self._scheme = "https" if secure else "http"
        self._listeners: list[socket.socket] = []
        self.lacking = False
        """Whether a port that is wanted cannot be had."""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Hold the ports while the block runs. Takes no time; what cannot be had is a warning."""
        self.try_open()
        try:
            yield
        finally:
            self._close()

    def descriptors(self) -> list[int]:
        """The sockets' descriptors, for a child to inherit."""
        return [listener.fileno() for listener in self._listeners]

    def addresses(self) -> list[str]:
        """The multiaddresses at which others would dial the ports, at most four. A wildcard is the outbound address,
        and loopback."""
        found = []
        for listener in self._listeners:
            host, port = listener.getsockname()[:2]
            kind = "ip6" if ":" in host else "ip4"
            hosts = [host]
            if host in ("0.0.0.0", "::"):  # noqa: S104  compared with
                outbound = address_text.outbound(kind)
                hosts = [*([] if outbound is None else [outbound]), "::1" if kind == "ip6" else "127.0.0.1"]
            found += [f"/{kind}/{one}/tcp/{port}/{self._scheme}" for one in hosts]
        return list(dict.fromkeys(found))[:4]

    def try_open(self) -> bool:
        """Open them, all or none; whether they are."""
        named = self._config.bulk.listen
        try:
            for text in named or self._config.listen[:1]:
                kind, host, port = address_text.split(text)
                self._listeners.append((_bind if named else _bind_near)(kind, host, port))
        except OSError as error:
            self._close()
            self.lacking = True
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            self._health.warn(
                TOPIC,
                f"weights: port {port} on {host} {what}: stop the program that holds it, or name another in "
                "bulk.listen; until then weights travel over libp2p, slowly",
            )
        else:
            self.lacking = False
            self._health.clear(TOPIC)
        return not self.lacking

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []


def _bind(kind: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _bind_near(kind: str, host: str, port: int) -> socket.socket:
    """A port that follows from the network's, or any where that cannot be had: nobody chose it."""
    wanted = port + PORT_STEP if 0 < port < 65536 - PORT_STEP else 0
    try:
        return _bind(kind, host, wanted)
    except OSError:
        return _bind(kind, host, 0)
