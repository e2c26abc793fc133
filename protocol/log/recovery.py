"""Recovery keys: how a stolen node's feed is closed, and how a lost node's credit goes on under a new key.

1. A ``join`` commits to SHA-256 of a recovery public key. Its private half is kept away from the machine.
2. ``close`` [target, recovery public key, signature] may stand in anybody's feed, ``rebind`` in the feed of the node
   that takes over. The signature is the recovery key's, over the canonical array ``[format, domain, target, author]``,
   in a context of its own for each kind. Without it the entry is malformed, and so is a rebind of the author itself.
3. Whether the key is the one that the target's join committed to is decided when a cut covers the entry: where it
   is not, or where that cut does not cover the join, the entry has no effect, then or later.
4. A close or rebind that has effect ends the target's feed at its certified head of that cut. What was final stays.
5. Of several rebinds of one target the first counts, by height of the covering cut and entry id. Credit moves along the
   chain old → new → newer; a rebind that would lead back to its author has no effect.

Rules 3 to 5 are those of ``protocol.log.endings``. ``check`` raises ``PeerError``.
"""

from __future__ import annotations

from hashlib import sha256

from protocol import codec, identity
from protocol.constants import FORMAT
from protocol.errors import LocalError, PeerError
from protocol.identity import Identity
from protocol.records import Close, Rebind


def commitment(public: bytes) -> bytes:
    """What a join says of the recovery key with this public half."""
    return sha256(public).digest()


def close(key: Identity, domain: bytes, target: bytes, author: bytes) -> Close:
    """The payload by which ``author`` closes the feed of ``target``, signed by its recovery ``key``."""
    return Close(target, key.node, key.sign(identity.CLOSE, _statement(domain, target, author)))


def rebind(key: Identity, domain: bytes, old: bytes, author: bytes) -> Rebind:
    """The payload by which ``author`` takes over from ``old``, signed by the recovery ``key`` of ``old``."""
    if old == author:
        raise LocalError("a node does not take over from itself")
    return Rebind(old, key.node, key.sign(identity.REBIND, _statement(domain, old, author)))


def check(record: Close | Rebind, domain: bytes, author: bytes) -> None:
    """Raise ``PeerError`` unless the payload holds its recovery key's signature (rule 2)."""
    context = identity.CLOSE if isinstance(record, Close) else identity.REBIND
    if isinstance(record, Rebind) and record.target == author:
        raise PeerError("rebind: a node does not take over from itself")
    message = _statement(domain, record.target, author)
    identity.verify(record.recovery, context, message, record.signature, record.KIND)


def _statement(domain: bytes, target: bytes, author: bytes) -> bytes:
    return codec.encode([FORMAT, domain, target, author])
