"""The daemon's side of the bulk child: it holds the ports, keeps a child running, and talks to it.

1. The listening sockets are the daemon's, and children inherit them: a port is the node's for its whole life, whatever
   becomes of a child, and what others know of it stays right.
2. A child that dies is started again, later each time; its death costs the transfers under way. Every start and end is
   told to those who registered with ``on_change``. While it is down nothing is announced.
3. A port that is taken and was chosen by nobody is replaced by a free one. One that the operator named is tried again
   every ``BUSY_PAUSE`` seconds, with a warning, and weights travel over libp2p alone meanwhile.
4. A child speaks with strangers: what it says is checked, and one that says what has no form is ended.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

import trio

from node.context import Node
from node.net import listening
from node.peers.own_state import OwnState
from node.weights.bulk.serving_limits import Limits
from node.workers import frames
from node.workers.child_process import Process, WorkerError, spawn
from node.workers.frames import decode
from protocol.errors import LocalError

TOPIC: Final = "bulk"
"""The health warning's."""
PORT_STEP: Final = 10000
BACKLOG: Final = 256
START_SECONDS: Final = 20.0
FIRST_PAUSE: Final = 0.5
MAX_PAUSE: Final = 30.0
STEADY: Final = 60.0
"""Seconds after which a child that dies is started again as if for the first time."""
BUSY_PAUSE: Final = 30.0
CALL_SECONDS: Final = 5.0
MAX_QUEUE: Final = 4096
"""Frames that wait for a child to take them; one that lets more pile up is ended."""
MAX_CERTIFICATES: Final = 1024
MEGABIT: Final = 125_000

Handler = Callable[..., None]


class Bulk:
    """The data plane of one node, as its daemon sees it."""

    def __init__(self, node: Node, own: OwnState) -> None:
        self._node = node
        self._own_state = own
        self.secret = secrets.token_bytes(32)
        self.own = ""
        """This node's certificate and key (PEM); empty in a public domain."""
        self.certificates: dict[bytes, bytes] = {}
        """Certificates (DER) of other nodes of a private domain, by node id, oldest first."""
        self.up = False
        """Whether a child runs and takes messages."""
        self.pid = 0
        self.starts = 0
        self._listeners: list[socket.socket] = []
        self._handlers: dict[str, Handler] = {"ready": self._ready, "done-call": self._acknowledged}
        self._changes: list[Callable[[bool], None]] = []
        self._queue: trio.MemorySendChannel[bytes] | None = None
        self._calls: dict[int, trio.Event] = {}
        self._next_call = 0
        self._is_ready = trio.Event()

    # --- where it is -----------------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether weights travel encrypted, and only between nodes that joined."""
        return bool(self._node.domain.private)

    @property
    def addresses(self) -> list[str]:
        """The multiaddresses to announce, at most four; none while nothing is served."""
        if not self.up:
            return []
        config = self._node.config.bulk
        return list(config.announce) or self.listening

    @property
    def listening(self) -> list[str]:
        """Where the ports are, as others would dial them. A wildcard is the outbound address, and loopback."""
        scheme = "https" if self.private else "http"
        found = []
        for listener in self._listeners:
            host, port = listener.getsockname()[:2]
            kind = "ip6" if ":" in host else "ip4"
            hosts = [host]
            if host in ("0.0.0.0", "::"):  # noqa: S104  compared with
                outbound = listening.outbound(kind)
                hosts = [*([] if outbound is None else [outbound]), "::1" if kind == "ip6" else "127.0.0.1"]
            found += [f"/{kind}/{one}/tcp/{port}/{scheme}" for one in hosts]
        return list(dict.fromkeys(found))[:4]

    # --- talking ---------------------------------------------------------------------------------------------------

    def hear(self, op: str, handler: Handler) -> None:
        """Call ``handler(**values)`` for each message ``op`` of a child. It must not block."""
        self._handlers[op] = handler

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(up)`` when a child has started, knowing nothing yet, and when it is gone."""
        self._changes.append(callback)

    def tell(self, op: str, **values: Any) -> bool:
        """Send a message to the child, without waiting; False, and nothing is sent, where none is up."""
        if self._queue is None:
            return False
        try:
            self._queue.send_nowait(frames.encode({"op": op, **values}))
        except trio.WouldBlock:
            self._queue.close()
            self._queue = None
            return False
        return True

    async def call(self, op: str, **values: Any) -> bool:
        """The same, and wait until the child has done it; False where it did not within ``CALL_SECONDS``."""
        self._next_call += 1
        number, done = self._next_call, trio.Event()
        self._calls[number] = done
        try:
            if not self.tell(op, call=number, **values):
                return False
            with trio.move_on_after(CALL_SECONDS):
                await done.wait()
            return done.is_set() and self.up
        finally:
            del self._calls[number]

    async def admit(self, node: bytes, certificate: bytes) -> bool:
        """Know ``node`` by this certificate (DER), in both directions; whether a child has heard of it."""
        if self.certificates.get(node) == certificate:
            await trio.lowlevel.checkpoint()
            return self.up
        self.certificates.pop(node, None)
        self.certificates[node] = certificate
        while len(self.certificates) > MAX_CERTIFICATES:
            del self.certificates[next(iter(self.certificates))]
        return await self.call("admit", node=node, certificate=certificate)

    # --- the child's life ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Hold the ports while the block runs. Takes no time; what cannot be had is a warning."""
        self._open_ports()
        try:
            yield
        finally:
            self._close_ports()

    async def run(self) -> None:
        """Keep a child running, for ever."""
        pause = FIRST_PAUSE
        while True:
            while not self._listeners:
                await trio.sleep(BUSY_PAUSE)
                self._open_ports()
            started = trio.current_time()
            why = await self._live()
            if trio.current_time() - started > STEADY:
                pause = FIRST_PAUSE
            self._node.health.warn(
                TOPIC, f"weights: the process that sends and fetches them {why}; it is started again in {pause:g} s"
            )
            await trio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _live(self) -> str:
        """One child from start to end; how it ended."""
        environment = {"MALLOC_ARENA_MAX": "2"}  # many threads that allocate little
        try:
            sockets = [listener.fileno() for listener in self._listeners]
            process = spawn(Process, "node.weights.bulk.bulk_child", "weights", environment, inherited=sockets)
        except WorkerError as error:
            await trio.lowlevel.checkpoint()
            return f"cannot be started ({error})"
        self.starts += 1
        self._own_state.children["bulk"] = self.pid = process.pid
        self._is_ready = trio.Event()
        why = ""
        try:
            async with trio.open_nursery() as nursery:
                send, receive = trio.open_memory_channel[bytes](MAX_QUEUE)
                self._queue = send
                self.tell("configure", **self._setup())
                nursery.start_soon(self._write, process, receive)
                nursery.start_soon(process.drain)
                nursery.start_soon(self._read, process)
                nursery.start_soon(self._watch_start, process)
                await process.wait_dead()
                nursery.cancel_scope.cancel()
            why = process.how_it_ended()
        finally:
            self._queue = None
            self._own_state.children.pop("bulk", None)
            self._change(False)
            await process.aclose()
        return why

    async def _write(self, process: Process, frames: trio.MemoryReceiveChannel[bytes]) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for frame in frames:
                await process.send(frame)
        process.kill()  # it closed its end, or took nothing for long

    async def _read(self, process: Process) -> None:
        try:
            while True:
                message = decode(await process.read_frame(), dict[str, Any])
                handler = self._handlers.get(str(message.pop("op", None)))
                if handler is None:
                    raise LocalError("a message of no known kind")
                try:
                    handler(**message)
                except TypeError as error:
                    raise LocalError(f"a message of no known form ({error})") from None
        except (LocalError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._node.logger.debug("weights: %s", error)
            process.kill()

    async def _watch_start(self, process: Process) -> None:
        with trio.move_on_after(START_SECONDS):
            await self._is_ready.wait()
        if not self._is_ready.is_set():
            process.kill()

    def _ready(self) -> None:
        self._is_ready.set()
        self._change(True)
        self._node.health.clear(TOPIC)

    def _acknowledged(self, call: int) -> None:
        if (done := self._calls.get(call)) is not None:
            done.set()

    def _change(self, up: bool) -> None:
        if self.up != up:
            self.up = up
            self._own_state.bulk = self.addresses
            self._own_state.announce()
            for callback in self._changes:
                callback(up)
            for call in self._calls.values() if not up else ():
                call.set()

    def _setup(self) -> dict[str, Any]:
        config = self._node.config.bulk
        limits = Limits(
            total=config.connections,
            of_peer=config.peer_connections,
            rate=config.rate * MEGABIT,
            peer_rate=config.peer_rate * MEGABIT,
            proxied=config.proxied,
        )
        return {
            "node": self._node.id,
            "domain": self._node.domain.id,
            "secret": self.secret,
            "versions": str(self._node.directory.versions.absolute()),
            "sockets": [listener.fileno() for listener in self._listeners],
            "limits": asdict(limits),
            "own": self.own,
            "admitted": {node.hex(): certificate for node, certificate in self.certificates.items()},
        }

    # --- ports -----------------------------------------------------------------------------------------------------

    def _open_ports(self) -> None:
        config = self._node.config
        named = config.bulk.listen
        try:
            for text in named or config.listen[:1]:
                kind, host, port = listening.split(text)
                if named:
                    self._listeners.append(_bind(kind, host, port))
                else:
                    self._listeners.append(_bind_near(kind, host, port))
        except OSError as error:
            self._close_ports()
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            self._node.health.warn(
                TOPIC,
                f"weights: port {port} on {host} {what}: stop the program that holds it, or name another in "
                "bulk.listen; until then weights travel over libp2p, slowly",
            )
        else:
            self._node.health.clear(TOPIC)

    def _close_ports(self) -> None:
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
