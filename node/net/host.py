"""The network as the daemon sees it: one guarded libp2p host with peers, requests, gossip and byte counts.

1. No exception of libp2p's or caused by a peer leaves this module. A host that dies all the same is restarted, on the
   same listening sockets, with the same handlers and topics.
2. ``open_network`` ends within two seconds, whatever peers do, and leaves no socket open.
3. ``PeerError`` names a peer's fault: the caller passes it to ``blame``. ``Unreachable`` is nobody's fault.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio

from node.net import requests
from node.net.address_text import Address, AddressError, outbound, parse_address
from node.net.discovery import AddressBook, PeerManager
from node.net.gossip import Gossip, GossipHandler
from node.net.guard import GuardedHost, GuardedSwarm, NetLimits, make_host, peer_of
from node.net.peer_scores import Scores
from node.net.requests import Count, Unreachable
from protocol.errors import Error, LocalError, PeerError
from protocol.identity import Identity

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS: Final = 1.0
MAX_RESTART_DELAY: Final = 5.0
BACKLOG: Final = 128


class PortBusy(Error):
    """A listening port is taken, or the address is not this machine's; the message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected peer: node id, who dialled, since when (trio's clock), and its socket's "host:port"."""

    node: bytes
    inbound: bool
    since: float
    address: str


class Network:
    """One guarded libp2p host: identity, peers, requests, gossip, byte counts. Made by ``open_network``."""

    def __init__(
        self,
        identity: Identity,
        listeners: Sequence[trio.SocketListener],
        domain_tag: str,
        limits: NetLimits,
        nursery: trio.Nursery,
    ) -> None:
        self.identity = identity
        self.node = identity.node
        self.limits = limits
        self.scores = Scores()
        self.counts: dict[str, Count] = {}
        self.restarts = 0
        self._listeners = listeners
        self.host: GuardedHost | None = None
        """The libp2p host that runs now; none while it is restarted."""
        self._up = trio.Event()
        self._servers: dict[str, requests.RequestServer] = {}
        self._peers: dict[bytes, Peer] = {}
        self._preferred: Callable[[bytes], bool] = lambda node: False
        self._on_connect: list[Callable[[bytes], None]] = []
        self.book = AddressBook(identity.node)
        self._manager = PeerManager(self.book, dial=self._dial, connected=self.is_connected, may_dial=self._may_dial)
        self.gossip = Gossip(
            identity.node,
            domain_tag,
            limits,
            count=self._count("gossip"),
            blame=self.blame,
            banned=self._banned,
        )
        self._nursery = nursery
        self._closing = False

    # --- who is there ------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """This node's own addresses, "/ip4/…/tcp/…/p2p/…". A wildcard is shown as loopback and the outbound address."""
        found: list[str] = []
        for listener in self._listeners:
            host, port = listener.socket.getsockname()[:2]
            six = ":" in host
            hosts: list[str | None] = [host]
            if ipaddress.ip_address(host).is_unspecified:
                hosts = ["::1" if six else "127.0.0.1", outbound("ip6" if six else "ip4")]
            found += [str(Address("ip6" if six else "ip4", one, port, self.node)) for one in hosts if one]
        return list(dict.fromkeys(found))

    @property
    def peers(self) -> dict[bytes, Peer]:
        """The connected peers by node id (a copy)."""
        return dict(self._peers)

    def hosts(self, node: bytes) -> list[str]:
        """The IP addresses at the other ends of the open connections to ``node``."""
        remotes = [connection.muxed_conn.get_remote_address() for connection in self._connections(node)]
        return list(dict.fromkeys(str(remote[0]) for remote in remotes if remote is not None))

    def is_connected(self, node: bytes) -> bool:
        """Whether a connection to ``node`` is open."""
        return self._connection(node) is not None

    def on_connect(self, callback: Callable[[bytes], None]) -> None:
        """Call ``callback(node id)`` whenever a peer appears. It must not block."""
        self._on_connect.append(callback)

    def prefer(self, preferred: Callable[[bytes], bool]) -> None:
        """From now on ``preferred(node id)`` tells for whom places among the connections are reserved: members and
        electors, say. It is asked often, and must not block."""
        self._preferred = preferred

    async def add_peer(self, address: str) -> None:
        """Remember a seed: it is dialled whenever it is not connected, for ever. Raises ``AddressError``."""
        node, parsed = _parse_named(address)
        self.book.learn(node, [parsed], trio.current_time(), seed=True)
        await trio.lowlevel.checkpoint()

    def learn(self, node: bytes, addresses: Sequence[str]) -> None:
        """Remember where ``node`` says it can be reached; unusable texts are skipped."""
        parsed = []
        for text in addresses:
            try:
                parsed.append(parse_address(text))
            except AddressError as error:
                log.debug("%s", error)
        if parsed:
            self.book.learn(node, parsed, trio.current_time())

    def known_addresses(self) -> dict[bytes, list[str]]:
        """Seeds and peers met so far with their addresses, newest first: what is worth keeping on disk."""
        return {
            node: [str(address) for address in entry.addresses]
            for node, entry in self.book.entries.items()
            if entry.addresses and (entry.seed or entry.reached)
        }

    async def connect(self, address: str, timeout: float) -> bytes:
        """Connect to the node at ``address`` now and return its id.

        Raises ``AddressError`` or ``Unreachable``, each with one line that names the address and what went wrong.
        """
        node, parsed = _parse_named(address)
        if node == self.node:
            raise AddressError(f"{address}: this is the node's own address")
        if not self.is_connected(node):
            with trio.move_on_after(timeout) as scope:
                await self._manager.connect(parsed)
            if scope.cancelled_caught:
                raise Unreachable(f"{address}: no answer within {timeout:g} s")
        return node

    async def disconnect(self, node: bytes) -> None:
        """Close all connections to ``node``."""
        if self.host is not None:
            await self._swarm.drop(peer_of(node))

    def blame(self, peer: bytes, error: PeerError, share: float = 1.0) -> None:
        """Count a mistake of ``peer``, or a share of one: logged, scored down; below the threshold it is banned."""
        if peer != self.node and self.scores.blame(peer, error, trio.current_time(), share) and not self._closing:
            self._nursery.start_soon(self.disconnect, peer)

    # --- requests and gossip -----------------------------------------------------------------------------------

    def serve(
        self, protocol: str, handler: requests.RequestHandler, *, max_request: int, max_concurrent_per_peer: int = 8
    ) -> None:
        """Answer requests of ``protocol``: ``await handler(peer, request) -> answer``. See ``node.net.requests``."""
        if protocol in self._servers:
            raise LocalError(f"protocol {protocol} has a handler already")
        server = requests.RequestServer(
            protocol,
            handler,
            max_request=max_request,
            max_concurrent_per_peer=max_concurrent_per_peer,
            limits=self.limits,
            count=self._count(protocol),
            blame=self.blame,
        )
        self._servers[protocol] = server
        if self.host is not None:
            self.host.set_stream_handler(protocol, server)

    async def request(self, peer: bytes, protocol: str, payload: bytes, *, timeout: float, max_response: int) -> bytes:
        """Ask ``peer`` and return its answer; a peer that is known but not connected is dialled first.

        Raises ``Unreachable`` (``Refused`` where the peer said no; nobody is to blame) or ``PeerError`` (an answer
        that breaks the rules: pass it to ``blame``).
        """
        started = trio.current_time()
        connection = self._connection(peer)
        if connection is None:
            with trio.move_on_after(timeout):
                await self._manager.reach(peer)
            connection = self._connection(peer)
            if connection is None:
                raise Unreachable(f"node {peer.hex()[:8]} is not connected")
        left = max(0.0, timeout - (trio.current_time() - started))
        return await requests.request(
            connection, protocol, payload, timeout=left, max_response=max_response, count=self._count(protocol)
        )

    def subscribe(self, topic: str, handler: GossipHandler, *, delay: float = 0.0) -> None:
        """Call ``handler(origin, data)``, plain or async, for every message of others on ``topic``.

        They are forwarded at once, or together within ``delay`` seconds, which costs this node and its peers less.
        """
        self.gossip.subscribe(topic, handler, delay=delay)

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip ``data`` (at most 256 KiB). A hint: it may be lost."""
        await self.gossip.publish(topic, data)

    @property
    def traffic(self) -> tuple[int, int]:
        """(sent, received) bytes of requests, answers and gossip data; ``counts`` has them by protocol."""
        return sum(count.sent for count in self.counts.values()), sum(count.received for count in self.counts.values())

    # --- inside ------------------------------------------------------------------------------------------------

    def _count(self, protocol: str) -> Count:
        return self.counts.setdefault(protocol, Count())

    @property
    def _swarm(self) -> GuardedSwarm:
        if self.host is None:
            raise Unreachable("the network is restarting")
        swarm: GuardedSwarm = self.host.get_network()
        return swarm

    def _connections(self, node: bytes) -> list[Any]:
        """The open connections to ``node``, oldest first."""
        return list(self._swarm.get_connections(peer_of(node))) if self.host is not None else []

    def _connection(self, node: bytes) -> Any:
        """The newest live connection to ``node``: an older one may be dead without knowing."""
        return next((one for one in reversed(self._connections(node)) if one.muxed_conn.is_established), None)

    def _banned(self, node: bytes) -> bool:
        return self.scores.banned(node, trio.current_time())

    def _may_dial(self, node: bytes) -> bool:
        return self.host is not None and not self._banned(node) and self._swarm.places.may_dial(node)

    def _admit(self, node: bytes) -> str | None:
        if node == self.node:
            return "that is this node itself"
        return "banned" if self._banned(node) else None

    def _changed(self, node: bytes, appeared: bool) -> None:
        """A connection was opened or closed."""
        connections = self._connections(node)
        if appeared and node not in self._peers and connections:
            remote = connections[0].muxed_conn.get_remote_address()
            self._peers[node] = Peer(
                node,
                not connections[0].muxed_conn.is_initiator,
                trio.current_time(),
                f"{remote[0]}:{remote[1]}" if remote is not None else "?",
            )
            self.book.connected(node, trio.current_time())
            for callback in self._on_connect:
                try:
                    callback(node)
                except Exception:
                    log.exception("a connection callback failed")
        elif not connections and self._peers.pop(node, None) is not None:
            self.book.disconnected(node, trio.current_time())

    async def _dial(self, host: str, port: int, node: bytes) -> None:
        swarm = self._swarm
        if self._banned(node):
            raise Unreachable("the node is banned")
        try:
            await swarm.dial(host, port, peer_of(node))
        except Exception as error:
            raise Unreachable(_dial_failure(error)) from None

    async def _supervise(self, *, task_status: Any) -> None:
        """Run libp2p hosts, one after the other should one die."""
        failures = 0
        while True:
            started = trio.current_time()
            try:
                await self._run_host(task_status if not self._up.is_set() else trio.TASK_STATUS_IGNORED)
            except Exception as error:
                log.error("the libp2p host died and is restarted: %r", error)  # one line
                log.debug("how the host died", exc_info=error)
            finally:
                self.host = None
                for node in list(self._peers):
                    self._changed(node, False)
            self.restarts += 1
            failures = 1 if trio.current_time() - started > 60 else failures + 1
            await trio.sleep(min(0.1 * 2**failures, MAX_RESTART_DELAY))

    async def _run_host(self, task_status: Any) -> None:
        host = make_host(
            self.identity,
            self.limits,
            admit=self._admit,
            preferred=lambda node: self._preferred(node),
            changed=self._changed,
            blame=self.blame,
        )
        for protocol, server in self._servers.items():
            host.set_stream_handler(protocol, server)
        async with host.run([]), trio.open_nursery() as nursery:
            await nursery.start(self.gossip.run, host)
            self.host = host
            for listener in self._listeners:
                nursery.start_soon(self._accept_forever, listener)
            if not self._up.is_set():
                self._up.set()
                task_status.started()

    async def _accept_forever(self, listener: trio.SocketListener) -> None:
        swarm = self._swarm

        async def serve(stream: trio.SocketStream) -> None:
            try:
                await swarm.accept(stream)
            except Exception as error:
                log.debug("an inbound connection failed: %r", error)
            finally:
                await trio.aclose_forcefully(stream)

        async with trio.open_nursery() as nursery:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:  # out of file descriptors: let some connections end
                    log.warning("cannot accept connections: %s", error)
                    await trio.sleep(0.5)
                    continue
                nursery.start_soon(serve, stream)

    async def _close(self) -> None:
        self._closing = True
        if self.host is not None:
            await self._swarm.drop()


@asynccontextmanager
async def open_network(
    identity: Identity, *, listen: Sequence[str], domain_tag: str, limits: NetLimits | None = None
) -> AsyncIterator[Network]:
    """Run a node's network while the block runs.

    ``listen`` are multiaddr texts such as "/ip4/127.0.0.1/tcp/0" (port 0: any free one); ``domain_tag`` keeps the
    gossip of different domains apart. Raises ``PortBusy`` or ``AddressError`` before anything runs; the block's own
    exceptions come out as they are.
    """
    listeners: list[trio.SocketListener] = []
    body_error: Exception | None = None
    try:
        for text in listen:
            listeners += await _listen(text)
        async with trio.open_nursery() as nursery:
            network = Network(identity, listeners, domain_tag, limits or NetLimits(), nursery)
            await nursery.start(network._supervise)
            nursery.start_soon(network._manager.run)
            try:
                yield network
            except Exception as error:
                body_error = error  # raised below, not wrapped in the nursery's group
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_SECONDS):
                    await network._close()
                nursery.cancel_scope.cancel()
        if body_error is not None:
            raise body_error
    finally:
        for listener in listeners:
            listener.socket.close()


def _parse_named(text: str) -> tuple[bytes, Address]:
    """The node id in an address, and the address; raises ``AddressError``."""
    parsed = parse_address(text)
    if parsed.node is None:
        raise AddressError(f"{text}: the address must end in /p2p/PEER")
    return parsed.node, parsed


async def _listen(text: str) -> list[trio.SocketListener]:
    address = parse_address(text)
    if address.kind not in ("ip4", "ip6"):
        raise AddressError(f"{text}: give an IP address to listen on")
    try:
        return list(await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG))
    except OSError as error:
        # trio reports the failure of one address as a group of one
        cause = error.__cause__ if error.__cause__ is not None else error
        number = cause.errno if isinstance(cause, OSError) else error.errno
        if number == errno.EADDRINUSE:
            raise PortBusy(
                f"port {address.port} on {address.host} is in use: stop the program that holds it or choose another"
            ) from None
        if number == errno.EACCES:
            raise PortBusy(f"port {address.port} is not allowed for this user: choose one above 1023") from None
        raise PortBusy(f"cannot listen on {text}: {error.strerror or error}") from None


def _dial_failure(error: Exception) -> str:
    """Why a dial failed, for people."""
    if isinstance(error, trio.TooSlowError):
        return "no answer"
    if isinstance(error, OSError):
        cause = error.__cause__
        if isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        shown = cause if isinstance(cause, OSError) else error
        return f"nobody answers there ({shown.strerror or shown})"
    chain: BaseException | None = error
    while chain is not None:
        if "mismatch" in type(chain).__name__.lower() or "mismatch" in str(chain).lower():
            return "another node answers there"
        chain = chain.__cause__ or chain.__context__
    return f"the connection failed ({error or type(error).__name__})"
