"""Words for people on a running node: why it has its role, what it waits for, what it is rejected for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from node.api.control_requests import Panel
from node.api.reason_words import remedy, words
from node.weights.held import payload as weights_payload
from proofs.checks import REASONS
from protocol.constants import MILLION
from protocol.credit.ledger import Ledger
from protocol.credit.reputation import Account
from protocol.domain import Policy
from protocol.log.quorum import Grant
from protocol.records import Rollout
from protocol.work import assignment, schedule
from protocol.work.presence import Presence


def why(
    role: str,
    own: bytes,
    presences: Mapping[bytes, Presence],
    policy: Policy,
    grant: Grant,
    standing: assignment.Standing,
    judges: assignment.Judges = assignment.anybody,
) -> str:
    """Why the node ``own`` has its role, in the terms of ``protocol.work.assignment``."""
    present = len(presences)
    least = {"validator": policy.validators_min, "relay": policy.relays_min}
    share = {"validator": policy.validators_per_million, "relay": policy.relays_per_million}
    willing = presences[own].willing if own in presences else ()
    match role:
        case "trainer":
            text = f"it holds the grant of term {grant.term}"
        case "validator" | "relay":
            places = max(least[role], present * share[role] // MILLION)
            text = f"it holds one of {places} {role} places among the {present} nodes present"
        case "inference" if willing == ("inference",):
            text = "it is willing to do nothing else"
        case "inference":
            text = f"the other places among the {present} nodes present are taken, and all others infer"
        case _:
            text = "no place is free that it is willing to take" if willing else "it is not willing to take any"
    wanted = assignment.assign(presences, policy, grant.trainer, standing, judges).get(own, role)
    if wanted == role:
        return text
    return f"{'' if role == 'none' else text + '; '}it becomes {wanted} as soon as that is settled"


def why_now(panel: Panel) -> str:
    """Why a running node has its role."""
    node = panel.node
    if panel.own.leaving:
        return "it has left; the next start brings it back" if panel.own.left else "it is leaving"
    grant = node.log.ledger.grant()
    if node.log.own_seq < 0:
        return "it has not joined yet"
    if grant is None:
        return "the domain has no trainer yet"
    judges, standing = node.log.ledger.may_validate, panel.presences.standing()
    return why(panel.own.role, node.id, panel.presences.members(), node.domain.policy, grant, standing, judges)


def waits_for(panel: Panel) -> list[str]:
    """What a running node waits for, each a phrase; none where it is at work or has nothing to do."""
    node, log, ledger = panel.node, panel.node.log, panel.node.log.ledger
    if panel.own.left:
        return []
    if not log.ready.is_set():
        height, claimed = len(log.replica.cuts), log.height_claimed
        return [log.waits_for(), *([f"the log to arrive: cut {height} of {claimed}"] if claimed > height else [])]
    if log.own_seq < 0:
        replica = log.replica
        if not replica.admissions.by(node.id, len(replica.cuts)):
            return ["a cut that admits this node"]
        return ["the entry that it joins with"]
    if ledger.grant() is None:
        present, asked = len(panel.presences.members()), node.domain.policy.min_nodes
        return [f"a first trainer: {present} nodes are present, {asked} are asked for"]
    newest, held = panel.weights.held.newest_number(), panel.weights.held.newest_held()
    number = -1 if held is None else weights_payload(held).number
    found = []
    elector = panel.elector.elector
    if elector is not None and (away := elector.voter.away()) is not None and elector.voter.elected:
        found.append(f"its part as an elector: {away}")
    if newest < 0:
        found.append("version 0 of the weights")
    elif number < newest:
        found.append(f"version {newest} of the weights to arrive")
    match panel.own.role:
        case "trainer" if newest >= 0 and not panel.own.paused():
            rollouts = (entry.payload for entry, _ in panel.pool.usable(newest).values())
            groups = sum(rollout.groups for rollout in rollouts if isinstance(rollout, Rollout))
            if groups < node.domain.recipe.groups_per_step:
                found.append(f"accepted rollouts: {groups} of {node.domain.recipe.groups_per_step} groups are there")
        case "validator" if newest >= 0:
            version = ledger.newest_weights()
            if version is not None and node.id not in ledger.validators_of(version.id):
                found.append("a version that counts it among the validators")
            elif not ledger.pending_for(node.id):
                found.append("submissions to audit")
        case "inference" if held is not None and not panel.own.generating:
            if not ledger.may_infer(node.id, held.id):
                found.append("the first version that is made after it joined")
            elif not panel.own.paused() and schedule.usable(newest - number, node.domain.recipe.async_level):
                found.append("room: enough rollouts wait for the trainer")
    if panel.own.paused():
        found.append(f"nothing: work ends at step {panel.own.pause_at_step}")
    return found


def last_rejection(ledger: Ledger, author: bytes) -> dict[str, Any] | None:
    """The newest submission of ``author`` that was not accepted: {seq, outcome, severity, reason, words}."""
    account = ledger.accounts().get(author)
    if account is None or not account.reasons:
        return None
    for entry, status in reversed(ledger.decisions()):
        if entry.author == author and status.outcome != "accepted":
            return {"seq": entry.seq, **asdict(status), "words": words(status.reason)}
    return None


def unpaid(account: Account | None) -> list[dict[str, Any]]:
    """Why submissions earned nothing: {reason, count, severity, words, remedy}, the most frequent first."""
    if account is None:
        return []
    return [
        {
            "reason": reason,
            "count": count,
            "severity": REASONS[reason].severity if reason in REASONS else "soft",
            "words": words(reason),
            "remedy": remedy(reason),
        }
        for reason, count in sorted(account.reasons.items(), key=lambda item: (-item[1], item[0]))
    ]


def why_nothing(panel: Panel) -> str | None:
    """Why a node that stands for inference has earned nothing so far, where no submission of its was judged; else
    None."""
    node, ledger = panel.node, panel.node.log.ledger
    account = ledger.accounts().get(node.id)
    if account is None or account.credit or account.reasons or panel.own.role != "inference":
        return None
    if account.pending:
        count = account.pending
        return f"{count} of its submissions wait for verdicts" if count > 1 else "its submission waits for verdicts"
    held = panel.weights.held.newest_held()
    if held is not None and not ledger.may_infer(node.id, held.id):
        return "it may generate from the first version on that is made after it joined"
    if held is not None and not panel.presences.can_decide(ledger.validators_of(held.id) - {node.id}):
        return "too few validators are there to judge what it would make"
    return "it has announced no submission yet"


def problems(status: Mapping[str, Any], needed: int) -> list[str]:
    """What is not in order, from a status' figures: lines for people. ``needed`` bytes are to be free."""
    peers = None if status["peers"] else "no peer is connected: see farflung peers"
    free = status["disk_free"]
    room = None if free >= needed else f"the disk has {free / 1e6:.0f} MB free: make room"
    return [text for text in (peers, room, status["over"]) if text]
