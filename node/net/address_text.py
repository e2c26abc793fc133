"""Multiaddr texts: where a node listens, and where peers are dialled.

An address is ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/p2p/PEER]``. Nothing here needs a running network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from protocol.errors import Error, PeerError
from protocol.identity import node_id, peer_id

# A presence carries at most eight addresses of 128 characters; more could not be announced.
MAX_ADDRESSES: Final = 8
MAX_ADDRESS_LENGTH: Final = 128

_PATTERN: Final = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/([A-Za-z0-9.:_-]{1,100})/tcp/([0-9]{1,5})(?:/p2p/([A-Za-z0-9]{1,64}))?"
)
# Reserved for documentation (RFC 5737, RFC 3849): routed like any address far away, and nothing is sent.
_FAR: Final = {"ip4": "192.0.2.1", "ip6": "2001:db8::1"}


class AddressError(Error):
    """A text that is not an address this node can use; the message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed multiaddr. ``node`` is None where the text names no peer."""

    kind: str
    host: str
    port: int
    node: bytes | None

    def __str__(self) -> str:
        suffix = f"/p2p/{peer_id(self.node)}" if self.node is not None else ""
        return f"/{self.kind}/{self.host}/tcp/{self.port}{suffix}"


@lru_cache(1024)  # every presence brings the same addresses again
def parse_address(text: str) -> Address:
    """Parse ``text``; raises ``AddressError``."""
    if len(text) > MAX_ADDRESS_LENGTH:
        raise AddressError(f"an address is a text of at most {MAX_ADDRESS_LENGTH} characters")
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise AddressError(f"{text!r} is not an address of the form /ip4/HOST/tcp/PORT/p2p/PEER")
    kind, host, port, peer = match.groups()
    try:
        if kind in ("ip4", "ip6"):
            host = str(ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host))
        node = node_id(peer) if peer is not None else None
    except ValueError:
        raise AddressError(f"{text!r} has no valid IPv{kind[2:]} address") from None
    except PeerError:
        raise AddressError(f"{text!r} names no Ed25519 peer id") from None
    if int(port) > 65535:
        raise AddressError(f"{text!r} has no valid port")
    return Address(kind, host, int(port), node)


def address_problem(address: object, *, peer: bool) -> str | None:
    """What is wrong with the text of an address to dial a ``peer`` at, or else to listen on; None if nothing is."""
    try:
        parsed = parse_address(address if isinstance(address, str) else repr(address))
    except AddressError as error:
        return str(error)
    if not peer:
        if parsed.node is not None:
            return f"{address!r} must not carry a peer id"
        return None if parsed.kind in _FAR else f"{address!r} is a name, and a node listens on an IP address"
    if parsed.node is None:
        return f"{address!r} lacks the peer's id (/p2p/12D3KooW…)"
    return None if parsed.port else f"{address!r} has no valid port"


def split(address: str) -> tuple[str, str, int]:
    """Kind ("ip4", "ip6", "dns"…), host and port of a valid multiaddr text, whatever follows them."""
    _, kind, host, _, port = address.split("/")[:5]
    return kind, host, int(port)


def outbound(kind: str) -> str | None:
    """This machine's own IP address on the way to others; None without such a way. ``kind`` is "ip4" or "ip6"."""
    try:
        with socket.socket(socket.AF_INET6 if kind == "ip6" else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_FAR[kind], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_addresses(listen: Iterable[str], node: bytes, way_out: Callable[[str], str | None] = outbound) -> list[str]:
    """Full addresses (with ``/p2p/…``) for others to dial, in the order of ``listen``.

    A wildcard stands for the address that packets leave from. Left out are ports that are not known yet (0), and
    wildcards of a protocol with no way out.
    """
    found: list[str] = []
    for kind, host, port in map(split, listen):
        reached = way_out(kind) if host in ("0.0.0.0", "::") else host  # noqa: S104  compared with, not bound to
        if port and reached is not None:
            found.append(str(Address(kind, reached, port, node)))
    return list(dict.fromkeys(found))
