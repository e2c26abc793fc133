"""What others' tools do with a transparency log, for tests: the whole tree, and the verifier of consistency proofs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.errors import PeerError
from protocol.log import merkle
from protocol.log.checkpoint import Checkpoint
from protocol.log.merkle import node_hash


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
