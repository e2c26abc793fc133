"""Heads: where each author's feed ends, one root over all of them, and what to ask a peer for.

1. A head is ``(author, seq, entry id, feed root, status)``. The feed root is the RFC 9162 root over the ids of the
   feed's entries 0 … seq. Status 0 is live; 1 is frozen: the author signed two branches, and the feed ends here.
2. The heads root is the RFC 9162 root over the canonical encodings of all heads, sorted by author.
3. For comparison heads fall into 256 buckets by the first byte of the author; a bucket's digest is SHA-256 over
   its heads' encodings in order, and 32 zero bytes where it is empty.
4. A peer's longer feed is asked for from where ours ends. Where a peer has another entry at a place that we hold
   too, that entry alone is asked for: together with ours it proves the fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final

from protocol import codec
from protocol.codec import Fields, Hash, Int, Key
from protocol.log import merkle
from protocol.values import value

LIVE: Final = 0
FROZEN: Final = 1
BUCKETS: Final = 256
EMPTY_BUCKET: Final = bytes(32)
MAX_RANGE: Final = 256
"""Most entries that one request asks for, so that an answer stays small and is verified as it comes."""


@value
class Head(Fields):
    """The end of one author's feed: ``seq`` of its newest entry, that entry's id, the root over all entry ids."""

    author: Key
    seq: Annotated[int, Int(0, 2**62)]
    entry_id: Hash
    feed_root: Hash
    status: Annotated[int, Int(LIVE, FROZEN)] = LIVE

    def to_value(self) -> list[Any]:
        """As every other class; a log has hundreds of thousands."""
        return [self.author, self.seq, self.entry_id, self.feed_root, self.status]

    def leaf(self) -> bytes:
        """The encoding that the heads root and the bucket digests cover."""
        return codec.encode(self.to_value())


HEAD: Final = Head.ARRAY


@value
class RangeRequest:
    """Entries ``first_seq`` … ``last_seq`` (both included) of one author."""

    author: bytes
    first_seq: int
    last_seq: int


def heads_root(heads: Iterable[Head]) -> bytes:
    """The 32-byte root over all heads; their order does not matter."""
    return merkle.root([head.leaf() for head in sorted(heads, key=lambda head: head.author)])


def bucket(author: bytes) -> int:
    """The bucket, 0 … 255, that an author's head falls into."""
    return author[0]


def plan(
    ours: Mapping[bytes, Head],
    theirs: Iterable[Head],
    id_at: Callable[[bytes, int], bytes | None] | None = None,
) -> list[RangeRequest]:
    """What to ask the peer for that reported the heads ``theirs``.

    ``id_at(author, seq)`` gives the id of our entry there, or None. Without it only our heads are compared.
    Fork proofs travel on their own.
    """
    requests = []
    for head in theirs:
        mine = ours.get(head.author)
        next_seq = 0 if mine is None else mine.seq + 1
        if head.seq >= next_seq:
            # Where we know of a fork and the peer does not, it is the peer that has something to learn.
            if mine is None or mine.status == LIVE or head.status == FROZEN:
                requests.append(RangeRequest(head.author, next_seq, min(head.seq, next_seq + MAX_RANGE - 1)))
            continue
        if mine is not None and mine.seq == head.seq:
            held: bytes | None = mine.entry_id
        else:
            held = id_at(head.author, head.seq) if id_at is not None else None
        if held is not None and held != head.entry_id:
            requests.append(RangeRequest(head.author, head.seq, head.seq))
    return requests
