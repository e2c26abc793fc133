"""Role negotiation: a pure function from what a node has heard, and from the log, to who does what.

1. Each node computes the roles of all and acts on its own row only, and on a change only after it stood for three
   presence intervals (``Stability``). So views may differ for a moment, and a node that vanishes is replaced
   without anyone deciding it.
2. Members count, and nobody else: ``presences`` are theirs. Who holds which place says the log (``standing``), not the
   presence.
3. A node holds one role. It never gets one that it is not willing to hold; where no place is left, it gets "none".
4. The trainer is who holds the newest term grant, if present.
5. The domain's policy says how many validators and relays there are: a least number, or a share of the members present.
   Places are filled in the order validator, relay, further validators, further relays. All others infer.
6. Inference never starves: no place takes the last node willing to infer, except the first validator's where nobody
   else would validate.
7. Whoever holds a place keeps it: holders come first, and holders of the other kind of place come last, so that a
   newcomer displaces nobody. Holders in excess (two halves of a network met) give way by the order of rule 8. A relay
   that has no address to be reached at holds nothing.
8. A free place goes to nodes that would not infer anyway, then by measured ability, then by what is claimed, then by
   lower node id. Abilities within a factor of about four count as equal: measurements waver, and a place that changes
   its candidate all the time is never taken.
9. A place of a validator goes only to a node whose verdicts can count: the log says who that is
   (``protocol.credit.ledger``). Where no such node is present the place stays empty; anybody else in it would judge in
   vain.
10. A term goes to a member who is named or has standing. Who was deposed lately comes last, then who trains already
    first, then the named in their order, then measured ability.

Paused nodes keep their roles: a pause is short, and a change of roles costs a model load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from protocol.constants import MILLION
from protocol.domain import Policy
from protocol.work.presence import Presence

PLACES: Final = ("validator", "relay")
"""The roles of limited number that presences alone decide."""

Rank = tuple[Any, ...]

Judges = Callable[[bytes], bool]
"""Whether a node's verdicts can count."""

Standing = Mapping[bytes, str]
"""The roles in office, by the log; who is not in it holds none."""


def anybody(node: bytes) -> bool:
    """The ``Judges`` of a domain that trusts all."""
    return True


def assign(
    presences: Mapping[bytes, Presence],
    policy: Policy,
    trainer: bytes | None,
    standing: Standing,
    judges: Judges = anybody,
) -> dict[bytes, str]:
    """The role of each member in ``presences``; ``trainer`` is the newest grant's holder, None before any."""
    roles = dict.fromkeys(presences, "none")
    if (
        trainer is not None
        and trainer in presences
        and ("trainer" in presences[trainer].willing or standing.get(trainer) == "trainer")
    ):
        roles[trainer] = "trainer"
    free = {node: presence for node, presence in presences.items() if roles[node] == "none"}
    could_infer = sum("inference" in presence.willing for presence in free.values())
    fit = {"validator": {n: p for n, p in free.items() if judges(n)}, "relay": free}
    queues = {role: _queue(fit[role], role, standing) for role in PLACES}
    counts = {
        "validator": max(policy.validators_min, len(presences) * policy.validators_per_million // MILLION),
        "relay": max(policy.relays_min, len(presences) * policy.relays_per_million // MILLION),
    }
    order = [role for role in PLACES if counts[role] > 0]
    order += [role for role in PLACES for _ in range(min(counts[role], len(free)) - 1)]
    for turn, role in enumerate(order):
        last: bytes | None = None
        while queues[role]:
            node = queues[role].pop()
            infers = "inference" in free[node].willing
            if roles[node] != "none":
                continue
            if infers and could_infer == 1:
                last = node  # it is the last to infer, and stays so: nobody asks for it again
                continue
            roles[node] = role
            could_infer -= infers
            break
        else:
            if role == "validator" and turn == 0 and last is not None:
                roles[last] = role
                could_infer = 0
    for node, presence in free.items():
        if roles[node] == "none" and "inference" in presence.willing:
            roles[node] = "inference"
    return roles


def trainer_candidate(
    presences: Mapping[bytes, Presence],
    policy: Policy,
    standing: Standing,
    may_train: Callable[[bytes], bool] = anybody,
    judges: Judges = anybody,
    named: Sequence[bytes] = (),
    deposed: Collection[bytes] = (),
) -> bytes | None:
    """The member that an elector grants the next term to, None where nobody present may have it and is willing.

    Among equals one whose role would then fall below the policy's least number, or without whom too few could judge,
    comes last. ``named`` are the named trainers in their order, ``deposed`` who lost the office lately.
    """
    could_judge = {node for node, presence in presences.items() if "validator" in presence.willing and judges(node)}
    holders = Counter(standing.get(node, "none") for node in presences)
    least = {"validator": policy.validators_min, "relay": policy.relays_min}

    def rank(node: bytes) -> Rank:
        presence, role = presences[node], standing.get(node, "none")
        needed = holders[role] <= least.get(role, 0) or (
            node in could_judge and len(could_judge) <= policy.validators_min
        )
        line = named.index(node) if node in named else len(named)
        ability = _compute(presence)
        return (node in deposed, role != "trainer", line, needed, *ability, -_size(presence.memory_mb), node)

    willing = [node for node, presence in presences.items() if "trainer" in presence.willing and may_train(node)]
    return min(willing, key=rank, default=None)


class Stability:
    """Remembers since when the same role has been proposed. ``seconds`` is how long it must have stood."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._role: str | None = None
        self._since = 0.0

    def stable(self, role: str, now: float) -> bool:
        """Note that ``role`` is proposed at monotonic time ``now``; True once it stood long enough."""
        if role != self._role:
            self._role, self._since = role, now
        return now - self._since >= self._seconds


def _queue(free: Mapping[bytes, Presence], role: str, standing: Standing) -> list[bytes]:
    """The nodes willing to take ``role``, the first in line at the end of the list."""
    other = next(place for place in PLACES if place != role)
    ability: Callable[[Presence], Rank] = _compute if role == "validator" else _reach

    def rank(node: bytes) -> Rank:
        presence, holds = free[node], standing.get(node, "none")
        reached = role != "relay" or bool(presence.addresses)
        held = 0 if holds == role and reached else 2 if holds == other and other in presence.willing else 1
        return (held, "inference" in presence.willing, *ability(presence), node)

    return sorted((node for node in free if role in free[node].willing), key=rank, reverse=True)


def _compute(presence: Presence) -> Rank:
    """Sorts the better computer first: what was measured before what is claimed."""
    return (-_size(presence.tokens_per_second), -_size(presence.gpu_mb), -_size(presence.cpus))


def _reach(presence: Presence) -> Rank:
    """Sorts the better relay first."""
    return (not presence.addresses, -_size(presence.bandwidth_kbps))


def _size(value: int) -> int:
    """Half the binary logarithm, 0 for "unknown": values within a factor of about four are equal."""
    return (value.bit_length() + 1) // 2
