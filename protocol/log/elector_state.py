"""An elector's state and the rules by which it votes, commits and grants: pure, so that tests explore them wholly.

Every function takes the state and returns the next one, which is stored before anything is sent, or a reason why not.
Epochs and terms begin with 1. Two quorums share an honest elector; from that and these rules follows that two
certified cuts of one height are the same, and that a term has one trainer.

Cuts
 1. One vote an epoch, and both votes and commits go to ever higher epochs. What was voted for is voted for again.
 2. Whoever committed to a cut is *locked* on it: at this height it votes for another one only if that one was prepared
    in a later epoch than its lock, and before the epoch of the vote. Were there one round only, a proposer that died
    with the first certificate would leave room for a second one of the same height.
 3. A commit needs a prepared cut of its epoch, which becomes the lock; not after a vote in a later epoch.
 4. A certified cut opens the next height: lock and vote are gone, the epochs stay.

Terms
 5. One grant a term, and ever higher terms.
 6. The base is at least the highest (term, number) of the versions on the lineage that this elector voted for or
    that are final: what is final is never given up. Votes count, not reports: they certify.
 7. After signing a grant, until it or a higher one is certified, the elector neither reports nor votes for versions
    of older terms beyond its base, nor grants on them. A prepared cut that holds some proves that the grant cannot be
    certified (its quorum would share an honest elector with the cut's), and lifts that.

A lost past (a restored backup)
 8. Whoever is shown a signature of its own that its state does not know abstains from everything, until a cut is
    certified without it in a later epoch than the others had reached when they were asked. Where the others are no
    quorum that cannot be: then nothing is lost but what no rule can mend, and it goes on above their epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Array, Bytes, Formatted, Hash, Int, Many, Optional
from protocol.constants import MAX_CUT_BYTES
from protocol.errors import PeerError
from protocol.log.amendment import Amendment
from protocol.log.quorum import CertifiedCut, Cut, Grant, PreparedCut, check_quorum, faults, quorum

MAX_BARS: Final = 64
"""Grants that were signed and never certified, of which an elector takes notice."""

Version = tuple[int, int]
"""The (term, number) of weights."""

_COUNTER: Final = Int(0, 2**62)
Counter = Annotated[int, _COUNTER]


@dataclass(frozen=True, slots=True)
class ElectorState(Formatted):
    """What an elector must not forget.

    ``height`` is the one being decided. ``voted`` is the cut it voted for in ``voted_epoch``, None where that was at an
    earlier height. ``abstains`` is the epoch that a cut must pass before it takes part again. ``granted`` is the grant
    of ``term`` that it signed, ``highest`` that of rule 6, ``bars`` are (term, base term, base number) of rule 7;
    ``amendment`` of number ``amended`` is the last that it signed.
    """

    height: Counter = 1
    voted_epoch: Counter = 0
    voted: Hash | None = None
    committed_epoch: Counter = 0
    lock: Annotated[
        PreparedCut | None, Optional(Bytes(most=MAX_CUT_BYTES, parse=PreparedCut.parse, pack=PreparedCut.encode))
    ] = None
    abstains: Counter | None = None
    term: Counter = 0
    granted: Hash | None = None
    highest: Annotated[Version, Array((("term", _COUNTER), ("number", _COUNTER)))] = (0, 0)
    amended: Counter = 0
    amendment: Hash | None = None
    bars: Annotated[
        tuple[tuple[int, int, int], ...],
        Many(Array((("term", _COUNTER), ("base_term", _COUNTER), ("base_number", _COUNTER))), most=MAX_BARS),
    ] = ()

    @property
    def epoch(self) -> int:
        """The highest epoch it voted or committed in, or knows a cut of."""
        return max(self.voted_epoch, self.committed_epoch)

    def encode(self) -> bytes:
        """The stored form."""
        return codec.encode(self.to_value())

    @classmethod
    def decode(cls, data: bytes) -> ElectorState:
        """The inverse of ``encode``; raises ``PeerError``."""
        return cls.from_value(codec.parse(data, cls.ARRAY, max_bytes=2 * MAX_CUT_BYTES, what="elector state"))


# Cuts


def vote(
    state: ElectorState,
    cut: Cut,
    epoch: int,
    proof: PreparedCut | None,
    electors: Sequence[bytes],
    versions: Iterable[Version] = (),
    *,
    limit: int,
) -> ElectorState | str:
    """Vote for ``cut`` in ``epoch``, whose content is in order. ``proof`` is what the proposer justifies it with,
    ``versions`` are those on the lineage that the cut makes final. No epoch is above ``limit``
    (``protocol.log.turns``): nobody uses them up."""
    if state.abstains is not None:
        return "it abstains, for a part of its past is lost"
    if cut.height != state.height:
        return f"it decides height {state.height}"
    if epoch == state.voted_epoch and cut.id == state.voted:
        return state
    if epoch <= state.epoch:
        return f"it is at epoch {state.epoch}"
    if epoch > limit:
        return "that epoch is too far ahead"
    if proof is not None and (wrong := _proof_problem(proof, cut, epoch, electors)) is not None:
        return wrong
    lock = state.lock
    same = lock is not None and lock.cut.id == cut.id
    if lock is not None and not same and (proof is None or proof.epoch <= lock.epoch):
        return f"it is locked on another cut since epoch {lock.epoch}"
    versions = list(versions)
    bars = [bar for bar in state.bars if any(_barred(bar, version) for version in versions)]
    if bars and not same and proof is None:
        return f"it signed a grant of term {bars[0][0]} on an older base than a version of this cut"
    return replace(
        state,
        voted_epoch=epoch,
        voted=cut.id,
        highest=max([state.highest, *versions]),
        bars=tuple(bar for bar in state.bars if bar not in bars),
    )


def commit(state: ElectorState, prepared: PreparedCut, electors: Sequence[bytes]) -> ElectorState | str:
    """Commit to a prepared cut, in its epoch."""
    if state.abstains is not None:
        return "it abstains, for a part of its past is lost"
    if prepared.cut.height != state.height:
        return f"it decides height {state.height}"
    if (wrong := _no_quorum(prepared, electors, "prepared cut")) is not None:
        return wrong
    lock = state.lock
    if lock is not None and prepared.epoch == state.committed_epoch and prepared.cut.id == lock.cut.id:
        return state
    if prepared.epoch < state.voted_epoch or prepared.epoch <= state.committed_epoch:
        return f"it is at epoch {state.epoch}"
    return replace(state, committed_epoch=prepared.epoch, lock=prepared)


def follow(
    state: ElectorState,
    certified: CertifiedCut,
    me: bytes,
    electors: Sequence[bytes],
    versions: Iterable[Version] = (),
    *,
    asked: bool = True,
) -> ElectorState:
    """Take notice of a cut that the own replica holds; ``versions`` as for ``vote``. Cuts come in order.

    ``asked``: the others said which epochs they reached since this elector knows that it lost something. Before that
    no cut ends its abstention: it may be an old one.
    """
    cut, epoch = certified.cut, certified.epoch
    versions = list(versions)
    signed = any(elector == me for elector, _ in certified.votes)
    if signed and epoch > state.committed_epoch:
        state = abstain(state, epoch, electors)
    elif not signed and asked and state.abstains is not None and epoch > state.abstains:
        state = replace(state, abstains=None)
    if cut.height >= state.height:
        state = replace(state, height=cut.height + 1, voted=None, lock=None)
    return replace(
        state,
        voted_epoch=max(state.voted_epoch, epoch),
        # A later vote at an older height is none: the epoch that was voted in is below the cut's.
        voted=state.voted if state.voted_epoch >= epoch else None,
        highest=max([state.highest, *versions]),
        bars=tuple(bar for bar in state.bars if not any(_barred(bar, version) for version in versions)),
    )


def _proof_problem(proof: PreparedCut, cut: Cut, epoch: int, electors: Sequence[bytes]) -> str | None:
    if proof.cut.id != cut.id or proof.epoch >= epoch:
        return "its justification is another cut's or of a later epoch"
    return _no_quorum(proof, electors, "justification")


def _no_quorum(prepared: PreparedCut, electors: Sequence[bytes], what: str) -> str | None:
    try:
        check_quorum(prepared.votes, electors, what)
    except PeerError as error:
        return str(error)
    return None


# Terms


def sign_grant(state: ElectorState, grant: Grant, known: int, *, limit: int) -> ElectorState | str:
    """Sign ``grant``, whose base is a version on the lineage; ``known`` is the highest term that is granted. No term is
    above ``limit``."""
    if state.abstains is not None:
        return "it abstains, for a part of its past is lost"
    if grant.id == state.granted and grant.term > known:
        return state
    if grant.term <= max(state.term, known):
        return f"it is at term {max(state.term, known)}"
    if grant.term > limit:
        return "that term is too far ahead"
    base = (grant.base_term, grant.base_number)
    if base < state.highest:
        return "the base is older than what may be final"
    if any(_barred(bar, base) for bar in state.bars):
        return "it signed a grant on an older base"
    bar = (grant.term, *base)
    # One that bars nothing more than the new one is not needed.
    kept = [old for old in state.bars if old[1:] < base]
    return replace(state, term=grant.term, granted=grant.id, bars=tuple([*kept, bar][-MAX_BARS:]))


def sign_amendment(state: ElectorState, amendment: Amendment, known: int) -> ElectorState | str:
    """Sign an amendment of the next number, the first of that number; ``known`` is that of the newest in force."""
    if state.abstains is not None:
        return "it abstains, for a part of its past is lost"
    if amendment.number != known + 1:
        return f"the next amendment has number {known + 1}"
    if amendment.id == state.amendment:
        return state
    if amendment.number <= state.amended:
        return f"it signed another amendment of number {state.amended}, and signs one of each number"
    return replace(state, amended=amendment.number, amendment=amendment.id)


def know_grant(state: ElectorState, grant: Grant) -> ElectorState:
    """Take notice of a certified grant, the one of the highest term held: it decides what the lineage is."""
    base = (grant.base_term, grant.base_number)
    return replace(
        state,
        highest=base if _barred((grant.term, *base), state.highest) else state.highest,
        bars=tuple(bar for bar in state.bars if bar[0] > grant.term),
    )


def barred(state: ElectorState, version: Version) -> bool:
    """Whether reports end before this version (rule 7)."""
    return any(_barred(bar, version) for bar in state.bars)


def contested(state: ElectorState, known: int) -> bool:
    """Whether it signed a grant of a higher term than any that is certified."""
    return any(bar[0] > known for bar in state.bars)


def _barred(bar: tuple[int, int, int], version: Version) -> bool:
    return version[0] < bar[0] and version > bar[1:]


# A lost past


def unknown(state: ElectorState, epoch: int, cut: bytes, *, committed: bool) -> bool:
    """Whether an own signature under this ballot is one that ``state`` would not have given."""
    if committed:
        return epoch > state.committed_epoch
    return epoch > state.voted_epoch or (epoch == state.voted_epoch and state.voted not in (None, cut))


def abstain(state: ElectorState, epoch: int, electors: Sequence[bytes]) -> ElectorState:
    """Take no part until a cut certified without this elector passed ``epoch`` (rule 8)."""
    if quorum(len(electors)) > len(electors) - 1:
        return replace(state, voted_epoch=max(state.voted_epoch, epoch), voted=None)
    return replace(state, abstains=max(epoch, state.abstains or 0))


def reached(claims: Sequence[int], electors: int) -> int | None:
    """The epoch that the others had reached by their ``claims``, None while too few answered.

    At least q−1 others signed any certificate. Of ``a`` answers at least ``a − (n − q)`` are theirs, less the other
    faulty ones; so that many highest claims cannot all be below its epoch, and one liar cannot raise it alone once
    all answered.
    """
    need = quorum(electors)
    if len(claims) < need - 1:
        return None
    signers = len(claims) - (electors - need) - max(0, faults(electors) - 1)
    return sorted(claims, reverse=True)[max(1, signers) - 1] if claims else 0
