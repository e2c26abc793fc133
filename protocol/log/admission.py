"""Admission: how a stranger becomes a member, so that words and fresh keys buy nothing.

1. An outsider has no feed. It offers a *ticket*: work done for its key, or an invitation. A cut admits the keys whose
   tickets it holds, at most ``per_cut`` of the genesis; a ``join`` is valid only if the cut that it anchors on, or an
   earlier one, admitted its author. Whoever the genesis or an amendment in force names is admitted without.
2. A ticket's work is a nonce for which ``work_of`` is at least the asked work: the Argon2id hash (RFC 9106; 1 MiB, one
   pass) of domain, node, cut and nonce, salted with a context, taken as a fraction, its inverse. So the asked work is
   the number of hashes that one expects to make, and one hash checks it. The named cut is one of the newest
   ``TICKET_CUTS``: nobody stores up work.
3. The asked work begins with that of the genesis, doubles after ``FULL_CUTS`` cuts in a row that admitted as many by
   work as they may, and is halved after as many others, never below the genesis'. Above it the proposer's order is
   free. Where the genesis says "invited", work admits nobody.
4. An invitation is a key pair whose public half an ``invite`` entry names; its author is the founder or an elector in
   force when a cut covers it. A ticket carries the invitation key's signature over the node, so one that was overheard
   is of no use to anybody else. Cuts count its uses; those of one inviter are at most ``LONE_USES`` in
   ``LONE_CUTS`` cuts. A later ``invite`` entry for the same key by the same author replaces the earlier.
5. The electors' quorum admits: whether the work is enough, voters judge before they vote (``protocol.log.proposal``).
   Everything else here is a rule of validity.

Tickets travel in cuts and by gossip; ``Ticket.parse`` raises ``PeerError``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Annotated, Any, Final

from nacl import pwhash

from protocol import codec, identity
from protocol.codec import Array, Fields, Hash, Int, Key, Many, Signature
from protocol.constants import FULL_CUTS, MAX_ADMISSIONS, TICKET_CUTS
from protocol.domain import Domain
from protocol.errors import PeerError
from protocol.identity import Identity
from protocol.log.entry import Entry
from protocol.records import Invite

CONTEXT: Final = b"farflung/ticket/v1\0"
MEMORY: Final = 1 << 20
"""Bytes that one hash of a ticket's work fills."""
MAX_TICKET_BYTES: Final = 256
LONE_USES: Final = 32
LONE_CUTS: Final = 100

_SALT: Final = sha256(CONTEXT).digest()[:16]


@dataclass(frozen=True, slots=True)
class Ticket(Fields):
    """Lets ``node`` in: by the work of ``nonce`` on ``cut`` (its id, or the domain's), or by ``invitation`` (a public
    key) and its ``signature``; then the nonce is 0 and the cut the domain's id."""

    node: Key
    cut: Hash
    nonce: Annotated[int, Int()]
    invitation: Key | None = None
    signature: Signature | None = None

    def encode(self) -> bytes:
        """The form in which it is gossiped."""
        return codec.encode(self.to_value())

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        """The inverse of ``encode``; raises ``PeerError``."""
        return cls.from_value(codec.parse(data, cls.ARRAY, max_bytes=MAX_TICKET_BYTES, what="ticket"))

    @classmethod
    def invited(cls, domain: bytes, key: Identity, node: bytes) -> Ticket:
        """A ticket by the invitation whose key is ``key``."""
        return cls(node, domain, 0, key.node, key.sign(identity.INVITE, domain + node))


TICKETS: Final = Many(Ticket.ARRAY, most=MAX_ADMISSIONS)


def work_of(domain: bytes, ticket: Ticket) -> int:
    """The work that a ticket shows, in expected hashes; takes about a millisecond."""
    secret = domain + ticket.node + ticket.cut + ticket.nonce.to_bytes(8, "big")
    digest = pwhash.argon2id.kdf(16, secret, _SALT, opslimit=1, memlimit=MEMORY)
    return (1 << 64) // (int.from_bytes(digest[:8], "big") + 1)


def search(domain: bytes, node: bytes, cut: bytes, asked: int, nonces: Iterable[int]) -> Ticket | None:
    """The first of these nonces whose work is enough; None where none is."""
    for nonce in nonces:
        ticket = Ticket(node, cut, nonce)
        if asked <= 1 or work_of(domain, ticket) >= asked:
            return ticket
    return None


@dataclass(frozen=True, slots=True)
class OpenInvitation(Fields):
    """What is left of an invitation by ``author``."""

    author: Key
    uses: Annotated[int, Int()]
    expires: Annotated[int, Int()]


SNAPSHOT: Final = Array(
    (
        ("admitted", Many(Array((("node", codec.KEY), ("height", Int()))), most=codec.MAX_INT)),
        (
            "invitations",
            Many(Array((("key", codec.KEY), *OpenInvitation.SCHEMA)), most=codec.MAX_INT),
        ),
        ("lone", Many(Array((("author", codec.KEY), ("height", Int()))), most=codec.MAX_INT)),
        ("work", Int()),
        ("full", Int()),
        ("others", Int()),
    )
)
"""What ``Admissions.to_value`` gives."""


class Admissions:
    """Who was admitted, by which cut; what invitations are left, and what work is asked. For reading only, but for
    ``cover``. ``admitted`` maps nodes to the height of the cut; those named in the genesis are at 0."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._rules = domain.admission
        self.admitted: dict[bytes, int] = dict.fromkeys(sorted(domain.named), 0)
        self.invitations: dict[bytes, OpenInvitation] = {}
        self.work = self._rules.work
        """The asked work."""
        self._lone: list[tuple[bytes, int]] = []
        self._full = self._others = 0

    def by(self, node: bytes, height: int) -> bool:
        """Whether the cut of this height or an earlier one admitted the node."""
        return self.admitted.get(node, height + 1) <= height

    def problem(self, ticket: Ticket, height: int, height_of: Callable[[bytes], int | None]) -> str | None:
        """Why the cut of ``height`` may not admit by this ticket, its work apart; None where it may. ``height_of``
        gives the height of a cut that is held."""
        if ticket.node in self.admitted:
            return "that node was admitted before"
        if ticket.invitation is None:
            if self._rules.mode != "open":
                return "this domain is for the invited"
            at = height_of(ticket.cut)
            if ticket.signature is not None or at is None or at < height - TICKET_CUTS:
                return "its work is not for one of the newest cuts"
            return None
        found = self.invitations.get(ticket.invitation)
        if ticket.nonce or ticket.cut != self._domain.id or ticket.signature is None:
            return "an invitation needs no work and names the domain"
        if found is None or found.uses < 1 or found.expires < height:
            return "the invitation is unknown, used up or over"
        if self._uses_of(found.author, height) >= LONE_USES:
            return "its inviter let in as many lately as one may"
        try:
            identity.verify(
                ticket.invitation, identity.INVITE, self._domain.id + ticket.node, ticket.signature, "ticket"
            )
        except PeerError:
            return "the invitation's signature is wrong"
        return None

    def check(self, tickets: Sequence[Ticket], height: int, height_of: Callable[[bytes], int | None]) -> None:
        """Raise ``PeerError`` unless the cut of ``height`` may admit by all these tickets together."""
        if len(tickets) > self._rules.per_cut:
            raise PeerError(f"cut: it admits {len(tickets)} keys, and at most {self._rules.per_cut} are allowed")
        if self.choose(tickets, height, height_of) != list(tickets):
            wrong = next((found for one in tickets if (found := self.problem(one, height, height_of))), None)
            raise PeerError(f"cut: a ticket admits nobody ({wrong or 'an invitation has fewer uses left'})")

    def choose(self, tickets: Iterable[Ticket], height: int, height_of: Callable[[bytes], int | None]) -> list[Ticket]:
        """Those of the tickets, the first ones first, by which the cut of ``height`` may admit together, ascending by
        node."""
        chosen: dict[bytes, Ticket] = {}
        used: dict[bytes, int] = {}
        lone: dict[bytes, int] = {}
        for ticket in tickets:
            if len(chosen) == self._rules.per_cut:
                break
            if ticket.node in chosen or self.problem(ticket, height, height_of) is not None:
                continue
            if ticket.invitation is not None:
                left = self.invitations[ticket.invitation]
                uses, by_author = used.get(ticket.invitation, 0) + 1, lone.get(left.author, 0) + 1
                if uses > left.uses or self._uses_of(left.author, height) + by_author > LONE_USES:
                    continue
                used[ticket.invitation], lone[left.author] = uses, by_author
            chosen[ticket.node] = ticket
        return [chosen[node] for node in sorted(chosen)]

    def cover(
        self, height: int, tickets: Sequence[Ticket], entries: Iterable[Entry], inviters: Collection[bytes]
    ) -> None:
        """Take notice of the cut of ``height``: its tickets, which ``check`` let pass, and the entries that it covers
        newly. ``inviters`` are the electors in force."""
        for ticket in tickets:
            self.admitted[ticket.node] = height
            if ticket.invitation is not None:
                left = self.invitations[ticket.invitation]
                self.invitations[ticket.invitation] = replace(left, uses=left.uses - 1)
                self._lone.append((left.author, height))
        self._lone = [(author, at) for author, at in self._lone if at > height - LONE_CUTS]
        allowed = {*inviters, self._domain.creator}
        for entry in sorted(entries, key=lambda entry: (entry.author, entry.seq)):
            if isinstance(entry.payload, Invite) and entry.author in allowed:
                known = self.invitations.get(entry.payload.key)
                if known is None or known.author == entry.author:
                    invitation = OpenInvitation(entry.author, entry.payload.uses, entry.payload.expires)
                    self.invitations[entry.payload.key] = invitation
        self.invitations = {key: one for key, one in self.invitations.items() if one.uses > 0 and one.expires > height}
        self._adapt(sum(ticket.invitation is None for ticket in tickets) == self._rules.per_cut)

    def name(self, height: int, nodes: Iterable[bytes]) -> None:
        """An amendment that is in force after the cut of ``height`` names these."""
        for node in nodes:
            self.admitted.setdefault(node, height)

    def _adapt(self, full: bool) -> None:
        self._full, self._others = (self._full + 1, 0) if full else (0, self._others + 1)
        if self._full == FULL_CUTS:
            self.work, self._full = min(2 * self.work, 2**40), 0
        elif self._others == FULL_CUTS:
            self.work, self._others = max(self.work // 2, self._rules.work), 0

    def _uses_of(self, author: bytes, height: int) -> int:
        return sum(by == author and at > height - LONE_CUTS for by, at in self._lone)

    def to_value(self) -> list[Any]:
        """All of it, for a snapshot."""
        invitations = [[key, *one.to_value()] for key, one in self.invitations.items()]
        admitted = [list(pair) for pair in self.admitted.items()]
        return [admitted, invitations, [list(use) for use in self._lone], self.work, self._full, self._others]

    @classmethod
    def from_value(cls, value: Any, domain: Domain) -> Admissions:
        """The inverse, for a value that fits ``SNAPSHOT``."""
        self = cls(domain)
        admitted, invitations, lone, self.work, self._full, self._others = value
        self.admitted = dict(admitted)
        self.invitations = {key: OpenInvitation(*rest) for key, *rest in invitations}
        self._lone = [(author, height) for author, height in lone]
        return self
