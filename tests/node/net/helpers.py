"""Networks and a raw attacker for the tests of node/net."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.pubsub.pb import rpc_pb2
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.utils.varint import encode_uvarint

from node.net.address_text import parse_address
from node.net.guard import NetLimits, peer_of
from node.net.host import Network, open_network
from protocol.identity import Identity

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
ECHO = "/test/echo/1"
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


def identity(number: int) -> Identity:
    """A fixed identity."""
    return Identity(bytes([number]) * 32)


async def never(peer: bytes, request: bytes) -> bytes:
    """A handler that does not answer."""
    await trio.Event().wait()
    return b""


async def echo(peer: bytes, request: bytes) -> bytes:
    """A handler that answers with the request."""
    await trio.lowlevel.checkpoint()
    return request


@asynccontextmanager
async def network(number: int, limits: NetLimits | None = None, tag: str = "test") -> AsyncIterator[Network]:
    """A network on a free port of 127.0.0.1 that serves ``ECHO``."""
    async with open_network(identity(number), listen=LISTEN, domain_tag=tag, limits=limits) as opened:
        opened.serve(ECHO, echo, max_request=8 << 20)
        yield opened


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until ``condition()`` holds."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # any state of the network may be waited for
            await trio.sleep(0.005)


async def usable(victim: Network, number: int = 200) -> None:
    """A third party can connect to ``victim`` and use it."""
    async with network(number) as third:
        node = await third.connect(victim.addresses[0], 5)
        assert await third.request(node, ECHO, b"still there?", timeout=5, max_response=64) == b"still there?"


def line(data: bytes) -> bytes:
    """A multistream-select line."""
    return bytes([len(data) + 1]) + data + b"\n"


MULTISTREAM = line(b"/multistream/1.0.0")


class Attacker:
    """An authenticated connection that sends whatever yamux frames it likes."""

    def __init__(self, session: Any, node: bytes) -> None:
        self.session = session
        self.node = node

    async def frame(self, kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> None:
        """Send one frame."""
        await self.session.write(struct.pack("!BBHII", 0, kind, flags, stream, length) + body)

    async def data(self, stream: int, body: bytes, flags: int = 0) -> None:
        """Send bytes on a stream."""
        await self.frame(DATA, flags, stream, len(body), body)

    async def closed(self) -> None:
        """Wait until the victim has closed the connection."""
        with trio.fail_after(5):
            while True:
                try:
                    await self.session.read()
                except Exception:
                    return


async def gossip_stream(bad: Attacker, stream: int = 1) -> None:
    """Open a stream for gossip to the victim."""
    await bad.frame(WINDOW, SYN, stream, 0)
    await bad.data(stream, MULTISTREAM + line(b"/meshsub/1.1.0"))


async def send_rpc(bad: Attacker, body: bytes, stream: int = 1) -> None:
    """Send one gossip RPC, whatever it says."""
    await bad.data(stream, encode_uvarint(len(body)) + body)


def signed(seed: bytes, topic: str, data: bytes, seqno: int = 0) -> Any:
    """A gossip message in the name of the node with that seed."""
    keys = create_new_key_pair(seed=seed)
    origin = peer_of(Identity(seed).node).to_bytes()
    message = rpc_pb2.Message(data=data, topicIDs=[topic], from_id=origin, seqno=seqno.to_bytes(8, "big"))
    message.signature = keys.private_key.sign(b"libp2p-pubsub:" + message.SerializeToString())
    return message


@asynccontextmanager
async def tcp(victim: Network, source: str = "127.0.0.1") -> AsyncIterator[trio.SocketStream]:
    """A bare TCP connection to ``victim``."""
    address = parse_address(victim.addresses[0])
    stream = await trio.open_tcp_stream(address.host, address.port, local_address=source)
    async with stream:
        yield stream


async def hung_up(stream: trio.SocketStream) -> None:
    """Wait until the victim has closed a bare connection."""
    with trio.fail_after(5), contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some(1024):
            pass


async def select(connection: Any, protocol: str) -> None:
    """Negotiate ``protocol`` on a raw or secured connection."""
    await MultiselectClient().select_one_of([protocol], MultiselectCommunicator(connection))


@asynccontextmanager
async def attacker(victim: Network, number: int = 66, keys: Any = None) -> AsyncIterator[Attacker]:
    """Connect to ``victim`` through Noise and yamux's negotiation, and no further."""
    keys = keys or create_new_key_pair(seed=bytes([number]) * 32)
    async with tcp(victim) as stream:
        raw = RawConnection(TrioTCPStream(stream), True)
        await select(raw, "/noise")
        noise = NoiseTransport(keys, noise_privkey=x25519_key_pair().private_key)
        session = await noise.secure_outbound(raw, peer_of(victim.node))
        await select(session, "/yamux/1.0.0")
        yield Attacker(session, identity(number).node)


Handler = Callable[[bytes, bytes], Awaitable[bytes]]
