"""One author's feed: the rules by which it grows, and its visible end as a replica holds it in memory; that of the
chain of cuts as well.

1. Entry n+1 names the id of entry n as ``prev``; sequence numbers have no gap.
2. Anchors never go back: the height of the anchored cut (0 for the domain's id) never falls within a feed.
3. At most ``MAX_ENTRIES_PER_ANCHOR`` entries of an author stand on one anchor.
4. Below its ``base`` a chain keeps no entries, only what follows from them: the state of the feed there.
5. Feed roots are computed when somebody asks. Those that are asked for lie near the end, or just behind what is final.

The first three are rules of validity: every replica refuses the same entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from protocol.constants import MAX_ENTRIES_PER_ANCHOR
from protocol.errors import LocalError, PeerError
from protocol.log.entry import NO_PREV, Entry
from protocol.log.merkle import EMPTY_RANGE, CompactRange
from protocol.log.quorum import CertifiedCut
from protocol.records import Weights
from protocol.values import value


@value
class FeedState:
    """Where a feed stands: ``next_seq`` and ``head`` (id of the newest entry, 32 zero bytes before the first), the
    height of its newest anchor and how many entries stand on it, and the compact range over its entry ids."""

    author: bytes
    next_seq: int = 0
    head: bytes = NO_PREV
    anchor_height: int = 0
    on_anchor: int = 0
    ids: CompactRange = EMPTY_RANGE

    def extend(self, new: Entry, anchor_height: int) -> FeedState:
        """The state after ``new``, whose anchor is the cut of that height; raises ``PeerError`` where a rule breaks."""
        if new.author != self.author:
            raise LocalError("an entry was handed to another author's feed")
        if new.seq != self.next_seq:
            raise PeerError(f"feed: entry {new.seq} where {self.next_seq} comes next")
        if new.prev != self.head:
            raise PeerError(f"feed: entry {new.seq} does not follow the one before")
        if anchor_height < self.anchor_height:
            raise PeerError(f"feed: the anchor of entry {new.seq} goes back")
        on_anchor = 1 if anchor_height > self.anchor_height else self.on_anchor + 1
        if on_anchor > MAX_ENTRIES_PER_ANCHOR:
            raise PeerError(f"feed: more than {MAX_ENTRIES_PER_ANCHOR} entries stand on one anchor")
        return FeedState(self.author, new.seq + 1, new.id, anchor_height, on_anchor, self.ids.append(new.id))


class Chain:
    """``entries`` are those from ``base.next_seq`` on, ``state`` is the feed's at its end; ``versions`` has (seq, term)
    of its weights entries. For reading only but for the methods."""

    __slots__ = ("_known", "base", "entries", "final", "state", "versions")

    def __init__(self, base: FeedState) -> None:
        self.base = base
        self.final = base
        """The state at the newest cut."""
        self.state = base
        self.entries: list[Entry] = []
        self.versions: list[tuple[int, int]] = []
        self._known = base

    @property
    def next_seq(self) -> int:
        """The seq of the next entry."""
        return self.state.next_seq

    def push(self, entry: Entry, anchor_height: int) -> None:
        """Take the next entry; raises ``PeerError`` where it breaks a rule of the feed."""
        self.state = self.state.extend(entry, anchor_height)
        self.entries.append(entry)
        if isinstance(entry.payload, Weights):
            self.versions.append((entry.seq, entry.payload.term))

    def at(self, seq: int) -> Entry | None:
        """The entry at ``seq``, if it is in memory."""
        place = seq - self.base.next_seq
        return self.entries[place] if 0 <= place < len(self.entries) else None

    def id_at(self, seq: int) -> bytes | None:
        """The id of the entry at ``seq``, if it is known without a look at the disk."""
        if seq >= 0 and seq == self.base.next_seq - 1:
            return self.base.head
        entry = self.at(seq)
        return None if entry is None else entry.id

    def slice(self, first: int, last: int | None = None) -> list[Entry]:
        """The entries ``first`` … ``last`` (both included) that are in memory; to the end where ``last`` is None."""
        start = self.base.next_seq
        end = len(self.entries) if last is None else max(last + 1 - start, 0)
        return self.entries[max(first - start, 0) : end]

    def state_at(self, seq: int, heights: Mapping[bytes, int]) -> FeedState | None:
        """The feed's state behind its entry ``seq``, from what is in memory; ``heights`` are those of cuts by id."""
        if not self.base.next_seq <= seq + 1 <= self.next_seq or seq < 0:
            return None
        if seq + 1 == self.next_seq:
            return self.state
        starts = (self._known, self.final, self.base)
        state = max((start for start in starts if start.next_seq <= seq + 1), key=lambda start: start.next_seq)
        for entry in self.slice(state.next_seq, seq):
            state = state.extend(entry, heights[entry.anchor])
        self._known = state
        return state

    def cut(self, seq: int, heights: Mapping[bytes, int]) -> None:
        """Take notice that a cut covers the feed up to ``seq``."""
        state = self.state_at(seq, heights)
        assert state is not None
        self.final = state

    def branch(self) -> Chain:
        """What is final of this chain, as one of its own."""
        other = Chain(self.base)
        other.final = other.state = other._known = self.final
        other.entries = self.slice(self.base.next_seq, self.final.next_seq - 1)
        other.versions = self.versions[: bisect_left(self.versions, (self.final.next_seq,))]
        return other

    def forget(self) -> Iterable[Entry]:
        """Drop what is final from memory; returns it."""
        gone = self.slice(self.base.next_seq, self.final.next_seq - 1)
        self.entries = self.slice(self.final.next_seq)
        self.versions = self.versions[bisect_left(self.versions, (self.final.next_seq,)) :]
        self.base = self.final
        if self._known.next_seq < self.base.next_seq:
            self._known = self.base
        return gone


class Cuts(Sequence[CertifiedCut]):
    """The cuts by height: the one of height h has index h - 1. Old ones may be out of memory (``LookupError``);
    iterating gives those that are in it."""

    def __init__(self) -> None:
        self._below = 0
        self._held: list[CertifiedCut] = []

    def __len__(self) -> int:
        return self._below + len(self._held)

    def __iter__(self) -> Iterator[CertifiedCut]:
        return iter(self._held)

    @overload
    def __getitem__(self, index: int) -> CertifiedCut: ...

    @overload
    def __getitem__(self, index: slice) -> list[CertifiedCut]: ...

    def __getitem__(self, index: int | slice) -> CertifiedCut | list[CertifiedCut]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self))) if place >= self._below]
        place = index + len(self) if index < 0 else index
        if not self._below <= place < len(self):
            raise IndexError(index)
        return self._held[place - self._below]

    @property
    def lowest(self) -> int:
        """The height of the oldest cut in memory."""
        return self._below + 1

    def append(self, certified: CertifiedCut) -> None:
        """Take the next cut."""
        self._held.append(certified)

    def resume(self, newest: CertifiedCut) -> None:
        """Begin with this cut."""
        self._below, self._held = newest.cut.height - 1, [newest]

    def forget(self, height: int) -> None:
        """Drop what is below this height from memory."""
        gone = max(height - self.lowest, 0)
        self._below += gone
        del self._held[:gone]
