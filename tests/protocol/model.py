"""Explicit-state exploration of ``protocol.log.elector_state``: every reachable world of four electors, with the real
rules.

One elector is faulty. Every vote, commit and grant of it always exists, and it shows any proposal with any
justification that exists to anybody, at any time, in every epoch: that includes whatever honest proposers would do, and
proposers that die half-way. What an honest elector signed may reach everybody at any later time, again and again, or
never: lost, repeated and reordered messages are the same worlds. So is a crash between storing and sending, for the
stored state is all that an elector has: the message is lost. ``forgetful`` makes the mistake of sending first: then a
crash between the two takes back the state and not the message.

A world is the sorted tuple of its three honest electors, so worlds that differ in their names only are one. What an
elector can do depends on itself and on what is prepared, certified and granted; that is computed once, by the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from protocol.log import elector_state as rules
from protocol.log.elector_state import ElectorState
from protocol.log.heads import Head, heads_root
from protocol.log.proposal import choose
from protocol.log.quorum import CertifiedCut, Cut, Grant, PreparedCut, quorum
from tests.protocol.builders import digest, key

DOMAIN = digest("domain")
ELECTORS = tuple(sorted(key(name).node for name in "abcd"))
assert quorum(len(ELECTORS)) == 3
OTHERS = tuple((elector, bytes(64)) for elector in ELECTORS[1:])
"""A quorum's signatures, without those of elector 0, in whose place rules are asked: they look no closer."""


def cut_on(prev: Cut | None, name: str) -> Cut:
    """A cut of one row on ``prev``, the first one where that is None."""
    head = Head(digest(name), 1, digest(f"entry {name}"), digest(f"root {name}"))
    before = () if prev is None else prev.changes
    parent, height = (DOMAIN, 1) if prev is None else (prev.id, prev.height + 1)
    return Cut.make(DOMAIN, height, parent, heads_root([*before, head]), [head])


class Local(NamedTuple):
    """An honest elector: number of its stored state, of the newest cut it knows (-1 for none), and what it ever sent,
    bit by bit: ballots by ``Model.bit``, grants by number."""

    state: int
    newest: int
    votes: int
    commits: int
    grants: int


World = tuple[int, int, int]
"""Numbers of the honest electors' ``Local`` in ``Model.locals``, ascending."""


class Shared(NamedTuple):
    """What two honest electors and the faulty one make: bits as in ``Local``."""

    prepared: int
    certified: int
    granted: int


def _two(a: int, b: int, c: int) -> int:
    """The bits that two of three have."""
    return (a & b) | (a & c) | (b & c)


@dataclass(frozen=True)
class Rules:
    """What electors follow; tests put a mistake in the place of one."""

    vote: Callable[..., rules.ElectorState | str] = rules.vote
    commit: Callable[..., rules.ElectorState | str] = rules.commit
    follow: Callable[..., rules.ElectorState] = rules.follow
    sign_grant: Callable[..., rules.ElectorState | str] = rules.sign_grant
    know_grant: Callable[..., rules.ElectorState] = rules.know_grant


RULES = Rules()


class Model:
    """Cuts and grants that may be proposed, in epochs 1 … ``epochs``. ``versions`` are those that a cut makes final.
    ``twins``: the two cuts may change places, and worlds that differ in that only are one."""

    def __init__(
        self,
        cuts: Sequence[Cut],
        epochs: int,
        *,
        grants: Sequence[Grant] = (),
        versions: Sequence[Sequence[rules.Version]] = (),
        by: Rules = RULES,
        learn: bool = False,
        forgetful: bool = False,
        twins: bool = False,
    ) -> None:
        self.by = by
        self.cuts = cuts
        self.epochs = epochs
        self.grants = grants
        self.versions = versions or [()] * len(cuts)
        self.learn = learn
        self.forgetful = forgetful
        self.twins = twins
        self.states: list[ElectorState] = []
        self._numbers: dict[ElectorState, int] = {}
        self._steps: dict[tuple[object, ...], int | None] = {}
        self.locals: list[Local] = []
        self._places: dict[Local, int] = {}
        self._moves: dict[tuple[int, Shared], list[int]] = {}
        self._mirrored: dict[int, int] = {}
        self._judged: dict[tuple[object, ...], str | None] = {}

    def bit(self, epoch: int, cut: int) -> int:
        """The bit of a ballot."""
        return 1 << (epoch - 1) * len(self.cuts) + cut

    def ballots(self, bits: int) -> list[tuple[int, int]]:
        """(epoch, cut) of every bit."""
        every = ((epoch, cut) for epoch in range(1, self.epochs + 1) for cut in range(len(self.cuts)))
        return [ballot for ballot in every if bits & self.bit(*ballot)]

    # What the rules say

    def step(self, rule: str, state: int, *arguments: int) -> int | None:
        """What a rule makes of a state, by number; None where it refuses."""
        place = (rule, state, *arguments)
        if place not in self._steps:
            outcome = self._ask(rule, self.states[state], *arguments)
            self._steps[place] = None if isinstance(outcome, str) else self._number(outcome)
        return self._steps[place]

    def _ask(self, rule: str, state: ElectorState, *arguments: int) -> ElectorState | str:
        match rule:
            case "vote":
                epoch, cut, proof = arguments
                justified = PreparedCut(self.cuts[cut], proof, OTHERS) if proof else None
                return self.by.vote(state, self.cuts[cut], epoch, justified, ELECTORS, self.versions[cut], limit=99)
            case "commit":
                epoch, cut = arguments
                return self.by.commit(state, PreparedCut(self.cuts[cut], epoch, OTHERS), ELECTORS)
            case "follow":
                epoch, cut = arguments
                certified = CertifiedCut(self.cuts[cut], epoch, OTHERS)
                return self.by.follow(state, certified, ELECTORS[0], ELECTORS, self.versions[cut])
            case "grant":
                return self.by.sign_grant(state, self.grants[arguments[0]], 0, limit=99)
            case _:
                return self.by.know_grant(state, self.grants[arguments[0]])

    def _number(self, state: ElectorState) -> int:
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    # Worlds

    def _place(self, one: Local) -> int:
        place = self._places.setdefault(one, len(self.locals))
        if place == len(self.locals):
            self.locals.append(one)
        return place

    def first(self) -> World:
        """Nothing happened yet."""
        one = self._place(Local(self._number(ElectorState()), -1, 0, 0, 0))
        return one, one, one

    def shared(self, world: World) -> Shared:
        """What is prepared, certified and granted in a world."""
        a, b, c = (self.locals[one] for one in world)
        return Shared(
            _two(a.votes, b.votes, c.votes), _two(a.commits, b.commits, c.commits), _two(a.grants, b.grants, c.grants)
        )

    def successors(self, world: World) -> Iterator[World]:
        """What one step of one elector makes of a world."""
        made = self.shared(world)
        for place, one in enumerate(world):
            if place and world[place - 1] == one:
                continue  # its twin's steps lead to the same worlds
            moves = self._moves.get((one, made))
            if moves is None:
                options = dict.fromkeys(self._options(self.locals[one], made))
                moves = self._moves[one, made] = [self._place(new) for new in options]
            for new in moves:
                yield self._canonical((*world[:place], new, *world[place + 1 :]))

    def _canonical(self, world: tuple[int, ...]) -> World:
        a, b, c = sorted(world)
        if self.twins:
            return min((a, b, c), self._sorted([self._mirror(one) for one in world]))
        return a, b, c

    @staticmethod
    def _sorted(world: Sequence[int]) -> World:
        a, b, c = sorted(world)
        return a, b, c

    def _mirror(self, place: int) -> int:
        """The elector in the world in which the two cuts have changed places."""
        found = self._mirrored.get(place)
        if found is None:
            one = self.locals[place]
            state = self.states[one.state]
            names = {cut.id: self.cuts[1 - number] for number, cut in enumerate(self.cuts)}
            voted = None if state.voted is None else names[state.voted].id
            lock = state.lock and replace(state.lock, cut=names[state.lock.cut.id])
            votes, commits = (
                sum(self.bit(epoch, 1 - cut) for epoch, cut in self.ballots(bits)) for bits in (one.votes, one.commits)
            )
            newest = one.newest if one.newest < 0 else 1 - one.newest
            number = self._number(replace(state, voted=voted, lock=lock))
            found = self._mirrored[place] = self._place(Local(number, newest, votes, commits, one.grants))
        return found

    def _options(self, one: Local, made: Shared) -> Iterator[Local]:
        parent = DOMAIN if one.newest < 0 else self.cuts[one.newest].id
        prepared = self.ballots(made.prepared)
        for cut, content in enumerate(self.cuts):
            if content.prev == parent:
                proofs = [0, *(epoch for epoch, shown in prepared if shown == cut)]
                for epoch in range(1, self.epochs + 1):
                    for proof in proofs:
                        state = self.step("vote", one.state, epoch, cut, proof)
                        if state is not None:
                            yield from self._sent(one, state, one._replace(votes=one.votes | self.bit(epoch, cut)))
        for epoch, cut in prepared:
            state = self.step("commit", one.state, epoch, cut)
            if state is not None:
                yield from self._sent(one, state, one._replace(commits=one.commits | self.bit(epoch, cut)))
        for epoch, cut in self.ballots(made.certified):
            # Whoever follows the last cut of the model only stops taking part: that adds nothing.
            if self.cuts[cut].prev == parent and any(after.prev == self.cuts[cut].id for after in self.cuts):
                state = self.step("follow", one.state, epoch, cut)
                assert state is not None
                yield one._replace(state=state, newest=cut)
        for number in range(len(self.grants)):
            state = self.step("grant", one.state, number)
            if state is not None:
                yield from self._sent(one, state, one._replace(grants=one.grants | 1 << number))
        if self.learn and made.granted:
            known = [number for number in range(len(self.grants)) if made.granted >> number & 1]
            state = self.step("know", one.state, max(known, key=lambda number: self.grants[number].term))
            assert state is not None
            yield one._replace(state=state)

    def _sent(self, one: Local, state: int, sent: Local) -> Iterator[Local]:
        yield sent._replace(state=state)
        if self.forgetful:
            yield sent

    def explore(self, wrong: Callable[[World], str | None], limit: int = 2_000_000) -> tuple[int, str | None]:
        """(number of worlds, what is wrong with the first one where something is)."""
        first = self.first()
        seen, left = {first}, [first]
        while left:
            world = left.pop()
            problem = wrong(world)
            if problem is not None:
                return len(seen), problem
            for new in self.successors(world):
                if new not in seen:
                    seen.add(new)
                    left.append(new)
            assert len(seen) <= limit, "the world grew beyond what a test has time for"
        return len(seen), None

    # What must hold

    def conflict(self, world: World) -> str | None:
        """Two cuts of one height, cuts that do not nest, or two prepared cuts of one epoch and height."""
        made = self.shared(world)
        place = ("conflict", made)
        if place not in self._judged:
            self._judged[place] = self._conflict(made.prepared, made.certified)
        return self._judged[place]

    def _conflict(self, prepared: int, certified: int) -> str | None:
        cuts = {cut for _, cut in self.ballots(certified)}
        for one in cuts:
            for other in cuts - {one}:
                a, b = self.cuts[one], self.cuts[other]
                if a.height == b.height:
                    return f"height {a.height} has two cuts"
                if a.height + 1 == b.height and b.prev != a.id:
                    return "cuts do not nest"
        ballots = self.ballots(prepared)
        for epoch, one in ballots:
            for other_epoch, other in ballots:
                if epoch == other_epoch and one < other and self.cuts[one].height == self.cuts[other].height:
                    return "an epoch prepared two cuts"
        return None

    def stuck(self, world: World) -> str | None:
        """Whether the honest electors alone, all of them, cannot make the next cut from here."""
        place = (
            self.shared(world).certified,
            *sorted((self.locals[one].state, self.locals[one].newest) for one in world),
        )
        if place not in self._judged:
            self._judged[place] = self._stuck(world)
        return self._judged[place]

    def _stuck(self, world: World) -> str | None:
        certified = self.ballots(self.shared(world).certified)
        ends: list[tuple[int, int]] = []
        for one in world:
            state, newest = self.locals[one].state, self.locals[one].newest
            while True:
                parent = DOMAIN if newest < 0 else self.cuts[newest].id
                found = next((ballot for ballot in certified if self.cuts[ballot[1]].prev == parent), None)
                if found is None:
                    break
                after = self.step("follow", state, *found)
                assert after is not None
                state, newest = after, found[1]
            ends.append((state, newest))
        if len({newest for _, newest in ends}) > 1:
            return "they follow different cuts"
        parent = DOMAIN if ends[0][1] < 0 else self.cuts[ends[0][1]].id
        fresh = next((cut for cut in self.cuts if cut.prev == parent), None)
        if fresh is None:
            return None
        chosen = choose([self.states[state].lock for state, _ in ends], lambda: fresh)
        assert chosen is not None
        cut, epoch = self.cuts.index(chosen[0]), self.epochs + 1
        proof = 0 if chosen[1] is None else chosen[1].epoch
        for state, _ in ends:
            voted = self.step("vote", state, epoch, cut, proof)
            if voted is None or self.step("commit", voted, epoch, cut) is None:
                return "honest electors alone are stuck"
        return None


def all_of(*checks: Callable[[World], str | None]) -> Callable[[World], str | None]:
    """The first complaint of several checks."""

    def check(world: World) -> str | None:
        return next((problem for one in checks if (problem := one(world)) is not None), None)

    return check


def two_trainers(model: Model) -> Callable[[World], str | None]:
    """Whether a term has two trainers."""

    def check(world: World) -> str | None:
        bits = model.shared(world).granted
        terms = [grant.term for number, grant in enumerate(model.grants) if bits >> number & 1]
        return "a term has two trainers" if len(set(terms)) < len(terms) else None

    return check


def given_up(model: Model) -> Callable[[World], str | None]:
    """Whether a certified cut holds a version that a certified grant of a later term passes over."""

    def check(world: World) -> str | None:
        made = model.shared(world)
        final: Iterable[rules.Version] = [
            version for _, cut in model.ballots(made.certified) for version in model.versions[cut]
        ]
        for number, grant in enumerate(model.grants):
            if made.granted >> number & 1:
                base = (grant.base_term, grant.base_number)
                if any(version[0] < grant.term and version > base for version in final):
                    return "a final version was given up"
        return None

    return check
