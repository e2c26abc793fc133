"""TLS 1.3 between the nodes of a private domain, each side pinned to the other's certificate.

1. Certificates are self-signed and name their libp2p peer (``node.weights.bulk.node_certificate``). Both sides learn
   the other's over libp2p, where tokens are handed out, and trust that one alone: OpenSSL itself refuses any other, so
   a stranger does not get through the handshake.
2. Pinned certificates need neither names nor a clock. Sessions are not resumed: each handshake shows the certificate.

Of the standard library only: the child holds no libp2p.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Final

MAX_CERTIFICATE: Final = 2048
"""Largest certificate (bytes, DER)."""

MAX_STALE: Final = 64
"""Certificates that nobody has any more, and that OpenSSL would still let in, until they are forgotten."""

_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL's x509_vfy.h


def _context(side: int, own: str) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # All have the same subject: only as the end of a partial chain is the very certificate looked for.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    # The module reads keys from files only; this one has no name and never meets a disk.
    descriptor = os.memfd_create("tls")
    try:
        os.write(descriptor, own.encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def _trust(context: ssl.SSLContext, certificate: bytes) -> None:
    """Let ``certificate`` (DER) through handshakes. One that OpenSSL takes for none keeps out no other."""
    with suppress(ssl.SSLError):
        context.load_verify_locations(cadata=certificate)


@lru_cache(64)  # making one takes longer than a handshake, and each flow wants one
def client_context(own: str, peer: bytes) -> ssl.SSLContext:
    """What connects to the node with certificate ``peer`` (DER); ``own``: this node's certificate and key (PEM).

    Raises ``ssl.SSLError`` for a certificate that is none.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, own)
    context.load_verify_locations(cadata=peer)
    return context


class Doorkeeper:
    """Which certificates get in, and whose they are. May be used from any thread."""

    def __init__(self, own: str, admitted: Mapping[bytes, bytes], *, max_stale: int = MAX_STALE) -> None:
        """``admitted``: node ids by certificate (DER)."""
        self._own = own
        self._max_stale = max_stale
        self._lock = Lock()
        self._peers = dict(admitted)
        self.context = self._make()
        """That of the next handshake."""
        self._stale = 0

    def _make(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER, self._own)
        context.num_tickets = 0
        for certificate in self._peers:
            _trust(context, certificate)
        return context

    def admit(self, node: bytes, certificate: bytes) -> None:
        """Let ``node`` in with this certificate, and with none that it had before."""
        with self._lock:
            if self._peers.get(certificate) == node:
                return
            others = {known: peer for known, peer in self._peers.items() if peer != node}
            self._stale += len(self._peers) - len(others)
            self._peers = others | {certificate: node}
            if self._stale <= self._max_stale:
                # OpenSSL guards its store, also where handshakes use it. What a node had before it does not forget, but
                # ``peer_of`` does.
                _trust(self.context, certificate)
            else:
                self.context, self._stale = self._make(), 0  # a millisecond for each certificate

    def certificate_of(self, node: bytes) -> bytes | None:
        """The certificate that ``node`` is known by."""
        return next((certificate for certificate, peer in self._peers.items() if peer == node), None)

    def peer_of(self, certificate: bytes) -> bytes | None:
        """Whose certificate it is; None for nobody's."""
        return self._peers.get(certificate)
