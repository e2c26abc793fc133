"""Merkle trees of RFC 9162 section 2.1 over SHA-256.

1. The root of no leaves is SHA-256 of nothing; a leaf is hashed behind a 0x00 byte, an inner node behind 0x01.
2. A tree of n > 1 leaves splits at the largest power of two below n.
3. A ``CompactRange`` keeps only the roots of the perfect subtrees, largest first: enough to append and to give
   the root, so old leaves may be forgotten.
4. A consistency proof from size 0 proves nothing, and there is none.

Verifiers raise ``PeerError``; the proof makers raise ``LocalError`` for sizes that do not exist.
https://www.rfc-editor.org/rfc/rfc9162.html#section-2.1
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from protocol.errors import LocalError, PeerError
from protocol.values import value

EMPTY_ROOT: Final = sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    """The 32-byte hash of a leaf that holds ``data``."""
    return sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The 32-byte hash of an inner node."""
    return sha256(b"\x01" + left + right).digest()


@value
class CompactRange:
    """The first ``size`` leaves of a tree, as the roots of its perfect subtrees, largest first."""

    size: int = 0
    nodes: tuple[bytes, ...] = ()

    def append(self, data: bytes) -> CompactRange:
        """The range with one more leaf that holds ``data``."""
        node = leaf_hash(data)
        nodes = list(self.nodes)
        full = self.size
        while full & 1:
            node = node_hash(nodes.pop(), node)
            full >>= 1
        return CompactRange(self.size + 1, (*nodes, node))

    @property
    def root(self) -> bytes:
        """The root of the tree over these leaves."""
        if not self.nodes:
            return EMPTY_ROOT
        node = self.nodes[-1]
        for left in reversed(self.nodes[:-1]):
            node = node_hash(left, node)
        return node


EMPTY_RANGE: Final = CompactRange()


def root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaves that hold these byte strings."""
    return root_of([leaf_hash(leaf) for leaf in leaves])


def root_of(hashes: Sequence[bytes]) -> bytes:
    """The root over leaf hashes."""
    return levels(hashes)[-1][0] if hashes else EMPTY_ROOT


def levels(hashes: Sequence[bytes]) -> list[list[bytes]]:
    """All levels of the tree over these leaf hashes, the root's last. Nodes are paired level by level: an odd one moves
    up unchanged, as rule 2 has it."""
    found = [list(hashes)]
    while len(level := found[-1]) > 1:
        paired = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        found.append(paired + level[len(level) & ~1 :])
    return found


def _siblings(above: Sequence[Sequence[bytes]], index: int) -> list[bytes]:
    """The siblings on the way up from node ``index`` of the first of these levels, where it has one."""
    path: list[bytes] = []
    for level in above:
        path += level[index ^ 1 : (index ^ 1) + 1]
        index >>= 1
    return path


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The audit path of leaf ``index``, lowest sibling first (RFC 9162 section 2.1.3.1)."""
    if not 0 <= index < len(leaves):
        raise LocalError(f"there is no leaf {index} of {len(leaves)}")
    return _siblings(levels([leaf_hash(leaf) for leaf in leaves]), index)


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], tree_root: bytes) -> None:
    """Raise ``PeerError`` unless the leaf hash ``leaf`` stands at ``index`` in the tree of ``size`` leaves with
    root ``tree_root`` (RFC 9162 section 2.1.3.2)."""
    if not 0 <= index < size:
        raise PeerError("inclusion proof: the index lies outside the tree")
    left, length = _shape(index, size)
    if len(proof) != length:
        raise PeerError(f"inclusion proof: too {'long' if len(proof) > length else 'short'}")
    verify_path(leaf, left, proof, tree_root)


def sides(index: int, size: int) -> int:
    """On which side the siblings of an audit path stand: bit i is 1 where sibling i is the left one.

    Index and size give a path its shape, yet several sizes give the same one; ``sides`` says no more than the shape.
    """
    return _shape(index, size)[0]


def _shape(index: int, size: int) -> tuple[int, int]:
    """(sides, length) of the audit path of a leaf."""
    found = length = 0
    while size > 1:
        if index ^ 1 < size:
            found |= (index & 1) << length
            length += 1
        index, size = index >> 1, (size + 1) >> 1
    return found, length


def verify_path(leaf: bytes, sides: int, proof: Sequence[bytes], tree_root: bytes) -> None:
    """Raise ``PeerError`` unless the path ``proof`` leads from the leaf hash ``leaf`` to ``tree_root``: that the leaf
    is in the tree, and nothing about its place. Only one ``sides`` fits a path."""
    if any(len(value) != 32 for value in (leaf, tree_root, *proof)):
        raise PeerError("path: a hash has 32 bytes")
    if not 0 <= sides < 1 << len(proof):
        raise PeerError("path: it has sides for more siblings than there are")
    node = leaf
    for sibling in proof:
        node = node_hash(sibling, node) if sides & 1 else node_hash(node, sibling)
        sides >>= 1
    if node != tree_root:
        raise PeerError("path: it leads to another root")


def consistency_path(hashes: Sequence[bytes], size: int) -> list[bytes]:
    """The proof that the tree of the first ``size`` of these leaf hashes is a prefix of the tree of all (section
    2.1.4.1)."""
    if not 0 < size <= len(hashes):
        raise LocalError(f"there is no consistency proof from {size} to {len(hashes)} leaves")
    if size == len(hashes):
        return []
    # From the root of the last perfect subtree that both trees have; where it is the whole of the first, that is known.
    height = ((size - 1) ^ size).bit_length() - 1
    index = (size - 1) >> height
    above = levels(hashes)[height:]
    return above[0][index : index + 1] * (index > 0) + _siblings(above, index)
