"""The daemon's side of the bulk child: it keeps one running and talks to it.

1. A child that dies is started again, later each time; its death costs the transfers under way. While it is down
   nothing is announced.
2. One that is started while a port lacks (``node.weights.bulk.bulk_ports``) serves nobody but fetches; it is replaced
   once the port is there.
3. A child speaks with strangers: what it says is checked, and one that says what has no form is ended. What it says of
   a transfer that is over means nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Protocol

import trio

from node.context import Node
from node.peers.own_state import OwnState
from node.weights.bulk import bulk_messages as messages
from node.weights.bulk import node_certificate
from node.weights.bulk.bulk_ports import BulkPorts
from node.weights.bulk.serving_limits import ServingLimits
from node.workers import frames
from node.workers.child_process import Process, WorkerError, spawn
from protocol.errors import LocalError

TOPIC: Final = "bulk"
"""The health warning's."""
START_SECONDS: Final = 20.0
FIRST_PAUSE: Final = 0.5
MAX_PAUSE: Final = 30.0
STEADY: Final = 60.0
"""Seconds after which a child that dies is started again as if for the first time."""
BUSY_PAUSE: Final = 30.0
SYNCHRONIZE_SECONDS: Final = 5.0
MAX_QUEUE: Final = 4096
"""Messages that wait for a child, or a transfer, to take them; a child that lets or has more pile up is ended."""
MAX_CERTIFICATES: Final = 1024
MEGABIT: Final = 125_000


class ChildEnd(Protocol):
    """The daemon's end of a child, as ``node.workers.child_process.Process`` is."""

    pid: int

    async def send(self, frame: bytes) -> None: ...
    async def read_frame(self) -> bytes: ...
    async def drain(self) -> None: ...
    async def wait_dead(self) -> None: ...
    def how_it_ended(self) -> str: ...
    def kill(self) -> None: ...
    async def aclose(self) -> None: ...


StartBulk = Callable[[Sequence[int]], ChildEnd]
"""Starts a child that inherits these descriptors. Raises ``WorkerError``."""


def start_child(sockets: Sequence[int]) -> ChildEnd:
    """A new child, as ``StartBulk``."""
    environment = {"MALLOC_ARENA_MAX": "2"}  # many threads that allocate little
    return spawn(Process, "node.weights.bulk.bulk_child", name="weights", environment=environment, inherited=sockets)


class BulkProcess:
    """The data plane of one node, as its daemon sees it. ``start`` starts children."""

    def __init__(
        self,
        node: Node,
        own: OwnState,
        *,
        start: StartBulk = start_child,
        start_seconds: float = START_SECONDS,
        first_pause: float = FIRST_PAUSE,
        busy_pause: float = BUSY_PAUSE,
    ) -> None:
        self._node = node
        self._own = own
        self._start = start
        self._start_seconds = start_seconds
        self._first_pause = first_pause
        self._busy_pause = busy_pause
        self.private = bool(node.domain.private)
        """Whether weights travel encrypted, and only between nodes that joined."""
        self.secret = secrets.token_bytes(32)
        self.own_pem, self.certificate = node_certificate.make(node.identity) if self.private else ("", b"")
        """This node's certificate, in a private domain: with its key, and for others (DER)."""
        self.known: dict[bytes, bytes] = {}
        """Certificates (DER) of other nodes of a private domain, by node id, oldest first."""
        self.ports = BulkPorts(node.config, node.health, secure=self.private)
        self.pid = 0
        self.starts = 0
        self._up = trio.Event()
        self._queue: trio.MemorySendChannel[bytes] | None = None
        self._transfers: dict[bytes, trio.MemorySendChannel[messages.FromTransfer]] = {}
        self._calls: dict[int, trio.Event] = {}
        self._next_call = 0

    @property
    def up(self) -> bool:
        """Whether a child runs and takes messages."""
        return self._up.is_set()

    async def wait_up(self) -> None:
        """Return once a child runs and takes messages."""
        await self._up.wait()

    @property
    def addresses(self) -> list[str]:
        """The multiaddresses to announce, at most four; none while nothing is served."""
        here = self.ports.addresses() if self.up else []
        return list(self._node.config.bulk.announce) if here and self._node.config.bulk.announce else here

    # --- talking ---------------------------------------------------------------------------------------------------

    def send(self, message: messages.ToChild) -> bool:
        """Send a message to the child, without waiting; False, and nothing is sent, where there is none."""
        if self._queue is None:
            return False
        try:
            self._queue.send_nowait(frames.encode(message))
        except trio.WouldBlock:
            self._queue.close()
            self._queue = None
            return False
        return True

    async def synchronize(self) -> bool:
        """Wait until the child has done all that was said to it; False where it did not in time."""
        self._next_call += 1
        number, done = self._next_call, trio.Event()
        self._calls[number] = done
        try:
            if not self.send(messages.Synchronize(number)):
                await trio.lowlevel.checkpoint()
                return False
            with trio.move_on_after(SYNCHRONIZE_SECONDS):
                await done.wait()
            return done.is_set() and self.up
        finally:
            del self._calls[number]

    async def admit(self, node: bytes, certificate: bytes) -> bool:
        """Know ``node`` by this certificate (DER), in both directions; whether a child does as well."""
        if self.known.get(node) == certificate:
            await trio.lowlevel.checkpoint()
            return self.up
        self.known.pop(node, None)
        self.known[node] = certificate
        while len(self.known) > MAX_CERTIFICATES:
            del self.known[next(iter(self.known))]
        self.send(messages.AdmitNode(node, certificate))
        return await self.synchronize()

    @contextmanager
    def open_transfer(self, digest: bytes) -> Iterator[trio.MemoryReceiveChannel[messages.FromTransfer]]:
        """Have the child fetch what lacks of an object that was begun in the store, while the block runs.

        What it says about that comes over the channel, which ends with the child.
        """
        send, receive = trio.open_memory_channel[messages.FromTransfer](MAX_QUEUE)
        with send, receive:
            self._transfers[digest] = send
            try:
                if not self.send(messages.BeginTransfer(digest)):
                    send.close()
                yield receive
            finally:
                del self._transfers[digest]
                self.send(messages.StopTransfer(digest))

    # --- the child's life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a child running, for ever."""
        pause = self._first_pause
        while True:
            started, lacked = trio.current_time(), self.ports.lacking
            why = await self._live()
            if lacked and not self.ports.lacking:
                continue  # it was ended for the ports' sake
            if trio.current_time() - started > STEADY:
                pause = self._first_pause
            self._node.health.warn(
                TOPIC, f"weights: the process that sends and fetches them {why}; it is started again in {pause:g} s"
            )
            await trio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _live(self) -> str:
        """One child from start to end; how it ended."""
        sockets = self.ports.descriptors()
        try:
            process = self._start(sockets)
        except WorkerError as error:
            await trio.lowlevel.checkpoint()
            return f"cannot be started ({error})"
        self.starts += 1
        self._own.children["bulk"] = self.pid = process.pid
        why = ""
        try:
            async with trio.open_nursery() as nursery:
                self._queue, frames_to_send = trio.open_memory_channel[bytes](MAX_QUEUE)
                self.send(self._setup(sockets))
                nursery.start_soon(self._write, process, frames_to_send)
                nursery.start_soon(process.drain)
                nursery.start_soon(self._read, process)
                nursery.start_soon(self._watch_start, process)
                nursery.start_soon(self._watch_ports, process)
                await process.wait_dead()
                nursery.cancel_scope.cancel()
            why = process.how_it_ended()
        finally:
            self._queue = None
            self._own.children.pop("bulk", None)
            self._on_gone()
            await process.aclose()
        return why

    async def _write(self, process: ChildEnd, waiting: trio.MemoryReceiveChannel[bytes]) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for frame in waiting:
                await process.send(frame)
        process.kill()  # it closed its end, or took nothing for long

    async def _read(self, process: ChildEnd) -> None:
        try:
            while True:
                self._receive(frames.decode(await process.read_frame(), messages.FromChild))
        except (LocalError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._node.logger.debug("weights: %s", error)
            process.kill()

    def _receive(self, message: messages.FromChild) -> None:
        match message:
            case messages.ChildReady():
                self._up.set()
                self._node.health.clear(TOPIC)
                self._announce()
            case messages.Synchronized(call=call):
                if (done := self._calls.get(call)) is not None:
                    done.set()
            case _:
                transfer = self._transfers.get(message.digest)
                if transfer is not None:
                    try:
                        with suppress(trio.ClosedResourceError):  # it began with an earlier child
                            transfer.send_nowait(message)
                    except trio.WouldBlock:
                        raise LocalError("more messages than a transfer takes") from None

    async def _watch_start(self, process: ChildEnd) -> None:
        with trio.move_on_after(self._start_seconds):
            await self.wait_up()
        if not self.up:
            process.kill()

    async def _watch_ports(self, process: ChildEnd) -> None:
        while self.ports.lacking:
            await trio.sleep(self._busy_pause)
            if self.ports.try_open():
                process.kill()

    def _on_gone(self) -> None:
        for transfer in self._transfers.values():
            transfer.close()
        for call in self._calls.values():
            call.set()
        if self.up:
            self._up = trio.Event()
            self._announce()

    def _announce(self) -> None:
        self._own.bulk = tuple(self.addresses)
        self._own.announce()

    def _setup(self, sockets: list[int]) -> messages.Configure:
        config = self._node.config.bulk
        limits = ServingLimits(
            total=config.connections,
            of_peer=config.peer_connections,
            rate=config.rate * MEGABIT,
            peer_rate=config.peer_rate * MEGABIT,
            proxied=config.proxied,
        )
        return messages.Configure(
            domain=self._node.domain.id,
            secret=self.secret,
            versions=str(self._node.directory.versions.absolute()),
            sockets=sockets,
            limits=limits,
            certificate=self.own_pem,
            admitted=list(self.known.items()),
        )
