"""A node's certificate for the data plane, as libp2p's TLS specifies it: self-signed, with a signature of the node's
key over the certificate's own. For the daemon, which has libp2p loaded."""

from __future__ import annotations

import ssl

from cryptography import x509
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.security.tls.certificate import create_cert_template, generate_certificate, verify_certificate_chain

from node.weights.bulk.pinned_tls import MAX_CERTIFICATE
from protocol.errors import PeerError
from protocol.identity import Identity


def make(identity: Identity) -> tuple[str, bytes]:
    """A new certificate of this node: certificate and key (PEM), and the certificate (DER)."""
    keys = create_new_key_pair(seed=identity.seed)
    certificate, key = generate_certificate(keys.private_key, create_cert_template())
    return certificate + key, ssl.PEM_cert_to_DER_cert(certificate)


def check(certificate: bytes, node: bytes) -> None:
    """Raise ``PeerError`` unless ``certificate`` (DER) is one of ``node``'s."""
    try:
        if len(certificate) > MAX_CERTIFICATE:
            raise ValueError("too large")
        key = verify_certificate_chain([x509.load_der_x509_certificate(certificate)])
        named = key.to_bytes()
    except Exception as error:  # libp2p's parser and cryptography's raise what they like
        raise PeerError(f"a certificate that is none ({str(error)[:100]})") from None
    if named != node:
        raise PeerError("a certificate of another node")
