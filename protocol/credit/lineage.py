"""Which versions stand: the weights entries that grants lead to, and the one chain of them that counts now.

1. A grant counts where its base is legitimate, with the term and number that the grant names; before version 0 the
   base is the domain's id. A grant that does not count is as if it were not there.
2. From the base of a grant that counts, its trainer goes on: the weights entry by that trainer, of that term, that
   names the newest one as predecessor and has the next number. Of several such entries the one of lowest seq counts.
3. A version is legitimate if some grant that counts leads to it. Nothing ever stops being legitimate, so the order in
   which grants and entries come does not matter, and submissions made with it are judged whatever comes later.
4. The lineage is what the grant of the highest term that counts leads to: its base, what came before it, and what its
   trainer made of it.
5. Version 0 has the manifest and the hash of the whole that the genesis names.
6. A version's step is the newest ``step`` entry before it in its author's feed, if the weights name it and both agree
   on term, number and base.

Old versions are kept as a few numbers each (``Version``), the newest ``KEPT`` with their entries.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Final

from protocol import codec
from protocol.codec import Array, Fields, Hash, Int, Key, Many, Optional
from protocol.errors import PeerError
from protocol.log import entry as entries
from protocol.log.entry import Entry
from protocol.log.quorum import Grant
from protocol.log.replica import Replica
from protocol.records import Step, Weights

KEPT: Final = 1024
"""Newest versions of which the entries are kept, with the steps that made them."""

_COUNT: Final = Int()
Count = Annotated[int, _COUNT]
ENTRY: Final = entries.WIRE
"""An entry in a snapshot."""


@dataclass(frozen=True, slots=True)
class Version(Fields):
    """A legitimate version. ``anchor_height`` is that of the cut its entry anchors on; ``step`` names the step entry
    that made it, which trained on ``trained`` responses and counted ``rejected`` ones."""

    id: Hash
    term: Count
    number: Count
    author: Key
    predecessor: Hash | None
    anchor_height: Count
    step: Hash | None
    trained: Count
    rejected: Count


_MADE: Final = Array((("weights", ENTRY), ("step", Optional(ENTRY))))
SCHEMA: Final = Array(
    (
        ("versions", Many(Version.ARRAY, most=codec.MAX_INT)),
        ("kept", Many(_MADE, most=codec.MAX_INT)),
        ("slots", Many(_MADE, most=codec.MAX_INT)),
        ("steps", Many(ENTRY, most=codec.MAX_INT)),
        (
            "tips",
            Many(Array((("term", _COUNT), ("tip", Optional(codec.HASH)))), most=codec.MAX_INT),
        ),
    )
)


def pack(entry: Entry) -> list[Any]:
    """An entry, as a snapshot holds it."""
    return [entry.body, entry.signature]


def unpack(value: list[Any]) -> Entry:
    """The inverse of ``pack``; raises ``PeerError``."""
    return entries.parse(value[0], value[1], verify=False)


class Lineage:
    """The versions that the entries and grants taken so far make legitimate. ``versions`` maps ids to them, ``line``
    has the ids of the lineage: index and number are the same."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.versions: dict[bytes, Version] = {}
        self.line: list[bytes] = []
        self.trained: Counter[bytes] = Counter()
        """Responses that the steps of the lineage trained on, by trainer."""
        self.rejected = 0
        """Responses that the steps of the lineage counted as rejected."""
        self.step_count = 0
        self._kept: dict[bytes, tuple[Entry, Entry | None]] = {}
        self._slots: dict[tuple[bytes, int, int, bytes | None], tuple[Entry, Entry | None]] = {}
        self._newest_step: dict[bytes, Entry] = {}
        self._grants: dict[int, Grant] = {}
        # The grants that count, each with the newest version that it leads to, and those that wait for their base.
        self._tips: dict[int, bytes | None] = {}
        self._bases: dict[bytes, list[Grant]] = {}
        self._fresh: list[bytes] = []

    def knows_grants(self) -> bool:
        """Whether it took notice of the grants that count, and of no others."""
        return self._replica.grants.keys() == self._grants.keys()

    def see_grants(self) -> list[bytes]:
        """Take notice of new grants. Returns what became legitimate."""
        if not self.knows_grants():
            grants = self._replica.grants
            for term in self._grants.keys() - grants.keys():
                self._drop(term)
            for term in sorted(grants.keys() - self._grants.keys()):
                self._grants[term] = grant = grants[term].grant
                if grant.base == self._replica.domain.id or grant.base in self.versions:
                    self._judge(grant)
                else:
                    self._bases.setdefault(grant.base, []).append(grant)
        return self._take_fresh()

    def _drop(self, term: int) -> None:
        """A grant that led to nothing is void by now (see ``protocol.log.grants``)."""
        grant = self._grants.pop(term)
        if grant in (waiting := self._bases.get(grant.base, [])):
            waiting.remove(grant)
        if term in self._tips:
            leading = term == max(self._tips)
            del self._tips[term]
            if leading:
                self._lead_to(self._tips[max(self._tips)] if self._tips else None)

    def add_step(self, entry: Entry) -> None:
        """Take a step entry."""
        self._newest_step[entry.author] = entry

    def add_weights(self, entry: Entry, weights: Weights) -> list[bytes]:
        """Take a weights entry. Returns what became legitimate."""
        model = self._replica.domain.model
        genesis = (model.manifest.hash, model.manifest.size, model.whole)
        if weights.number == 0 and (weights.manifest, weights.manifest_size, weights.whole) != genesis:
            return []
        grant = self._grants.get(weights.term)
        if grant is not None and (grant.trainer != entry.author or self._passed(weights)):
            return []
        slot = (entry.author, weights.term, weights.number, weights.predecessor)
        self._slots.setdefault(slot, (entry, self._step_of(entry, weights)))
        if weights.term in self._tips:
            self._follow(weights.term)
        return self._take_fresh()

    def _passed(self, weights: Weights) -> bool:
        """Whether the term has a version of this number or a higher one already."""
        tip = self._tips.get(weights.term)
        return tip is not None and weights.number <= self.versions[tip].number

    def _step_of(self, entry: Entry, weights: Weights) -> Entry | None:
        step = self._newest_step.get(entry.author)
        if step is None or step.id != weights.step:
            return None
        made = step.payload
        assert isinstance(made, Step)
        fits = (made.term, made.number, made.base) == (weights.term, weights.number, weights.predecessor)
        return step if fits else None

    def _take_fresh(self) -> list[bytes]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def _judge(self, grant: Grant) -> None:
        """Count the grant, whose base is known, if it names its base rightly."""
        tip = None
        if grant.base != self._replica.domain.id:
            base = self.versions[grant.base]
            if (base.term, base.number) != (grant.base_term, grant.base_number):
                return
            tip = base.id
        self._tips[grant.term] = tip
        if grant.term == max(self._tips):
            self._lead_to(tip)
        self._follow(grant.term)

    def _lead_to(self, tip: bytes | None) -> None:
        line: list[bytes] = []
        while tip is not None:
            line.append(tip)
            tip = self.versions[tip].predecessor
        self.line, self.trained, self.rejected, self.step_count = [], Counter(), 0, 0
        for version in reversed(line):
            self._lengthen(self.versions[version])

    def _lengthen(self, version: Version) -> None:
        self.line.append(version.id)
        if version.step is not None:
            self.trained[version.author] += version.trained
            self.rejected += version.rejected
            self.step_count += 1

    def _follow(self, term: int) -> None:
        """Go on with what the trainer of this term, whose grant counts, made of its newest version."""
        trainer = self._grants[term].trainer
        while True:
            tip = self._tips[term]
            number = 0 if tip is None else self.versions[tip].number + 1
            found = self._slots.pop((trainer, term, number, tip), None)
            if found is None:
                return
            self._legitimise(term, *found)

    def _legitimise(self, term: int, entry: Entry, step: Entry | None) -> None:
        weights = entry.payload
        assert isinstance(weights, Weights)
        trained, rejected = 0, 0
        if step is not None:
            assert isinstance(step.payload, Step)
            trained, rejected = step.payload.trained, step.payload.rejected
        version = Version(
            id=entry.id,
            term=term,
            number=weights.number,
            author=entry.author,
            predecessor=weights.predecessor,
            anchor_height=self._replica.height(entry.anchor) or 0,
            step=None if step is None else step.id,
            trained=trained,
            rejected=rejected,
        )
        self.versions[entry.id] = version
        self._tips[term] = entry.id
        self._kept[entry.id] = (entry, step)
        self._fresh.append(entry.id)
        if term == max(self._tips):
            self._lengthen(version)
        while len(self._kept) > KEPT:
            oldest = next(iter(self._kept))
            kept = self._kept.pop(oldest)
            if oldest in self.line[-1:]:
                # What the next version goes on from stays: it moves to the end.
                self._kept[oldest] = kept
        for grant in self._bases.pop(entry.id, ()):
            self._judge(grant)

    # Reading

    def entry(self, weights: bytes) -> Entry | None:
        """The entry of a legitimate version that is kept."""
        found = self._kept.get(weights)
        return None if found is None else found[0]

    def entries(self) -> list[Entry]:
        """The weights entries of the lineage that are kept, oldest first."""
        return [found[0] for found in map(self._kept.get, self.line[-KEPT:]) if found is not None]

    def steps(self) -> list[Entry]:
        """The step entries that made the versions of the lineage, as far as they are kept, oldest first."""
        found = map(self._kept.get, self.line[-KEPT:])
        return [made[1] for made in found if made is not None and made[1] is not None]

    def position(self, weights: bytes) -> int | None:
        """The number of a version on the lineage, None for any other."""
        version = self.versions.get(weights)
        if version is None or version.number >= len(self.line) or self.line[version.number] != weights:
            return None
        return version.number

    # The snapshot

    def copy(self) -> Lineage:
        """A lineage of its own in the same state."""
        new = Lineage(self._replica)
        new.versions, new.line, new.trained = dict(self.versions), list(self.line), Counter(self.trained)
        new.rejected, new.step_count = self.rejected, self.step_count
        new._kept, new._slots, new._newest_step = dict(self._kept), dict(self._slots), dict(self._newest_step)
        new._grants, new._tips = dict(self._grants), dict(self._tips)
        new._bases = {base: list(grants) for base, grants in self._bases.items()}
        return new

    def to_value(self) -> list[Any]:
        """All of it but the grants, ready for ``codec.encode``."""
        return [
            [version.to_value() for version in self.versions.values()],
            [_made(*made) for made in self._kept.values()],
            [_made(*made) for made in self._slots.values()],
            [pack(step) for step in self._newest_step.values()],
            [[term, tip] for term, tip in self._tips.items()],
        ]

    @classmethod
    def from_value(cls, value: Any, replica: Replica) -> Lineage:
        """The inverse of ``to_value``, for a value that fits ``SCHEMA``, beside at least the grants of then.

        Raises ``PeerError`` for one that cannot be.
        """
        self = cls(replica)
        versions, kept, slots, steps, tips = value
        self.versions = {row[0]: Version(*row) for row in versions}
        for row in kept:
            entry, step = _unmade(row)
            self._kept[entry.id] = (entry, step)
        for row in slots:
            entry, step = _unmade(row)
            weights = entry.payload
            if not isinstance(weights, Weights):
                raise PeerError("snapshot: a version is no weights entry")
            self._slots[entry.author, weights.term, weights.number, weights.predecessor] = (entry, step)
        self._newest_step = {step.author: step for step in map(unpack, steps)}
        for term, tip in tips:
            if term not in replica.grants or (tip is not None and tip not in self.versions):
                raise PeerError("snapshot: a grant or a version is missing")
            self._grants[term] = replica.grants[term].grant
            self._tips[term] = tip
        for version in self.versions.values():
            before = self.versions.get(version.predecessor or b"")
            if version.number != (0 if before is None else before.number + 1):
                raise PeerError("snapshot: a version does not follow its predecessor")
        if self._tips:
            self._lead_to(self._tips[max(self._tips)])
        self.see_grants()
        self._fresh.clear()
        return self


def _made(weights: Entry, step: Entry | None) -> list[Any]:
    return [pack(weights), None if step is None else pack(step)]


def _unmade(value: list[Any]) -> tuple[Entry, Entry | None]:
    return unpack(value[0]), None if value[1] is None else unpack(value[1])
