"""Bearer tokens of the data plane: who may fetch, from where, until when.

A daemon hands them out over libp2p, where it knows the peer; its child checks them. Only those two know the secret.

1. A token is base64url of ``node id ‖ expiry in ms (8) ‖ number of hosts (1) ‖ hosts (16 each) ‖ HMAC-SHA-256 of all
   that (32)``. Time is this machine's monotonic clock, which its processes share; a secret lives as long as a daemon.
2. A host is the IPv6 form of an address that the peer's libp2p connections come from. Without hosts the token is good
   from everywhere: behind a proxy addresses say nothing, and TLS names the peer itself.
3. All addresses of the machine itself are one host (``LOCAL``): a neighbour may dial any of them.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protocol.errors import PeerError

LIFETIME: Final = 600
"""Seconds for which a new token is good."""

MAX_HOSTS: Final = 4
LOCAL: Final = bytes(15) + b"\x01"
"""The host of every address of this machine: ::1."""

_FIXED: Final = 32 + 8 + 1
_MAC: Final = 32
MAX_TOKEN: Final = 4 * -(-(_FIXED + 16 * MAX_HOSTS + _MAC) // 3)
"""Longest token (characters)."""


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """What a valid token says: whose it is, from which hosts (empty: from everywhere), until when (monotonic clock)."""

    node: bytes
    hosts: tuple[bytes, ...]
    until: float

    def good_from(self, host: bytes) -> bool:
        """Whether a connection from ``host`` may use the token."""
        return not self.hosts or host in self.hosts


def host_of(address: str, own: Sequence[str] = ()) -> bytes:
    """The 16 bytes of an IP address; ``own`` are addresses of this machine. Raises ``ValueError`` for no address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    if parsed.is_loopback or str(parsed) in own:
        return LOCAL
    return parsed.packed if parsed.version == 6 else bytes(10) + b"\xff\xff" + parsed.packed


def mint(secret: bytes, node: bytes, hosts: Sequence[bytes], expiry: float) -> str:
    """A token for ``node``, good until ``expiry`` (seconds of the monotonic clock)."""
    kept = hosts[:MAX_HOSTS]
    body = node + int(expiry * 1000).to_bytes(8, "big") + bytes([len(kept)]) + b"".join(kept)
    return base64.urlsafe_b64encode(body + hmac.digest(secret, body, "sha256")).decode().rstrip("=")


def check(secret: bytes, token: str, now: float) -> TokenGrant:
    """What ``token`` grants at ``now`` (seconds of the monotonic clock); raises ``PeerError`` for one that is none."""
    if len(token) > MAX_TOKEN:
        raise PeerError("the token is too long")
    try:
        data = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
    except ValueError:  # binascii.Error and UnicodeEncodeError are ones
        raise PeerError("the token is not base64") from None
    body, mac = data[:-_MAC], data[-_MAC:]
    if len(body) < _FIXED or not hmac.compare_digest(hmac.digest(secret, body, "sha256"), mac):
        raise PeerError("the token is not one of this node's")
    until = int.from_bytes(body[32:40], "big") / 1000
    if until <= now:
        raise PeerError("the token has expired")
    return TokenGrant(body[:32], tuple(body[at : at + 16] for at in range(_FIXED, len(body), 16)), until)
