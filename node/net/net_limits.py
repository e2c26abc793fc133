"""What peers may use of this node's network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Seconds, bytes and counts; the defaults fit a machine with 1 GB to spare."""

    inbound_connections: int = 40
    outbound_connections: int = 24
    """Counted apart: however many connect to this node, it goes on dialling."""
    reserved_connections: int = 10
    """Of the inbound ones, for preferred peers only; and beyond the outbound ones, for these and for whom this node has
    something to ask."""
    newcomer_connections: int = 4
    """Of the inbound ones, never for preferred peers: a node that everybody knows lets newcomers in all the same."""
    connections_per_address: int = 8
    """Inbound ones of peers without preference from one IPv4 address or IPv6 /64, this machine's own excepted."""
    handshakes: int = 64
    handshakes_per_address: int = 16
    handshake_timeout: float = 10.0
    keepalive: float = 5.0
    frame_timeout: float = 10.0
    """That a peer may leave a frame unread in its socket."""
    request_slot: float = 5.0
    """That a request may wait for one of its peer's slots."""
    request_reading: float = 15.0
    """That a peer has to send its whole request."""
    receive_buffers: int = 256 << 20
    dial_timeout: float = 10.0
    gossip_rpc: int = 1 << 20
    gossip_message: int = 256 << 10
    gossip_burst: int = 256
    gossip_per_second: float = 32.0
