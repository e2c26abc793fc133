"""The containment of libp2p 0.8.1: nothing a peer sends may stop this node or be believed unproven.

Each defect of the stock library (reproduced, with a regression test in ``tests/node/net/test_guard.py``) and its
answer here:

1. An exception in any stream handler cancels the whole host: ``GuardedHost`` contains it and resets the stream.
2. Five bytes of invalid UTF-8 in multistream-select kill the host, and a line may announce any length: lines are
   bounded ASCII (``Muxer.read_line``, ``_read_line``).
3. One unparsable gossip RPC, bad key or raising validator kills host or pubsub: ``node.net.pubsub``.
4. Every inbound connection keeps a slot until the process ends, so the node goes deaf: ``GuardedSwarm`` counts
   connections while they live, and handshakes in progress apart (slow loris), by ``node.net.places``.
5. Flow control is not enforced, streams are unlimited, and their semaphore is shared by all peers: ``node.net.yamux``;
   libp2p's resource manager is not used.
6. A cancelled write desynchronises Noise for the whole connection: ``node.net.yamux`` writes frames whole.
7. Plaintext and SECIO are accepted, so peer ids can be forged: Noise is the only security protocol here, and only
   Ed25519 peer ids are admitted.

Beyond the defects: identify, ping, AutoConnector, peer exchange and libp2p's own dialling and listening are off (they
run as system tasks, believe addresses from anybody, and share listening ports silently); the signed peer record is
left out of gossip; Noise works on the bare socket (``node.net.noise``).

The patches know one version of the library, so this module refuses any other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

import libp2p.network.connection.swarm_connection as swarm_connection
import trio
from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.host.basic_host import BasicHost
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.io.utils import read_exactly
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import decode_uvarint_from_stream

from node.net.net_limits import NetLimits as NetLimits
from node.net.noise import Noise
from node.net.places import Handshakes, Places, neighbourhood
from node.net.yamux import Muxer
from node.net.yamux_stream import MAX_LINE, Budget, MuxerStream, Violation
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity, peer_id

LIBP2P_VERSION: Final = "0.8.1"

if version("libp2p") != LIBP2P_VERSION:
    raise LocalError(
        f"node/net/guard.py contains libp2p {LIBP2P_VERSION}, but {version('libp2p')} is installed: "
        f"run pip install libp2p=={LIBP2P_VERSION}"
    )

log = logging.getLogger(__name__)

MULTISTREAM: Final = "/multistream/1.0.0"

NEGOTIATION_TIMEOUT: Final = 10.0
"""Seconds a peer has to name the protocol of a stream that it opened."""

MAX_NEGOTIATION_LINES: Final = 8
"""Protocols a peer may ask for on one stream."""

MAX_CONNECTIONS: Final = 1 << 16
"""Libp2p's own bound, which is never reached: ``GuardedSwarm.places`` counts."""

ID_PREFIX = ID.from_base58(peer_id(bytes(32))).to_bytes()[:-32]


def node_of(peer: Any) -> bytes:
    """The node id in a libp2p ``ID``; raises ``PeerError`` unless it is an Ed25519 one."""
    raw: bytes = peer.to_bytes()
    if len(raw) != len(ID_PREFIX) + 32 or not raw.startswith(ID_PREFIX):
        raise PeerError("not an Ed25519 peer id")
    return raw[len(ID_PREFIX) :]


def peer_of(node: bytes) -> Any:
    """The libp2p ``ID`` of a node id."""
    return ID(ID_PREFIX + node)


# --- process-wide patches ------------------------------------------------------------------------------------------


async def _read_line(self: Any) -> str:
    """Defect 2, in the negotiations before a muxer exists: bounded, and every failure is the declared one."""
    try:
        size = await decode_uvarint_from_stream(self.read_writer)
        if not 1 <= size <= MAX_LINE:
            raise MultiselectCommunicatorError("a line of a forbidden length")
        line: bytes = await read_exactly(self.read_writer, size)
        if not line.endswith(b"\n"):
            raise MultiselectCommunicatorError("a line without an end")
        return line[:-1].decode("ascii")
    except (ParseError, IOException, UnicodeDecodeError) as error:
        raise MultiselectCommunicatorError(f"unreadable line: {error}") from None


MultiselectCommunicator.read = _read_line
# Stock libp2p reports peers' faults as warnings and errors with tracebacks, there through the root logger; this package
# does its own accounting.
swarm_connection.logging = logging.getLogger("libp2p")
swarm_connection.logging.setLevel(logging.CRITICAL)


# --- the swarm and the host ----------------------------------------------------------------------------------------


class _MuxerMultistream(MuxerMultistream):  # type: ignore[misc]
    """Negotiates yamux and runs ours; the stock class has its own hard-wired."""

    def __init__(self, make: Callable[[Any, Any], Muxer]) -> None:
        super().__init__({TProtocol(YAMUX): Muxer})
        self._make = make

    async def new_conn(self, conn: Any, peer_id: Any) -> Muxer:
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._make(conn, peer_id)


class _NoAutoConnector:
    """Stands in for libp2p's AutoConnector, which dials whatever address the peerstore holds."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def run_background_task(self, nursery: trio.Nursery) -> None: ...


class GuardedSwarm(Swarm):  # type: ignore[misc]
    """A swarm that counts what lives, dials only when told to, and contains its callbacks.

    ``admit(node)`` answers why a peer is refused, or None; ``preferred(node)`` tells whom places are reserved for;
    ``changed(node, connected)`` hears of every connection that opens or closes.
    """

    def __init__(
        self,
        *args: Any,
        limits: NetLimits,
        admit: Callable[[bytes], str | None],
        preferred: Callable[[bytes], bool],
        changed: Callable[[bytes, bool], None],
    ) -> None:
        config = ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections=MAX_CONNECTIONS,
            max_connections_per_peer=2,
            # ``self.places`` counts, ``accept`` and ``dial`` have deadlines: second ones here could only disagree.
            inbound_upgrade_timeout=math.inf,
            outbound_upgrade_timeout=math.inf,
        )
        super().__init__(*args, transports=[TCP()], retry_config=RetryConfig(max_retries=0), connection_config=config)
        self.limits = limits
        self.handshakes = Handshakes(limits)
        self.places = Places(limits, preferred)
        self.auto_connector = _NoAutoConnector()
        self._admit = admit
        self._changed = changed

    async def accept(self, stream: trio.SocketStream) -> None:
        """Defect 4: one inbound TCP connection, from handshake to end. Raises nothing but cancellation."""
        try:
            where = neighbourhood(str(stream.socket.getpeername()[0]))
        except OSError:
            return  # gone already
        with trio.move_on_after(self.limits.handshake_timeout) as scope:
            handshake = self.handshakes.begin(where, trio.current_time(), scope.cancel)
            if handshake is None:
                return
            try:
                muxer = await self.upgrade_inbound_raw_conn(RawConnection(TrioTCPStream(stream), False), None)
            except Exception as error:
                log.debug("inbound connection from %s failed: %r", where, error)
                return
            finally:
                self.handshakes.end(handshake)
        if not scope.cancelled_caught:
            await muxer.event_closed.wait()

    async def dial(self, host: str, port: int, peer: Any) -> None:
        """Connect to ``peer`` at an IP address; raises ``OSError``, ``trio.TooSlowError`` or libp2p's errors."""
        with trio.fail_after(self.limits.dial_timeout):
            stream = await trio.open_tcp_stream(host, port)
            try:
                await self.upgrade_outbound_raw_conn(RawConnection(TrioTCPStream(stream), True), peer)
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise

    async def add_conn(self, muxed_conn: Any, direction: str = "unknown") -> Any:
        """Defect 7: only proven ids that this node wants (and Ed25519 ones: no muxer is made for others)."""
        node, remote = node_of(muxed_conn.peer_id), muxed_conn.get_remote_address()
        refused = self._admit(node) if remote is not None else "gone"
        if refused is None:
            refused = self.places.take(muxed_conn, node, not muxed_conn.is_initiator, neighbourhood(remote[0]))
        if refused is not None:
            await muxed_conn.close()
            raise SwarmException(f"refused: {refused}")
        try:
            return await super().add_conn(muxed_conn, direction)
        except BaseException:
            self.places.leave(muxed_conn)
            raise

    async def dial_peer(self, peer_id: Any) -> Any:
        """Stock libp2p dials whatever address it heard of, and only one of them."""
        raise SwarmException("not connected")

    async def notify_connected(self, conn: Any) -> None:
        peer = conn.muxed_conn.peer_id
        for older in self.get_connections(peer):
            if older is not conn:
                older.muxed_conn.probe()
        self._changed(node_of(peer), True)
        await self._notify("connected", conn)

    async def notify_disconnected(self, conn: Any) -> None:
        peer = conn.muxed_conn.peer_id
        self._changed(node_of(peer), False)
        await self._notify("disconnected", conn)
        if conn.muxed_conn.silent and self.manager.is_running:
            self.manager.run_task(self.drop, peer)

    async def notify_opened_stream(self, stream: Any) -> None:
        """Nobody listens; the stock class opens a nursery for each stream."""

    async def notify_closed_stream(self, stream: Any) -> None:
        """See ``notify_opened_stream``."""
        stream._resource_released = True

    async def _notify(self, method: str, *args: Any) -> None:
        for notifee in list(self.notifees):
            try:
                await getattr(notifee, method)(self, *args)
            except Exception:
                log.exception("a connection callback failed")

    async def drop(self, peer: Any = None) -> None:
        """Close every connection (to ``peer``, if it is given): gossip recovers only from that, not from closing one of
        two. All at the same time: the stock class takes 0.2 s for each."""

        async def close(connection: Any) -> None:
            try:
                await connection.close()
            except Exception as error:
                log.debug("closing a connection failed: %r", error)

        async with trio.open_nursery() as nursery:
            for connection in self.get_connections(peer):
                nursery.start_soon(close, connection)


class GuardedHost(BasicHost):  # type: ignore[misc]
    """A host without identify whose stream handlers cannot hurt it. ``blame(node, error)`` hears of rubbish."""

    def __init__(self, swarm: GuardedSwarm, blame: Callable[[bytes, PeerError], None]) -> None:
        super().__init__(network=swarm, disable_identify_address_discovery=True)
        self.blame = blame
        self.multiselect.handlers.clear()  # no identify, no ping
        swarm.notifees.clear()  # nor the callbacks that run them

    def _schedule_identify(self, peer_id: Any, *, reason: str) -> None:
        """Off: it runs as a system task and fills the peerstore with what peers claim."""

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        """Defects 1 and 2: negotiate and run one inbound stream. Raises nothing but cancellation."""
        try:
            with trio.fail_after(NEGOTIATION_TIMEOUT):
                handler = await self._negotiate(net_stream)
            if handler is None:
                await net_stream.muxed_stream.finish(1)  # not a reset, which would take the "na" away again
            else:
                await handler(net_stream)
        except Exception as error:
            if isinstance(error, Violation):
                self.blame(node_of(net_stream.muxed_conn.peer_id), error)
            else:
                log.debug("a stream handler failed: %r", error)
            with trio.move_on_after(1):
                await net_stream.reset()

    async def _negotiate(self, net_stream: Any) -> Any:
        """The handler of the protocol that the peer names, or None where it named none that is spoken here."""
        stream: MuxerStream = net_stream.muxed_stream
        if await stream.read_line() != MULTISTREAM:
            raise Violation("not multistream-select")
        answer = line(MULTISTREAM)
        for attempt in range(MAX_NEGOTIATION_LINES):
            if answer and not stream.has_line():  # a dialler that sent its wish at once gets both answers at once
                await stream.write(answer)
                answer = b""
            try:
                protocol = TProtocol(await stream.read_line())
            except (Violation, MuxedStreamEOF):
                if attempt == 0:
                    raise
                return None  # after "na" comes the request of a dialler that did not wait for the answer
            handler = self.multiselect.handlers.get(protocol)
            await stream.write(answer + line(protocol if handler is not None else "na"))
            answer = b""
            if handler is not None:
                net_stream.set_protocol(protocol)
                return handler
        raise Violation("asks for too many protocols")


def line(text: str) -> bytes:
    """``text`` as a multistream-select line (shorter than 127 characters)."""
    data = text.encode("ascii") + b"\n"
    return bytes([len(data)]) + data


def make_host(
    identity: Identity,
    limits: NetLimits,
    *,
    admit: Callable[[bytes], str | None],
    preferred: Callable[[bytes], bool],
    changed: Callable[[bytes, bool], None],
    blame: Callable[[bytes, PeerError], None],
) -> GuardedHost:
    """A host for ``identity`` with everything above in place; run its ``GuardedSwarm`` as a libp2p service."""
    keys = ed25519_key_pair(seed=identity.seed)
    budget = Budget(limits.receive_buffers)

    def make(secured: Any, peer: Any) -> Muxer:
        node = node_of(peer)  # refuse other kinds of key before anything else is done for them
        return Muxer(
            secured,
            peer,
            budget=budget,
            keepalive=limits.keepalive,
            frame_timeout=limits.frame_timeout,
            on_violation=lambda error: blame(node, error),
        )

    upgrader = TransportUpgrader({TProtocol(NOISE): Noise(keys, noise_privkey=x25519_key_pair().private_key)}, {})
    upgrader.muxer_multistream = _MuxerMultistream(make)
    store = PeerStore()
    identifier = ID.from_pubkey(keys.public_key)
    if node_of(identifier) != identity.node:
        raise LocalError("libp2p derives another node id from this key")
    store.add_key_pair(identifier, keys)
    swarm = GuardedSwarm(identifier, store, upgrader, limits=limits, admit=admit, preferred=preferred, changed=changed)
    return GuardedHost(swarm, blame)
