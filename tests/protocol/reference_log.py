"""What others' tools do with a transparency log, for tests: the whole tree, and the verifier of consistency proofs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from protocol import identity
from protocol.errors import LocalError, PeerError
from protocol.log import merkle, signed_note
from protocol.log.checkpoint import Checkpoint
from protocol.log.heads import BUCKETS, EMPTY_BUCKET, Head, bucket
from protocol.log.merkle import node_hash
from protocol.log.signed_note import Note, VerifierKey

ED25519: Final = 0x01
"""Signature type: Ed25519 over the note's text."""

_VKEY: Final = re.compile(r"([^+]+)\+([0-9a-f]{8})\+([A-Za-z0-9+/]+=*)")


class ReferenceLog:
    """The tree over the bodies of a domain's cuts."""

    def __init__(self, domain: bytes, bodies: Iterable[bytes] = ()) -> None:
        self.domain = domain
        self.bodies = list(bodies)

    def checkpoint(self, size: int | None = None) -> Checkpoint:
        """The checkpoint at ``size``, the newest where that is None."""
        size = len(self.bodies) if size is None else size
        return Checkpoint(self.domain, size, merkle.root(self.bodies[:size]))

    def consistency(self, size1: int, size2: int) -> list[bytes]:
        """The proof that the checkpoint of ``size2`` cuts continues that of ``size1`` (at least 1)."""
        return merkle.consistency_path([merkle.leaf_hash(body) for body in self.bodies[:size2]], size1)


def verify_consistency(size1: int, size2: int, proof: Sequence[bytes], root1: bytes, root2: bytes) -> None:
    """Raise ``PeerError`` unless the tree of ``size1`` leaves with ``root1`` is a prefix of the tree of ``size2``
    leaves with ``root2`` (RFC 9162 section 2.1.4.2). ``size1`` 0 is refused."""
    if not 0 < size1 <= size2:
        raise PeerError("consistency proof: the sizes are out of order")
    if size1 == size2:
        if proof or root1 != root2:
            raise PeerError("consistency proof: equal sizes need equal roots and no proof")
        return
    if any(len(value) != 32 for value in (root1, root2, *proof)):
        raise PeerError("consistency proof: a hash has 32 bytes")
    path = list(proof)
    if size1 & (size1 - 1) == 0:
        path.insert(0, root1)
    if not path:
        raise PeerError("consistency proof: too short")
    position, last = size1 - 1, size2 - 1
    while position & 1:
        position >>= 1
        last >>= 1
    first = second = path[0]
    for node in path[1:]:
        if last == 0:
            raise PeerError("consistency proof: too long")
        if position & 1 or position == last:
            first = node_hash(node, first)
            second = node_hash(node, second)
            while not position & 1 and position:
                position >>= 1
                last >>= 1
        else:
            second = node_hash(second, node)
        position >>= 1
        last >>= 1
    if last != 0:
        raise PeerError("consistency proof: too short")
    if first != root1 or second != root2:
        raise PeerError("consistency proof: it leads to other roots")


def parse_verifier_key(text: str) -> VerifierKey:
    """The inverse of ``VerifierKey.encode``; raises ``PeerError``."""
    found = _VKEY.fullmatch(text)
    if found is None or not signed_note.good_name(found[1]):
        raise PeerError("verifier key: it has another form")
    raw = signed_note.unbase64(found[3], "verifier key")
    if len(raw) != 33:
        raise PeerError("verifier key: an Ed25519 key has 32 bytes")
    made = VerifierKey(found[1], raw[0], raw[1:])
    if made.id.hex() != found[2]:
        raise PeerError("verifier key: the key id belongs to another key")
    return made


def verify_note(note: Note, keys: Iterable[VerifierKey]) -> list[VerifierKey]:
    """Which of ``keys`` (of type ``ED25519``) signed the note: at least one, or ``PeerError``."""
    signers = []
    for key in keys:
        if key.type != ED25519:
            raise LocalError(f"a key of type {key.type} does not sign plain notes")
        signatures = note.of(key)
        for signature in signatures:
            identity.verify(key.key, b"", note.text.encode(), signature, "note")
        if signatures:
            signers.append(key)
    if not signers:
        raise PeerError("note: no known key signed it")
    return signers


def bucket_digests(heads: Iterable[Head]) -> list[bytes]:
    """The 256 digests of 32 bytes by which two nodes find the buckets that differ."""
    leaves: dict[int, list[bytes]] = {}
    for head in sorted(heads, key=lambda head: head.author):
        leaves.setdefault(bucket(head.author), []).append(head.leaf())
    return [
        sha256(b"".join(leaves[number])).digest() if number in leaves else EMPTY_BUCKET for number in range(BUCKETS)
    ]
