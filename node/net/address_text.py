"""Whether a text is a multiaddr that a node can listen on, or dial a peer at."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from protocol.errors import PeerError
from protocol.identity import node_id

# A presence carries at most eight addresses of 128 characters; more could not be announced.
MAX_ADDRESSES: Final = 8
MAX_ADDRESS_LENGTH: Final = 128

_ADDRESS: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})(?:/p2p/([1-9A-HJ-NP-Za-km-z]+))?")


def address_problem(address: object, *, peer: bool) -> str | None:
    """What is wrong with a multiaddr text, or None. ``peer`` asks for a trailing ``/p2p/<peer id>``."""
    if not isinstance(address, str) or len(address) > MAX_ADDRESS_LENGTH:
        return f"an address is a text of at most {MAX_ADDRESS_LENGTH} characters"
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return f"{address!r} is not an address"
    kind, host, port, name = found.groups()
    if int(port) > 65535:
        return f"{address!r} has no valid port"
    if kind in ("ip4", "ip6"):
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            return f"{address!r} has no valid IP address"
        if version != int(kind[2:]):
            return f"{address!r} has an IP address of the other version"
    if peer:
        if name is None:
            return f"{address!r} lacks the peer's id (/p2p/12D3KooW…)"
        try:
            node_id(name)
        except PeerError:
            return f"{address!r} names no Ed25519 peer id"
        if int(port) == 0:
            return f"{address!r} has no valid port"
    elif name is not None:
        return f"{address!r} must not carry a peer id"
    elif kind not in ("ip4", "ip6"):
        return f"{address!r} is a name, and a node listens on an IP address"
    return None
