"""The bulk child: serves and fetches bulk objects beside the daemon, so that its loop never waits for weights.

``python -m node.weights.bulk.bulk_child SOCKET``; what is said over the socket: ``node.weights.bulk.bulk_messages``.

1. Its listening sockets are inherited, so that a port outlives a child.
2. It imports neither libp2p nor trio nor a task's libraries. Threads do the work: they sleep in the kernel.
3. It dies with the daemon, in the midst of anything: what it wrote is marked as verified only once it is.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import ssl
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from node.errors import Unreachable
from node.store.version_store import VersionStore
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk.bulk_address import parse
from node.weights.bulk.chunk_server import ChunkNews, ChunkServer
from node.weights.bulk.holder_connection import HolderConnection
from node.weights.bulk.pinned_tls import Doorkeeper, client_context
from node.weights.bulk.transfer import Transfers
from node.weights.bulk.transfer_state import Means
from node.workers import frames
from node.workers.child_loop import die_with_parent, end_when_closed

log = logging.getLogger(__name__)

NICENESS: Final = 12
"""Well behind the daemon, whose answers must not wait while every processor receives, and a little behind the children
that compute."""
STACK: Final = 512 << 10
SWITCH: Final = 0.001
"""Seconds after which a thread that computes lets another go on; all of them are about to wait again."""


class Child:
    """What the child does for the daemon at the other end of ``connection``."""

    def __init__(self, setup: messages.Configure, connection: socket.socket) -> None:
        self._setup = setup
        self._daemon = connection
        self._lock = threading.Lock()
        self._news = ChunkNews()
        self._store = VersionStore(Path(setup.versions), owner=False)
        self._doorkeeper: Doorkeeper | None = None
        if setup.certificate:
            admitted = {certificate: node for node, certificate in setup.admitted}
            self._doorkeeper = Doorkeeper(setup.certificate, admitted)
        self._transfers = Transfers(self._store, Means(self.connect, self.send, self._news.notify))
        self._server = ChunkServer(
            domain=setup.domain,
            secret=setup.secret,
            find=self._store.open,
            limits=setup.limits,
            doorkeeper=self._doorkeeper,
            news=self._news,
            coming=self._transfers.coming,
        )

    def run(self) -> None:
        """Serve, and do what the daemon asks for until it is gone."""
        self._server.listen([socket.socket(fileno=number) for number in self._setup.sockets])
        gc.freeze()  # what is here now stays, and need not be looked through again and again
        self.send(messages.ChildReady())
        while (body := frames.read_frame(self._daemon)) is not None:
            message = frames.decode(body, messages.ToChild)
            try:
                self._receive(message)
            except Exception:
                log.exception("bulk: %s failed", type(message).__name__)

    def send(self, message: messages.FromChild) -> None:
        """Send a message to the daemon, from any thread. Where it is gone, so is this process, at once."""
        frame = frames.encode(message)
        with self._lock, suppress(OSError):
            self._daemon.sendall(frame)

    def connect(self, address: str, node: bytes, token: str) -> HolderConnection:
        """A connection to a holder at a multiaddress; nothing is dialled yet.

        Raises ``PeerError`` for an address that is none, ``Unreachable`` where a private domain's node cannot be
        reached securely.
        """
        place = parse(address)
        context: ssl.SSLContext | None = None
        if self._doorkeeper is not None:
            certificate = self._doorkeeper.certificate_of(node)
            if not place.secure or certificate is None:
                raise Unreachable("weights of a private domain travel encrypted only")
            try:
                context = client_context(self._setup.certificate, certificate)
            except ssl.SSLError as error:
                raise Unreachable(f"its certificate cannot be used ({error.reason})") from None
        elif place.secure:
            context = ssl.create_default_context()  # a proxy's certificate, of a name that others know
        path = place.base_path(self._setup.domain)
        return HolderConnection(place, tls=context, peer=node, base_path=path, token=token)

    def _receive(self, message: messages.ToChild) -> None:
        match message:
            case messages.Synchronize(call=call):
                self.send(messages.Synchronized(call))
            case messages.ChunksCame():
                self._news.notify()
            case messages.ForgetObject(digest=digest):
                self._store.open(digest)  # which lets go of what is not there any more
            case messages.AdmitNode(node=node, certificate=certificate):
                if self._doorkeeper is not None:
                    self._doorkeeper.admit(node, certificate)
            case messages.Configure():
                raise ValueError("it is configured already")
            case _:
                self._transfers.receive(message)


def main(arguments: list[str]) -> None:
    """The whole life of the child."""
    descriptor = int(arguments[0])
    die_with_parent()
    os.nice(NICENESS)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    threading.stack_size(STACK)
    sys.setswitchinterval(SWITCH)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=end_when_closed, args=(descriptor,), daemon=True, name="end-when-closed").start()
    body = frames.read_frame(connection)
    if body is not None:
        Child(frames.decode(body, messages.Configure), connection).run()


if __name__ == "__main__":
    main(sys.argv[1:])
