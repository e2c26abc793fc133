"""The bulk child: serves and fetches bulk objects beside the daemon, so that its loop never waits for weights.

``python -m node.weights.bulk.bulk_child SOCKET``. Frames are those of ``node.workers.frames``, each a map with ``op``:

1. The first from the daemon is ``configure`` (see ``Setup``), answered by ``ready``; its listening sockets are
   inherited, so that a port outlives a child. Then any of ``operations``, which do not wait.
2. ``call`` in a frame asks for an acknowledgement: ``{"op": "done-call", "call": …}`` once the operation has run.
3. It imports neither libp2p nor trio nor a task's libraries. Threads do the work: they sleep in the kernel.
4. It dies with the daemon, in the midst of anything: what it wrote is marked as verified only once it is.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.errors import Unreachable
from node.store.version_store import VersionStore
from node.weights.bulk.bulk_address import parse
from node.weights.bulk.chunk_server import News, Server
from node.weights.bulk.holder_connection import CHUNK_SECONDS, Connection
from node.weights.bulk.pinned_tls import Doorkeeper, client_context
from node.weights.bulk.serving_limits import Limits
from node.weights.bulk.transfer_table import Transfers
from node.workers import frames
from node.workers.child_loop import die_with_parent, end_when_closed

log = logging.getLogger(__name__)

NICENESS: Final = 12
"""Well behind the daemon, whose answers must not wait while every processor receives, and a little behind the children
that compute."""
STACK: Final = 512 << 10
SWITCH: Final = 0.001
"""Seconds after which a thread that computes lets another go on; all of them are about to wait again."""

Operation = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Setup:
    """What the daemon says at start.

    ``sockets`` are the descriptors of listening sockets, ``own`` is this node's certificate and key (PEM) in a private
    domain, ``admitted`` the certificates (DER) of its peers by node id.
    """

    node: bytes
    domain: bytes
    secret: bytes
    versions: str
    sockets: list[int]
    limits: dict[str, Any]
    own: str = ""
    admitted: dict[str, bytes] | None = None


class Daemon:
    """The way back: frames to the daemon, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, op: str, **values: Any) -> None:
        """Send one frame. Where the daemon is gone, so is this process, at once."""
        frame = frames.encode({"op": op, **values})
        with self._lock, suppress(OSError):
            self._connection.sendall(frame)


class Child:
    """What the parts of the child share.

    ``store`` opens bulk objects, ``news.tell()`` wakes those who wait for chunks, ``daemon.say`` talks back.
    """

    def __init__(self, setup: Setup, daemon: Daemon) -> None:
        self.setup = setup
        self.daemon = daemon
        self.news = News()
        self.store = VersionStore(Path(setup.versions), owner=False)
        self.doorkeeper: Doorkeeper | None = None
        if setup.own:
            admitted = {certificate: bytes.fromhex(node) for node, certificate in (setup.admitted or {}).items()}
            self.doorkeeper = Doorkeeper(setup.own, admitted)
        self.server = Server(
            domain=setup.domain,
            secret=setup.secret,
            find=self.store.open,
            limits=Limits(**setup.limits),
            secure=None if self.doorkeeper is None else (self.doorkeeper.context, self.doorkeeper.peer_of),
            news=self.news,
        )
        self._transfers = Transfers(self)
        self.server.coming = self._transfers.coming

    def connection(self, address: str, node: bytes, token: str, *, chunk_timeout: float = CHUNK_SECONDS) -> Connection:
        """A connection to a holder at a multiaddress; nothing is dialled yet.

        Raises ``PeerError`` for an address that is none, ``Unreachable`` where a private domain's node cannot be
        reached securely.
        """
        place = parse(address)
        context: ssl.SSLContext | None = None
        if self.doorkeeper is not None:
            certificate = self.doorkeeper.certificate_of(node)
            if not place.secure or certificate is None:
                raise Unreachable("weights of a private domain travel encrypted only")
            try:
                context = client_context(self.setup.own, certificate)
            except ssl.SSLError as error:
                raise Unreachable(f"its certificate cannot be used ({error.reason})") from None
        elif place.secure:
            context = ssl.create_default_context()  # a proxy's certificate, of a name that others know
        path = place.base_path(self.setup.domain)
        return Connection(place, tls=context, peer=node, base_path=path, token=token, chunk_timeout=chunk_timeout)

    def operations(self) -> dict[str, Operation]:
        """What the daemon may ask for."""
        own: dict[str, Operation] = {"admit": self._admit, "forget": self._forget, "stir": self.news.tell}
        return own | self._transfers.operations()

    def _admit(self, node: bytes, certificate: bytes) -> None:
        if self.doorkeeper is not None:
            self.doorkeeper.admit(node, certificate)

    def _forget(self, digest: bytes) -> None:
        """An object was deleted: let go of its files, which take room on the disk for as long as they are open."""
        self.store.open(digest)


def run(operations: Mapping[str, Operation], connection: socket.socket, daemon: Daemon) -> None:
    """Run what the daemon asks for until it is gone."""
    while (body := frames.read_frame(connection)) is not None:
        message = frames.decode(body, dict[str, Any])
        name, call = message.pop("op", None), message.pop("call", None)
        operation = operations.get(name) if isinstance(name, str) else None
        try:
            if operation is None:
                raise ValueError(f"unknown operation {name!r}")
            operation(**message)
        except Exception:
            log.exception("bulk: %s failed", name)
        if call is not None:
            daemon.say("done-call", call=call)


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
    if body is None:
        return
    first = frames.decode(body, dict[str, Any])
    first.pop("op")
    daemon = Daemon(connection)
    child = Child(Setup(**first), daemon)
    child.server.listen([socket.socket(fileno=number) for number in child.setup.sockets])
    gc.freeze()  # what is here now stays, and need not be looked through again and again
    daemon.say("ready")
    run(child.operations(), connection, daemon)


if __name__ == "__main__":
    main(sys.argv[1:])
