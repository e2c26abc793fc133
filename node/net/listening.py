"""Where a node with these listening addresses can be dialled, found without starting its network."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

from protocol.identity import peer_id

_WILDCARDS: Final = {"0.0.0.0": "ip4", "::": "ip6"}  # noqa: S104  compared with, not bound to
# Reserved for documentation (RFC 5737, RFC 3849): routed like any address far away, and nothing is sent.
_FAR: Final = {"ip4": "192.0.2.1", "ip6": "2001:db8::1"}


def split(address: str) -> tuple[str, str, int]:
    """Kind ("ip4", "ip6", "dns"…), host and port of a valid multiaddr text."""
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


def own_addresses(listen: Iterable[str], node: bytes) -> list[str]:
    """Full addresses (with ``/p2p/…``) for others to dial, in the order of ``listen``.

    A wildcard stands for the address that packets leave from. Left out are ports that are not known yet (0), and
    wildcards of a protocol with no way out.
    """
    found: list[str] = []
    for address in listen:
        kind, host, port = split(address)
        if port == 0:
            continue
        reached = outbound(kind) if host in _WILDCARDS else host
        if reached is not None:
            found.append(f"/{kind}/{reached}/tcp/{port}/p2p/{peer_id(node)}")
    return list(dict.fromkeys(found))
