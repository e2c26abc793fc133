"""Where a node's weights can be fetched: multiaddresses that end in ``/http`` or ``/https``.

``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/http[s][/http-path/PREFIX]``; the prefix is percent-encoded, as multiaddresses
have it, and stands before every path (a reverse proxy that serves more than one thing).

Addresses are a stranger's words, and this node is to dial them. So that nobody borrows it to reach what only it can
reach (services of its own machine, of its network, of its cloud):

1. An address out of no public range is dialled only where libp2p reaches the peer in no public range either: it is a
   neighbour then. One of this machine only where the peer itself is on this machine.
2. Link-local, unspecified and multicast addresses are dialled where libp2p reached the very peer at them, only.
3. A name is dialled at the public addresses that it resolves to, and at no others.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from protocol.errors import PeerError

MAX_ADDRESS: Final = 128
"""Longest text (characters): a presence carries no longer ones."""

_PATTERN: Final = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/([A-Za-z0-9.:_-]{1,100})/tcp/([0-9]{1,5})/(https?)(?:/http-path/([A-Za-z0-9._%-]{1,100}))?"
)
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._-]{1,100})+")


@dataclass(frozen=True, slots=True)
class BulkAddress:
    """A parsed address. ``kind`` is "ip4", "ip6" or "dns…"; ``prefix`` is empty or begins with a slash."""

    kind: str
    host: str
    port: int
    secure: bool
    prefix: str = ""

    def __str__(self) -> str:
        path = f"/http-path/{self.prefix[1:].replace('/', '%2F')}" if self.prefix else ""
        return f"/{self.kind}/{self.host}/tcp/{self.port}/{'https' if self.secure else 'http'}{path}"

    def base_path(self, domain: bytes) -> str:
        """What every request's path to the node begins with. ``domain`` is the domain's id."""
        return f"{self.prefix}/farflung/1/{domain.hex()}"


@lru_cache(1024)  # every presence brings the same addresses again
def parse(text: str) -> BulkAddress:
    """The address in ``text``; raises ``PeerError``."""
    match = _PATTERN.fullmatch(text)
    if match is None or len(text) > MAX_ADDRESS:
        raise PeerError(f"{text[:MAX_ADDRESS]!r} is not an address of the form /ip4/HOST/tcp/PORT/http")
    kind, host, port, scheme, path = match.groups()
    prefix = "" if path is None else "/" + unquote(path).strip("/")
    if not 0 < int(port) < 65536 or (prefix and (not _PREFIX.fullmatch(prefix) or ".." in prefix)):
        raise PeerError(f"{text!r} has no valid port or path")
    if kind in ("ip4", "ip6"):
        try:
            host = str(ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host))
        except ValueError:
            raise PeerError(f"{text!r} has no valid IP address") from None
    return BulkAddress(kind, host, int(port), scheme == "https", prefix)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            return ipaddress.IPv4Address(found.packed[12:])
        return found.ipv4_mapped or found.sixtofour or found
    return found


_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def public(host: str) -> bool:
    """Whether ``host`` is an IP address that means the same machine to everybody."""
    found = _ip(host)
    return found is not None and found.is_global and not found.is_multicast


def loopback(host: str) -> bool:
    """Whether ``host`` is an IP address of whoever dials it."""
    found = _ip(host)
    return found is not None and found.is_loopback


def may_dial(place: BulkAddress, remote: Sequence[str], *, near: bool) -> bool:
    """Rules 1 and 2 for a peer that libp2p reaches at the addresses ``remote``; ``near``: it is on this machine."""
    if not place.kind.startswith("ip") or public(place.host) or place.host in remote:
        return True
    found = _ip(place.host)
    if found is None or found.is_link_local or found.is_unspecified or found.is_multicast:
        return False
    return near if found.is_loopback else not all(public(host) for host in remote)
