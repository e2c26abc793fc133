"""A vector of heads with its root and its bucket digests kept up to date, for logs of many authors.

The levels of the heads tree (``protocol.log.heads`` rule 2) are kept: a head that moves costs one path, not the tree.
Only a new author, whose leaf shifts those behind it, has the tree built anew, from leaf hashes that are kept as well.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from hashlib import sha256

from protocol.log import merkle
from protocol.log.heads import BUCKETS, EMPTY_BUCKET, Head, bucket


class HeadTable:
    """The vector. ``rows`` (author → head) is for reading only."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Head] = {}
        self._order: list[bytes] = []
        self._leaves: dict[bytes, bytes] = {}
        self._levels: list[list[bytes]] = [[]]
        # The authors in the order in which the levels have them.
        self._built: list[bytes] = []
        self._digests = [EMPTY_BUCKET] * BUCKETS
        # Authors whose leaves the levels do not show yet, and whether the levels have another order.
        self._moved: set[bytes] = set()
        self._reordered = False
        self._stale_buckets: set[int] = set()

    def set(self, head: Head) -> None:
        """Put an author's head in the place of its last one."""
        if head.author not in self.rows:
            insort(self._order, head.author)
            self._reordered = True
        self.rows[head.author] = head
        self._leaves[head.author] = head.leaf()
        self._moved.add(head.author)
        self._stale_buckets.add(bucket(head.author))

    def remove(self, author: bytes) -> None:
        """Take an author's head out, if it is there."""
        if self.rows.pop(author, None) is not None:
            del self._order[bisect_left(self._order, author)], self._leaves[author]
            self._moved.discard(author)
            self._reordered = True
            self._stale_buckets.add(bucket(author))

    def root(self) -> bytes:
        """The heads root."""
        self._refresh()
        return self._levels[-1][0] if self._order else merkle.EMPTY_ROOT

    def root_with(self, changes: Iterable[Head]) -> bytes:
        """The heads root that the vector would have with ``changes``."""
        self._refresh()
        leaves = {head.author: merkle.leaf_hash(head.leaf()) for head in changes}
        if not leaves.keys() <= self.rows.keys():
            old = dict(zip(self._order, self._levels[0], strict=True))
            merged = {**old, **leaves}
            return merkle.root_of([merged[author] for author in sorted(merged)])
        changed = {bisect_left(self._order, author): leaf for author, leaf in leaves.items()}
        for level, above in zip(self._levels, self._levels[1:], strict=False):
            changed = _parents(level, changed)
            assert len(above) == (len(level) + 1) // 2
        return changed.get(0) or self.root()

    def digests(self) -> list[bytes]:
        """The digests of the 256 buckets."""
        for number in self._stale_buckets:
            first = bisect_left(self._order, bytes([number]))
            last = bisect_left(self._order, bytes([number + 1])) if number + 1 < BUCKETS else len(self._order)
            leaves = [self._leaves[author] for author in self._order[first:last]]
            self._digests[number] = sha256(b"".join(leaves)).digest() if leaves else EMPTY_BUCKET
        self._stale_buckets.clear()
        return list(self._digests)

    def in_buckets(self, wanted: Iterable[int], after: bytes, most: int) -> list[Head]:
        """The heads of these buckets whose authors come behind ``after``, ascending, at most ``most``."""
        found: list[Head] = []
        for number in sorted(wanted):
            place = max(bisect_left(self._order, bytes([number])), bisect_left(self._order, after))
            while place < len(self._order) and bucket(self._order[place]) == number and len(found) < most:
                if self._order[place] > after:
                    found.append(self.rows[self._order[place]])
                place += 1
        return found

    def _refresh(self) -> None:
        if self._reordered:
            known: Mapping[bytes, bytes] = dict(zip(self._built, self._levels[0], strict=True))
            self._levels = merkle.levels(
                [
                    merkle.leaf_hash(self._leaves[author]) if author in self._moved else known[author]
                    for author in self._order
                ]
            )
            self._built = list(self._order)
        elif self._moved:
            changed = {bisect_left(self._order, a): merkle.leaf_hash(self._leaves[a]) for a in self._moved}
            for level in self._levels:
                for place, node in changed.items():
                    level[place] = node
                changed = _parents(level, changed)
        self._moved.clear()
        self._reordered = False


def _parents(level: list[bytes], changed: Mapping[int, bytes]) -> dict[int, bytes]:
    """The nodes above ``changed`` ones, in a tree whose odd last node moves up as it is."""
    parents: dict[int, bytes] = {}
    for place in changed:
        left = place & ~1
        if left >> 1 in parents:
            continue
        if left + 1 == len(level):
            parents[left >> 1] = changed[left]
        else:
            one, other = changed.get(left) or level[left], changed.get(left + 1) or level[left + 1]
            parents[left >> 1] = merkle.node_hash(one, other)
    return parents
