"""Ed25519 identities (RFC 8032, through PyNaCl alone: mixing libraries would split replicas on edge cases).

1. A node id is the 32-byte Ed25519 public key; the libp2p PeerId is the same key in an identity multihash.
2. A signature covers ``context ‖ message``; the context ends in a NUL byte and differs for every kind of
   object, so that a signature over one kind never passes for another.
"""

from __future__ import annotations

import base58
from nacl.bindings import crypto_sign_open
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.signing import SigningKey

from protocol.errors import LocalError, PeerError

ENTRY = b"farflung/entry/v1\0"
GENESIS = b"farflung/genesis/v1\0"
PRESENCE = b"farflung/presence/v1\0"
REPORT = b"farflung/report/v1\0"
VOTE = b"farflung/vote/v1\0"
COMMIT = b"farflung/commit/v1\0"
AMEND = b"farflung/amend/v1\0"
GRANT = b"farflung/grant/v1\0"
CLOSE = b"farflung/close/v1\0"
REBIND = b"farflung/rebind/v1\0"
"""A recovery key's signatures (see ``protocol.log.recovery``)."""
INVITE = b"farflung/invite/v1\0"
"""An invitation key's signature over the node that it lets in (``protocol.log.admission``)."""
ABSENT = b"farflung/absent/v1\0"
"""An elector's word that it heard nothing of a node (``protocol.log.absence``)."""
DRAW = b"farflung/draw/v1\0"
"""A validator's signature over a submission, which draws the groups it replays (``protocol.work.schedule``)."""

# protobuf PublicKey{Type: Ed25519, Data: 32 bytes} in an identity multihash (libp2p peer-ids specification)
_PEER_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"


class Identity:
    """A private key with its node id. ``seed`` is 32 secret bytes."""

    __slots__ = ("_key", "node", "seed")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise LocalError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        self.seed = seed
        self._key = SigningKey(seed)
        self.node = bytes(self._key.verify_key)

    def sign(self, context: bytes, message: bytes) -> bytes:
        """The 64-byte signature over ``context ‖ message``."""
        return bytes(self._key.sign(context + message).signature)


def verify(node: bytes, context: bytes, message: bytes, signature: bytes, what: str = "object") -> None:
    """Raise ``PeerError`` unless ``signature`` is ``node``'s over ``context ‖ message``."""
    try:
        # What PyNaCl's VerifyKey does once it knows the lengths.
        if len(node) != 32 or len(signature) != 64:
            raise ValueError
        crypto_sign_open(signature + context + message, node)
    except (BadSignatureError, CryptoError, ValueError, TypeError):
        raise PeerError(f"{what}: the signature is wrong") from None


def peer_id(node: bytes) -> str:
    """The base58 libp2p PeerId ("12D3KooW…") of a node id."""
    return str(base58.b58encode(_PEER_ID_PREFIX + node), "ascii")


def node_id(peer: str) -> bytes:
    """The node id of a base58 libp2p PeerId; raises ``PeerError`` for anything but an Ed25519 one."""
    try:
        raw = bytes(base58.b58decode(peer))
    except ValueError:
        raise PeerError(f"{peer!r} is not a peer id") from None
    if len(raw) != 38 or not raw.startswith(_PEER_ID_PREFIX):
        raise PeerError(f"{peer!r} is not an Ed25519 peer id")
    return raw[6:]
