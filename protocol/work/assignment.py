"""Role negotiation: a pure function from what a node has heard to who does what.

1. Each node computes the roles of all and acts on its own row only, and on a change only after it stood for three
   presence intervals (``Stability``). So views may differ for a moment, and a node that vanishes is replaced
   without anyone deciding it.
2. A node holds one role. It never gets one that it is not willing to hold; where no place is left, it gets "none".
3. The trainer is who holds the newest term grant, if present.
4. The domain's policy says how many validators and relays there are: a least number, or a share of the nodes present.
   Places are filled in the order validator, relay, further validators, further relays. All others infer.
5. Inference never starves: no place takes the last node willing to infer, except the first validator's where nobody
   else would validate.
6. Whoever holds a place keeps it: holders come first, and holders of the other kind of place come last, so that a
   newcomer displaces nobody. Holders in excess (two halves of a network met) give way by the order of rule 7.
7. A free place goes to nodes that would not infer anyway, then by measured ability, then by lower node id. Abilities
   within a factor of about four count as equal: measurements waver, and a place that changes its candidate all
   the time is never taken. A relay that has no address to be reached at comes after those that have.

8. A place of a validator goes only to a node whose verdicts can count: the log says who that is
   (``protocol.credit.ledger``).
    Where no such node is present the place stays empty; anybody else in it would judge in vain.

Paused nodes keep their roles: a pause is short, and a change of roles costs a model load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from protocol.constants import MILLION
from protocol.domain import Policy
from protocol.work.presence import Presence

PLACES: Final = ("validator", "relay")
"""The roles of limited number that presences alone decide."""

Rank = tuple[Any, ...]

Judges = Callable[[bytes], bool]
"""Whether a node's verdicts can count."""


def anybody(node: bytes) -> bool:
    """The ``Judges`` of a domain that trusts all."""
    return True


def assign(
    presences: Mapping[bytes, Presence], policy: Policy, trainer: bytes | None, judges: Judges = anybody
) -> dict[bytes, str]:
    """The role of each node in ``presences``; ``trainer`` is the newest grant's holder, None before any."""
    roles = dict.fromkeys(presences, "none")
    if trainer is not None and trainer in presences and _may(presences[trainer], "trainer"):
        roles[trainer] = "trainer"
    free = {node: presence for node, presence in presences.items() if roles[node] == "none"}
    could_infer = sum("inference" in presence.willing for presence in free.values())
    fit = {"validator": {n: p for n, p in free.items() if judges(n)}, "relay": free}
    queues = {role: _queue(fit[role], role) for role in PLACES}
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


def trainer_candidate(presences: Mapping[bytes, Presence], policy: Policy, judges: Judges = anybody) -> bytes | None:
    """The node that an elector grants the next term to, None where nobody present is willing.

    A node that trains already comes first; one whose role would then fall below the policy's least number, or without
    whom too few could judge, comes last; between them measured ability decides, then the lower node id.
    """
    could_judge = {node for node, presence in presences.items() if "validator" in presence.willing and judges(node)}
    holders = Counter(presence.role for presence in presences.values())
    least = {"validator": policy.validators_min, "relay": policy.relays_min}

    def rank(item: tuple[bytes, Presence]) -> Rank:
        node, presence = item
        needed = holders[presence.role] <= least.get(presence.role, 0) or (
            node in could_judge and len(could_judge) <= policy.validators_min
        )
        return (presence.role != "trainer", needed, *_compute(presence), -_size(presence.memory_mb), node)

    willing = [item for item in presences.items() if "trainer" in item[1].willing]
    return min(willing, key=rank)[0] if willing else None


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


def _may(presence: Presence, role: str) -> bool:
    return role in presence.willing or presence.role == role


def _queue(free: Mapping[bytes, Presence], role: str) -> list[bytes]:
    """The nodes willing to take ``role``, the first in line at the end of the list."""
    other = next(place for place in PLACES if place != role)
    ability: Callable[[Presence], Rank] = _compute if role == "validator" else _reach

    def rank(node: bytes) -> Rank:
        presence = free[node]
        held = 0 if presence.role == role else 2 if presence.role == other and other in presence.willing else 1
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
