"""The error tree: who is at fault decides the class.

1. ``LocalError`` is our own bug or misuse: it must never be caused by bytes from outside.
2. ``PeerError`` is rubbish from a peer: it is logged once, counted and scored, and stops nothing else.
3. ``Evidence`` is misbehaviour that carries a signature: it can be shown to others.

Parsers of bytes from outside raise ``PeerError`` or ``Evidence`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Error(Exception):
    """Base of every error that Farflung raises on purpose."""


class LocalError(Error):
    """A mistake of this program or of its caller."""


class PeerError(Error):
    """A peer sent something malformed, oversized, unsigned or out of place."""


class Evidence(Error):
    """A peer signed something that proves misbehaviour.

    ``proof`` is the encoded proof object (for a fork, see ``protocol.log.fork_proof.ForkProof``).
    """

    def __init__(self, message: str, proof: bytes) -> None:
        super().__init__(message)
        self.proof = proof


@contextmanager
def ours(what: str = "") -> Iterator[None]:
    """Around a look at our own object as a peer would have it: what makes that a ``PeerError`` is a ``LocalError``,
    whose message begins with ``what``."""
    try:
        yield
    except PeerError as error:
        raise LocalError(what + str(error)) from None
