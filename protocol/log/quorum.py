"""Electors: head reports, votes, cuts and term grants.

1. Of n electors f = ⌊(n−1)/3⌋ may be faulty; q = ⌊(n+f)/2⌋ + 1 make a quorum, so two quorums share an honest one.
2. A cut's body names its height (1, 2, … along the chain of cuts), the cut before (the domain's id for the first), the
   heads root over every author's certified head, the rows that moved since the cut before, ascending by author, and the
   tickets of those whom it admits (``protocol.log.admission``), ascending by node.
   ``id = SHA-256("farflung/cut-id/v1\\0" ‖ body)``. A cut that changes nothing is malformed. One height has one cut.
3. A ballot is ``[domain, epoch, cut id]``; epochs count attempts and never measure time. An elector votes for a ballot
   (round 1, ``identity.VOTE``): q votes make a ``PreparedCut``. On that it commits to the same ballot (round 2,
   ``identity.COMMIT``): q commits of one epoch make a ``CertifiedCut``. Both have the form
   ``[body, epoch, [[elector, signature], …]]``, ascending by elector; neither epoch nor signatures are part of the id.
4. An elector signs a report of its heads each epoch: those above the newest cut it knows, and the highest (term,
   number) among the weights it holds on the lineage. Reports only grow and never switch branches.
5. Who proposes what is the business of ``protocol.log.proposal``; when an elector may vote, that of
   ``protocol.log.elector_state``.
6. A grant gives a term to one trainer on a base version; an elector grants a term once. It names as its anchor the
   newest cut that its makers knew: in force are the electors of the cut after that one. Its certificate is
   ``[body, [[elector, signature], …]]``, under ``identity.GRANT``. Before version 0 the base is the domain's id, with
   base term and number 0.
7. Parsing a certificate verifies each signature under the key that it names. Whether the signers are a quorum of the
   electors in force depends on the log: see ``check_quorum`` and ``protocol.log.replica``.

Parsers raise ``PeerError`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, Self

from protocol import codec, identity
from protocol.codec import Array, Bytes, Formatted, Hash, Int, Key, Many
from protocol.constants import FORMAT, MAX_CUT_BYTES
from protocol.errors import LocalError, PeerError, ours
from protocol.identity import Identity
from protocol.log.admission import TICKETS, Ticket
from protocol.log.heads import FROZEN, HEAD, Head
from protocol.records import VOTES

CUT_CONTEXT: Final = b"farflung/cut-id/v1\0"
GRANT_CONTEXT: Final = b"farflung/grant-id/v1\0"
MAX_CHANGES: Final = 2**15
"""Most authors that one cut moves or one report lists; with it the largest body stays below ``MAX_CUT_BYTES``."""
MAX_GRANT_BYTES: Final = 16 << 10

_COUNTER = Int(0, 2**62)
Counter = Annotated[int, _COUNTER]
_SIGNED: Final = codec.envelope(MAX_CUT_BYTES)
_CERTIFIED: Final = Array((("body", Bytes(most=MAX_CUT_BYTES)), ("epoch", _COUNTER), ("signatures", VOTES)))
_GRANTED: Final = Array((("body", Bytes(most=MAX_GRANT_BYTES)), ("signatures", VOTES)))

Votes = tuple[tuple[bytes, bytes], ...]
"""(elector, signature) pairs, ascending by elector."""


def faults(electors: int) -> int:
    """How many of ``electors`` may be faulty."""
    return (electors - 1) // 3


def quorum(electors: int) -> int:
    """How many of ``electors`` certify something."""
    return (electors + faults(electors)) // 2 + 1


@dataclass(frozen=True, slots=True)
class Cut(Formatted):
    """A vector of heads, as the rows that moved since the cut ``prev``, and whom it admits. Make it with ``make`` or
    ``parse``."""

    domain: Hash
    height: Annotated[int, Int(1, 2**62)]
    prev: Hash
    heads_root: Hash
    changes: Annotated[tuple[Head, ...], Many(HEAD, most=MAX_CHANGES)]
    tickets: Annotated[tuple[Ticket, ...], TICKETS]
    body: bytes
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", sha256(CUT_CONTEXT + self.body).digest())

    @classmethod
    def make(
        cls,
        domain: bytes,
        height: int,
        prev: bytes,
        root: bytes,
        changes: Iterable[Head],
        tickets: Iterable[Ticket] = (),
    ) -> Cut:
        """A new cut; raises ``LocalError`` for one that others would refuse."""
        rows = [head.to_value() for head in sorted(changes, key=lambda head: head.author)]
        admitted = [ticket.to_value() for ticket in sorted(tickets, key=lambda ticket: ticket.node)]
        body = codec.encode([FORMAT, domain, height, prev, root, rows, admitted])
        with ours():
            return cls.parse(body)

    @classmethod
    def parse(cls, body: bytes) -> Cut:
        """Parse a cut's body; raises ``PeerError``."""
        made = cls.from_value(codec.parse(body, cls.ARRAY, max_bytes=MAX_CUT_BYTES, what="cut"), body=body)
        if (made.height == 1) != (made.prev == made.domain):
            raise PeerError("cut: the first cut and no other follows the domain's id")
        _check_rows(made.changes, "cut")
        if any(left.node >= right.node for left, right in pairwise(made.tickets)):
            raise PeerError("cut: the tickets are not strictly ascending by node")
        if not made.changes and not made.tickets:
            raise PeerError("cut: it changes nothing")
        return made


@dataclass(frozen=True, slots=True)
class Ballots:
    """A cut with the signatures of a quorum to its ballot of ``epoch``, one kind in each subclass."""

    CONTEXT: ClassVar[bytes]
    WHAT: ClassVar[str]

    cut: Cut
    epoch: int
    votes: Votes

    def encode(self) -> bytes:
        """The wire form ``[body, epoch, [[elector, signature], …]]``."""
        return codec.encode([self.cut.body, self.epoch, self.votes])

    @classmethod
    def parse(cls, data: bytes, *, verify: bool = True) -> Self:
        """Parse and verify every signature under the key it names (rule 7); raises ``PeerError``."""
        body, epoch, signatures = codec.parse(data, _CERTIFIED, max_bytes=MAX_CUT_BYTES, what=cls.WHAT)
        cut = Cut.parse(body)
        return cls(cut, epoch, _signed(signatures, cls.CONTEXT, ballot(cut, epoch), cls.WHAT, verify=verify))


@dataclass(frozen=True, slots=True)
class PreparedCut(Ballots):
    """A cut with the votes of a quorum: no other content has them in that epoch."""

    CONTEXT: ClassVar = identity.VOTE
    WHAT: ClassVar = "prepared cut"


@dataclass(frozen=True, slots=True)
class CertifiedCut(Ballots):
    """A cut with the commits of a quorum."""

    CONTEXT: ClassVar = identity.COMMIT
    WHAT: ClassVar = "cut"


@dataclass(frozen=True, slots=True)
class Grant(Formatted):
    """A term for ``trainer`` from the weights entry ``base`` on, whose term and number are ``base_*``; ``anchor`` is
    the newest cut that its makers knew, the domain's id before the first."""

    domain: Hash
    term: Annotated[int, Int(1, 2**62)]
    trainer: Key
    base: Hash
    base_term: Counter
    base_number: Counter
    anchor: Hash
    body: bytes
    id: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", sha256(GRANT_CONTEXT + self.body).digest())

    @classmethod
    def make(
        cls, domain: bytes, term: int, trainer: bytes, base: bytes, base_term: int, base_number: int, anchor: bytes
    ) -> Grant:
        """A new grant; raises ``LocalError`` for one that others would refuse."""
        body = codec.encode([FORMAT, domain, term, trainer, base, base_term, base_number, anchor])
        with ours():
            return cls.parse(body)

    @classmethod
    def parse(cls, body: bytes) -> Grant:
        """Parse a grant's body; raises ``PeerError``."""
        made = cls.from_value(codec.parse(body, cls.ARRAY, max_bytes=MAX_GRANT_BYTES, what="grant"), body=body)
        if made.base == made.domain:
            if made.base_term or made.base_number:
                raise PeerError("grant: before version 0 the base has term and number 0")
        elif not 0 < made.base_term < made.term:
            raise PeerError("grant: the base is not of an earlier term")
        return made


@dataclass(frozen=True, slots=True)
class CertifiedGrant:
    """A grant with the signatures of a quorum."""

    grant: Grant
    votes: Votes

    def encode(self) -> bytes:
        """The wire form ``[body, [[elector, signature], …]]``."""
        return codec.encode([self.grant.body, self.votes])

    @classmethod
    def parse(cls, data: bytes, *, verify: bool = True) -> CertifiedGrant:
        """Parse and verify every signature under the key it names (rule 7); raises ``PeerError``."""
        body, signatures = codec.parse(data, _GRANTED, max_bytes=MAX_GRANT_BYTES, what="certified grant")
        grant = Grant.parse(body)
        return cls(grant, _signed(signatures, identity.GRANT, body, "grant", verify=verify))


@dataclass(frozen=True, slots=True)
class Report(Formatted):
    """What an elector holds: its heads above ``newest_cut`` (a cut's id, or the domain's), and the highest (term,
    number) of the weights it holds, (0, 0) before version 0."""

    domain: Hash
    elector: Key
    epoch: Counter
    newest_cut: Hash
    heads: Annotated[tuple[Head, ...], Many(HEAD, most=MAX_CHANGES)]
    term: Counter
    number: Counter

    def sign(self, elector: Identity) -> bytes:
        """The wire form ``[body, signature]``."""
        if elector.node != self.elector:
            raise LocalError("a report is signed by the elector that it names")
        rows = tuple(sorted(self.heads, key=lambda head: head.author))
        body = codec.encode(replace(self, heads=rows).to_value())
        return codec.encode([body, elector.sign(identity.REPORT, body)])

    @classmethod
    def parse(cls, data: bytes, electors: Sequence[bytes]) -> Report:
        """Parse and verify a report; raises ``PeerError``."""
        body, signature = codec.parse(data, _SIGNED, max_bytes=MAX_CUT_BYTES, what="report")
        report = cls.from_value(codec.parse(body, cls.ARRAY, max_bytes=MAX_CUT_BYTES, what="report"))
        if report.elector not in electors:
            raise PeerError("report: its author is no elector")
        identity.verify(report.elector, identity.REPORT, body, signature, "report")
        _check_rows(report.heads, "report")
        return report


def ballot(cut: Cut, epoch: int) -> bytes:
    """What votes for and commits to ``cut`` in ``epoch`` sign."""
    return ballot_of(cut.domain, epoch, cut.id)


def ballot_of(domain: bytes, epoch: int, cut: bytes) -> bytes:
    """The ballot for the cut of this id."""
    return codec.encode([domain, epoch, cut])


def vote(elector: Identity, cut: Cut, epoch: int) -> tuple[bytes, bytes]:
    """(elector, signature): a vote for ``cut``, to be stored before it is sent."""
    return elector.node, elector.sign(identity.VOTE, ballot(cut, epoch))


def commit(elector: Identity, cut: Cut, epoch: int) -> tuple[bytes, bytes]:
    """(elector, signature): a commit to ``cut``; the prepared cut is stored as the lock before it is sent."""
    return elector.node, elector.sign(identity.COMMIT, ballot(cut, epoch))


def verify_vote(cut: Cut, epoch: int, elector: bytes, signature: bytes, electors: Sequence[bytes]) -> None:
    """Raise ``PeerError`` unless this is an elector's vote for ``cut`` in ``epoch``."""
    _verify(ballot(cut, epoch), elector, signature, electors, identity.VOTE, "vote")


def verify_commit(cut: Cut, epoch: int, elector: bytes, signature: bytes, electors: Sequence[bytes]) -> None:
    """Raise ``PeerError`` unless this is an elector's commit to ``cut`` in ``epoch``."""
    _verify(ballot(cut, epoch), elector, signature, electors, identity.COMMIT, "commit")


def grant_vote(elector: Identity, grant: Grant) -> tuple[bytes, bytes]:
    """(elector, signature): the elector's part of a grant's certificate."""
    return elector.node, elector.sign(identity.GRANT, grant.body)


def verify_grant_vote(grant: Grant, elector: bytes, signature: bytes, electors: Sequence[bytes]) -> None:
    """Raise ``PeerError`` unless this is an elector's signature for ``grant``."""
    _verify(grant.body, elector, signature, electors, identity.GRANT, "grant")


def prepare(cut: Cut, epoch: int, votes: Mapping[bytes, bytes], electors: Sequence[bytes]) -> PreparedCut:
    """The prepared cut from verified votes (elector → signature); ``LocalError`` below a quorum."""
    return PreparedCut(cut, epoch, _enough(votes, electors))


def certify(cut: Cut, epoch: int, commits: Mapping[bytes, bytes], electors: Sequence[bytes]) -> CertifiedCut:
    """The certificate from verified commits (elector → signature); ``LocalError`` below a quorum."""
    return CertifiedCut(cut, epoch, _enough(commits, electors))


def certify_grant(grant: Grant, votes: Mapping[bytes, bytes], electors: Sequence[bytes]) -> CertifiedGrant:
    """The certificate from verified signatures (elector → signature); ``LocalError`` below a quorum."""
    return CertifiedGrant(grant, _enough(votes, electors))


def check_quorum(votes: Votes, electors: Sequence[bytes], what: str) -> None:
    """Raise ``PeerError`` unless the signers are a quorum of ``electors`` and nobody else."""
    if any(elector not in electors for elector, _ in votes):
        raise PeerError(f"{what}: a signer is no elector")
    if len(votes) < quorum(len(electors)):
        raise PeerError(f"{what}: {len(votes)} signatures are no quorum of {len(electors)} electors")


def moves(old: Head | None, new: Head) -> bool:
    """Whether a row may follow ``old``: a longer feed, or the same one frozen; nothing follows a frozen row."""
    if old is None:
        return True
    if old.status == FROZEN:
        return False
    return new.seq > old.seq or (new.seq == old.seq and new.entry_id == old.entry_id and new.status == FROZEN)


def _check_rows(heads: Sequence[Head], what: str) -> None:
    if any(left.author >= right.author for left, right in pairwise(heads)):
        raise PeerError(f"{what}: the rows are not strictly ascending by author")


def _verify(
    body: bytes, elector: bytes, signature: bytes, electors: Sequence[bytes], context: bytes, what: str
) -> None:
    if elector not in electors:
        raise PeerError(f"{what}: a signer is no elector")
    identity.verify(elector, context, body, signature, what)


def _signed(signatures: list[Any], context: bytes, message: bytes, what: str, *, verify: bool) -> Votes:
    votes = tuple((elector, signature) for elector, signature in signatures)
    if any(left[0] >= right[0] for left, right in pairwise(votes)):
        raise PeerError(f"{what}: the signers are not strictly ascending")
    if verify:
        for elector, signature in votes:
            identity.verify(elector, context, message, signature, what)
    return votes


def _enough(votes: Mapping[bytes, bytes], electors: Sequence[bytes]) -> Votes:
    chosen = tuple(sorted((elector, signature) for elector, signature in votes.items() if elector in electors))
    if len(chosen) < quorum(len(electors)):
        raise LocalError(f"{len(chosen)} votes are no quorum of {len(electors)} electors")
    return chosen
